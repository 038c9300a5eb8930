"""One request as the planner sees it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ramify.cache.content_atoms import Media, Salt
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease


@dataclass(slots=True, eq=False)
class RadixSequence:
    """One request as the planner sees it.

    The caller owns `tokens` and may append to it between steps, and `num_draft` until `commit`;
    `namespace`, `reuse`, `media`, `salts` and `max_shared` are fixed. `reuse=False` reads nothing
    from the cache but publishes what it computes. The tokens of a segment of `media` are known by
    its content, whatever ids stand there. A salt may begin where no token is yet. The rest is the
    planner's to write and everyone's to read.
    """

    tokens: array[int]
    namespace: bytes = b""
    reuse: bool = True
    num_computed: int = 0  # committed length: K/V is there for so many tokens
    num_planned: int = 0  # of them new in the plan that is not committed yet
    num_read: int = 0  # tokens found computed when first planned
    num_shared: int = 0  # tokens attached to while another sequence computed them
    row: int | None = None
    lease: Lease | None = None
    private: list[int] = field(default_factory=list)  # pages after the lease's
    released: bool = False
    order: int = 0  # when it was planned; a leader comes before its followers
    media: Sequence[Media] = field(default=(), kw_only=True)
    salts: Sequence[Salt] = field(default=(), kw_only=True)
    num_draft: int = 0  # of `tokens`, at the end: guesses, which nobody else may attach to
    max_shared: int | None = field(default=None, kw_only=True)  # tokens that others may attach to

    def __post_init__(self) -> None:
        given: object = self.tokens
        if isinstance(given, Iterable) and not isinstance(given, array):
            self.tokens = array("i", given)

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose K/V is still to be computed (before the first plan: all of them)."""
        return len(self.tokens) - self.num_computed

    def clone_unplanned(self) -> RadixSequence:
        """The same tokens for another life of their own; nothing is planned of them."""
        return RadixSequence(
            self.tokens[:],
            self.namespace,
            self.reuse,
            media=self.media,
            salts=self.salts,
            max_shared=self.max_shared,
        )

    def shareable(self, num_tokens: int) -> int:
        """Of the first `num_tokens` tokens, those whose K/V others may use."""
        known = min(num_tokens, len(self.tokens) - self.num_draft)
        return known if self.max_shared is None else min(known, self.max_shared)

    def key(self, num_tokens: int) -> CacheKey:
        """The cache key of the first `num_tokens` tokens; they may end inside a media segment."""
        if not self.media and not self.salts:
            return CacheKey(self.tokens[:num_tokens], self.namespace)
        salts = [salt for salt in self.salts if salt.start < len(self.tokens)]
        whole = CacheKey(self.tokens, self.namespace, media=self.media, salts=salts)
        return whole.prefix(num_tokens)
