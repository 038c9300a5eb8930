"""`AttentionBatch` against a plain loop over its tokens."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.attention.batch import AttentionBatch, Extend, sharing_arrays
from ramify.kv.block_table import PagedBlockTable


def test_slots_follow_the_pages_not_the_positions() -> None:
    """A request with pages 7, 2 writes token 4 to the first slot of page 2."""
    table = PagedBlockTable.of([[7, 2]], page_size=4)

    batch = AttentionBatch.build([Extend(0, row=0, num_cached=3, num_new=2)], table)

    assert batch.slot_mapping.tolist() == [31, 8]
    assert batch.kv_slots(0).tolist() == [28, 29, 30, 31, 8]


def test_a_query_row_sits_behind_what_is_cached() -> None:
    """Query row i of a request has position kv_len - q_len + i, whatever else is in the batch."""
    table = PagedBlockTable.of([[0, 1], [2], [3, 4]], page_size=4)
    extends = [Extend(5, 2, num_cached=5, num_new=1), Extend(6, 1, 0, 3), Extend(7, 0, 4, 4)]

    batch = AttentionBatch.build(extends, table)

    assert batch.positions.tolist() == [5, 0, 1, 2, 4, 5, 6, 7]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 4, 8]
    assert batch.seq_lens_kv.tolist() == [6, 3, 8]
    assert batch.num_cached.tolist() == [5, 0, 4]
    assert (batch.max_q_len, batch.max_kv_len, batch.total_kv) == (4, 8, 17)


def test_a_page_beyond_the_step_is_hidden() -> None:
    """Pages of a row beyond this step are -1 in the batch."""
    table = PagedBlockTable.of([[6, 5, 4], [3]], page_size=2)

    batch = AttentionBatch.build([Extend(0, 0, 0, 3), Extend(1, 1, 0, 1)], table)

    assert batch.block_table.tolist() == [[6, 5], [3, -1]]
    assert table.pages(0) == [6, 5, 4]


def test_an_empty_batch_is_legal() -> None:
    """No requests, no rows, no error."""
    batch = AttentionBatch.build([], PagedBlockTable(1, 4, page_size=2))

    assert (batch.num_seqs, batch.num_tokens, batch.total_kv) == (0, 0, 0)
    assert (batch.max_q_len, batch.max_kv_len) == (0, 0)
    assert batch.cu_seqlens_q.tolist() == [0]
    assert not batch.num_cached.any()


def test_flashinfer_gets_one_list_of_pages() -> None:
    """Pages of all requests in order, where each begins, and the tokens in each last page."""
    table = PagedBlockTable.of([[6, 5, 4], [3], [9, 8], []], page_size=4)
    extends = [Extend(0, 0, 4, 3), Extend(1, 1, 0, 1), Extend(2, 2, 7, 1), Extend(3, 3, 0, 0)]

    arrays = AttentionBatch.build(extends, table).paged_kv_arrays()

    assert arrays.paged_kv_indptr.tolist() == [0, 2, 3, 5, 5]
    assert arrays.paged_kv_indices.tolist() == [6, 5, 3, 9, 8]
    assert arrays.paged_kv_last_page_len.tolist() == [3, 1, 4, 0]
    for values in (
        arrays.paged_kv_indptr,
        arrays.paged_kv_indices,
        arrays.paged_kv_last_page_len,
    ):
        assert values.dtype == np.int32


def test_flashinfers_arrays_of_an_empty_batch() -> None:
    """One offset, no page."""
    arrays = AttentionBatch.build([], PagedBlockTable(1, 4, page_size=2)).paged_kv_arrays()

    assert arrays.paged_kv_indptr.tolist() == [0]
    assert not len(arrays.paged_kv_indices) and not len(arrays.paged_kv_last_page_len)


def test_a_batch_is_frozen() -> None:
    """Its fields and arrays are read-only, and it is no view of the table."""
    table = PagedBlockTable.of([[1, 0]], page_size=1)
    batch = AttentionBatch.build([Extend(0, 0, 1, 1)], table)

    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.page_size = 3  # type: ignore[misc]
    for value in (getattr(batch, field.name) for field in dataclasses.fields(batch)):
        if isinstance(value, np.ndarray):
            assert not value.flags.writeable
    table.rewrite(0, 0, [7])

    assert batch.block_table.tolist() == [[1, 0]]


def test_a_token_without_a_page_is_an_assertion_error() -> None:
    """A row with fewer pages than the step needs is caught before anything is written."""
    table = PagedBlockTable.of([[0]], page_size=2)

    with pytest.raises((AssertionError, IndexError)):
        AttentionBatch.build([Extend(0, 0, 0, 3)], table)


@given(
    page_size=st.integers(1, 17),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=6),
    seed=st.integers(0, 2**16),
)
def test_arrays_are_those_of_a_plain_loop(
    page_size: int, lengths: list[tuple[int, int]], seed: int
) -> None:
    """Every array equals the one built token by token, in the documented dtype."""
    needs = [-(-(cached + new) // page_size) for cached, new in lengths]
    shuffled = np.random.default_rng(seed).permutation(sum(needs)).tolist()
    rows = [[shuffled.pop() for _ in range(need)] for need in needs]
    table = PagedBlockTable.of(rows, page_size)
    extends = [Extend(row, row, *length) for row, length in enumerate(lengths)][::-1]

    batch = AttentionBatch.build(extends, table)

    positions, slots = [], []
    for extend in extends:
        for position in range(extend.num_cached, extend.kv_len):
            positions.append(position)
            page = rows[extend.row][position // page_size]
            slots.append(page * page_size + position % page_size)
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    for seq, extend in enumerate(extends):
        kv_slots = batch.kv_slots(seq).tolist()
        new = slice(*batch.cu_seqlens_q[seq : seq + 2])
        assert len(kv_slots) == extend.kv_len == batch.seq_lens_kv[seq]
        assert kv_slots[extend.num_cached :] == slots[new]
    for name in ("cu_seqlens_q", "seq_lens_kv", "num_cached", "block_table", "positions"):
        assert getattr(batch, name).dtype == np.int32
    assert batch.slot_mapping.dtype == np.int64
    assert batch.total_kv == sum(extend.kv_len for extend in extends)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=9),
    page_size=st.sampled_from([1, 2, 5, 16]),
    spare=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_decodes_are_a_batch_like_any_other(
    lengths: list[int], page_size: int, spare: int, seed: int
) -> None:
    """`from_decodes` and `from_rows` give the same arrays, whatever spare pages rows have."""
    rng = np.random.default_rng(seed)
    ids = iter(rng.permutation(1_000).tolist())
    spares = rng.integers(0, spare + 1, len(lengths))
    table = PagedBlockTable.of(
        [
            [next(ids) for _ in range(length // page_size + 1 + more)]
            for length, more in zip(lengths, spares, strict=True)
        ],
        page_size,
    )
    rows = rng.permutation(len(lengths))
    sharing = sharing_arrays([(-1, 0)] * len(lengths), len(lengths))
    cached = [lengths[row] for row in rows]

    batch = AttentionBatch.from_decodes(rows, cached, table, sharing)

    other = AttentionBatch.from_rows(rows, cached, [1] * len(lengths), table, sharing)
    for field in dataclasses.fields(AttentionBatch):
        actual, expected = getattr(batch, field.name), getattr(other, field.name)
        assert np.array_equal(actual, expected), field.name
        if isinstance(actual, np.ndarray):
            assert actual.dtype == expected.dtype and not actual.flags.writeable
        else:
            assert type(actual) is type(expected)


def test_a_decode_without_a_page_is_an_assertion_error() -> None:
    table = PagedBlockTable.of([[3, 4], [5]], page_size=2)
    rows, sharing = np.array([0, 1]), sharing_arrays((), 2)

    with pytest.raises(AssertionError, match="a new token has no page"):
        AttentionBatch.from_decodes(rows, [3, 2], table, sharing)


@pytest.mark.parametrize("num_last", [None, 1, 4])
def test_part_of_a_batch_is_the_batch_of_that_part(num_last: int | None) -> None:
    """`select` equals a batch of only those requests.

    With `num_rows`, of only their last tokens, those before counting as cached.
    """
    table = PagedBlockTable.of([[7, 2, 5], [7, 0, 9], [7, 0, 8]], 4)
    extends = [Extend(0, 0, 3, 5), Extend(1, 1, 4, 5), Extend(2, 2, 8, 1)]
    batch = AttentionBatch.build(extends, table, [(-1, 0), (0, 4), (1, 8)])
    shared: dict[tuple[int, ...], list[tuple[int, int]]] = {
        (0, 2): [(-1, 0), (0, 4)],
        (1, 2): [(-1, 0), (0, 8)],
    }

    for seqs in ([], [0], [0, 2], [1, 2], [0, 1, 2]):
        selected = [extends[seq] for seq in seqs]
        num_rows = None
        if num_last is not None:
            counts = [min(num_last, extend.num_new) for extend in selected]
            selected = [
                dataclasses.replace(extend, num_cached=extend.kv_len - count, num_new=count)
                for extend, count in zip(selected, counts, strict=True)
            ]
            num_rows = np.array(counts, np.int64)
        part = batch.select(seqs, num_rows)
        sharing = list(zip(batch.shared_with, batch.shared_len, strict=True))[: len(seqs)]
        sharing = shared.get(tuple(seqs), sharing)
        expected = AttentionBatch.build(selected, table, sharing)
        assert np.array_equal(part.shared_with, expected.shared_with)
        assert np.array_equal(part.shared_len, expected.shared_len)
        for name in ("cu_seqlens_q", "seq_lens_kv", "num_cached", "positions", "slot_mapping"):
            assert np.array_equal(getattr(part, name), getattr(expected, name)), name
            assert getattr(part, name).dtype == getattr(expected, name).dtype, name
            assert not getattr(part, name).flags.writeable, name
        for name in ("max_q_len", "max_kv_len", "total_kv", "num_tokens"):
            assert getattr(part, name) == getattr(expected, name), name
        for seq in range(len(seqs)):
            assert np.array_equal(part.kv_slots(seq), expected.kv_slots(seq))


@given(texts=st.lists(st.text("ab", max_size=5), min_size=1, max_size=8), mask=st.integers(0, 255))
def test_selected_requests_share_what_they_shared(texts: list[str], mask: int) -> None:
    """For every number of tokens, whichever requests are left out. A letter is a page."""
    beginnings = sorted({text[:end] for text in texts for end in range(1, len(text) + 1)})
    rows = [
        [*(beginnings.index(text[: i + 1]) for i in range(len(text))), len(beginnings) + index]
        for index, text in enumerate(texts)
    ]
    sharing = [(-1, 0)]
    for i in range(1, len(texts)):  # with the first of the texts that share most with it
        common = [max(n for n in range(6) if texts[i][:n] == text[:n]) for text in texts[:i]]
        common = [min(n, len(texts[i]), len(text)) for n, text in zip(common, texts, strict=False)]
        most = max(common)
        sharing.append((common.index(most), 2 * most) if most else (-1, 0))
    extends = [Extend(i, i, 2 * len(text), 1) for i, text in enumerate(texts)]
    batch = AttentionBatch.build(extends, PagedBlockTable.of(rows, 2), sharing)
    seqs = [i for i in range(len(texts)) if mask >> i & 1]

    part = batch.select(seqs)

    for num_tokens in range(2, 12, 2):
        whole, selected = batch.prefix_leaders(num_tokens), part.prefix_leaders(num_tokens)
        pairs = [(i, j) for i in range(len(seqs)) for j in range(i)]
        for i, j in pairs:
            together = whole[seqs[i]] == whole[seqs[j]]
            assert (selected[i] == selected[j]) == together, (num_tokens, seqs[i], seqs[j])
