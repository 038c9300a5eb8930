"""`PackedLinear` and `QKNormRope`: right, and a row's bits do not depend on the other rows."""

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
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops.cpu.linear import PackedLinear, packed_gemm_supports
from ramify.models.ops.cpu.rope import QKNormRope
from ramify.models.ops.functional import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    apply_rotary,
    layer_norm,
    rms_norm,
)
from ramify.models.ops.protocol import Activation, Heads
from ramify.models.ops.rotary_table import RotaryTable
from tests.cpu.attention_cases import spec_of

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu.simd import HAS_BF16_DOT

DTYPES = [torch.float32, torch.bfloat16]
# [out_width, in_width] around one and several panels of NR, one and several KC strips, and odd widths
SHAPES = [(64, 128), (1, 1), (7, 3), (16, 256), (33, 257), (100, 76), (301, 511), (48, 1030)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_count_and_no_place_changes_a_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """1 to 33 rows and large counts; row blocks that are full, one row over and one row short."""
    linear = PackedLinear(random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1))
    rows = random(600, shape[1], dtype=dtype, seed=2)
    counts = {*range(1, 34), *PROBE_ROW_COUNTS, 95, 96, 97, 191, 193, 288, 511, 599}

    assert batch_variant_row_counts(linear, rows, sorted(counts)) == ()


@pytest.mark.parametrize("width", [511, 512])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, threads: int, width: int) -> None:
    """A task's result does not depend on the worker that computes it."""
    linear, x = (
        PackedLinear(random(301, width, dtype=dtype)),
        random(130, width, dtype=dtype, seed=2),
    )
    expected, before = linear(x), torch.get_num_threads()

    try:
        torch.set_num_threads(threads)
        y = linear(x)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(y, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_truth_as_the_dtype_allows(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    """Against float64: |error| <= 2^-22 * sum |terms| + a rounding of the result; norm like `F.linear`'s."""
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
        sizes = F.linear(*(tensor.abs() for tensor in wide))

        y = linear(x)

        assert y.dtype == dtype
        error = (y.double() - truth).abs()
        assert (error <= 2.0**-22 * sizes + unit * truth.abs()).all()
        other = F.linear(x.float(), weight.float(), bias.float()).to(dtype).double() - truth
        assert num_rows < 8 or error.norm() <= 2 * other.norm() + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_fits_is_exact_and_rounds_to_even(dtype: torch.dtype) -> None:
    """Products of small integers are exact; halfway between two bfloat16 numbers, the even number."""
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
    """NaN and infinity in a row reach that row's results only."""
    linear, x = PackedLinear(random(40, 70, dtype=dtype)), random(9, 70, dtype=dtype, seed=1)
    expected = linear(x)
    x[4, 3], x[5, 69] = torch.nan, torch.inf

    y = linear(x)

    assert y[4].isnan().all()
    assert (~y[5].isfinite()).all()
    finite_rows = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(y[finite_rows], expected[finite_rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_no_rows(dtype: torch.dtype) -> None:
    """x may have any strides; no rows give no rows."""
    linear = PackedLinear(random(20, 30, dtype=dtype))
    wide, tall = random(6, 90, dtype=dtype), random(30, 6, dtype=dtype)

    assert torch.equal(linear(wide[:, 31:61]), linear(wide[:, 31:61].contiguous()))
    assert torch.equal(linear(tall.T), linear(tall.T.contiguous()))
    assert linear(wide[:0, :30]).shape == (0, 20)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_does_not_matter(default: torch.dtype) -> None:
    """Scratch is float32 whatever `torch.set_default_dtype` says."""
    weight, x = random(40, 2000), random(300, 2000, seed=1)
    expected = PackedLinear(weight)(x)
    spec = spec_of(dtype=torch.bfloat16, head_dim=64)

    # A new thread has scratch of its own, allocated now.
    def in_a_thread() -> None:
        results.append(PackedLinear(weight)(x))
        results.append(CpuBackend(spec, torch.device("cpu")))

    results: list[object] = []
    try:
        torch.set_default_dtype(default)
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
    finally:
        torch.set_default_dtype(torch.float32)

    assert len(results) == 2 and isinstance(results[0], Tensor)
    assert torch.equal(results[0], expected)


def test_numba_cpu_name_decides_which_instructions_are_used() -> None:
    """For a CPU without dot products and look-ups none is emitted: LLVM would abort the process."""
    program = (
        "import torch; from ramify.models.ops.cpu.linear import PackedLinear; "
        "from ramify.models.ops.weight_rounding import quantize_weight; "
        "w, x = torch.ones(64, 32), torch.ones(3, 32); "
        "assert (PackedLinear(w.bfloat16())(x.bfloat16()) == 32).all(); "
        "y = PackedLinear(quantize_weight(w, 4, 32))(x); "
        "assert (y - 32).abs().max() < 0.1, y"
    )
    run_with(program, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="+sse2")


def test_bf16_dot_needs_all_of_its_cpu_features() -> None:
    """A hypervisor can hide any of them."""
    features = "avx512f", "avx512vl", "avx512dq", "avx512bf16"
    program = "from ramify.kernels.cpu.simd import HAS_BF16_DOT; assert HAS_BF16_DOT == {}"
    everything = ",".join(f"+{feature}" for feature in features)
    run_with(program.format(HAS_BF16_DOT), NUMBA_CPU_FEATURES=everything)
    for missing in features:
        flags = ",".join(f"{'-' if feature == missing else '+'}{feature}" for feature in features)
        run_with(program.format(False), NUMBA_CPU_FEATURES=flags)
        run_with(program.format(False), NUMBA_CPU_FEATURES=f"+{missing},{flags}")


def run_with(program: str, **variables: str) -> None:
    """Run a program with these environment variables; it must end without an error."""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_packed_gemm_supports_gives_the_reason_for_no() -> None:
    """float64 and other devices than CPU are not supported."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert packed_gemm_supports(torch.float32, cpu) is None
    assert "float64" in (packed_gemm_supports(torch.float64, cpu) or "")
    assert "device meta" in (packed_gemm_supports(torch.float32, meta) or "")


def reference(
    x: Tensor, weight: Tensor, norm: Tensor | None, activation: Activation | None
) -> Tensor:
    """Norm, linear and activation as separate torch operations, each rounded to the dtype."""
    if norm is not None:
        x = rms_norm(x, norm, 1e-5) if norm.dim() == 1 else layer_norm(x, norm[0], norm[1], 1e-5)
    y = F.linear(x.float(), weight.float()).to(x.dtype)
    if activation is None:
        return y
    if activation in PLAIN_ACTIVATIONS:
        return PLAIN_ACTIVATIONS[activation](y)
    return GATED_ACTIVATIONS[activation](*y.chunk(2, -1))


FUSED: list[tuple[str | None, Activation | None]] = [
    ("rms", None),
    ("layer", None),
    (None, "gelu_tanh"),
    (None, "sigmoid"),
    (None, "silu_mul"),
    (None, "gelu_tanh_mul"),
    (None, "clamped_swiglu_mul"),
    ("rms", "silu_mul"),
    ("layer", "gelu_tanh"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("norm_kind", "activation"), FUSED)
@pytest.mark.parametrize("shape", [(64, 128), (2, 1), (66, 257), (10, 19), (302, 511)])
def test_fused_norm_and_activation_equal_separate_operations(
    shape: tuple[int, int], norm_kind: str | None, activation: Activation | None, dtype: torch.dtype
) -> None:
    """Norm prologue and activation epilogue, at odd widths, to a rounding; no row count changes a bit."""
    # Some gates and ups of the clamped activation are beyond its limit.
    weight = (4 if activation == "clamped_swiglu_mul" else 1) * random(*shape, dtype=dtype)
    weight /= shape[1] ** 0.5
    norm = None
    if norm_kind == "rms":
        norm = random(shape[1], dtype=dtype, seed=3)
    elif norm_kind == "layer":
        norm = random(2, shape[1], seed=3)
    linear = PackedLinear(
        weight, norm=None if norm is None else (norm, 1e-5), activation=activation
    )
    # The mean of a row is not zero.
    x = 3 * random(600, shape[1], dtype=dtype, seed=2) + 1

    y = linear(x)

    expected = reference(x, weight, norm, activation)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.shape == expected.shape
    assert torch.allclose(y.float(), expected.float(), tolerance, 10 * tolerance)
    counts = (*range(1, 34), 95, 96, 97, 127, 193, 512)
    assert batch_variant_row_counts(linear, x, counts) == ()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 40, 77])
def test_a_residual_gets_the_result_added(width: int, dtype: torch.dtype) -> None:
    """In place, with the bits of `residual + linear(x)`: the result is rounded before it is added."""
    linear = PackedLinear(random(width, 50, dtype=dtype), random(width, dtype=dtype, seed=1))
    for num_rows in (1, 7, 100):
        x = random(num_rows, 50, dtype=dtype)
        residual = random(num_rows, width, dtype=dtype, seed=9)
        expected = residual + linear(x)

        returned = linear(x, residual=residual)

        assert returned is residual
        assert torch.equal(returned, expected)


def test_a_residual_that_does_not_fit_is_refused() -> None:
    """Of another shape or not contiguous; with a gated linear torch adds."""
    x, weight = random(9, 50), random(40, 50)

    with pytest.raises(ConfigError, match="residual is"):
        PackedLinear(weight)(x, residual=random(3, 40))
    with pytest.raises(ConfigError, match="contiguous"):
        PackedLinear(weight)(x, residual=random(40, 9).T)
    gated = PackedLinear(weight, activation="silu_mul")
    assert torch.equal(gated(x, residual=torch.ones(9, 20)), gated(x) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_inside_the_kernel_is_silu(dtype: torch.dtype) -> None:
    """For large gates of both signs, around zero, and NaN."""
    gate = torch.tensor([-200.0, -100.0, -20.0, -1.0, -0.0, 0.0, 1e-8, 1.0, 20.0, 200.0]).to(dtype)
    linear = PackedLinear(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(dtype), activation="silu_mul")

    y = linear(torch.stack((gate, torch.ones_like(gate)), 1))[:, 0]

    expected = F.silu(gate.float())
    unit = 1e-6 if dtype == torch.float32 else 2.0**-8
    assert torch.allclose(y.float(), expected, rtol=unit, atol=1e-30)
    assert linear(torch.tensor([[torch.nan, 1.0]]).to(dtype)).isnan().all()


@pytest.mark.parametrize("workers", [1, 2, 8, 32])
@pytest.mark.parametrize("gated", [False, True])
def test_no_task_is_without_panels(gated: bool, workers: int) -> None:
    """A task without panels would pack a block of rows for nothing."""
    from ramify.kernels.cpu.gemm_microkernels import NR
    from ramify.kernels.cpu.op_records import GEMM

    linear = PackedLinear(random(14 * NR, 8), activation="silu_mul" if gated else None)
    for rows in (1, 90, 200, 3000):
        num_n_splits = linear.op(rows, workers)[GEMM.num_n_splits]
        assert 1 <= num_n_splits <= (7 if gated else 14)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_does_not_depend_on_flushing_of_subnormals(dtype: torch.dtype) -> None:
    """Threads of one pool may differ in that; gates whose exponentials are near the smallest numbers."""
    gate = -torch.linspace(80, 110, 4000).to(dtype)
    linear = PackedLinear(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).to(dtype), activation="silu_mul")
    results, before = list[torch.Tensor](), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            results.append(linear(torch.stack((gate, torch.ones_like(gate)), 1)))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 18, 20, 32, 64, 130])
@pytest.mark.parametrize("form", [None, "head", "width", "after_rope"])
def test_qk_norm_and_rope_equal_torch(
    form: QkNormForm | None, head_dim: int, dtype: torch.dtype
) -> None:
    """Norm and rope of q and k heads, v untouched; no row count changes a bit."""
    counts = (3, 2) if form == "width" else (1, 1)
    rotary = RotaryTable(RopeConfig(10_000.0), head_dim=head_dim, max_len=50, dtype=dtype)
    norms = [random(n * head_dim, dtype=dtype, seed=i) for i, n in enumerate(counts, 1)]
    weights_and_eps = None if form is None else (norms[0], norms[1], 1e-6)
    qk_norm_rope = QKNormRope(
        rotary.cos, rotary.sin, Heads(3, 2, head_dim), norms=weights_and_eps, form=form or "head"
    )
    rows = random(600, 7 * head_dim, dtype=dtype)
    positions = torch.arange(600) * 7 % 50

    def rotated(indices: Tensor) -> Tensor:
        return qk_norm_rope.rotate(rows[indices], positions[indices])

    result = rotated(torch.arange(600)).unflatten(1, (7, head_dim))

    heads = rows.unflatten(1, (7, head_dim))
    q_k_v = heads.split((3, 2, 2), 1)
    angles = rotary.cos_sin(positions)

    def expected_heads(x: Tensor, weight: Tensor) -> Tensor:
        if form == "width":
            x = rms_norm(x.flatten(1), weight, 1e-6).view(x.shape)
        elif form == "head":
            x = rms_norm(x, weight, 1e-6)
        x = apply_rotary(x, *angles)
        return rms_norm(x, weight, 1e-6) if form == "after_rope" else x

    q, k = map(expected_heads, q_k_v[:2], norms)
    expected = torch.cat((q, k, q_k_v[2]), 1)
    if form is not None:
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert torch.allclose(result.float(), expected.float(), tolerance, tolerance)
    else:
        assert torch.equal(result, expected)
    row_counts = (*range(1, 34), 127, 512)
    assert batch_variant_row_counts(rotated, torch.arange(600), row_counts) == ()


def test_a_position_outside_the_tables_is_an_error() -> None:
    """Its row is left unchanged; wrong shapes and dtypes are refused."""
    rotary = RotaryTable(RopeConfig(10_000.0), head_dim=8, max_len=5, dtype=torch.float32)
    qk_norm_rope = QKNormRope(rotary.cos, rotary.sin, Heads(1, 1, 8))
    rows = random(2, 24)
    before = rows.clone()

    with pytest.raises(IndexError, match=r"0\.\.4"):
        qk_norm_rope.rotate(rows, torch.tensor([1, 5]))
    assert torch.equal(rows[1], before[1])
    with pytest.raises(ConfigError, match="positions are"):
        qk_norm_rope.rotate(rows, torch.tensor([1]))
    with pytest.raises(ConfigError, match="rows are"):
        qk_norm_rope.rotate(rows[:, :10], torch.tensor([1, 2]))
    assert qk_norm_rope.rotate(rows[:0], torch.zeros(0, dtype=torch.int64)).shape == (0, 24)


def test_rows_of_another_kind_are_refused() -> None:
    """The kernel gets addresses only: wrong dtypes and shapes are checked before the call."""
    linear = PackedLinear(random(20, 30))

    for wrong in (random(3, 29), random(3, 30).bfloat16(), random(30)):
        with pytest.raises(ConfigError, match="x is"):
            linear(wrong)


@pytest.mark.parametrize(
    ("norm", "way_out"),
    [
        (random(30, dtype=torch.float16), "use torch.bfloat16 or torch.float32"),
        (random(2, 30, dtype=torch.bfloat16), "use torch.float32"),
    ],
)
def test_a_norm_in_another_dtype_is_refused(norm: Tensor, way_out: str) -> None:
    """An RMS norm's weight is in the rows' dtype or in float32, a layer norm's in float32."""
    with pytest.raises(ConfigError, match=f"a norm in {norm.dtype} for rows in .*{way_out}"):
        PackedLinear(random(20, 30, dtype=torch.bfloat16), norm=(norm, 1e-5))
