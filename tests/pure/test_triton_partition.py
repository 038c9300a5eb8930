"""The partition for the Triton kernel: every query meets every visible key split once."""

import time
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ramify.attention.backends.triton_partition import (
    GpuPartition,
    PartitionConfig,
    partition_step,
    split_leaders,
)
from ramify.attention.batch import AttentionBatch, Extend
from ramify.kv.block_table import PagedBlockTable

PAGE = 4
SPLIT = 8


def config(**changes: int | bool) -> PartitionConfig:
    base: dict[str, int | bool] = {
        "split": SPLIT,
        "decode_tokens": 4,
        "prefill_tokens": 8,
        "decode_limit": 6,
        "programs_per_item": 2,
        "saturating_programs": 1 << 20,
    }
    return PartitionConfig(**(base | changes))  # type: ignore[arg-type]


def batch_of(
    shares: list[tuple[int, int]], sharing: list[tuple[int, int]] | None = None
) -> AttentionBatch:
    """Requests of (cached, new) tokens; `sharing` is (earlier request or -1, tokens in common)."""
    rows: list[list[int]] = []
    page = 0
    for seq, (cached, new) in enumerate(shares):
        other, length = sharing[seq] if sharing else (-1, 0)
        pages = rows[other][: length // PAGE] if other >= 0 else []
        missing = -(-(cached + new) // PAGE) - len(pages)
        rows.append([*pages, *range(page, page + missing)])
        page += missing
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    return AttentionBatch.build(extends, PagedBlockTable.of(rows, PAGE), sharing or ())


def computed(batch: AttentionBatch, partition: GpuPartition) -> Counter[tuple[int, int]]:
    """How often each (token, split) is computed. Asserts that its pages are the token's."""
    owner = np.repeat(np.arange(batch.num_seqs), np.diff(batch.cu_seqlens_q))
    counts: Counter[tuple[int, int]] = Counter()
    slots: Counter[int] = Counter()
    for items in (partition.prefill_items, partition.decode_items):
        for start, count, row, first, end, partial, *_ in items.tolist():
            assert count > 0
            assert not partial or end == first + 1
            for token in partition.tokens[start : start + count].tolist():
                last = int(batch.positions[token]) // SPLIT
                for split in range(first, min(end, last + 1)):
                    counts[token, split] += 1
                    pages = slice(split * SPLIT // PAGE, (split + 1) * SPLIT // PAGE)
                    visible = slice(pages.start, min(pages.stop, -(-(last + 1) * SPLIT // PAGE)))
                    pages_of = batch.block_table[owner[token], visible]
                    used = pages_of >= 0
                    assert np.array_equal(batch.block_table[row, visible][used], pages_of[used])
                    if partial:
                        assert token in partition.split_tokens
                        slots[int(partition.split_offsets[token]) + split] += 1
                    else:
                        assert token not in partition.split_tokens
    assert sorted(slots) == list(range(partition.num_partials))
    assert set(slots.values()) <= {1}
    return counts


def expected(batch: AttentionBatch) -> Counter[tuple[int, int]]:
    return Counter(
        (token, split)
        for token, position in enumerate(batch.positions.tolist())
        for split in range(position // SPLIT + 1)
    )


@st.composite
def batches(draw: st.DrawFn) -> AttentionBatch:
    shares = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 14)), max_size=7))
    sharing: list[tuple[int, int]] = []
    for seq, (cached, new) in enumerate(shares):
        other = draw(st.integers(-1, seq - 1))
        longest = min(cached + new, sum(shares[other])) if other >= 0 else 0
        length = draw(st.integers(0, longest // PAGE)) * PAGE
        sharing.append((other, length) if other >= 0 else (-1, 0))
    return batch_of(shares, sharing)


@given(batch=batches(), saturating=st.sampled_from([0, 8, 1 << 20]), tile=st.integers(1, 5))
def test_every_query_meets_every_split_once(
    batch: AttentionBatch, saturating: int, tile: int
) -> None:
    """Whatever is shared or split, in the right pages; partial results never collide."""
    partition = partition_step(batch, config(saturating_programs=saturating, decode_tokens=tile))

    assert computed(batch, partition) == expected(batch)


def test_requests_that_share_a_prefix_read_it_together() -> None:
    """Three decoding requests over 24 shared tokens: one item for each shared split."""
    shares = [(30, 1), (27, 1), (25, 1)]
    alone = partition_step(batch_of(shares), config())

    partition = partition_step(batch_of(shares, [(-1, 0), (0, 24), (1, 24)]), config())

    shared = [item for item in partition.decode_items.tolist() if item[1] == 3]
    assert [item[3] for item in shared] == [0, 1, 2]
    assert {item[2] for item in shared} == {0}
    assert len(alone.decode_items) == 12
    assert len(partition.decode_items) == 6


def test_more_sharers_than_a_tile_has_rows_take_several_tiles() -> None:
    """Ten decodes share a split; a tile has four rows."""
    shares = [(20, 1)] * 10
    sharing = [(-1, 0), *[(0, 16)] * 9]

    partition = partition_step(batch_of(shares, sharing), config(decode_tokens=4))

    counts = [item[1] for item in partition.decode_items.tolist() if item[3] == 0]
    assert counts == [4, 4, 2]


def test_sharing_counts_in_whole_splits() -> None:
    """The split in which two requests diverge is read once for each."""
    others, lengths = np.array([-1, 0, 1], np.int32), np.array([0, 15, 20], np.int32)

    leaders = split_leaders(others, lengths, 3, 8)

    assert leaders.tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 2]]


def test_a_full_device_splits_only_what_is_shared() -> None:
    """Splitting costs a merge: on a full device, only requests that share a split are split."""
    shares = [(40, 1), (30, 1), (31, 1)]
    batch = batch_of(shares, [(-1, 0), (-1, 0), (1, 16)])

    partition = partition_step(batch, config(saturating_programs=1))

    assert partition.split_tokens.tolist() == [1, 2]


def test_the_longest_item_comes_first() -> None:
    """So that the program that finishes last is a short one."""
    partition = partition_step(batch_of([(0, 9), (30, 9), (8, 9)]), config())

    ends = partition.prefill_items[:, 4].tolist()
    assert ends == sorted(ends, reverse=True)


def test_ab24_a_step_is_partitioned_without_a_loop_over_its_tokens() -> None:
    """64 requests of 4k tokens and a chunk of 4k tokens: less than 20 ms."""
    batch = batch_of([(4000, 1)] * 64 + [(0, 4096)])
    partition_config = config(split=512, decode_tokens=4, prefill_tokens=16, decode_limit=16)

    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        partition_step(batch, partition_config)
        seconds.append(time.perf_counter() - start)

    assert min(seconds) < 0.02
