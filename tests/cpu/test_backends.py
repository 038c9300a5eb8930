"""Every backend against an independent dense attention in float64."""

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.attention.backend import select_backend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.backends.sdpa import SdpaBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.errors import ConfigError
from ramify.kv.block_table import PagedBlockTable
from tests.budget import examples
from tests.pure.planner_bench import most_in_common

CPU = torch.device("cpu")
# test_parity_grid.py has the GPU backends, with fewer tokens
ON_CPU = ("eager", "cpu", "blocked", "sdpa")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # for outputs of about 1
HEADS = {"mha": (3, 3), "gqa": (6, 2), "mqa": (5, 1)}

# (cached, new): decode, a first chunk, later chunks, across and at the edges of 256-key blocks
MIXED = ((0, 5), (37, 1), (300, 1), (255, 1), (256, 1), (250, 20), (1000, 13), (0, 1), (9, 64))
DECODE = ((1, 1), (64, 1), (700, 1), (511, 1), (512, 1))
PREFILL = ((0, 280), (0, 7), (1, 8), (128, 129))
BATCHES = {"mixed": MIXED, "decode": DECODE, "prefill": PREFILL}


@dataclass(frozen=True)
class Case:
    """A batch over scattered pages; every slot without a request's token is NaN."""

    spec: AttentionSpec
    batch: AttentionBatch
    q: Tensor  # [T, num_heads, head_dim]
    planes: dict[str, Tensor]
    dense: list[tuple[Tensor, Tensor]]  # per request: keys and values [kv_len, kv_heads, dim]


def spec_of(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "page_size": 16,
        "dtype": torch.float32,
        "windows": (None,),
        "scale": 0.25,
        "exact": False,
    }
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


def case_of(spec: AttentionSpec, shares: tuple[tuple[int, int], ...], seed: int = 0) -> Case:
    noise = torch.Generator().manual_seed(seed)
    page_size = spec.page_size
    counts = [-(-(cached + new) // page_size) for cached, new in shares]
    spare = 3
    pages = torch.randperm(sum(counts) + spare, generator=noise).tolist()
    rows = [[pages.pop() for _ in range(count)] for count in counts]
    table = PagedBlockTable.of(rows, page_size)
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    batch = AttentionBatch.build(extends, table)
    shape = (sum(counts) + spare + 1, page_size, spec.num_kv_heads, spec.head_dim)
    planes = {name: torch.full(shape, torch.nan, dtype=spec.dtype) for name in ("k", "v")}
    dense = []
    for cached, new in shares:
        size = (cached + new, *shape[2:])
        key, value = (torch.randn(size, generator=noise).to(spec.dtype) for _ in "kv")
        dense.append((key, value))
    for row, (key, value) in zip(rows, dense, strict=True):
        for position in range(len(key)):
            page, offset = row[position // page_size], position % page_size
            planes["k"][page, offset] = key[position]
            planes["v"][page, offset] = value[position]
    q_shape = (batch.num_tokens, spec.num_heads, spec.head_dim)
    q = torch.randn(q_shape, generator=noise).to(spec.dtype)
    return Case(spec, batch, q, planes, dense)


def dense_attention(case: Case, layer: int = 0) -> Tensor:
    """[T, num_heads, head_dim] float64, one query head at a time."""
    spec, batch, window = case.spec, case.batch, case.spec.windows[layer]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for seq, (key, value) in enumerate(case.dense):
        start, stop = int(batch.cu_seqlens_q[seq]), int(batch.cu_seqlens_q[seq + 1])
        kv_len = len(key)
        query = torch.arange(kv_len - (stop - start), kv_len)[:, None]
        position = torch.arange(kv_len)[None, :]
        visible = position <= query
        if window is not None:
            visible &= position > query - window
        for head in range(spec.num_heads):
            shared = head // (spec.num_heads // spec.num_kv_heads)
            scores = case.q[start:stop, head].double() @ key[:, shared].double().T * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            weights = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
            out[start:stop, head] = weights @ value[:, shared].double()
    return out


def run(name: str, case: Case, *, padding_rows: int = 0, layer: int = 0) -> Tensor:
    backend = select_backend(name, case.spec, CPU).backend
    filler = case.q.new_full((padding_rows, *case.q.shape[1:]), 7.0)
    q = torch.cat([case.q, filler])
    return backend.run(backend.plan(case.batch), layer, q, case.planes)


def assert_agrees(name: str, case: Case, *, layer: int = 0) -> None:
    out = run(name, case, padding_rows=3, layer=layer)
    num_tokens = case.batch.num_tokens
    assert out.dtype == case.spec.dtype
    assert out.shape == (num_tokens + 3, case.spec.num_heads, case.spec.head_dim)
    assert torch.equal(out[num_tokens:], torch.zeros_like(out[num_tokens:]))
    error = (out[:num_tokens].double() - dense_attention(case, layer)).abs().max()
    assert float(error) < TOLERANCE[case.spec.dtype]


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ON_CPU)
def test_backends_agree_with_dense_attention(name: str, heads: str, page_size: int) -> None:
    """Any page size, any GQA group size, any mixture of chunks and decodes."""
    num_heads, num_kv_heads = HEADS[heads]
    spec = spec_of(num_heads=num_heads, num_kv_heads=num_kv_heads, page_size=page_size)

    for seed, shares in enumerate(BATCHES.values()):
        assert_agrees(name, case_of(spec, shares, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [16, 20, 64, 80, 128])
@pytest.mark.parametrize("name", ON_CPU)
def test_any_head_dim_and_dtype(name: str, head_dim: int, dtype: torch.dtype) -> None:
    """Head dimensions need not be powers of two, nor multiples of 16."""
    spec = spec_of(head_dim=head_dim, dtype=dtype, scale=head_dim**-0.5)

    assert_agrees(name, case_of(spec, MIXED))


@pytest.mark.parametrize("window", [1, 5, 50, 256, 300, 4096])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_window_hides_what_is_further_back(name: str, window: int) -> None:
    """A query sees itself and window - 1 tokens before it; layers without a window see all."""
    spec = spec_of(windows=(window, None))
    case = case_of(spec, MIXED)

    for layer in range(2):
        assert_agrees(name, case, layer=layer)

    if window <= 5:  # the window matters: the layers differ
        assert not torch.allclose(run(name, case, layer=0), run(name, case, layer=1))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", ["eager", "cpu", "blocked"])
def test_a_soft_cap_bounds_the_scores(name: str, window: int | None) -> None:
    """Scores are capped before they are masked."""
    spec = spec_of(soft_cap=1.5, scale=2.0, windows=(window,))
    case = case_of(spec, MIXED)

    assert_agrees(name, case)

    uncapped = replace(case, spec=spec_of(scale=2.0, windows=(window,)))
    assert not torch.allclose(run(name, case), run(name, uncapped), atol=1e-2)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("name", ON_CPU)
def test_a_chunk_of_any_length_equals_the_whole_prompt(name: str, page_size: int) -> None:
    """The rows of a prompt are the same whether it is one chunk or any number of them."""
    total = 75
    spec = spec_of(page_size=page_size)
    whole = case_of(spec, ((0, total),))
    expected = dense_attention(whole)
    pages = whole.batch.block_table[0].tolist()
    table = PagedBlockTable.of([pages], page_size)

    for q_len in range(1, total + 1, 7):
        batch = AttentionBatch.build([Extend(0, 0, total - q_len, q_len)], table)
        part = Case(spec, batch, whole.q[-q_len:], whole.planes, whole.dense)

        out = run(name, part)

        assert float((out.double() - expected[-q_len:]).abs().max()) < TOLERANCE[spec.dtype]


@pytest.mark.parametrize("name", ON_CPU)
def test_an_empty_batch_is_legal(name: str) -> None:
    """No requests: no rows, and padding rows come back as zeros."""
    spec = spec_of()
    batch = AttentionBatch.build([], PagedBlockTable.of([], 16))
    planes = {plane: torch.full((2, 16, 2, 16), torch.nan) for plane in ("k", "v")}
    case = Case(spec, batch, torch.zeros(0, 6, 16), planes, [])

    assert run(name, case).shape == (0, 6, 16)
    assert torch.equal(run(name, case, padding_rows=8), torch.zeros(8, 6, 16))


@pytest.mark.parametrize("name", ON_CPU)
def test_old_contents_of_a_page_do_not_matter(name: str) -> None:
    """NaN, infinity or zeros in unused slots: the same bits."""
    spec = spec_of(windows=(40,), soft_cap=None)
    case = case_of(spec, MIXED)
    expected = run(name, case)
    assert not expected.isnan().any()

    for filler in (math.inf, -math.inf, 0.0):
        planes = {
            plane: torch.where(values.isnan(), filler, values)
            for plane, values in case.planes.items()
        }
        out = run(name, Case(spec, case.batch, case.q, planes, case.dense))

        assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("name", ["eager", "cpu", "blocked"])
def test_requests_that_share_pages_read_the_same_keys(name: str) -> None:
    """Block tables may overlap: equal queries over a shared prefix get equal rows."""
    spec = spec_of()
    alone = case_of(spec, ((320, 1),))
    pages = alone.batch.block_table[0].tolist()
    table = PagedBlockTable.of([pages] * 3, spec.page_size)
    batch = AttentionBatch.build([Extend(i, i, 320, 1) for i in range(3)], table)

    out = run(name, Case(spec, batch, alone.q.expand(3, -1, -1), alone.planes, alone.dense * 3))

    assert torch.equal(out, run(name, alone).expand(3, -1, -1))


def test_the_metadata_of_a_batch_is_frozen_and_complete() -> None:
    """Positions, slots and maxima follow from the extends and their pages alone."""
    table = PagedBlockTable.of([[7, 2], [5, 0, 9]], page_size=4)

    batch = AttentionBatch.build([Extend(0, 0, 3, 2), Extend(1, 1, 0, 9)], table)

    assert batch.cu_seqlens_q.tolist() == [0, 2, 11]
    assert batch.seq_lens_kv.tolist() == [5, 9]
    assert batch.slot_mapping.tolist() == [31, 8, 20, 21, 22, 23, 0, 1, 2, 3, 36]
    assert batch.kv_slots(0).tolist() == [28, 29, 30, 31, 8]
    assert batch.block_table.tolist() == [[7, 2, -1], [5, 0, 9]]
    assert (batch.max_q_len, batch.max_kv_len, batch.total_kv) == (9, 9, 14)
    assert batch.num_cached.any()
    assert batch.slot_mapping.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        batch.positions[0] = 1


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("name", ["eager", "cpu", "blocked"])
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_masked_keys_and_values_may_be_non_finite(
    name: str, window: int | None, poison: float
) -> None:
    """Non-finite K/V of a token changes no row before it, and none beyond the window."""
    spec = spec_of(windows=(window,), page_size=1)
    case = case_of(spec, ((0, 300),))
    position = 260
    clean = run(name, case)
    planes = {plane: values.clone() for plane, values in case.planes.items()}
    for values in planes.values():
        values[case.batch.block_table[0, position]] = poison

    out = run(name, Case(spec, case.batch, case.q, planes, case.dense))

    blind = [*range(position), *(range(position + window, 300) if window else ())]
    assert torch.equal(out[blind].view(torch.int32), clean[blind].view(torch.int32))
    assert not out[position].isfinite().all()


def wrong_inputs() -> dict[str, Callable[[Case], Case]]:
    """Arguments whose shape, dtype or memory order does not fit the spec."""

    def planes(case: Case, change: Callable[[Tensor], Tensor]) -> Case:
        changed = {name: change(plane) for name, plane in case.planes.items()}
        return Case(case.spec, case.batch, case.q, changed, case.dense)

    return {
        "fewer rows": lambda c: Case(c.spec, c.batch, c.q[:-1], c.planes, c.dense),
        "wider q": lambda c: Case(c.spec, c.batch, c.q.repeat(1, 1, 2), c.planes, c.dense),
        "narrow planes": lambda c: planes(c, lambda p: p[..., :-1].contiguous()),
        "strided planes": lambda c: planes(c, lambda p: torch.stack((p, p), 1)[:, 0]),
        "other page size": lambda c: planes(c, lambda p: p.view(-1, 8, *p.shape[2:])),
        "float64": lambda c: planes(c, Tensor.double),
        "no planes": lambda c: Case(c.spec, c.batch, c.q, {}, c.dense),
    }


@pytest.mark.parametrize("fault", wrong_inputs())
def test_the_compiled_kernels_get_no_wrong_planes(fault: str) -> None:
    """Compiled code checks nothing: a caller's mistake raises before it runs."""
    with pytest.raises(ConfigError):
        run("cpu", wrong_inputs()[fault](case_of(spec_of(), MIXED)))


def test_latents_and_rotary_parts_may_be_stored_in_two_dtypes() -> None:
    """Latents with scales, rope without."""
    spec = spec_of(num_kv_heads=1, head_dim=24, value_dim=16, kind="mla")
    table = PagedBlockTable.of([list(range(20))], 16)
    batch = AttentionBatch.build([Extend(0, 0, 290, 10)], table)
    draw = torch.Generator().manual_seed(0)
    planes = {
        "latent": torch.randint(-127, 128, (20, 16, 16), generator=draw, dtype=torch.int8),
        "latent_scale": torch.rand(20, 16, generator=draw) / 64,
        "rope": torch.randn(20, 16, 8, generator=draw).bfloat16(),
    }
    case = Case(spec, batch, torch.randn(10, 6, 24, generator=draw), planes, [])

    assert torch.allclose(run("cpu", case), run("eager", case), atol=1e-5)


def test_a_backend_leaves_the_number_of_threads_as_it_was() -> None:
    """Probe verdicts and exactness hold for one number of threads."""
    code = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.cpu.test_backends import CPU, MIXED, case_of, run, spec_of\n"
        "run('cpu', case_of(spec_of(), MIXED)); print(torch.get_num_threads())"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.stdout == "1\n", process.stderr


# -- reading a shared prefix once ---------------------------------------------------------------


@given(
    page_size=st.sampled_from([1, 3, 16, 64]),
    trunks=st.lists(st.integers(0, 900), min_size=1, max_size=3),
    requests=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 600), st.integers(1, 40)),
        min_size=1,
        max_size=7,
    ),
    window=st.sampled_from([None, None, 5, 300]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=examples(40))
def test_shared_reads_change_no_bit(
    page_size: int,
    trunks: list[int],
    requests: list[tuple[int, int, int]],
    window: int | None,
    seed: int,
) -> None:
    """Nested prefixes, chunks and decodes in one batch: the bits of each request alone."""
    draw = np.random.default_rng(seed)
    fresh = iter(draw.permutation(20_000 // page_size).tolist())
    trunk = [next(fresh) for _ in range(sum(trunks) // page_size)]
    rows, extends = [], []
    for i, (depth, own, q_len) in enumerate(requests):
        shared = trunk[: sum(trunks[:depth]) // page_size]
        length = len(shared) * page_size + own + 1
        rows.append(shared + [next(fresh) for _ in range(own // page_size + 1)])
        extends.append(Extend(i, i, max(0, length - q_len), min(q_len, length)))
    sharing = [most_in_common(rows, i, page_size) for i in range(len(rows))]
    spec = spec_of(page_size=page_size, windows=(window,), head_dim=24)
    num_pages = 20_000 // page_size + 1
    noise = torch.Generator().manual_seed(seed)
    planes = {
        name: torch.randn(num_pages, page_size, 2, 24, generator=noise) for name in ("k", "v")
    }
    table = PagedBlockTable.of(rows, page_size)
    together = AttentionBatch.build(extends, table, sharing)
    q = torch.randn(together.num_tokens, 6, 24, generator=noise)

    grouped = run("cpu", Case(spec, together, q, planes, []))
    apart = run("cpu", Case(spec, AttentionBatch.build(extends, table), q, planes, []))
    assert torch.equal(grouped.view(torch.int32), apart.view(torch.int32))
    for i, extend in enumerate(extends):
        own_rows = slice(*together.cu_seqlens_q[i : i + 2].tolist())
        alone = AttentionBatch.build([extend], table)
        out = run("cpu", Case(spec, alone, q[own_rows], planes, []))
        assert torch.equal(out.view(torch.int32), grouped[own_rows].view(torch.int32))


def test_sdpa_reads_contiguous_pages_in_place() -> None:
    """No copy for them; other pages are gathered into a buffer that is reused."""
    spec = spec_of()
    backend = SdpaBackend(spec, CPU)
    planes = {name: torch.randn(9, 16, 2, 16) for name in ("k", "v")}
    buffers = []
    for pages in ([3, 4, 5, 6], [3, 7, 1, 6], [1, 5, 3, 0]):
        batch = AttentionBatch.build([Extend(0, 0, 59, 2)], PagedBlockTable.of([pages], 16))
        q = torch.ones(2, 6, 16)
        out = backend.run(backend.plan(batch), 0, q, planes)
        eager = run("eager", Case(spec, batch, q, planes, []))
        assert torch.allclose(out, eager, atol=1e-5)
        buffers.append({name: buffer.data_ptr() for name, buffer in backend._scratch.items()})

    assert buffers[0] == {}
    assert buffers[1] == buffers[2] != {}


def test_requests_below_one_prefix_are_one_task() -> None:
    """The blocks of a shared prefix are one task for all; each has its own after it."""
    backend = CpuBackend(spec_of(), CPU)
    pages = list(range(40))
    rows = [[*pages[:34], 100 + i] for i in range(8)] + [pages[:17] + [200] * 4]
    extends = [Extend(i, i, 34 * 16, 1) for i in range(8)] + [Extend(8, 8, 20 * 16, 1)]
    sharing = [(-1, 0), *[(0, 34 * 16)] * 7, (0, 17 * 16)]

    plan = backend.plan(AttentionBatch.build(extends, PagedBlockTable.of(rows, 16), sharing))

    first, second, third = plan.phases
    assert {tuple(task[[2, 7, 8]]) for task in first} == {(9, 0, 1)}  # nine tokens, block 0
    assert {tuple(task[[2, 7, 8]]) for task in second} == {(8, 1, 2), (1, 1, 2)}
    assert {tuple(task[[2, 7, 8]]) for task in third} == {(1, 2, 3)}


def test_queries_may_be_views_in_any_float_dtype() -> None:
    """The kernel converts, scales and rounds them as torch does."""
    case = case_of(spec_of(head_dim=20, dtype=torch.bfloat16, scale=0.3), MIXED)
    backend = CpuBackend(case.spec, CPU)
    plan = backend.plan(case.batch)
    wide = backend.run(plan, 0, case.q.float(), case.planes)
    spread = torch.cat([case.q, case.q], 1)[:, : case.q.shape[1]]
    for q in (case.q, spread, case.q.half(), case.q.mT.contiguous().mT):
        assert torch.equal(backend.run(plan, 0, q, case.planes), wide.to(q.dtype))
