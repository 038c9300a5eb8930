"""exp, row maximum, exp-minus-max with its sum, and tanh soft cap as LLVM IR.

Like `simd`: a fixed sequence of operations per element.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.simd import (
    HAS_BF16_DOT,
    LANES,
    TILE_N,
    bf16_dot,
    broadcast,
    call_function,
    constant,
    i32,
    i64,
    llvm_intrinsic,
    load,
    maximum,
    offset,
    reduce_lanes,
    store,
    vector_type,
)

# (exp(r) - 1 - r) / r², highest power first, |r| <= ln 2 / 2 (expf of the Cephes library)
_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # sum: ln 2; n * _LN2_HIGH is exact
_LOG2_E = 1.4426950408889634
_EXP_UNDERFLOW = -87.0  # exp is 0 below; exp(-87) is about 1.6e-38

# 2^r, highest power first, 0 <= r < 1: relative error below 2^-18, exactly 1 at 0 (minimax, by
# Lawson's reweighted least squares)
_EXP2_BF16_TERMS = (1.3426685531e-2, 5.2242472201e-2, 2.4128020570e-1, 6.9304484478e-1, 1.0)
_MIN_NORMAL_EXPONENT = -126.0  # float32's smallest normal number is 2 to this
_ROUND_DOWN, _ROUND_CURRENT = 1, 4  # immediate of `vreduceps`; rounding operand: as in MXCSR

_int, _float = types.int64, types.float32


def exp_f32(builder: Any, x: Any) -> Any:
    """exp(x), x <= 80, to about 2 ulp: exactly 1 at 0, exactly 0 below `_EXP_UNDERFLOW`, NaN of NaN."""
    lanes = x.type.count

    def c(value: float) -> Any:
        return constant(value, lanes)

    low = builder.fcmp_ordered("<", x, c(_EXP_UNDERFLOW))
    x = builder.select(low, c(_EXP_UNDERFLOW), x)
    n = llvm_intrinsic(builder, "rint", builder.fmul(x, c(_LOG2_E)))
    r = llvm_intrinsic(builder, "fma", n, c(-_LN2_HIGH), x)
    r = llvm_intrinsic(builder, "fma", n, c(-_LN2_LOW), r)
    p = _polynomial(builder, r, _EXP_TERMS)
    y = builder.fadd(llvm_intrinsic(builder, "fma", builder.fmul(p, r), r, r), c(1.0))
    if HAS_BF16_DOT and lanes == LANES:
        return _avx512_masked(builder, "scalef", y, n, mask=builder.not_(low))
    power = builder.add(builder.fptosi(n, vector_type(lanes, i32)), constant(127, lanes, i32))
    bits = builder.shl(power, constant(23, lanes, i32))
    return builder.select(low, c(0.0), builder.fmul(y, builder.bitcast(bits, x.type)))


def exp_bf16(builder: Any, x: Any, *, flush_subnormals: bool = True) -> Any:
    """exp(x), x <= 0, accurate enough for bfloat16 (2^-17); `exp_f32` without `HAS_BF16_DOT`.

    Exactly 1 at 0 and NaN of NaN.

    Args:
        flush_subnormals: make subnormal results 0. If False, the conversion that follows must do
            that: here it depends on the thread's MXCSR.
    """
    if not HAS_BF16_DOT or x.type.count != LANES:
        return exp_f32(builder, x)
    t = builder.fmul(x, constant(_LOG2_E, LANES))
    p = _polynomial(
        builder, _avx512_masked(builder, "reduce", t, i32(_ROUND_DOWN)), _EXP2_BF16_TERMS
    )
    # scalef multiplies by 2 ** floor(t)
    mask = None
    if flush_subnormals:
        mask = builder.fcmp_unordered(">=", t, constant(_MIN_NORMAL_EXPONENT, LANES))
    return _avx512_masked(builder, "scalef", p, t, mask=mask)


def _polynomial(builder: Any, x: Any, terms: tuple[float, ...]) -> Any:
    lanes = x.type.count
    p = constant(terms[0], lanes)
    for term in terms[1:]:
        p = llvm_intrinsic(builder, "fma", p, x, constant(term, lanes))
    return p


def _avx512_masked(builder: Any, name: str, *args: Any, mask: Any = None) -> Any:
    """An AVX-512 instruction on the lanes of a mask (None: all); the other lanes become 0."""
    vector, bits = vector_type(LANES), ir.IntType(LANES)
    lanes = bits(-1) if mask is None else builder.bitcast(mask, bits)
    full_name = f"llvm.x86.avx512.mask.{name}.ps.{32 * LANES}"
    args = (*args, constant(0.0, LANES), lanes, i32(_ROUND_CURRENT))
    return call_function(builder, full_name, vector, *args)


@intrinsic
def row_max(_: Any, row: Any, count: Any) -> Any:
    """Maximum of `count` floats, a multiple of LANES: by lane, ascending, then across lanes."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count = args
        maxima = cgutils.alloca_once_value(builder, constant(float("-inf"), LANES))
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            x = load(builder, offset(builder, row, loop.index, 4 * LANES), vector_type(LANES))
            builder.store(maximum(builder, builder.load(maxima), x), maxima)
        return reduce_lanes(builder, builder.load(maxima), lambda a, b: maximum(builder, a, b))

    return _float(_int, _int), code


@intrinsic
def exp_minus_max(_: Any, row: Any, count: Any, row_max: Any) -> Any:
    """exp(x - row_max) of `count` floats, a multiple of LANES, in place; returns their sum.

    The sum goes by lane, ascending, then across lanes: trailing floats of -inf do not change it.
    """

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count, row_max = args
        vector, steps = vector_type(LANES), builder.udiv(count, i64(LANES))
        wide_max = broadcast(builder, row_max, LANES)
        sums = cgutils.alloca_once_value(builder, constant(0.0, LANES))
        with cgutils.for_range(builder, steps) as loop:
            address = offset(builder, row, loop.index, 4 * LANES)
            y = exp_f32(builder, builder.fsub(load(builder, address, vector), wide_max))
            store(builder, y, address)
            builder.store(builder.fadd(builder.load(sums), y), sums)
        return reduce_lanes(builder, builder.load(sums), builder.fadd)

    return _float(_int, _int, _float), code


@intrinsic
def exp_minus_max_vnni(_: Any, row: Any, count: Any, row_max: Any) -> Any:
    """`exp_minus_max` for VNNI: writes `count` bfloat16 from the row's beginning on.

    `count` is a multiple of TILE_N. Returns the sum of the rounded results; each of its lanes sums
    two neighbours. Subnormals are 0.
    """

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count, row_max = args
        vector, steps = vector_type(LANES), builder.udiv(count, i64(TILE_N))
        wide_max = broadcast(builder, row_max, LANES)
        ones = constant(0x3F803F80, LANES, i32)
        sums = cgutils.alloca_once_value(builder, constant(0.0, LANES))
        with cgutils.for_range(builder, steps) as loop:
            address = offset(builder, row, loop.index, 8 * LANES)
            halves = []
            for v in range(2):
                x = load(builder, builder.add(address, i64(4 * LANES * v)), vector)
                x = builder.fsub(x, wide_max)
                halves.append(exp_bf16(builder, x, flush_subnormals=False))
            weights = _pack_two_bf16(builder, halves)
            store(builder, weights, offset(builder, row, loop.index, 4 * LANES))
            builder.store(bf16_dot(builder, ones, weights, builder.load(sums)), sums)
        return reduce_lanes(builder, builder.load(sums), builder.fadd)

    return _float(_int, _int, _float), code


def _pack_two_bf16(builder: Any, halves: list[Any]) -> Any:
    """Two float32 vectors to one of bfloat16, to the nearest, ties to even; subnormals to zero."""
    words = vector_type(2 * LANES, ir.IntType(16))
    if not HAS_BF16_DOT:  # compiled all the same, never executed
        return ir.Constant(words, ir.Undefined)
    return call_function(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", words, *halves[::-1])


@intrinsic
def exp_scalar(_: Any, x: Any) -> Any:
    """exp(x) of a scalar x <= 80, with the bits of `exp_minus_max`."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(exp_f32(builder, broadcast(builder, args[0], 4)), i32(0))

    return _float(_float), code


@intrinsic
def tanh_soft_cap(_: Any, row: Any, cap: Any, count: Any) -> Any:
    """cap * tanh(x / cap) of `count` floats, a multiple of LANES, in place."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, cap, count = args
        wide_cap, ones = broadcast(builder, cap, LANES), constant(1.0, LANES)
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            address = offset(builder, row, loop.index, 4 * LANES)
            x = builder.fdiv(load(builder, address, vector_type(LANES)), wide_cap)
            minus_2_abs = builder.fmul(llvm_intrinsic(builder, "fabs", x), constant(-2.0, LANES))
            e = exp_f32(builder, minus_2_abs)
            t = builder.fdiv(builder.fsub(ones, e), builder.fadd(ones, e))
            store(
                builder, builder.fmul(llvm_intrinsic(builder, "copysign", t, x), wide_cap), address
            )
        return context.get_dummy_value()

    return types.void(_int, _float, _int), code
