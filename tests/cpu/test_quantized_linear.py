"""`PackedLinear` of quantised weights: the bits that its arithmetic says, and no other row's."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.attention.exactness import batch_variant_row_counts
from ramify.kernels.cpu.abi import INT8, NORMAL_LEVELS
from ramify.kernels.cpu.op_records import GEMM
from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.cpu.quantized_panels import panels_support
from ramify.models.ops.functional import GATED_ACTIVATIONS, rms_norm
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat, as_tensor, concat_weights

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

DTYPES = [torch.float32, torch.bfloat16]
SIGNED, UNSIGNED = tuple(range(-8, 8)), tuple(range(16))
# out_width, in_width, format: around panels and blocks, short last groups, one scale a row, scattered levels
CASES: list[tuple[int, int, WeightFormat]] = [
    (64, 256, WeightFormat(8, 32)),
    (33, 576, WeightFormat(8, 576)),
    (7, 40, WeightFormat(8, 1000)),
    (64, 1024, WeightFormat(8, 256)),
    (40, 200, WeightFormat(8, 16, has_min=True)),
    (70, 576, WeightFormat(4, 32, levels=SIGNED)),
    (1, 8, WeightFormat(4, 32, levels=SIGNED)),
    (100, 640, WeightFormat(4, 32, has_min=True, levels=UNSIGNED)),
    (64, 384, WeightFormat(4, 128, has_min=True, levels=UNSIGNED)),
    (48, 520, WeightFormat(4, 16, levels=NORMAL_LEVELS)),
    (64, 256, WeightFormat(8, 64, row_bits=8)),
    (33, 584, WeightFormat(8, 584, has_min=True, row_bits=8)),
    (70, 576, WeightFormat(4, 32, levels=SIGNED, row_bits=8)),
    (48, 520, WeightFormat(4, 16, has_min=True, levels=NORMAL_LEVELS, row_bits=8)),
]
IDS = [
    f"{n}x{k}-{f.bits}-{f.group_size}-{f.has_min}-{f.levels[:1]}-{f.row_bits}" for n, k, f in CASES
]


def quantized(
    out_width: int,
    in_width: int,
    kind: WeightFormat,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fine: bool = False,
) -> QuantizedWeight:
    """Random codes, scales and offsets; scales of float16 unless `fine`."""
    generator = torch.Generator().manual_seed(seed)
    shape, groups = (out_width, in_width), -(-in_width // kind.group_size)
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if kind.bits == 4:
        choice = torch.randint(0, 16, shape, generator=generator)
        codes = torch.tensor(kind.levels, dtype=torch.int8)[choice]
    scales = torch.rand(out_width, groups, generator=generator) * 0.01
    mins = torch.randn(out_width, groups, generator=generator) * 0.05 if kind.has_min else None
    if not fine:
        scales, mins = scales.half().float(), None if mins is None else mins.half().float()
    return QuantizedWeight(kind, codes, scales, mins, dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fma(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """x * y + z, rounded once."""
    total = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if total == 0:
        return np.float32(0.0)
    # float() rounds a fraction correctly, but to float64: round to odd first, then to float32.
    near = float(total)
    if Fraction(near) != total and not np.float64(near).view(np.int64) & 1:
        towards = np.inf if total > Fraction(near) else -np.inf
        near = float(np.nextafter(near, towards))
    return np.float32(near)


def group_and_block(kind: WeightFormat) -> tuple[int, int]:
    """Elements of x that are summed together, and that share a scale."""
    if kind.row_bits == 8:
        group = min(kind.group_size, 64)
        return group, max(group, 32)
    return min(kind.group_size, 128), 128


def by_hand(row: Tensor, weight: QuantizedWeight, bias: float, column: int) -> float:
    """An element of the result as `quantized_gemm` defines it, in exact integers and fractions."""
    bits = weight.format.row_bits
    group, block_size = group_and_block(weight.format)
    x, limit = row.float().numpy(), np.float32(2 ** (bits - 1) - 1)
    codes = weight.codes[column].numpy().astype(np.int64)
    total = np.float32(bias)
    for begin in range(0, len(x), group):
        block = x[begin // block_size * block_size :][:block_size]
        largest = np.abs(block).max()
        scale = np.float32(0) if largest < 2.0**-100 else largest / limit
        factor = np.float32(0) if largest < 2.0**-100 else limit / largest
        integers = np.rint(x[begin : begin + group] * factor).astype(np.int64)
        number = min(begin // weight.group_size, weight.scales.shape[1] - 1)
        dot = np.float32(int((integers * codes[begin : begin + group]).sum()))
        total = fma(dot, np.float32(weight.scales[column, number]) * scale, total)
        if weight.mins is not None:
            x_sum = np.float32(int(integers.sum())) * scale
            total = fma(np.float32(weight.mins[column, number]), x_sum, total)
    return float(total)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_an_element_is_one_chain_over_exact_sums_of_groups(
    case: tuple[int, int, WeightFormat], dtype: torch.dtype, fine: bool
) -> None:
    """Bit by bit, with rows that have outliers, zeros and very small numbers."""
    weight = quantized(*case, dtype=dtype, fine=fine)
    bias = random(case[0], dtype=dtype, seed=2)
    x = random(5, case[1], dtype=dtype)
    x[1, 3], x[2], x[3] = 1e4, 0.0, x[3] * 1e-25
    linear = PackedLinear(weight, bias)

    y = linear(x)

    columns = sorted({0, case[0] // 2, case[0] - 1})
    for row in range(5):
        for column in columns:
            expected = by_hand(x[row], weight, float(bias[column]), column)
            assert y[row, column] == torch.tensor(expected).to(dtype)


# What a process compiled for AVX2 computes of 4-bit codes with and without offsets.
ON_AVX2 = """
import torch
from ramify.kernels.cpu.abi import NORMAL_LEVELS
from ramify.kernels.cpu.simd import LANES
from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat

assert LANES == 8
x = torch.randn(9, 160)
# Offsets come first: of their sums nothing may be left in the scratch that all share.
for levels in (range(16), range(-8, 8), NORMAL_LEVELS):
    for mins in (torch.randn(20, 5), None):
        kind = WeightFormat(4, 32, mins is not None, tuple(levels))
        codes = torch.tensor(levels, dtype=torch.int8)[torch.randint(0, 16, (20, 160))]
        weight = QuantizedWeight(kind, codes, torch.rand(20, 5), mins, torch.float32)
        linear, wide = PackedLinear(weight), weight.dequantize()
        torch.testing.assert_close(linear(x), x @ wide.T, rtol=1e-3, atol=0.2)
        assert torch.equal(linear.weight_rows(torch.arange(20)), wide)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="needs AVX2")
def test_four_bits_are_looked_up_on_avx2() -> None:
    """Any levels, with offsets and without; 4 bits in memory, as everywhere."""
    variables = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2"}

    result = subprocess.run(
        [sys.executable, "-c", ON_AVX2],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_tiles_of_int8_have_the_same_bits(
    case: tuple[int, int, WeightFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors with AMX: blocks of few rows, whole ones, and one row over; outliers, zeros, NaN."""
    weight, x = quantized(*case), random(115, case[1])
    x[1, 3], x[2], x[3], x[7, 0] = 1e4, 0.0, x[3] * 1e-25, torch.nan
    linear = PackedLinear(weight)
    if not linear.op(8, 1)[GEMM.code_tiles]:
        pytest.skip("no tiles of int8 here, or none of that shape")
    counts = (8, 9, 16, 17, 31, 33, 96, 97, 112, 115)
    by_tiles = [linear(x[:count]) for count in counts]

    monkeypatch.setattr(linear, "_record", linear._record._replace(code_tiles=0))
    monkeypatch.setattr(linear, "_ops_by_rows", {})

    for count, tiled in zip(counts, by_tiles, strict=True):
        torch.testing.assert_close(tiled, linear(x[:count]), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rows_are_as_near_to_the_truth_as_their_integers_allow(
    case: tuple[int, int, WeightFormat],
) -> None:
    """Half a step of an element's block, times the weight, summed; and a rounding of each sum."""
    weight = quantized(*case)
    x = random(20, case[1])
    wide = weight.dequantize().double()
    size = group_and_block(case[2])[1]
    padded = F.pad(x, (0, -case[1] % size)).unflatten(1, (-1, size))
    steps = padded.abs().amax(2, keepdim=True).expand_as(padded).flatten(1)[:, : case[1]]
    steps = steps / (2 ** (case[2].row_bits - 1) - 1)

    y = PackedLinear(weight)(x)

    error = (y.double() - x.double() @ wide.T).abs()
    allowed = 0.51 * steps.double() @ wide.abs().T + 2.0**-20 * x.abs().double() @ wide.abs().T
    assert (error <= allowed).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_row_count_no_place_and_no_thread_changes_a_bit(
    case: tuple[int, int, WeightFormat], dtype: torch.dtype, threads: int
) -> None:
    """1 to 33 rows, blocks that are full, one row over and one short, by any number of threads."""
    linear = PackedLinear(quantized(*case, dtype=dtype), random(case[0], dtype=dtype, seed=1))
    rows, before = random(200, case[1], dtype=dtype, seed=2), torch.get_num_threads()
    counts = [*range(1, 34), 95, 96, 97, 191, 193]

    expected = linear(rows)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(linear(rows), expected)
        assert batch_variant_row_counts(linear, rows, counts) == ()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES[:6:2], ids=IDS[:6:2])
def test_rows_that_are_not_numbers_stay_alone(
    case: tuple[int, int, WeightFormat], dtype: torch.dtype
) -> None:
    """NaN and infinity in a row make all of that row's results other than finite, and no others."""
    linear, x = PackedLinear(quantized(*case, dtype=dtype)), random(9, case[1], dtype=dtype)
    expected = linear(x)
    x[4, 3], x[5, case[1] - 1] = torch.nan, -torch.inf

    y = linear(x)

    assert not y[4:6].isfinite().any()
    others = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(y[others], expected[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_norm_gate_and_residual_are_those_of_separate_operations(
    case: tuple[int, int, WeightFormat], dtype: torch.dtype
) -> None:
    """A norm before, a gated activation behind, or a residual: the same bits as one after the other."""
    out_width, width, kind = case
    gate, up = (quantized(out_width, width, kind, dtype=dtype, seed=s) for s in (3, 4))
    x, norm = random(13, width, dtype=dtype), random(width, dtype=dtype, seed=5)
    normed = rms_norm(x, norm, 1e-5)
    residual = random(13, out_width, dtype=dtype, seed=6)

    fused = PackedLinear(concat_weights([gate, up]), norm=(norm, 1e-5), activation="silu_mul")(x)
    added = PackedLinear(gate)(x, residual=residual.clone())

    parts = PackedLinear(gate)(normed), PackedLinear(up)(normed)
    separate = GATED_ACTIVATIONS["silu_mul"](*parts)
    torch.testing.assert_close(
        fused, separate, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3
    )
    assert torch.equal(added, residual + PackedLinear(gate)(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_rows_of_the_weight_come_back(
    case: tuple[int, int, WeightFormat], dtype: torch.dtype
) -> None:
    """An embedding that is tied to the head reads rows of the packed codes."""
    weight = quantized(*case, dtype=dtype, fine=True)
    rows = torch.tensor([case[0] - 1, 0, 0])

    assert torch.equal(PackedLinear(weight).weight_rows(rows), weight.dequantize()[rows])


def test_unlike_formats_become_the_narrowest_that_holds_all() -> None:
    """4-bit q and k with a v of 8 bits in other groups; a matrix with offsets beside one without."""
    kinds = (
        WeightFormat(4, 32, levels=SIGNED),
        WeightFormat(8, 16),
        WeightFormat(4, 64, True, UNSIGNED),
    )
    parts = [quantized(rows, 256, kind) for rows, kind in zip((5, 3, 4), kinds, strict=True)]

    merged = concat_weights(parts)

    assert isinstance(merged, QuantizedWeight)
    assert merged.format == WeightFormat(8, 16, has_min=True)
    assert torch.equal(merged.dequantize(), torch.cat([as_tensor(part) for part in parts]))
    alike = concat_weights([parts[0], quantized(2, 256, WeightFormat(4, 16, levels=SIGNED))])
    assert isinstance(alike, QuantizedWeight)
    assert alike.format == WeightFormat(4, 16, levels=SIGNED)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 40).map(lambda units: 8 * units),
    st.sampled_from([8, 16, 32, 64, 128, 256, 4096]),
    st.sampled_from([(), SIGNED, UNSIGNED, NORMAL_LEVELS]),
    st.booleans(),
    st.sampled_from([8, 16]),
    st.integers(1, 14),
)
def test_any_shape_and_format_is_computed_by_its_chain(
    out_width: int,
    in_width: int,
    group: int,
    levels: Any,
    has_min: bool,
    row_bits: Any,
    num_rows: int,
) -> None:
    """One column by hand, for shapes and formats that nobody chose."""
    kind = WeightFormat(4 if levels else 8, group, has_min, levels, row_bits)
    weight = quantized(out_width, in_width, kind, fine=True)
    x = random(num_rows, in_width)
    assert panels_support(weight) is None

    y = PackedLinear(weight)(x)

    row, column = num_rows - 1, out_width // 2
    assert float(y[row, column]) == by_hand(x[row], weight, 0.0, column)


@pytest.mark.parametrize(
    ("width", "group", "reason"),
    [
        (12, 4, "rows of 12 are no multiple of 8"),
        (96, 24, "groups of 24 neither divide 128 nor are multiples of it"),
        (400, 192, "groups of 192 neither divide 128 nor are multiples of it"),
        (96, 4, "groups of 4 neither"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_the_reason(
    width: int, group: int, reason: str
) -> None:
    """Such a matrix is computed by torch."""
    weight = quantized(16, width, WeightFormat(8, group))

    assert reason in str(panels_support(weight))


def with_factors(weight: QuantizedWeight, seed: int = 7) -> QuantizedWeight:
    """The same with scales and offsets that are multiples of a float16 for each 256 weights, as K-quants have."""
    generator = torch.Generator().manual_seed(seed)
    rows, groups = weight.scales.shape
    spans = weight.shape[1] // 256
    count = 1 if weight.mins is None else 2
    factors = (torch.randn(rows, count, spans, generator=generator) * 0.01).half()
    factors[0, :, 0] = 0
    multiples = torch.randint(-128, 128, (count, rows, groups), generator=generator)
    wide = factors.float().repeat_interleave(groups // spans, -1)
    scales = wide[:, 0] * multiples[0]
    mins = None if weight.mins is None else wide[:, 1] * multiples[1]
    return replace(weight, scales=scales, mins=mins, factors=factors)


@pytest.mark.parametrize("activation", [None, "silu_mul"])
@pytest.mark.parametrize(
    "kind",
    [
        WeightFormat(4, 32, has_min=True, levels=UNSIGNED),
        WeightFormat(8, 16),
        WeightFormat(4, 16, has_min=True, levels=UNSIGNED, row_bits=8),
        WeightFormat(4, 32, levels=NORMAL_LEVELS),
    ],
)
def test_multiples_of_factors_have_the_bits_of_scales(
    kind: WeightFormat, activation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any number of rows, by tiles and without; they take a byte each."""
    weight = with_factors(quantized(78, 768, kind))
    linear, plain = (
        PackedLinear(matrix, activation=activation)
        for matrix in (weight, replace(weight, factors=None))
    )
    assert linear._record.scale_kind == INT8
    x = random(40, 768)
    for count in (1, 3, 8, 40):
        assert torch.equal(linear(x[:count]), plain(x[:count]))
    monkeypatch.setattr(linear, "_record", linear._record._replace(code_tiles=0))
    monkeypatch.setattr(linear, "_ops_by_rows", {})
    assert torch.equal(linear(x), plain(x))
    if activation is None:
        rows = torch.tensor([77, 0, 31])
        assert torch.equal(linear.weight_rows(rows), weight.dequantize()[rows])


def test_factors_outlive_reordering_and_joining() -> None:
    """Rows of q and k move, matrices of unlike types join: a type without offsets has zeros for their factors."""
    q = with_factors(quantized(8, 512, WeightFormat(4, 32, has_min=True, levels=UNSIGNED)))
    v = with_factors(quantized(6, 512, WeightFormat(8, 16)), seed=9)
    index = torch.tensor([3, 1, 0, 2, 4, 6, 5, 7])

    joined = concat_weights([q.rows(index), v])

    assert isinstance(joined, QuantizedWeight)
    assert joined.format == WeightFormat(8, 16, has_min=True)
    assert joined.factors is not None
    assert torch.equal(joined.dequantize(), torch.cat([q.dequantize()[index], v.dequantize()]))
    x = random(3, 512)
    assert torch.equal(PackedLinear(joined)(x), PackedLinear(replace(joined, factors=None))(x))
    no_factors = concat_weights([q, quantized(2, 512, WeightFormat(8, 16))])
    assert isinstance(no_factors, QuantizedWeight)
    assert no_factors.factors is None
