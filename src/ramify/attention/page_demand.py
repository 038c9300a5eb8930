"""Validate a plan and count the pages it will reserve, before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ramify.attention.sequence import RadixSequence
from ramify.cache.key import CacheKey
from ramify.cache.leases import Lease
from ramify.cache.packed import ATOM_BYTES, common_pages
from ramify.counts import counted
from ramify.errors import CacheError
from ramify.kv.block_table import PagedBlockTable


class PlanEntry(NamedTuple):
    """A sequence of a plan that is not a plain decode: fresh, a prefill chunk or drafts."""

    sequence: RadixSequence
    limit: int  # most tokens to compute
    key: CacheKey | None  # None: it neither attaches to cached pages nor announces its own


def validate_plannable(
    sequences: Sequence[tuple[RadixSequence, int]], table: PagedBlockTable
) -> None:
    """Raise CacheError if a sequence cannot be planned, or they need too many rows.

    Args:
        sequences: each with the most tokens it may compute.
    """
    num_rows = 0
    for sequence, limit in sequences:
        if sequence.released:
            raise CacheError("the sequence was released; make a new one to go on")
        if getattr(sequence.tokens, "typecode", None) != "i":
            raise CacheError(
                f"the tokens are {type(sequence.tokens).__name__} but must be 32-bit integers; "
                'use array("i", tokens)'
            )
        if sequence.is_planned:
            raise CacheError("the sequence is in a plan that was not committed or abandoned")
        if sequence.num_uncomputed < 1 or limit < 1:
            raise CacheError(
                f"the sequence has {counted(sequence.num_uncomputed, 'uncomputed token')} and may compute "
                f"{limit}; both must be at least 1, append a token first"
            )
        if len(sequence.tokens) > table.max_tokens:
            raise CacheError(
                f"the sequence has {len(sequence.tokens)} tokens but a row of the block table "
                f"holds {table.max_tokens}; build the table with more pages"
            )
        num_rows += sequence.row is None
    if num_rows > table.num_free_rows:
        raise CacheError(
            f"{counted(num_rows, 'new sequence')} but {counted(table.num_free_rows, 'free row')} in the block "
            "table; release some, or build it with more rows"
        )


def split_decodes(
    sequences: Sequence[RadixSequence], limits: Sequence[int], *, page_size: int, max_tokens: int
) -> tuple[list[RadixSequence], list[RadixSequence], list[tuple[RadixSequence, int]]]:
    """Split off plain decodes: live sequences that compute one token.

    They attach to nothing and announce nothing, so that planning them is cheap.

    Returns:
        the decodes; the decodes that need a page; the other sequences with their limits.
    """
    decodes: list[RadixSequence] = []
    needing_page: list[RadixSequence] = []
    others: list[tuple[RadixSequence, int]] = []
    for sequence, limit in zip(sequences, limits, strict=True):
        lease, done, tokens = sequence.lease, sequence.num_computed, sequence.tokens
        if (
            lease is None
            or limit != 1
            or sequence.num_planned
            or sequence.num_ahead
            or sequence.num_draft
            or sequence.media
            or not done < len(tokens) <= max_tokens
            or tokens[done] < 0
        ):
            others.append((sequence, limit))
            continue
        decodes.append(sequence)
        if done >= lease.num_tokens + len(sequence.private) * page_size:
            needing_page.append(sequence)
    return decodes, needing_page, others


def pages_needed(
    entries: Sequence[PlanEntry],
    *,
    page_size: int,
    share: bool,
    is_released: Callable[[Lease, CacheKey], bool],
) -> int:
    """Pages that live or attached sequences will reserve, given what they share in the batch.

    Args:
        is_released: whether the tree has a page of the key after the lease, which it cannot read.
    """
    page_bytes = page_size * ATOM_BYTES
    # by namespace and atoms up to the first page that is not cached: what leaders will announce
    leaders: dict[tuple[bytes, bytes], list[bytes]] = {}
    total = 0
    for sequence, limit, key in entries:
        assert sequence.lease is not None
        begin, num_leased = sequence.num_computed, len(sequence.lease.pages)
        held = num_leased + len(sequence.private)
        follows = sequence.row is None and share and sequence.reuse
        if key is not None:
            atoms = key.atoms
            start = num_leased * page_bytes
            group = leaders.setdefault((sequence.namespace, atoms[: start + page_bytes]), [])
            if follows and group:
                usable = atoms[: (len(sequence.tokens) - 1) // page_size * page_bytes]
                shared = max(common_pages(usable, other, page_bytes, start) for other in group)
                if shared:  # it goes on behind what it would have copied
                    held, begin = held + shared, (num_leased + shared) * page_size
            end = min(len(sequence.tokens), begin + limit)
            shareable = sequence.shareable(end)
            announced = atoms[: shareable // page_size * page_bytes]
            # not announced: single tokens, and what another announces below the same node
            is_announced = shareable - begin > 1 and len(announced) > start
            if is_announced and (follows or not group) and not is_released(sequence.lease, key):
                group.append(announced)
        end = min(len(sequence.tokens), begin + limit)
        total += max(0, -(-end // page_size) - held)
    return total
