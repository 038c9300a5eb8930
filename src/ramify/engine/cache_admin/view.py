"""`llm.cache`: show what is cached, explain misses; pin, clear, warm and share prefixes."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.cache.inspection import NodeInfo, count_pages, nodes_under, time_before, top_nodes
from ramify.cache.key import CacheKey
from ramify.cache.maintenance import evict_suffix
from ramify.cache.partial_page import count_partial_tokens
from ramify.cache.pins import Pin
from ramify.cache.prefix_cache import PrefixCache
from ramify.cache.sessions import end_session
from ramify.cache.types import CacheStats, Node
from ramify.counts import counted
from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView, view_branches
from ramify.engine.cache_admin.drawing import draw_tree
from ramify.engine.cache_admin.warmup import (
    WarmPrompt,
    WarmupResult,
    pin_public_prefixes,
    public_prefix_ids,
    read_prompts,
)
from ramify.engine.call_turns import whole_call
from ramify.engine.core import EngineCore
from ramify.engine.prefix_namespaces import owner_of_namespace, owner_of_node
from ramify.engine.scheduling.validation import validate_token_ids
from ramify.engine.text.prompt_inputs import Prefix, prefix_token_ids, stable_prefix_ids
from ramify.errors import ConcurrentCallError, ConfigError, InvalidParamsError, PinError
from ramify.outputs import Explanation, RequestOutput

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

PREVIEW_CHARS = 60  # of the text of a node
DRAWN_NODES = 40  # by `print(llm.cache)`


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A tree node, that is a run of pages, for people to read. Parents come before their children."""

    id: int
    parent: int  # node id; 0 for the beginning of a prompt
    level: int  # number of nodes above
    start: int  # number of tokens above
    num_tokens: int
    num_pages: int
    hits: int  # lookups that read it
    pins: int  # requests and pins that hold it now
    is_pending: bool  # its K/V is being computed
    num_children: int
    age_s: float
    idle_s: float
    namespace: str  # hash, 8 hex digits
    tenant: str
    is_stale: bool  # computed with earlier weights: no lookup can hit it
    token_ids: tuple[int, ...]  # the first few
    text: str  # of `token_ids`; empty without a tokenizer


# Fields that `TreeNode` has from `NodeInfo`; `namespace` has another type.
_COPIED_FIELDS = {field.name for field in fields(TreeNode)} & (
    {field.name for field in fields(NodeInfo)} - {"namespace"}
)


@dataclass(frozen=True, slots=True, repr=False)
class TreeView:
    """The nodes with most hits, in depth-first order; printed as a tree."""

    nodes: tuple[TreeNode, ...]
    num_nodes: int  # in the whole cache

    def __repr__(self) -> str:
        return draw_tree(self.nodes, self.num_nodes)


@dataclass(frozen=True, slots=True)
class ClearResult:
    """Result of `CacheView.clear`."""

    num_pages: int  # evicted
    num_kept: int  # pages that the filters select too, but that are in use


class CacheView:
    """The calls behind `llm.cache`; those of several threads wait for each other (`CallTurns`).

    A prefix is a text (tokenised like a prompt), token ids, or messages of a conversation. `tenant`
    and `salt` select where it is cached, as in `LLM.generate`.
    """

    def __init__(
        self,
        engine: EngineCore,
        tokenizer: Tokenizer | None,
        compute: Callable[[Sequence[WarmPrompt]], Sequence[RequestOutput | Exception]],
    ) -> None:
        self._engine, self._tokenizer, self._compute = engine, tokenizer, compute
        self.turns = engine.turns

    def __repr__(self) -> str:
        try:
            stats = self.core.stats()
        except ConcurrentCallError:
            return f"<{type(self).__name__}: in use by another thread>"
        num_kept = stats.num_pages - stats.free_pages
        return (
            f"<{type(self).__name__}: {num_kept:,} of {stats.num_pages:,} pages of {stats.page_size} "
            f"tokens in use, {counted(stats.num_nodes, 'node')}, hit rate {stats.hit_rate:.0%}>"
        )

    @whole_call
    def __str__(self) -> str:
        return f"{self!r}\n{self.tree(DRAWN_NODES)!r}"

    @property
    def core(self) -> PrefixCache:
        """The `PrefixCache` itself, with leases and pages."""
        return self._engine.cache

    @whole_call
    def stats(self) -> CacheStats:
        """See `PrefixCache.stats`."""
        return self.core.stats()

    @whole_call
    def check(self) -> None:
        """Recount nodes, pages and leases. Raises InvariantError if a counter is wrong."""
        self.core.check()

    @whole_call
    def explain(self, prompt: Prefix, *, tenant: str = "", salt: str = "") -> Explanation:
        """Explain a lookup of this prompt: tokens that hit, reason for the miss. Changes nothing."""
        return self._explain(self._key(prompt, tenant, salt, add_generation_prompt=True))

    @whole_call
    def explain_to_tenant(
        self, token_ids: Sequence[int], *, tenant: str = "", salt: str = ""
    ) -> Explanation | None:
        """`explain` without anything about the prompts of others; None: the prefix cache is off."""
        key = self._key(token_ids, tenant, salt)
        if not self._engine.config.requested.cache.prefix_cache:
            return None
        return self._explain(
            key, may_tell=lambda namespace: owner_of_namespace(namespace)[0] == tenant
        )

    def _explain(
        self, key: CacheKey, may_tell: Callable[[bytes], bool] | None = None
    ) -> Explanation:
        explanation = self.core.explain(key, may_tell=may_tell)
        if not self._engine.config.requested.cache.partial_pages:
            return explanation
        return explanation.with_copied(count_partial_tokens(self.core, key))

    @whole_call
    def pin(
        self,
        prefix: Prefix,
        *,
        owner: str = "user",
        ttl_s: float | None = None,
        tenant: str = "",
        salt: str = "",
        room_tokens: int = 0,
    ) -> Pin:
        """Keep the cached pages of a prefix from eviction.

        Args:
            owner: a name for the list of pins.
            ttl_s: seconds until the pin expires; each hit of the whole prefix restarts them. None:
                until `unpin`.
            room_tokens: tokens of the pool that must stay without a pin.

        Raises:
            PinError: no page of it is cached (`warm` it first), or the budget for pins is spent.
        """
        room_pages = -(-room_tokens // self.core.page_size)
        return self.core.pin(self._key(prefix, tenant, salt), owner, ttl_s, room_pages=room_pages)

    @whole_call
    def unpin(self, pin: Pin | int) -> None:
        """End a pin. Raises PinError if it has expired or was unpinned before."""
        self.core.unpin(pin)

    @whole_call
    def unpin_prefix(self, prefix: Prefix, *, owner: str, tenant: str = "", salt: str = "") -> int:
        """End the owner's pins that `pin` has made of exactly this prefix, as whole pages; returns how many.

        Pins of the same tokens for another tenant or salt stay.
        """
        ids = prefix_token_ids(prefix, self._tokenizer, add_generation_prompt=False)
        tokens = validate_token_ids(ids, self._engine.vocab_size)
        whole = tokens[: len(tokens) // self.core.page_size * self.core.page_size]
        keys = self._engine.namespaces.keys_of(whole, tenant, salt)
        return self._end([pin for pin in self.core.pins(owner) if pin.key in keys])

    @whole_call
    def pins(self, owner: str | None = None) -> list[Pin]:
        """All live pins, or those of one owner, oldest first."""
        return self.core.pins(owner)

    @whole_call
    def end_pins(self, owner: str) -> int:
        """End all pins of an owner; returns how many."""
        return self._end(self.core.pins(owner))

    def _end(self, pins: Sequence[Pin]) -> int:
        for pin in pins:
            with suppress(PinError):  # it has expired just now
                self.core.unpin(pin)
        return len(pins)

    @whole_call
    def end_session(self, name: str, *, tenant: str = "") -> int | None:
        """End a session: its pages that no other request has used are evicted before all others.

        Returns how many pages; None if no session of this tenant and name is alive.
        """
        return end_session(self.core, tenant, name)

    @whole_call
    def tree(self, max_nodes: int = 200) -> TreeView:
        """The `max_nodes` nodes with most hits, with their texts. Cost: O(max_nodes)."""
        if isinstance(max_nodes, bool) or not isinstance(max_nodes, int) or max_nodes < 1:
            raise ConfigError(f"max_nodes={max_nodes!r} but it must be an integer >= 1")
        dump = top_nodes(self.core, max_nodes)
        return TreeView(tuple(map(self._tree_node, dump.nodes)), dump.num_nodes)

    @whole_call
    def branches(self, query: BranchQuery) -> BranchView:
        """A part of the tree, for charts: see `view_branches`; `with_texts` adds the texts."""
        return view_branches(self._engine, query)

    @whole_call
    def clear(
        self,
        *,
        prefix: Prefix | None = None,
        tenant: str | None = None,
        salt: str | None = None,
        older_than_s: float | None = None,
    ) -> ClearResult:
        """Evict everything, or the pages that pass all given filters; also while serving.

        The cache tiers are emptied in either case. Pages that requests and pins hold stay, and are counted. Cost: O(cached nodes).

        Args:
            prefix: pages of prompts that begin with it; of the prefix itself, the pages that no
                other prompt shares. The last token of a text is left out, as more text after it
                could change it.
            tenant, salt: pages of this tenant, with this salt. With a `prefix`, "" by default.
            older_than_s: pages not used for this many seconds.
        """
        # Which pages of the tiers a filter selects is not known: tokens and ages are in the pool only.
        self._engine.clear_tiers()
        if prefix is None and tenant is None and salt is None and older_than_s is None:
            return ClearResult(self.core.clear(), self.core.stats().cached_pages)
        if older_than_s is not None and not (
            isinstance(older_than_s, int | float) and older_than_s >= 0
        ):
            raise ConfigError(f"older_than_s={older_than_s!r} but it must be a number >= 0")
        under: frozenset[int] | None = None
        if prefix is not None:
            ids = stable_prefix_ids(prefix, self._tokenizer)
            checked = validate_token_ids(ids, self._engine.vocab_size)
            tenant, salt = tenant or "", salt or ""
            keys = self._engine.namespaces.keys_under(checked, tenant, salt)
            under = frozenset[int]().union(*(nodes_under(self.core, key) for key in keys))
        limit_s = None if older_than_s is None else time_before(self.core, older_than_s)

        def is_selected(node: Node) -> bool:
            if under is not None and node.id not in under:
                return False
            if tenant is not None or salt is not None:
                owner = owner_of_node(node)
                if tenant not in (None, owner[0]) or salt not in (None, owner[1]):
                    return False
            return limit_s is None or node.used_s <= limit_s

        evicted = self.core.evict_if(is_selected)
        return ClearResult(
            evicted, count_pages(self.core, lambda node: node.pins > 0 and is_selected(node))
        )

    @whole_call
    def evict_answers(
        self,
        prompt: Sequence[int],
        answers: Sequence[Sequence[int]],
        num_kept: int,
        *,
        tenant: str = "",
        salt: str = "",
    ) -> None:
        """Evict answers to a prompt, with the prompt's pages behind its first `num_kept` tokens.

        Pages that requests hold or other prompts share stay.
        """
        ids = array("i", prompt)
        for answer in answers:
            key = self._engine.namespaces.key(ids, tenant, salt, answer=answer)
            evict_suffix(self.core, key, num_kept)
            if self._engine.tiering is not None:
                self._engine.tiering.remove_key(key, num_kept)

    @whole_call
    def warm(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """Compute prompts before they are asked; returns what was computed and what was cached.

        Args:
            prompts: a file, see `read_prompts`; or a list.

        Raises:
            ConfigError: the file cannot be used; nothing was computed.
        """
        return WarmupResult.of(self._compute(as_warm_prompts(prompts)))

    @whole_call
    def share(self, prompts: Path | str | Sequence[WarmPrompt]) -> WarmupResult:
        """Declare prefixes public: compute and pin them, and let every tenant read them.

        A tenant's prompt that begins with a whole public prefix reads its pages; the pages after
        them are the tenant's own. Nothing else is ever shared between tenants. A declaration holds
        as long as the engine. The pin ends with new weights, or if a page is suspected of damage:
        the next request then computes the prefix for all, and another `share` pins it again. Share
        before tenants send such prompts: what they have cached by then is not hit any more.

        Args:
            prompts: a file, see `read_prompts`; or a list. End a conversation where all others go
                on differently: with the system message, given together with its tools. The last
                token of a text is left out, as more text after it could change it.

        Raises:
            ConfigError: the file cannot be used, the prefix cache is off, or a prefix has a tenant
                or salt, is shorter than a page, or cannot be served; nothing is shared.
            PinError: they take more than half of the pages; nothing is shared.
        """
        prefixes = as_warm_prompts(prompts)
        ids = self._public_prefix_ids(prefixes)
        result = WarmupResult.of(self._compute(prefixes))
        pin_public_prefixes(self._engine, ids, result)
        return result

    def _public_prefix_ids(self, prefixes: Sequence[WarmPrompt]) -> list[array[int]]:
        engine = self._engine
        return public_prefix_ids(
            prefixes,
            self._tokenizer,
            vocab_size=engine.vocab_size,
            page_size=engine.config.page_size,
        )

    def _key(
        self, prefix: Prefix, tenant: str, salt: str, *, add_generation_prompt: bool = False
    ) -> CacheKey:
        ids = prefix_token_ids(prefix, self._tokenizer, add_generation_prompt=add_generation_prompt)
        checked = validate_token_ids(ids, self._engine.vocab_size)
        return self._engine.namespaces.key(checked, tenant, salt)

    def _tree_node(self, node: NodeInfo) -> TreeNode:
        ids = tuple(token for token in array("i", node.first_atoms) if token >= 0)
        tenant, _ = owner_of_node(node)
        return TreeNode(
            **{name: getattr(node, name) for name in _COPIED_FIELDS},
            start=node.start_token,
            namespace=hashlib.blake2b(node.namespace, digest_size=4).hexdigest(),
            tenant=tenant,
            is_stale=self._engine.namespaces.is_stale(node),
            token_ids=ids,
            text=preview_text(ids, self._tokenizer),
        )


def preview_text(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The beginning of the text of token ids; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…"


def as_warm_prompts(prompts: object) -> Sequence[WarmPrompt]:
    """The prompts of a list, or of a file.

    Raises:
        InvalidParamsError: it is neither, or the list has something else.
        ConfigError: see `read_prompts`.
    """
    if isinstance(prompts, list | tuple):
        for prompt in prompts:
            if not isinstance(prompt, WarmPrompt):
                raise InvalidParamsError(
                    "prompts", prompt, "a list of WarmPrompt, such as WarmPrompt(text)"
                )
        return prompts
    if not isinstance(prompts, str | Path):
        raise InvalidParamsError("prompts", prompts, "a file, or a list of WarmPrompt")
    return read_prompts(Path(prompts))
