"""The state of a request in the planner: tokens, pages, and how far its K/V is computed."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ramify.cache.content_atoms import Media, Salt
from ramify.cache.key import CacheKey, key_of_atoms, pack
from ramify.cache.leases import Lease
from ramify.cache.packed import ATOM_BYTES
from ramify.cache.partial_page import PartialPage
from ramify.cache.session_table import Session
from ramify.outputs import Explanation


@dataclass(slots=True, eq=False)
class RadixSequence:
    """A request in the planner: its tokens, pages, and how far its K/V is computed.

    The caller writes `tokens`, by appending between steps, and `num_draft` until `commit`; it sets
    `has_looked_up` of a sequence that goes on where another ended. `namespace`, `reuse`, `media`, `salts`,
    `max_shared`, `may_tell` and `session` are fixed. Only the planner
    writes the other fields; everyone may read them.

    `reuse=False` reads nothing from the cache but publishes its own pages. Tokens of a `media`
    segment are identified by its content, not by their ids. A salt may start beyond the last token.

    With `may_tell`, the first plan leaves in `explanation` why the cache had no more of the prompt,
    pages that the same step computes included; see `PrefixCache.explain`.
    """

    tokens: array[int]
    namespace: bytes = b""
    reuse: bool = True
    num_computed: int = 0  # committed tokens: their K/V is in the pages
    num_planned: int = 0  # tokens computed by the plan that is not committed yet
    num_ahead: int = 0  # tokens computed by a second plan, behind that one
    num_read: int = 0  # cache-hit tokens: computed before the first plan
    num_copied: int = 0  # of `num_read`: copied from part of a cached page
    num_shared: int = 0  # tokens attached in flight: another sequence computes them
    row: int | None = None
    lease: Lease | None = None
    private: list[int] = field(default_factory=list)  # pages after the lease's
    source: PartialPage | None = None  # that the plan copies from; pinned until it is committed
    released: bool = False
    # Number of its last plan that was not a plain decode; a leader's is below its followers'.
    order: int = 0
    has_looked_up: bool = False  # its lookup is counted: a request counts one
    media: Sequence[Media] = field(default=(), kw_only=True)
    salts: Sequence[Salt] = field(default=(), kw_only=True)
    num_draft: int = 0  # drafts at the end of `tokens`, never shared
    max_shared: int | None = field(default=None, kw_only=True)  # tokens that others may reuse
    may_tell: Callable[[bytes], bool] | None = field(default=None, kw_only=True)
    explanation: Explanation | None = field(default=None, kw_only=True)
    session: Session | None = field(default=None, kw_only=True)  # whose pages it uses

    def __post_init__(self) -> None:
        tokens: object = self.tokens
        if isinstance(tokens, Iterable) and not isinstance(tokens, array):
            self.tokens = array("i", tokens)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K/V is still to be computed; before the first plan all tokens."""
        return len(self.tokens) - self.num_computed

    def clone_unplanned(self) -> RadixSequence:
        """A fresh sequence with a copy of the tokens; nothing of it is planned or computed."""
        return RadixSequence(
            self.tokens[:],
            self.namespace,
            self.reuse,
            media=self.media,
            salts=self.salts,
            max_shared=self.max_shared,
            session=self.session,
        )

    @property
    def is_planned(self) -> bool:
        """Whether a plan is not committed yet."""
        return bool(self.num_planned or self.num_ahead)

    def shareable(self, num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens others may reuse: drafts never."""
        limit = min(num_tokens, len(self.tokens) - self.num_draft)
        return limit if self.max_shared is None else min(limit, self.max_shared)

    def key(self, num_tokens: int) -> CacheKey:
        """The cache key of the first `num_tokens` tokens; they may end inside a media segment."""
        if not self.media and not self.salts:
            return CacheKey(self.tokens[:num_tokens], self.namespace)
        salts = [salt for salt in self.salts if salt.start < len(self.tokens)]
        whole = CacheKey(self.tokens, self.namespace, media=self.media, salts=salts)
        return whole.prefix(num_tokens)

    def key_beyond(self, lease: Lease, num_tokens: int) -> CacheKey:
        """`key`, where a lease of the sequence has fewer tokens: packs and checks only the others."""
        if self.media or self.salts:
            return self.key(num_tokens)
        num_leased, known = lease.num_tokens, lease.full_key
        atoms = known.atoms[: num_leased * ATOM_BYTES] + pack(self.tokens[num_leased:num_tokens])
        return key_of_atoms(atoms, known.namespace, ())
