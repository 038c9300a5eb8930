"""The prefixes that live requests share: a compressed tree, groups, and what computing once saves.

`RequestTree` has the structure and the exact counts. `RequestPrefixMatcher` answers in the terms of a
batch scheduler: with whom a request shares, which groups there are, what a cache would save.
"""

from ramify.analysis.sharing.groups import PrefixGroup
from ramify.analysis.sharing.prefix_matcher import (
    OptimizationSuggestions,
    PerformanceAnalysis,
    RequestPrefixMatcher,
    SharedComputationGraph,
)
from ramify.analysis.sharing.request_tree import RequestTree, SharingNode

__all__ = [
    "OptimizationSuggestions",
    "PerformanceAnalysis",
    "PrefixGroup",
    "RequestPrefixMatcher",
    "RequestTree",
    "SharedComputationGraph",
    "SharingNode",
]
