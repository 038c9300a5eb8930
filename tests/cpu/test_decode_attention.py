"""Rows that read K/V where it lies have the bits of rows that have it laid out, whoever shares a task."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.backends.cpu_partition import TaskPartitioner
from ramify.attention.spec import AttentionSpec
from tests.cpu.attention_cases import (
    CPU,
    assert_same_bits,
    batch_of,
    pages_of,
    planes_of,
    run,
    spec_of,
)
from tests.cpu.attention_cases import Step as Case

LENGTHS = [1, 17, 31, 32, 33, 63, 64, 65, 96, 128, 250, 255, 256, 257, 288, 289, 511, 513, 700, 40]
F32, BF16 = torch.float32, torch.bfloat16
# of K/V and of queries; both in bfloat16 are computed in pairs, where the processor can
KINDS = [(one, F32) for one in (F32, BF16, torch.float16, torch.int8, torch.float8_e4m3fn)]
KINDS.append((BF16, BF16))


def backend_of(spec: AttentionSpec, num_workers: int) -> CpuBackend:
    before = torch.get_num_threads()
    torch.set_num_threads(num_workers)
    try:
        return CpuBackend(spec, CPU)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3), (15, 5), (8, 1)])
@pytest.mark.parametrize("head_dim", [8, 24, 40, 64])
@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=str)
def test_a_row_has_the_bits_that_it_has_in_a_chunk(
    kind: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    window: int | None,
) -> None:
    """One token of each of 20 requests (all heads in a task), of 3 (some heads), and in chunks of 17."""
    spec = spec_of(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, page_size=4, dtype=dtype,
        kv_dtype=kind, windows=(window,), soft_cap=5.0 if head_dim == 24 else None,
    )  # fmt: skip
    noise = torch.Generator().manual_seed(head_dim + heads)
    lengths = [length + 16 for length in LENGTHS]
    rows = pages_of(lengths, 4, noise)
    planes = planes_of(spec, rows, lengths, noise)
    backend = CpuBackend(spec, CPU)

    chunks = batch_of(spec, [(length - 17, 17) for length in lengths], rows)
    q = torch.randn(chunks.num_tokens, heads, head_dim, generator=noise).to(dtype)
    in_chunks = run(backend, Case(chunks, q, planes, None))

    for at in (0, 7, 16):
        mine = torch.arange(at, chunks.num_tokens, 17)
        shares = [(length - 17 + at, 1) for length in lengths]
        one_each = batch_of(spec, shares, rows)
        together = run(backend, Case(one_each, q[mine], planes, None))
        assert_same_bits(together, in_chunks[mine])
        for begin, end in pairwise([0, 3, 4, 11, len(lengths)]):
            few = batch_of(spec, shares[begin:end], rows[begin:end])
            alone = run(backend, Case(few, q[mine[begin:end]], planes, None))
            assert_same_bits(alone, together[begin:end])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_tokens", range(1, 10))
@pytest.mark.parametrize("group", [1, 2, 3])
def test_so_many_rows_of_a_head(num_tokens: int, group: int, dtype: torch.dtype) -> None:
    """Tiles of 1, 2 and 4 rows, whole and not: 1 to 9 tokens with 1 to 3 heads in a group."""
    spec = spec_of(num_heads=2 * group, num_kv_heads=2, head_dim=24, dtype=dtype)
    noise = torch.Generator().manual_seed(num_tokens)
    lengths = [300, 270, 45]
    rows = pages_of(lengths, 8, noise)
    planes = planes_of(spec, rows, lengths, noise)
    backend = CpuBackend(spec, CPU)

    chunks = batch_of(spec, [(length - 40, 40) for length in lengths], rows)
    q = torch.randn(chunks.num_tokens, 2 * group, 24, generator=noise).to(dtype)
    in_chunks = run(backend, Case(chunks, q, planes, None)).view(3, 40, 2 * group, 24)
    some = batch_of(spec, [(length - num_tokens, num_tokens) for length in lengths], rows)
    mine = q.view(3, 40, 2 * group, 24)[:, 40 - num_tokens :].flatten(0, 1)

    found = run(backend, Case(some, mine, planes, None))

    assert_same_bits(found, in_chunks[:, 40 - num_tokens :].flatten(0, 1))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (6, 3), (10, 5)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, F32), (BF16, F32), (torch.int8, F32), (BF16, BF16)], ids=str
)
def test_blocks_that_several_workers_read(
    kind: torch.dtype,
    dtype: torch.dtype,
    num_workers: int,
    heads: int,
    kv_heads: int,
    window: int | None,
) -> None:
    """Blocks of one request, or of a prefix that two share, cut among workers: the bits of a chunk."""
    spec = spec_of(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=8,
        dtype=dtype,
        kv_dtype=kind,
        windows=(window,),
    )
    noise = torch.Generator().manual_seed(num_workers + heads)
    backend = backend_of(spec, num_workers)
    for kv_len in (300, 512, 513, 769, 1024, 1100, 1800):
        rows = pages_of([kv_len] * 2, 8, noise)
        rows[1][: (kv_len - 3) // 8] = rows[0][: (kv_len - 3) // 8]
        sharing = [(-1, 0), (0, (kv_len - 3) // 8 * 8)]
        planes = planes_of(spec, rows, [kv_len] * 2, noise)
        chunks = batch_of(spec, [(kv_len - 20, 20)] * 2, rows)
        q = torch.randn(40, heads, 8, generator=noise).to(dtype)
        in_chunks = run(backend, Case(chunks, q, planes, None)).view(2, 20, heads, 8)
        for num_tokens in (1, 2, 3):
            mine = q.view(2, 20, heads, 8)[:, -num_tokens:]
            alone = batch_of(spec, [(kv_len - num_tokens, num_tokens)], rows[:1])
            found = run(backend, Case(alone, mine[0], planes, None))
            assert_same_bits(found, in_chunks[0, -num_tokens:])
            both = batch_of(spec, [(kv_len - num_tokens, num_tokens)] * 2, rows, sharing)
            found = run(backend, Case(both, mine.flatten(0, 1), planes, None))
            assert_same_bits(found, in_chunks[:, -num_tokens:].flatten(0, 1))


@pytest.mark.parametrize(
    ("kv_len", "broken", "query"),
    [(257, torch.nan, 1.0), (272, torch.nan, 1.0), (20, torch.nan, 1.0), (20, -1e30, 1e30)],
)
def test_scores_that_are_no_numbers_are_no_reason_to_look_away(
    kv_len: int, broken: float, query: float
) -> None:
    """NaN in the last block's keys, or no score but -inf: the last row is NaN, alone or with others."""
    spec = spec_of(num_heads=2, num_kv_heads=1, head_dim=8)
    noise = torch.Generator().manual_seed(0)
    rows = pages_of([kv_len], 8, noise)
    backend = CpuBackend(spec, CPU)
    planes = planes_of(spec, rows, [kv_len], noise)
    for position in range(kv_len // 256 * 256, kv_len):
        planes["k"][rows[0][position // 8], position % 8] = broken
    for num_tokens in (1, 2, 9):
        q = torch.full((num_tokens, 2, 8), query)
        batch = batch_of(spec, [(kv_len - num_tokens, num_tokens)], rows)
        found = run(backend, Case(batch, q, planes, None))
        assert found[-1].isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("place", [257, 258, 269, 270])
def test_a_value_that_is_no_number_stays_with_rows_that_see_it(
    place: int, window: int | None, dtype: torch.dtype
) -> None:
    """At even and at odd places of a block, for many rows and for few; the others keep their bits."""
    spec = spec_of(num_heads=2, num_kv_heads=1, head_dim=24, dtype=dtype, windows=(window,))
    noise = torch.Generator().manual_seed(0)
    kv_len, backend = 290, CpuBackend(spec, CPU)
    rows = pages_of([kv_len], 8, noise)
    planes = planes_of(spec, rows, [kv_len], noise)
    broken = planes | {"v": planes["v"].clone()}
    broken["v"][rows[0][place // 8], place % 8] = torch.inf
    q = torch.randn(kv_len, 2, 24, generator=noise).to(dtype)
    for begin, end in [
        (250, 290),
        (place - 3, place),
        (place - 1, place + 1),
        (place + 4, place + 6),
    ]:
        batch = batch_of(spec, [(begin, end - begin)], [rows[0][: -(-end // 8)]])
        expected = run(backend, Case(batch, q[begin:end], planes, None))
        found = run(backend, Case(batch, q[begin:end], broken, None))
        for position in range(begin, end):
            if position < place or (window and position >= place + window):
                assert_same_bits(found[position - begin], expected[position - begin])
            else:
                assert not found[position - begin].isfinite().any()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_plan_that_follows_another_is_the_one_made_anew(
    num_workers: int, window: int | None
) -> None:
    """Requests that grow by a token each, over block ends, alone and on a prefix, one more or less."""
    spec = spec_of(num_heads=4, num_kv_heads=2, windows=(window,))
    noise, backend = torch.Generator().manual_seed(0), backend_of(spec, num_workers)
    lengths = [640, 700, 900, 120]
    rows = pages_of([length + 300 for length in lengths], 8, noise)
    for i in (1, 2):
        rows[i][:64] = rows[0][:64]
    sharing = [(-1, 0), (0, 512), (0, 512), (-1, 0)]
    for step in range(280):
        count = 3 if step % 40 == 7 else 4
        shared = [(-1, 0)] * 4 if step % 50 == 9 else sharing
        shares = [(length + step, 1) for length in lengths[:count]]
        batch = batch_of(spec, shares, rows[:count], shared[:count])

        found, expected = backend.plan(batch), backend_of(spec, num_workers).plan(batch)

        for name in ("tasks", "starts", "splits", "tokens", "positions", "table"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist(), (step, name)
        for name in ("page_size", "num_tokens", "max_rows", "state_rows"):
            assert getattr(found, name) == getattr(expected, name)
        assert [one.tolist() for one in found.phases] == [one.tolist() for one in expected.phases]


def test_tasks_are_cut_by_what_they_cost() -> None:
    """A shared prefix and one long request are work for several; equal requests are a task each."""
    spec = spec_of(num_heads=8, num_kv_heads=8)
    backend = backend_of(spec, 2)

    def costs(lengths: list[int], shared: int = 0) -> list[list[int]]:
        noise = torch.Generator().manual_seed(0)
        rows = pages_of(lengths, 8, noise)
        for one in rows[1:]:
            one[: shared // 8] = rows[0][: shared // 8]
        sharing = [(-1, 0)] + [(0, shared)] * (len(rows) - 1) if shared else None
        batch = batch_of(spec, [(length - 1, 1) for length in lengths], rows, sharing)
        phases = backend.plan(batch).phases
        return [[int(t[2] * (t[4] - t[3]) * (t[8] - t[7])) for t in phase] for phase in phases]

    prefix, _ = costs([2100] * 16, shared=2048)
    assert len(prefix) == 8 and max(prefix) == min(prefix)
    (one_long,) = costs([8192] + [101] * 7)
    assert one_long == [8] * 39
    (equal,) = costs([2000] * 16)
    assert len(equal) == 16
    (alone,) = costs([2000])
    assert alone == [8] * 8
    (odd,) = costs([2100])
    assert odd == [8] * 8 + [4] * 2
    (one_full,) = costs([300])  # of two blocks, in both of which the workers read some heads each
    assert one_full == [4] * 4
    (short,) = costs([200])
    assert short == [2] * 4


def test_blocks_before_every_window_are_no_tasks() -> None:
    """Layers that all have a window: blocks that no row sees in any of them are left out."""
    for windows, first in (((300, 700), 16), ((300, None), 0)):
        backend = backend_of(spec_of(num_heads=2, num_kv_heads=1, windows=windows), 2)
        rows = pages_of([5000], 8, torch.Generator().manual_seed(0))
        plan = backend.plan(batch_of(backend.spec, [(4999, 1)], rows))
        assert plan.tasks[:, 7].min() == first
        assert plan.splits[0, :2].tolist() == [first, 20]


@pytest.mark.parametrize("group", [1, 4, 31])
@pytest.mark.parametrize("windows", [(None,), (300,)])
@pytest.mark.parametrize("position", [0, 255, 256, 700])
def test_one_token_in_one_piece_is_cut_as_any_other(
    group: int, windows: tuple[int | None, ...], position: int
) -> None:
    """The short way gives what the long one does for the same token in a piece less than one."""
    spec = spec_of(num_heads=2 * group, num_kv_heads=2, page_size=16, windows=windows)
    found = []
    for pieces in (1, 0):
        cut = TaskPartitioner(
            np.array([position]),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            windows=spec.windows,
            num_workers=2,
            state_width=66,
        )
        for block in (0, 1):
            cut.add_rows(block, 7, (0,), (block, 3), pieces)
        found.append(cut.build(np.zeros((1, 64), np.int32), 16))

    for name in ("tasks", "starts", "splits", "tokens", "positions"):
        assert np.array_equal(getattr(found[0], name), getattr(found[1], name)), name
