"""Branch off and cut sequences of a planner; ask what it could take. Rare beside `plan` and `commit`."""

# ruff: noqa: SLF001 - these functions are bodies of the planner's methods in a file of their own

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ramify.attention.page_demand import PlanEntry, validate_plannable
from ramify.attention.sequence import RadixSequence
from ramify.errors import CacheError

if TYPE_CHECKING:
    from ramify.attention.planner import RadixAttentionPlanner


def can_allocate(
    planner: RadixAttentionPlanner, sequences: Sequence[RadixSequence], num_tokens: int
) -> bool:
    """See `RadixAttentionPlanner.can_allocate`."""
    if any(sequence.released or sequence.lease is not None for sequence in sequences):
        return False
    longer: list[tuple[RadixSequence, int]] = []
    for i, sequence in enumerate(sequences):
        clone = sequence.clone_unplanned()
        # a token id that no text and no other clone has
        clone.tokens.extend(array("i", [2**31 - 1 - i]) * num_tokens)
        longer.append((clone, len(clone.tokens)))
    try:
        validate_plannable(longer, planner.table)
        entries = [PlanEntry(s, limit, planner._key(s, limit)) for s, limit in longer]
        for sequence, _, key in entries:
            planner._attach(sequence, key)
        live = [*planner._by_lease.values(), *(sequence for sequence, _ in longer)]
        return planner._pages_needed(entries) <= planner._window.num_available(live)
    except CacheError:
        return False
    finally:
        for sequence, _ in longer:
            if sequence.lease is not None:
                planner._detach(sequence)


def fork(
    planner: RadixAttentionPlanner, sequence: RadixSequence
) -> tuple[RadixSequence, list[tuple[int, int]]]:
    """See `RadixAttentionPlanner.fork`."""
    if sequence.lease is None or planner._is_in_flight(sequence):
        raise CacheError(
            "only a sequence whose last step is committed, and that waits for no other, can "
            "be forked; call commit first"
        )
    if not planner.table.num_free_rows:
        raise CacheError("no free row in the block table; release a sequence first")
    num_held = max(0, -(-sequence.num_computed // planner.page_size) - len(sequence.lease.pages))
    num_copied = len(planner._window.owned(sequence.private[:num_held]))
    if num_copied > planner.cache.num_available:
        planner._batches.forget()
        planner._window.make_room(num_copied, planner._by_lease.values())
    computed = sequence.private[:num_held]
    copied = planner._window.owned(computed)  # perhaps fewer now
    pages = planner.cache.reserve(len(copied))
    clone = sequence.clone_unplanned()
    clone.num_computed = clone.num_read = sequence.num_computed
    clone.has_looked_up = True
    clone.lease = planner.cache.fork(sequence.lease)
    clone.private = [*computed[: num_held - len(copied)], *pages]
    clone.order, clone.row = next(planner._order), planner.table.allocate()
    planner.table.append(clone.row, [*clone.lease.pages, *clone.private])
    planner._by_lease[clone.lease.id] = clone
    return clone, list(zip(copied, pages, strict=True))


def rollback(planner: RadixAttentionPlanner, sequence: RadixSequence, num_tokens: int) -> None:
    """See `RadixAttentionPlanner.rollback`."""
    if sequence.lease is None or planner._is_in_flight(sequence):
        raise CacheError("only a sequence whose last step is committed can be rolled back")
    if not 0 <= num_tokens <= sequence.num_computed:
        raise CacheError(f"{num_tokens} tokens to keep of {sequence.num_computed} computed")
    if num_tokens < sequence.lease.num_tokens:
        num_tokens = num_tokens // planner.page_size * planner.page_size
    is_readable = planner._window.is_readable(sequence, num_tokens)
    num_tokens = num_tokens if is_readable else 0
    if num_tokens < sequence.lease.num_tokens or not is_readable:
        planner._batches.forget()
        old, sequence.lease = sequence.lease, planner.cache.fork(sequence.lease, num_tokens)
        planner._by_lease[sequence.lease.id] = planner._by_lease.pop(old.id)
        planner.cache.release(old, planner._window.owned(sequence.private))
        sequence.private = []
        assert sequence.row is not None
        planner.table.truncate(sequence.row, len(sequence.lease.pages))
        num_tokens = sequence.lease.num_tokens
    sequence.num_computed = num_tokens
