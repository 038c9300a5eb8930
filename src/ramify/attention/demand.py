"""What a plan will take, known before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.attention.sequence import RadixSequence
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, common_pages


def sort_out(
    sequences: Sequence[RadixSequence], limits: Sequence[int], *, page_size: int, max_tokens: int
) -> tuple[list[RadixSequence], list[RadixSequence], list[RadixSequence], list[int]]:
    """Live sequences that compute one token: all of them, and those that need a page for it.

    They announce nothing and attach to nothing, so that there is little to do for them. Then
    all others with their limits.
    """
    decodes: list[RadixSequence] = []
    growing: list[RadixSequence] = []
    others: list[RadixSequence] = []
    rest: list[int] = []
    for one, limit in zip(sequences, limits, strict=True):
        lease, done, tokens = one.lease, one.num_computed, one.tokens
        if (
            lease is None
            or limit != 1
            or one.num_planned
            or one.num_draft
            or one.media
            or not done < len(tokens) <= max_tokens
            or tokens[done] < 0
        ):
            others.append(one)
            rest.append(limit)
            continue
        decodes.append(one)
        if done >= lease.num_tokens + len(one.private) * page_size:
            growing.append(one)
    return decodes, growing, others, rest


def num_pages_asked(
    sequences: Sequence[RadixSequence],
    limits: Sequence[int],
    keys: Sequence[CacheKey | None],
    *,
    page_size: int,
    share: bool,
) -> int:
    """Pages that live or attached sequences will reserve, sharing inside the batch included."""
    page_bytes = page_size * ATOM_BYTES
    leaders: dict[tuple[bytes, bytes], list[bytes]] = {}
    total = 0
    for one, limit, key in zip(sequences, limits, keys, strict=True):
        assert one.lease is not None
        begin, first = one.num_computed, len(one.lease.pages)
        held = first + len(one.private)
        follows = one.row is None and share and one.reuse
        if key is not None:
            atoms = key.atoms
            start = first * page_bytes
            group = leaders.setdefault((one.namespace, atoms[: start + page_bytes]), [])
            if follows and group:
                usable = atoms[: (len(one.tokens) - 1) // page_size * page_bytes]
                shared = max(common_pages(usable, each, page_bytes, start) for each in group)
                held, begin = held + shared, begin + shared * page_size
            end = min(len(one.tokens), begin + limit)
            known = one.shareable(end)
            announced = atoms[: known // page_size * page_bytes]
            # not announced: single tokens, and what another announces below the same node
            if known - begin > 1 and len(announced) > start and (follows or not group):
                group.append(announced)
        end = min(len(one.tokens), begin + limit)
        total += max(0, -(-end // page_size) - held)
    return total
