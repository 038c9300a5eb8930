"""`RequestPrefixMatcher`: with whom a request shares, in what groups, and what that saves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

from ramify.analysis.sharing.finite_cache import CacheSaving, PrefillCost, measure_saving
from ramify.analysis.sharing.groups import PrefixGroup, prefix_groups
from ramify.analysis.sharing.request_tree import RequestTree, SharingNode
from ramify.errors import ConfigError

NUM_TOP = 5
SMALL_BATCHES = (1, 2, 4)
COMMON_BATCHES = (1, 2, 4, 8)


def _field(value: object, name: str) -> Any:
    """A field by its name, as in JSON: `__getitem__` of the values below."""
    if name.startswith("_") or name not in type(value).__dict__.get("__slots__", ()):
        raise KeyError(name)
    return getattr(value, name)


@dataclass(frozen=True, slots=True)
class SharedComputationGraph:
    """The tree as nodes and edges, and the groups that share computation."""

    nodes: tuple[SharingNode, ...]
    edges: tuple[tuple[int, int], ...]  # ids of parent and child
    sharing_opportunities: tuple[PrefixGroup, ...]  # most tokens saved first
    potential_savings: int  # tokens; each token once, however many groups it is in
    total_tokens: int
    unique_tokens: int

    __getitem__ = _field


@dataclass(frozen=True, slots=True)
class PerformanceAnalysis:
    """What sharing saves with the stated capacity."""

    num_requests: int
    total_tokens: int
    unique_tokens: int
    tokens_saved: int  # total less unique
    computed_tokens: int  # with the stated capacity, in order of insertion
    hit_rate: float
    capacity_tokens: int | None
    max_concurrent_sharing: int  # requests of the largest group

    __getitem__ = _field


@dataclass(frozen=True, slots=True)
class OptimizationSuggestions:
    """What to compute once, for whom, and what it saves."""

    sharing_graph: SharedComputationGraph
    prefix_groups: tuple[PrefixGroup, ...]
    total_sharing_opportunities: int
    estimated_speedup_factor: float
    performance_analysis: PerformanceAnalysis
    top_opportunities: tuple[PrefixGroup, ...]
    recommended_batch_sizes: tuple[int, ...]  # that hold a group whole

    __getitem__ = _field


class RequestPrefixMatcher:
    """Live requests, and what they could share.

    Args:
        block_size: tokens of a unit; see `RequestTree`.
        capacity_tokens: of the cache that the speed-up is stated for; None: nothing is evicted.
        cost: of prefill; by default every token costs the same.
    """

    def __init__(
        self,
        *,
        block_size: int = 1,
        capacity_tokens: int | None = None,
        cost: PrefillCost | None = None,
    ) -> None:
        if capacity_tokens is not None and capacity_tokens < block_size:
            raise ConfigError(
                f"capacity_tokens={capacity_tokens} is less than a block of {block_size}; give at "
                f"least {block_size}, or None for a cache that evicts nothing"
            )
        self.tree = RequestTree(block_size=block_size)
        self.capacity_tokens = capacity_tokens
        self.cost = PrefillCost() if cost is None else cost

    def __len__(self) -> int:
        return len(self.tree)

    def add_request_prefix(
        self, request_id: Hashable, tokens: Iterable[int], *, num_tokens: int | None = None
    ) -> None:
        """Add a request, or replace the one with this id; see `RequestTree.insert_request`."""
        self.tree.insert_request(request_id, tokens, num_tokens=num_tokens)

    def remove_request(self, request_id: Hashable) -> None:
        """Remove a request; an unknown id changes nothing."""
        self.tree.remove_request(request_id)

    def find_computation_sharing_opportunities(
        self, request_id: Hashable, tokens: Iterable[int]
    ) -> list[Hashable]:
        """The other requests that share the longest prefix with `tokens`; [] if none shares any."""
        return self.tree.find_shared_prefixes(tokens, exclude=request_id)[0]

    def get_prefix_groups(self) -> tuple[PrefixGroup, ...]:
        """The forest of groups of two or more requests, each before the groups inside it."""
        return prefix_groups(self.tree)

    def get_shared_computation_graph(self) -> SharedComputationGraph:
        """All nodes and edges of the tree, and its groups by tokens saved."""
        return self._graph(self.get_prefix_groups())

    def estimate_saving(self, capacity_tokens: int | None = None) -> CacheSaving:
        """Tokens and cost with an LRU cache of a capacity; None: a cache that evicts nothing."""
        return measure_saving(self.tree, capacity_tokens, self.cost)

    def get_optimization_suggestions(self, *, num_top: int = NUM_TOP) -> OptimizationSuggestions:
        """Groups, the most valuable of them, and the speed-up with the stated capacity."""
        groups = self.get_prefix_groups()
        graph = self._graph(groups)
        saving = self.estimate_saving(self.capacity_tokens)
        roots = [group.num_requests for group in groups if group.parent is None]
        sizes = {*roots, *COMMON_BATCHES} if roots else SMALL_BATCHES
        return OptimizationSuggestions(
            sharing_graph=graph,
            prefix_groups=groups,
            total_sharing_opportunities=len(groups),
            estimated_speedup_factor=saving.speedup,
            performance_analysis=PerformanceAnalysis(
                num_requests=len(self.tree),
                total_tokens=self.tree.total_tokens,
                unique_tokens=self.tree.unique_tokens,
                tokens_saved=self.tree.tokens_saved,
                computed_tokens=saving.computed_tokens,
                hit_rate=saving.hit_rate,
                capacity_tokens=self.capacity_tokens,
                max_concurrent_sharing=max(roots, default=0),
            ),
            top_opportunities=graph.sharing_opportunities[:num_top],
            recommended_batch_sizes=tuple(sorted(sizes)),
        )

    def _graph(self, groups: tuple[PrefixGroup, ...]) -> SharedComputationGraph:
        nodes = tuple(self.tree.nodes())
        return SharedComputationGraph(
            nodes=nodes,
            edges=tuple((node.parent, node.id) for node in nodes if node.parent is not None),
            sharing_opportunities=tuple(
                sorted(groups, key=lambda group: (-group.tokens_saved, group.id))
            ),
            potential_savings=self.tree.tokens_saved,
            total_tokens=self.tree.total_tokens,
            unique_tokens=self.tree.unique_tokens,
        )
