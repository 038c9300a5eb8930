"""The in-place decode path has the bits of the packed-block path, whatever shares a task."""

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
# dtypes of K/V and of queries; two bfloat16 use VNNI if the CPU has it
KINDS = [(kind, F32) for kind in (F32, BF16, torch.float16, torch.int8, torch.float8_e4m3fn)]
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
def test_a_decode_has_the_bits_of_a_chunk(
    kind: torch.dtype,
    dtype: torch.dtype,
    head_dim: int,
    heads: int,
    kv_heads: int,
    window: int | None,
) -> None:
    """A token of each of 20 requests (all heads in a task), of 1 to 9 of them, and chunks of 17."""
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

    for offset in (0, 7, 16):
        q_rows = torch.arange(offset, chunks.num_tokens, 17)
        shares = [(length - 17 + offset, 1) for length in lengths]
        decodes = batch_of(spec, shares, rows)
        together = run(backend, Case(decodes, q[q_rows], planes, None))
        assert_same_bits(together, in_chunks[q_rows])
        for begin, end in pairwise([0, 3, 4, 11, len(lengths)]):
            few = batch_of(spec, shares[begin:end], rows[begin:end])
            alone = run(backend, Case(few, q[q_rows[begin:end]], planes, None))
            assert_same_bits(alone, together[begin:end])


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("num_tokens", range(1, 10))
@pytest.mark.parametrize("group", [1, 2, 3])
def test_every_number_of_rows_per_head(num_tokens: int, group: int, dtype: torch.dtype) -> None:
    """Full and partial tiles of 1, 2 and 4 rows: 1 to 9 tokens, GQA groups of 1 to 3 heads."""
    spec = spec_of(num_heads=2 * group, num_kv_heads=2, head_dim=24, dtype=dtype)
    noise = torch.Generator().manual_seed(num_tokens)
    lengths = [300, 270, 45]
    rows = pages_of(lengths, 8, noise)
    planes = planes_of(spec, rows, lengths, noise)
    backend = CpuBackend(spec, CPU)

    chunks = batch_of(spec, [(length - 40, 40) for length in lengths], rows)
    q = torch.randn(chunks.num_tokens, 2 * group, 24, generator=noise).to(dtype)
    in_chunks = run(backend, Case(chunks, q, planes, None)).view(3, 40, 2 * group, 24)
    last_rows = batch_of(spec, [(length - num_tokens, num_tokens) for length in lengths], rows)
    last_q = q.view(3, 40, 2 * group, 24)[:, 40 - num_tokens :].flatten(0, 1)

    out = run(backend, Case(last_rows, last_q, planes, None))

    assert_same_bits(out, in_chunks[:, 40 - num_tokens :].flatten(0, 1))


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (6, 3), (10, 5)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("kind", "dtype"), [(F32, F32), (BF16, F32), (torch.int8, F32), (BF16, BF16)], ids=str
)
def test_split_kv_has_the_bits_of_a_chunk(
    kind: torch.dtype,
    dtype: torch.dtype,
    num_workers: int,
    heads: int,
    kv_heads: int,
    window: int | None,
) -> None:
    """Blocks of a request, or of a prefix that two share, split among workers."""
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
            last_q = q.view(2, 20, heads, 8)[:, -num_tokens:]
            alone = batch_of(spec, [(kv_len - num_tokens, num_tokens)], rows[:1])
            out = run(backend, Case(alone, last_q[0], planes, None))
            assert_same_bits(out, in_chunks[0, -num_tokens:])
            both = batch_of(spec, [(kv_len - num_tokens, num_tokens)] * 2, rows, sharing)
            out = run(backend, Case(both, last_q.flatten(0, 1), planes, None))
            assert_same_bits(out, in_chunks[:, -num_tokens:].flatten(0, 1))


@pytest.mark.parametrize(
    ("kv_len", "broken", "query"),
    [(257, torch.nan, 1.0), (272, torch.nan, 1.0), (20, torch.nan, 1.0), (20, -1e30, 1e30)],
)
def test_nan_scores_give_nan_outputs(kv_len: int, broken: float, query: float) -> None:
    """NaN in the last block's keys, or all scores -inf: the last row is NaN in any batch."""
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
        out = run(backend, Case(batch, q, planes, None))
        assert out[-1].isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("position", [257, 258, 269, 270])
def test_a_non_finite_value_reaches_only_rows_that_see_it(
    position: int, window: int | None, dtype: torch.dtype
) -> None:
    """At even and odd keys of a block, for many rows and few; the other rows keep their bits."""
    spec = spec_of(num_heads=2, num_kv_heads=1, head_dim=24, dtype=dtype, windows=(window,))
    noise = torch.Generator().manual_seed(0)
    kv_len, backend = 290, CpuBackend(spec, CPU)
    rows = pages_of([kv_len], 8, noise)
    planes = planes_of(spec, rows, [kv_len], noise)
    broken = planes | {"v": planes["v"].clone()}
    broken["v"][rows[0][position // 8], position % 8] = torch.inf
    q = torch.randn(kv_len, 2, 24, generator=noise).to(dtype)
    for begin, end in [
        (250, 290),
        (position - 3, position),
        (position - 1, position + 1),
        (position + 4, position + 6),
    ]:
        batch = batch_of(spec, [(begin, end - begin)], [rows[0][: -(-end // 8)]])
        expected = run(backend, Case(batch, q[begin:end], planes, None))
        out = run(backend, Case(batch, q[begin:end], broken, None))
        for query in range(begin, end):
            if query < position or (window and query >= position + window):
                assert_same_bits(out[query - begin], expected[query - begin])
            else:
                assert not out[query - begin].isfinite().any()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_a_reused_decode_plan_equals_a_new_plan(num_workers: int, window: int | None) -> None:
    """Requests grow by a token per step, over block ends, with and without a shared prefix."""
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

        actual, expected = backend.plan(batch), backend_of(spec, num_workers).plan(batch)

        for name in ("tasks", "starts", "splits", "tokens", "positions", "table"):
            assert getattr(actual, name).tolist() == getattr(expected, name).tolist(), (step, name)
        for name in ("page_size", "num_tokens", "max_rows", "state_rows"):
            assert getattr(actual, name) == getattr(expected, name)
        phases = [[phase.tolist() for phase in plan.phases] for plan in (actual, expected)]
        assert phases[0] == phases[1]


def test_tasks_are_partitioned_by_cost() -> None:
    """A shared prefix or a long request is split into tasks; equal requests are a task each."""
    spec = spec_of(num_heads=8, num_kv_heads=8)
    backend = backend_of(spec, 2)

    def costs(lengths: list[int], shared: int = 0) -> list[list[int]]:
        noise = torch.Generator().manual_seed(0)
        rows = pages_of(lengths, 8, noise)
        for pages in rows[1:]:
            pages[: shared // 8] = rows[0][: shared // 8]
        sharing = [(-1, 0)] + [(0, shared)] * (len(rows) - 1) if shared else None
        batch = batch_of(spec, [(length - 1, 1) for length in lengths], rows, sharing)
        phases = backend.plan(batch).phases
        return [
            [int(task[2] * (task[4] - task[3]) * (task[8] - task[7])) for task in phase]
            for phase in phases
        ]

    prefix, _ = costs([2100] * 16, shared=2048)
    assert len(prefix) == 8 and max(prefix) == min(prefix)
    (long_and_short,) = costs([8192] + [101] * 7)
    assert long_and_short == [8] * 39
    (equal,) = costs([2000] * 16)
    assert len(equal) == 16
    (alone,) = costs([2000])
    assert alone == [8] * 8
    (odd,) = costs([2100])
    assert odd == [8] * 8 + [4] * 2
    (two_blocks,) = costs([300])  # workers split both blocks by heads
    assert two_blocks == [4] * 4
    (short,) = costs([200])
    assert short == [2] * 4


def test_blocks_before_every_window_are_left_out() -> None:
    """If all layers have a window, blocks that no row sees in any layer have no task."""
    for windows, first in (((300, 700), 16), ((300, None), 0)):
        backend = backend_of(spec_of(num_heads=2, num_kv_heads=1, windows=windows), 2)
        rows = pages_of([5000], 8, torch.Generator().manual_seed(0))
        plan = backend.plan(batch_of(backend.spec, [(4999, 1)], rows))
        assert plan.tasks[:, 7].min() == first
        assert plan.splits[0, :2].tolist() == [first, 20]


@pytest.mark.parametrize("group", [1, 4, 31])
@pytest.mark.parametrize("windows", [(None,), (300,)])
@pytest.mark.parametrize("position", [0, 255, 256, 700])
def test_the_fast_path_for_one_token_gives_the_same_tasks(
    group: int, windows: tuple[int | None, ...], position: int
) -> None:
    """num_tasks=1 takes the fast path of `add_rows`, 0 the general one: equal tasks."""
    spec = spec_of(num_heads=2 * group, num_kv_heads=2, page_size=16, windows=windows)
    plans = []
    for num_tasks in (1, 0):
        partitioner = TaskPartitioner(
            np.array([position]),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            windows=spec.windows,
            num_workers=2,
            state_width=66,
        )
        for block in (0, 1):
            partitioner.add_rows(block, 7, (0,), (block, 3), num_tasks)
        plans.append(partitioner.build(np.zeros((1, 64), np.int32), 16))

    for name in ("tasks", "starts", "splits", "tokens", "positions"):
        assert np.array_equal(getattr(plans[0], name), getattr(plans[1], name)), name
