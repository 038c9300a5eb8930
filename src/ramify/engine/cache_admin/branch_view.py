"""Branches of the prefix tree for a chart: a few levels at a time, as one tenant or all may see them."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ramify.cache.branches import SEES_ALL, Branch, BranchFilter, read_branches
from ramify.cache.key import namespace_of
from ramify.engine.core import EngineCore
from ramify.engine.prefix_namespaces import owner_of_namespace, owner_of_node

if TYPE_CHECKING:
    from ramify.engine.text.tokenizer import Tokenizer

MAX_CHARS = 480  # of the text of a node
POOL, EVICTED = "pool", "evicted"
EVERYBODY = ("", "")  # tenant and salt of what all share


@dataclass(frozen=True, slots=True)
class BranchQuery:
    """Which part of the tree to read; see `read_branches`.

    Args:
        tenant: sees its own nodes, and the shared prefixes that they begin with; None: all.
    """

    below: int = 0
    max_nodes: int = 200
    max_levels: int = 8
    tenant: str | None = None

    def shows(self, base: bytes) -> BranchFilter:
        """What the reader may see.

        Args:
            base: namespace of what all share; see `PrefixNamespaces`.
        """
        tenant = self.tenant
        if tenant is None:
            return SEES_ALL
        return BranchFilter(
            lambda owner: owner_of_namespace(owner)[0] == tenant,
            lambda namespace: owner_of_namespace(namespace) == EVERYBODY,
            first=(namespace_of(base=base, tenant=tenant, salt=""), base),
        )


@dataclass(frozen=True, slots=True)
class BranchNode:
    """A node of the tree: a run of tokens that prompts share. Parents come before their children."""

    id: int
    parent: int  # node id; 0 for the beginning of a prompt
    start: int  # tokens before it
    num_tokens: int
    cached_tokens: int  # of these, in the pool
    tier: str  # "pool"; of a node with evicted tokens, the tier that has the first, or "evicted"
    is_own: bool  # False: only text and tokens are known, of a prefix that is shared with others
    hits: int  # lookups that read it
    leases: int  # requests and pins that hold it now
    is_pending: bool  # its K/V is being computed
    age_s: float
    idle_s: float
    tenant: str
    namespace: str  # hash, 8 hex digits
    is_stale: bool  # computed with earlier weights: no lookup can hit it
    is_cut: bool  # it has children that were left out
    token_ids: tuple[int, ...]  # the first few
    text: str = ""  # of `token_ids`
    replica: int | None = None  # that has it; None: there is one engine


@dataclass(frozen=True, slots=True)
class BranchView:
    """Answer to a `BranchQuery`, in depth-first order."""

    nodes: tuple[BranchNode, ...]
    is_cut: bool  # beginnings of prompts were left out
    num_nodes: int | None  # with cached tokens in the whole tree; None: not to be told

    def with_texts(self, tokenizer: Tokenizer) -> BranchView:
        """The same with the texts of the nodes; takes 0.1 ms and more a node."""
        nodes = (replace(node, text=_text_of(node, tokenizer)) for node in self.nodes)
        return replace(self, nodes=tuple(nodes))


def view_branches(core: EngineCore, query: BranchQuery) -> BranchView:
    """Read branches, between two steps; without texts.

    Raises:
        ConfigError: there is no such node, or the tenant may not see it.
    """
    tree, tiering = core.cache._tree, core.tiering  # noqa: SLF001 - counts, for operators
    branches = read_branches(
        core.cache,
        query.below,
        max_nodes=query.max_nodes,
        max_levels=query.max_levels,
        shows=query.shows(core.namespaces.base),
        hashes_evicted=tiering is not None,
    )
    tiers: dict[bytes, str] = {}
    if tiering is not None:
        hashes = [branch.evicted_hash for branch in branches.nodes if branch.evicted_hash]
        tiers = dict(zip(hashes, tiering.tiers_of(hashes), strict=True))
    nodes = tuple(_node(core, branch, tiers) for branch in branches.nodes)
    num_nodes = tree.num_nodes - tree.num_ghosts if query.tenant is None else None
    return BranchView(nodes, branches.is_cut, num_nodes)


def _node(core: EngineCore, branch: Branch, tiers: dict[bytes, str]) -> BranchNode:
    tier = tiers.get(branch.evicted_hash) or EVICTED
    is_whole = branch.cached_tokens == branch.num_tokens
    return BranchNode(
        id=branch.id,
        parent=branch.parent,
        start=branch.start_token,
        num_tokens=branch.num_tokens,
        cached_tokens=branch.cached_tokens,
        tier=POOL if is_whole else tier,
        is_own=branch.is_own,
        hits=branch.hits,
        leases=branch.leases,
        is_pending=branch.is_pending,
        age_s=branch.age_s,
        idle_s=branch.idle_s,
        tenant=owner_of_node(branch)[0],
        namespace=hashlib.blake2b(branch.namespace, digest_size=4).hexdigest(),
        is_stale=core.namespaces.is_stale(branch),
        is_cut=branch.is_cut,
        token_ids=tuple(token for token in array("i", branch.first_atoms) if token >= 0),
    )


def _text_of(node: BranchNode, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode(node.token_ids, skip_special_tokens=False)
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"
