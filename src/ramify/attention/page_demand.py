"""What a plan needs and will take, known before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.attention.sequence import RadixSequence
from ramify.cache.key import CacheKey
from ramify.cache.packed import ATOM_BYTES, common_pages
from ramify.errors import CacheError
from ramify.kv.block_table import PagedBlockTable


def validate_plannable(
    sequences: Sequence[RadixSequence], limits: Sequence[int], table: PagedBlockTable
) -> None:
    """Raise CacheError, before anything is changed, if one of them cannot be planned."""
    rows = 0
    for one, limit in zip(sequences, limits, strict=True):
        if one.released:
            raise CacheError("the sequence was released; make a new one to go on")
        if getattr(one.tokens, "typecode", None) != "i":
            raise CacheError(
                f"the tokens are {type(one.tokens).__name__} but must be 32-bit integers; "
                'use array("i", tokens)'
            )
        if one.num_planned:
            raise CacheError("the sequence is in a plan that was not committed or abandoned")
        if one.num_uncomputed < 1 or limit < 1:
            raise CacheError(
                f"the sequence has {one.num_uncomputed} uncomputed tokens and may compute "
                f"{limit}; both must be at least 1, append a token first"
            )
        if len(one.tokens) > table.max_tokens:
            raise CacheError(
                f"the sequence has {len(one.tokens)} tokens but a row of the block table "
                f"holds {table.max_tokens}; build the table with more pages"
            )
        rows += one.row is None
    if rows > table.num_free_rows:
        raise CacheError(
            f"{rows} new sequences but {table.num_free_rows} free rows in the block "
            "table; release some, or build it with more rows"
        )


def split_decodes(
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


def pages_needed(
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
