"""One result of a call that ran on several replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

from ramify.cache.pins import Pin
from ramify.engine.cache_admin import calls
from ramify.engine.cache_admin.branch_view import BranchView
from ramify.engine.cache_admin.view import TreeNode, TreeView
from ramify.outputs import Explanation

MAX_REPLICAS = 1024
# Of equal replicas; everything else in a statistic is a count.
SHARED_FIELDS = frozenset({"page_size"})


def cluster_id(local: int, slot: int) -> int:
    """The id of a pin or node of one replica, as the cluster shows it.

    Args:
        slot: number of the replica, below `MAX_REPLICAS`.
    """
    return local * MAX_REPLICAS + slot


def split_id(id_: int) -> tuple[int, int]:
    """(id at the replica, slot of the replica)."""
    return divmod(id_, MAX_REPLICAS)


def merged(call: Any, results: Sequence[tuple[int, Any]]) -> Any:
    """The result of a call.

    Args:
        results: of each replica, with its slot; at least one.
    """
    values = [value for _, value in results]
    match call:
        case calls.ReadStats() | calls.ReadCacheStats() | calls.ClearCache():
            return summed(values)
        case calls.EndPins() | calls.UnpinPrefix():
            return sum(values)
        case calls.EndSession():  # it may have been at several replicas, or at none
            known_pages = [value for value in values if value is not None]
            return sum(known_pages) if known_pages else None
        case calls.Explain() | calls.ExplainToTenant():
            known = [value for value in values if isinstance(value, Explanation)]
            return max(known, key=lambda value: value.read_tokens, default=None)
        case calls.ListPins():
            return [renumbered_pin(pin, slot) for slot, pins in results for pin in pins]
        case calls.ReadTree():
            return _merged_tree(call.max_nodes, results)
        case calls.ReadBranches():
            return merged_branches(results)
        case _:
            return values[0]


def renumbered_pin(pin: Pin, slot: int) -> Pin:
    """A pin of a replica with the id that the cluster shows."""
    return replace(pin, id=cluster_id(pin.id, slot))


def summed(values: Sequence[Any]) -> Any:
    """Numbers added up; in dataclasses, tuples and dicts each by itself."""
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        return type(first)(
            **{
                field.name: getattr(first, field.name)
                if field.name in SHARED_FIELDS
                else summed([getattr(value, field.name) for value in values])
                for field in fields(first)
            }
        )
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: summed([value[name] for value in values if name in value]) for name in names}
    if isinstance(first, tuple):
        return tuple(map(summed, zip(*values, strict=True)))
    return sum(values)


def _merged_tree(max_nodes: int, results: Sequence[tuple[int, TreeView]]) -> TreeView:
    """The nodes of all trees, each in the order of its tree; cut at `max_nodes`, evenly."""
    share = -(-max_nodes // len(results))
    nodes: list[TreeNode] = []
    for slot, view in results:
        nodes += [
            replace(
                node,
                id=cluster_id(node.id, slot),
                parent=cluster_id(node.parent, slot) if node.parent else 0,
            )
            for node in view.nodes[:share]
        ]
    return TreeView(tuple(nodes[:max_nodes]), sum(view.num_nodes for _, view in results))


def merged_branches(results: Sequence[tuple[int, BranchView]]) -> BranchView:
    """The branches of all replicas, each with the number of its replica, one tree after the other."""
    nodes = [
        replace(
            node,
            id=cluster_id(node.id, slot),
            parent=cluster_id(node.parent, slot) if node.parent else 0,
            replica=slot,
        )
        for slot, view in results
        for node in view.nodes
    ]
    counts = [view.num_nodes for _, view in results if view.num_nodes is not None]
    is_cut = any(view.is_cut for _, view in results)
    return BranchView(tuple(nodes), is_cut, sum(counts) if counts else None)
