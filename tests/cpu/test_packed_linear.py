"""The product kernel: right, and the same for a row whatever rows stand beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.exactness import PROBE_ROW_COUNTS, batch_variant_row_counts
from ramify.errors import ConfigError
from ramify.models.config import RopeConfig
from ramify.models.ops.cpu_linear import PackedLinear, packed_gemm_supports
from ramify.models.ops.cpu_rope import QKNormRope
from ramify.models.ops.functional import apply_rotary, rms_norm, silu_and_mul
from ramify.models.rope import RotaryTable
from tests.cpu.attention_cases import spec_of

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu.simd import HAS_BF16_DOT

DTYPES = [torch.float32, torch.bfloat16]
# widths around one and several panels, one strip and several, and none of these
SHAPES = [(64, 128), (1, 1), (7, 3), (16, 256), (33, 257), (100, 76), (301, 511), (48, 1030)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_count_and_no_place_changes_a_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """1 to 33 rows and large counts, with blocks that are full, one over and one short."""
    linear = PackedLinear(random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1))
    rows = random(600, shape[1], dtype=dtype, seed=2)
    counts = {*range(1, 34), *PROBE_ROW_COUNTS, 95, 96, 97, 191, 193, 288, 511, 599}

    assert batch_variant_row_counts(linear, rows, sorted(counts)) == ()


@pytest.mark.parametrize("width", [511, 512])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, threads: int, width: int) -> None:
    """Who computes a task does not matter."""
    linear, x = (
        PackedLinear(random(301, width, dtype=dtype)),
        random(130, width, dtype=dtype, seed=2),
    )
    expected, before = linear(x), torch.get_num_threads()

    try:
        torch.set_num_threads(threads)
        found = linear(x)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_truth_as_the_dtype_allows(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    """Against float64: two roundings of the terms' sizes, and of the result; on average `F.linear`'s."""
    weight = random(*shape, dtype=dtype)
    bias = (
        random(shape[0], dtype=dtype, seed=1) if with_bias else torch.zeros(shape[0], dtype=dtype)
    )
    linear = PackedLinear(weight, bias if with_bias else None)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    for num_rows in (1, 2, 3, 5, 12, 47, 130):
        x = random(num_rows, shape[1], dtype=dtype, seed=num_rows)
        wide = x.double(), weight.double(), bias.double()
        truth = F.linear(*wide)
        sizes = F.linear(*(part.abs() for part in wide))

        found = linear(x)

        assert found.dtype == dtype
        error = (found.double() - truth).abs()
        assert (error <= 2.0**-22 * sizes + unit * truth.abs()).all()
        other = F.linear(x.float(), weight.float(), bias.float()).to(dtype).double() - truth
        assert num_rows < 8 or error.norm() <= 1.5 * other.norm() + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_fits_is_exact_and_rounds_to_even(dtype: torch.dtype) -> None:
    """Small integers have one answer; halfway between two bfloat16 the even one is taken."""
    weight = torch.arange(-20, 20, dtype=torch.float32).reshape(4, 10).to(dtype)
    x = torch.arange(30, dtype=torch.float32).reshape(3, 10).to(dtype)
    halfway = torch.tensor([[256.0, 1.0], [256.0, 3.0]]).to(dtype)

    assert torch.equal(PackedLinear(weight)(x), (x.double() @ weight.double().T).to(dtype))
    assert torch.equal(
        PackedLinear(torch.ones(1, 2, dtype=dtype))(halfway)[:, 0],
        torch.tensor([257.0, 259.0]).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_numbers_stay_alone(dtype: torch.dtype) -> None:
    """NaN and infinity in one row reach that row's results and no other."""
    linear, x = PackedLinear(random(40, 70, dtype=dtype)), random(9, 70, dtype=dtype, seed=1)
    expected = linear(x)
    x[4, 3], x[5, 69] = torch.nan, torch.inf

    found = linear(x)

    assert found[4].isnan().all()
    assert (~found[5].isfinite()).all()
    kept = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_nothing_at_all(dtype: torch.dtype) -> None:
    """Rows may be far apart or transposed; no rows give no rows."""
    linear = PackedLinear(random(20, 30, dtype=dtype))
    wide, tall = random(6, 90, dtype=dtype), random(30, 6, dtype=dtype)

    assert torch.equal(linear(wide[:, 31:61]), linear(wide[:, 31:61].contiguous()))
    assert torch.equal(linear(tall.T), linear(tall.T.contiguous()))
    assert linear(wide[:0, :30]).shape == (0, 20)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_is_its_callers_affair(default: torch.dtype) -> None:
    """Scratch is float32, whatever tensors are that nobody said a dtype for."""
    weight, x = random(40, 2000), random(300, 2000, seed=1)
    expected = PackedLinear(weight)(x)
    spec = spec_of(dtype=torch.bfloat16, head_dim=64)

    def in_a_thread() -> None:  # with scratch of its own, made anew
        found.append(PackedLinear(weight)(x))
        found.append(CpuBackend(spec, torch.device("cpu")))

    found: list[object] = []
    try:
        torch.set_default_dtype(default)
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
    finally:
        torch.set_default_dtype(torch.float32)

    assert len(found) == 2 and isinstance(found[0], Tensor)
    assert torch.equal(found[0], expected)


def test_a_processor_that_numba_is_told_of_gets_what_it_has() -> None:
    """Compiled for another one, nothing is multiplied in pairs: LLVM would end the process."""
    program = (
        "import torch; from ramify.models.ops.cpu_linear import PackedLinear; "
        "w, x = torch.ones(64, 32), torch.ones(3, 32); "
        "assert (PackedLinear(w.bfloat16())(x.bfloat16()) == 32).all()"
    )
    run_told(program, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse2")


def test_pairs_want_all_that_they_are_made_of() -> None:
    """A hypervisor can leave out any of it."""
    wanted = "avx512f", "avx512vl", "avx512dq", "avx512bf16"
    program = "from ramify.kernels.cpu.simd import HAS_BF16_DOT; assert HAS_BF16_DOT == {}"
    run_told(program.format(HAS_BF16_DOT), NUMBA_CPU_FEATURES=",".join(f"+{one}" for one in wanted))
    for missing in wanted:
        told = ",".join(f"{'-' if one == missing else '+'}{one}" for one in wanted)
        run_told(program.format(False), NUMBA_CPU_FEATURES=told)
        run_told(program.format(False), NUMBA_CPU_FEATURES=f"+{missing},{told}")


def run_told(program: str, **told: str) -> None:
    """Run a program with these variables; it must end without an error."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_what_cannot_be_computed_is_refused_with_the_reason() -> None:
    """float64 and other devices are for others."""
    assert packed_gemm_supports(torch.zeros(2, 2)) is None
    assert "float64" in (packed_gemm_supports(torch.zeros(2, 2, dtype=torch.float64)) or "")
    assert "device meta" in (packed_gemm_supports(torch.zeros(2, 2, device="meta")) or "")


def reference(x: Tensor, weight: Tensor, norm: Tensor | None, gated: bool) -> Tensor:
    """What separate operations give, each rounded to the dtype."""
    if norm is not None:
        x = rms_norm(x, norm, 1e-5)
    y = F.linear(x.float(), weight.float()).to(x.dtype)
    return silu_and_mul(*y.chunk(2, -1)) if gated else y


FUSED = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("normed", "gated"), FUSED)
@pytest.mark.parametrize("shape", [(64, 128), (2, 1), (66, 257), (10, 19), (302, 511)])
def test_what_is_fused_is_what_separate_operations_give(
    shape: tuple[int, int], normed: bool, gated: bool, dtype: torch.dtype
) -> None:
    """Norm before and gate behind, at odd widths, to a rounding; and no row count changes a bit."""
    weight = random(*shape, dtype=dtype) / shape[1] ** 0.5
    norm = random(shape[1], dtype=dtype, seed=3) if normed else None
    linear = PackedLinear(weight, norm=None if norm is None else (norm, 1e-5), gated=gated)
    x = 3 * random(600, shape[1], dtype=dtype, seed=2)

    found = linear(x)

    expected = reference(x, weight, norm, gated)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert found.shape == expected.shape
    assert torch.allclose(found.float(), expected.float(), tolerance, 10 * tolerance)
    counts = (*range(1, 34), 95, 96, 97, 127, 193, 512)
    assert batch_variant_row_counts(linear, x, counts) == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 40, 77])
def test_a_result_is_added_as_if_it_were_there_already(width: int, dtype: torch.dtype) -> None:
    """In place, with the bits of a sum of the rounded result."""
    linear = PackedLinear(random(width, 50, dtype=dtype), random(width, dtype=dtype, seed=1))
    for num_rows in (1, 7, 100):
        x, sums = random(num_rows, 50, dtype=dtype), random(num_rows, width, dtype=dtype, seed=9)
        expected = sums + linear(x)

        found = linear.add_to(sums, x)

        assert found is sums
        assert torch.equal(found, expected)


def test_sums_that_do_not_fit_are_refused() -> None:
    """Another shape or order in memory, or a gated product."""
    x, weight = random(9, 50), random(40, 50)

    with pytest.raises(ConfigError, match="sums are"):
        PackedLinear(weight).add_to(random(3, 40), x)
    with pytest.raises(ConfigError, match="contiguous"):
        PackedLinear(weight).add_to(random(40, 9).T, x)
    with pytest.raises(ConfigError, match="gated"):
        PackedLinear(weight, gated=True).add_to(random(9, 20), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_inside_the_kernel_is_silu(dtype: torch.dtype) -> None:
    """Far out on both sides, at zero, and for what is not a number."""
    gate = torch.tensor([-200.0, -100.0, -20.0, -1.0, -0.0, 0.0, 1e-8, 1.0, 20.0, 200.0]).to(dtype)
    linear = PackedLinear(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(dtype), gated=True)

    found = linear(torch.stack((gate, torch.ones_like(gate)), 1))[:, 0]

    expected = F.silu(gate.float())
    unit = 1e-6 if dtype == torch.float32 else 2.0**-8
    assert torch.allclose(found.float(), expected, rtol=unit, atol=1e-30)
    assert linear(torch.tensor([[torch.nan, 1.0]]).to(dtype)).isnan().all()


@pytest.mark.parametrize("workers", [1, 2, 8, 32])
@pytest.mark.parametrize("gated", [False, True])
def test_no_task_is_without_panels(gated: bool, workers: int) -> None:
    """It would pack a block of rows for nothing."""
    from ramify.kernels.cpu.gemm_microkernels import NR

    linear = PackedLinear(random(14 * NR, 8), gated=gated)
    for rows in (1, 90, 200, 3000):
        *_, pieces, _ = linear.op(rows, workers)
        assert 1 <= pieces <= (7 if gated else 14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_is_that_of_a_thread_that_flushes_subnormals(dtype: torch.dtype) -> None:
    """Such a thread may be one of several: gates whose exponentials are near the least numbers."""
    gate = -torch.linspace(80, 110, 4000).to(dtype)
    linear = PackedLinear(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(dtype), gated=True)
    found, before = list[torch.Tensor](), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            found.append(linear(torch.stack((gate, torch.ones_like(gate)), 1)))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 18, 20, 32, 64, 130])
@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_turned_as_by_torch(normed: bool, head_dim: int, dtype: torch.dtype) -> None:
    """Norm and rotation of queries and keys, values untouched; no row count changes a bit."""
    rotary = RotaryTable(RopeConfig(10_000.0), head_dim=head_dim, max_len=50, dtype=dtype)
    norms = [random(head_dim, dtype=dtype, seed=i) for i in (1, 2)]
    named = (norms[0], norms[1], 1e-6) if normed else None
    turn = QKNormRope(rotary.cos, rotary.sin, num_q=3, num_k=2, norms=named)
    rows = random(600, 7 * head_dim, dtype=dtype)
    positions = torch.arange(600) * 7 % 50

    def turned(indices: Tensor) -> Tensor:
        return turn(rows[indices], positions[indices])

    found = turned(torch.arange(600)).unflatten(1, (7, head_dim))

    heads = rows.unflatten(1, (7, head_dim))
    parts = heads.split((3, 2, 2), 1)
    q, k = (rms_norm(x, w, 1e-6) if normed else x for x, w in zip(parts[:2], norms, strict=True))
    angles = rotary.cos_sin(positions)
    expected = torch.cat((apply_rotary(q, *angles), apply_rotary(k, *angles), parts[2]), 1)
    if normed:
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(found.float(), expected.float(), tolerance, tolerance)
    else:
        assert torch.equal(found, expected)
    counts = (*range(1, 34), 127, 512)
    assert batch_variant_row_counts(turned, torch.arange(600), counts) == ()


def test_a_position_outside_the_tables_is_an_error() -> None:
    """Its row is left alone; shapes and dtypes that do not fit are refused."""
    rotary = RotaryTable(RopeConfig(10_000.0), head_dim=8, max_len=5, dtype=torch.float32)
    turn = QKNormRope(rotary.cos, rotary.sin, num_q=1, num_k=1)
    rows = random(2, 24)
    before = rows.clone()

    with pytest.raises(IndexError, match=r"0\.\.4"):
        turn(rows, torch.tensor([1, 5]))
    assert torch.equal(rows[1], before[1])
    with pytest.raises(ConfigError, match="positions are"):
        turn(rows, torch.tensor([1]))
    with pytest.raises(ConfigError, match="rows are"):
        turn(rows[:, :10], torch.tensor([1, 2]))
    assert turn(rows[:0], torch.zeros(0, dtype=torch.int64)).shape == (0, 24)


def test_rows_of_another_kind_are_refused() -> None:
    """The kernel is told addresses: a wrong dtype or width must be found before."""
    linear = PackedLinear(random(20, 30))

    for wrong in (random(3, 29), random(3, 30).bfloat16(), random(30)):
        with pytest.raises(ConfigError, match="x is"):
            linear(wrong)
