"""Repair a planner, its block table and its cache after one of their calls was interrupted."""

# ruff: noqa: SLF001 - `repair_planner` is a method of the planner in a file of its own

from __future__ import annotations

from collections.abc import Iterable

from ramify.attention.planner import RadixAttentionPlanner
from ramify.attention.sequence import RadixSequence
from ramify.cache.call_guard import guarded
from ramify.cache.maintenance import repair


@guarded
def repair_planner(planner: RadixAttentionPlanner, sequences: Iterable[RadixSequence]) -> int:
    """Make planner, block table and cache consistent again after an interrupt.

    KeyboardInterrupt, or what another signal handler raises, may end a call of planner or cache
    anywhere. Afterwards all sequences are as before their first plan: without pages and row, to be
    planned again from the start, or released. What they had published stays cached, unless the call
    had begun to change the tree: then the cache is empty. Leases of other callers end, pins stay.

    Args:
        sequences: all live sequences of the caller.

    Returns how many pins were lost. May be interrupted, and called again. O(nodes + pages).
    """
    num_pins = repair(planner.cache)
    for sequence in [*planner._by_lease.values(), *planner._awaiting_leader, *sequences]:
        sequence.lease, sequence.row, sequence.private, sequence.source = None, None, [], None
        sequence.num_computed = sequence.num_planned = sequence.num_ahead = 0
        sequence.num_draft = 0
        sequence.num_read = sequence.num_shared = sequence.num_copied = 0
    planner.table.reset()
    planner._by_lease.clear()
    planner._awaiting_leader.clear()
    planner._batches.forget()
    return num_pins
