"""`flat_slots`: slots of block-table rows as one flat list, against a plain loop."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.attention.batch import AttentionBatch, Extend
from ramify.errors import ConfigError
from ramify.kv.block_table import BlockTable, ContiguousBlockTable, PagedBlockTable
from ramify.kv.flat_slots import flat_slots
from ramify.kv.pool import KVLayout, KVPool
from tests.budget import examples


def by_loop(
    table: list[list[int]], rows: list[int], lengths: list[int], starts: list[int], page_size: int
) -> list[int]:
    """What `flat_slots` must return, by a loop over positions."""
    slots = []
    for row, length, start in zip(rows, lengths, starts, strict=True):
        for position in range(start, start + length):
            page, offset = divmod(position, page_size)
            slots.append(table[row][page] * page_size + offset)
    return slots


def flat(
    table: Tensor, rows: list[int], lengths: list[int], starts: list[int] | None, page_size: int
) -> Tensor:
    """`flat_slots` of lists."""
    return flat_slots(
        table,
        torch.tensor(rows, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        page_size=page_size,
        total=sum(lengths),
        starts=None if starts is None else torch.tensor(starts, dtype=torch.int32),
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize(
    ("rows", "lengths", "starts"),
    [
        ([0], [5], None),
        ([0, 1, 2], [40, 1, 17], None),
        ([2, 0], [600, 1025], None),  # more than 512, the tokens per block of common kernels
        ([1, 3], [4, 9], [3, 40]),
        ([3, 1, 0], [0, 0, 6], [9, 0, 2]),
        ([1, 2, 0, 3], [5, 0, 0, 7], [0, 9, 1, 33]),
        ([2, 2], [3, 6], [0, 2]),  # a row may repeat
        ([0, 2], [0, 0], None),
        ([], [], None),
        ([], [], []),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_slots_are_those_of_a_plain_loop(
    rows: list[int],
    lengths: list[int],
    starts: list[int] | None,
    page_size: int,
    shuffled: bool,
) -> None:
    """Contiguous or shuffled pages, start offsets, empty requests, no requests."""
    width = -(-1100 // page_size)
    pages = torch.arange(4 * width)
    if shuffled:
        pages = torch.randperm(4 * width, generator=torch.Generator().manual_seed(0))
    table = pages.view(4, width).int()

    slots = flat(table, rows, lengths, starts, page_size)

    assert slots.dtype == torch.int64
    loop = by_loop(table.tolist(), rows, lengths, starts or [0] * len(rows), page_size)
    assert slots.tolist() == loop


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), page_size=st.integers(1, 5), num_rows=st.integers(1, 4))
def test_any_ranges_of_any_rows(data: st.DataObject, page_size: int, num_rows: int) -> None:
    """Random tables, rows, start positions and lengths."""
    width = 6
    table = data.draw(st.permutations(range(num_rows * width)))
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), max_size=5))
    max_tokens = width * page_size
    starts = [data.draw(st.integers(0, max_tokens)) for _ in rows]
    lengths = [data.draw(st.integers(0, max_tokens - start)) for start in starts]
    pages = torch.tensor(table, dtype=torch.int32).view(num_rows, width)

    slots = flat(pages, rows, lengths, starts, page_size)

    assert slots.tolist() == by_loop(pages.tolist(), rows, lengths, starts, page_size)


def test_ab12_pages_become_slots_once() -> None:
    """Slots equal those of the attention batch, and are below num_pages * page_size."""
    table = PagedBlockTable.of([[7, 2, 0], [5, 1], [6, 4, 3]], page_size=16)
    batch = AttentionBatch.build([Extend(0, 2, 30, 9), Extend(1, 0, 0, 33)], table)

    slots = flat(torch.from_numpy(table.array), [2, 0], batch.seq_lens_kv.tolist(), None, 16)

    expected = np.concatenate([batch.kv_slots(0), batch.kv_slots(1)])
    assert slots.tolist() == expected.tolist()
    assert int(slots.max()) < 8 * 16


def test_ab14_yb9_no_host_sync_on_any_device() -> None:
    """It runs on meta tensors, whose values cannot be read back."""
    table = torch.zeros(4, 9, dtype=torch.int32, device="meta")
    rows = torch.zeros(3, dtype=torch.int64, device="meta")
    lengths = torch.zeros(3, dtype=torch.int32, device="meta")

    slots = flat_slots(table, rows, lengths, page_size=4, total=50, starts=lengths)

    assert slots.shape == (50,)
    assert slots.device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        lengths.sum().item()


def test_slots_beyond_32_bits_are_exact() -> None:
    """Slots of a page number that fits in int32 may not fit in int32."""
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)

    assert flat(table, [0], [2], [14], 16).tolist() == [2**35 - 2, 2**35 - 1]


def test_yb17_a_hole_gives_no_slot_of_another_page() -> None:
    """A token whose page is -1 has a slot below 0 at every offset."""
    table = torch.tensor([[3, -1]], dtype=torch.int32)

    assert flat(table, [0], [8], None, 4).tolist() == [12, 13, 14, 15, -4, -3, -2, -1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": torch.zeros(4, dtype=torch.int32)}, r"table \(4,\)"),
        ({"lengths": torch.ones(3, dtype=torch.int32)}, r"\(2,\), \(3,\)"),
        ({"starts": torch.ones(1, dtype=torch.int32)}, r"\(2,\), \(2,\), \(1,\)"),
        ({"lengths": torch.ones(2)}, "must be int32 or int64"),
        ({"page_size": 0}, "page_size=0"),
        ({"total": -1}, "total=-1"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(changes: dict[str, object], message: str) -> None:
    """Shapes, dtypes and sizes are checked, which needs no values from the device."""
    fitting: dict[str, object] = {
        "table": torch.zeros(2, 2, dtype=torch.int32),
        "rows": torch.arange(2),
        "lengths": torch.ones(2, dtype=torch.int32),
        "page_size": 2,
        "total": 2,
    }
    flat_slots(**fitting)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match=message):
        flat_slots(**(fitting | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", [PagedBlockTable, ContiguousBlockTable])
def test_eb3_tokens_appended_one_by_one_are_read_back_in_order(
    kind: type[PagedBlockTable | ContiguousBlockTable], page_size: int
) -> None:
    """Two requests decode alternately into two layers; each reads back its own tokens in order."""
    table: BlockTable = kind(3, 12 // page_size, page_size)
    pool = KVPool(KVLayout.mha(2, 1, 1), 3 * 12 // page_size, page_size)
    pages = torch.randperm(pool.num_pages, generator=torch.Generator().manual_seed(1)).tolist()
    rows = [table.allocate() for _ in range(3)][1:]
    for step in range(10):
        for row in rows:
            if isinstance(table, PagedBlockTable) and step % page_size == 0:
                table.append(row, [pages.pop()])
            batch = AttentionBatch.build([Extend(row, row, step, 1)], table)
            table.update(row, 1)
            for layer in range(2):
                token = torch.full((1, 1, 1), float(100 * layer + 10 * row + step))
                pool.write_kv(layer, torch.tensor(batch.slot_mapping), k=token, v=-token)

    lengths = table.lengths(rows).tolist()
    slots = flat(torch.tensor(table.array), rows, lengths, None, page_size)

    for layer in range(2):
        expected = [float(100 * layer + 10 * row + step) for row in rows for step in range(10)]
        dense = pool.gather_kv(layer, slots)
        assert dense["k"].flatten().tolist() == expected
        assert (-dense["v"]).flatten().tolist() == expected


def test_eb8_a_request_ends_where_its_tokens_end() -> None:
    """Requests of 5 and 3 tokens in pages of 4: unused slots of a last page are not included."""
    table = PagedBlockTable.of([[0, 3], [2]], page_size=4)
    pool = KVPool(KVLayout.mha(1, 1, 1), 4, 4)
    for row, length in ((0, 5), (1, 3)):
        table.update(row, length)
        new = torch.full((length, 1, 1), float(row + 1))
        slots = flat(torch.tensor(table.array), [row], [length], None, 4)
        pool.write_kv(0, slots, k=new, v=new)

    lengths = table.lengths([0, 1]).tolist()
    slots = flat(torch.tensor(table.array), [0, 1], lengths, None, 4)

    assert pool.gather_kv(0, slots)["k"].flatten().tolist() == [1, 1, 1, 1, 1, 2, 2, 2]
