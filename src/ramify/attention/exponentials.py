"""Exponentials as LLVM IR, and the softmax made of them, as `simd` is written.

Like all of `simd`, a fixed sequence of operations per element.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.simd import (
    DOTS,
    LANES,
    TILE_COLUMNS,
    _call,
    _const,
    _dot,
    _fill,
    _fold,
    _i32,
    _i64,
    _load,
    _max,
    _step,
    _store,
    _vec,
)

# exp(r) - 1 - r over r², highest power first, |r| <= ln 2 / 2 (Cephes mathematical library, expf)
_EXP_TERMS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; the first has few bits
_LOG2_E = 1.4426950408889634
_EXP_LEAST = -87.0  # below it exp is 0 here; float32 would go on to 1e-38

# 2^r, highest power first, 0 <= r < 1: within 2^-18, and 1 at 0 (the largest relative error made
# least by Lawson's reweighted least squares)
_SHORT_TERMS = (1.3426685531e-2, 5.2242472201e-2, 2.4128020570e-1, 6.9304484478e-1, 1.0)
_NORMAL_LEAST = -126.0  # the power of two of float32's least normal number
_FLOOR, _CURRENT = 1, 4  # how `vreduceps` rounds; the rounding that is set

_int, _float = types.int64, types.float32


def _exp(builder: Any, x: Any) -> Any:
    """exp(x) for x <= 0 to about 2 ulp: exactly 1 at 0, exactly 0 below `_EXP_LEAST`, NaN of NaN."""
    lanes = x.type.count

    def c(value: float) -> Any:
        return _const(value, lanes)

    low = builder.fcmp_ordered("<", x, c(_EXP_LEAST))
    x = builder.select(low, c(_EXP_LEAST), x)
    n = _call(builder, "rint", builder.fmul(x, c(_LOG2_E)))
    r = _call(builder, "fma", n, c(-_LN2_HIGH), x)
    r = _call(builder, "fma", n, c(-_LN2_LOW), r)
    p = _polynomial(builder, r, _EXP_TERMS)
    y = builder.fadd(_call(builder, "fma", builder.fmul(p, r), r, r), c(1.0))
    if DOTS and lanes == LANES:
        return _masked(builder, "scalef", y, n, mask=builder.not_(low))
    power = builder.add(builder.fptosi(n, _vec(lanes, _i32)), _const(127, lanes, _i32))
    bits = builder.shl(power, _const(23, lanes, _i32))
    return builder.select(low, c(0.0), builder.fmul(y, builder.bitcast(bits, x.type)))


def short_exp(builder: Any, x: Any, *, normal: bool = True) -> Any:
    """exp(x) for x <= 0 for what becomes a bfloat16: to 2^-17, or where `DOTS` is not, as `_exp`.

    Exactly 1 at 0 and NaN of NaN.

    Args:
        normal: what would be subnormal is 0; if not, it is subnormal, or 0 where a thread flushes
            them, as what comes next must do.
    """
    if not DOTS or x.type.count != LANES:
        return _exp(builder, x)
    t = builder.fmul(x, _const(_LOG2_E, LANES))
    p = _polynomial(builder, _masked(builder, "reduce", t, _i32(_FLOOR)), _SHORT_TERMS)
    # by 2 to the power of the next integer below t
    mask = builder.fcmp_unordered(">=", t, _const(_NORMAL_LEAST, LANES)) if normal else None
    return _masked(builder, "scalef", p, t, mask=mask)


def _polynomial(builder: Any, x: Any, terms: tuple[float, ...]) -> Any:
    lanes = x.type.count
    p = _const(terms[0], lanes)
    for term in terms[1:]:
        p = _call(builder, "fma", p, x, _const(term, lanes))
    return p


def _masked(builder: Any, name: str, *args: Any, mask: Any = None) -> Any:
    """An instruction of AVX-512 for the lanes of a mask, or for all; the others become 0."""
    vec, bits = _vec(LANES), ir.IntType(LANES)
    kinds = [*(one.type for one in args), vec, bits, _i32]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vec, kinds), f"llvm.x86.avx512.mask.{name}.ps.{32 * LANES}"
    )
    lanes = bits(-1) if mask is None else builder.bitcast(mask, bits)
    return builder.call(function, [*args, _const(0.0, LANES), lanes, _i32(_CURRENT)])


@intrinsic
def largest(_: Any, row: Any, count: Any) -> Any:
    """Of `count` floats, a multiple of LANES: lane by lane, ascending, then across lanes."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count = args
        top = cgutils.alloca_once_value(builder, _const(float("-inf"), LANES))
        with cgutils.for_range(builder, builder.udiv(count, _i64(LANES))) as loop:
            x = _load(builder, _step(builder, row, loop.index, 4 * LANES), _vec(LANES))
            builder.store(_max(builder, builder.load(top), x), top)
        return _fold(builder, builder.load(top), lambda a, b: _max(builder, a, b))

    return _float(_int, _int), code


@intrinsic
def exp_row(_: Any, row: Any, count: Any, peak: Any) -> Any:
    """In place exp(x - peak) of `count` floats, a multiple of LANES; the sum of the results.

    It is taken lane by lane, ascending, then across lanes: further floats that are -inf do not
    change it.
    """

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count, peak = args
        vec, steps = _vec(LANES), builder.udiv(count, _i64(LANES))
        wide = _fill(builder, peak, LANES)
        total = cgutils.alloca_once_value(builder, _const(0.0, LANES))
        with cgutils.for_range(builder, steps) as loop:
            at = _step(builder, row, loop.index, 4 * LANES)
            y = _exp(builder, builder.fsub(_load(builder, at, vec), wide))
            _store(builder, y, at)
            builder.store(builder.fadd(builder.load(total), y), total)
        return _fold(builder, builder.load(total), builder.fadd)

    return _float(_int, _int, _float), code


@intrinsic
def exp_pairs(_: Any, row: Any, count: Any, peak: Any) -> Any:
    """`exp_row` for pairs: the results are bfloat16, from the row's beginning on.

    `count` is a multiple of TILE_COLUMNS. The sum is that of the rounded results, a lane of it that
    of two lanes side by side; subnormals are 0.
    """

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count, peak = args
        vec, steps = _vec(LANES), builder.udiv(count, _i64(TILE_COLUMNS))
        wide = _fill(builder, peak, LANES)
        ones = _const(0x3F803F80, LANES, _i32)
        total = cgutils.alloca_once_value(builder, _const(0.0, LANES))
        with cgutils.for_range(builder, steps) as loop:
            at = _step(builder, row, loop.index, 8 * LANES)
            both = []
            for v in range(2):
                x = _load(builder, builder.add(at, _i64(4 * LANES * v)), vec)
                both.append(short_exp(builder, builder.fsub(x, wide), normal=False))
            weights = _two_to_bf16(builder, both)
            _store(builder, weights, _step(builder, row, loop.index, 4 * LANES))
            builder.store(_dot(builder, ones, weights, builder.load(total)), total)
        return _fold(builder, builder.load(total), builder.fadd)

    return _float(_int, _int, _float), code


def _two_to_bf16(builder: Any, both: list[Any]) -> Any:
    """Two float32 vectors as one of bfloat16, to the nearest, ties to even; subnormals to zero."""
    kind = _vec(2 * LANES, ir.IntType(16))
    if not DOTS:  # compiled all the same, never called
        return ir.Constant(kind, ir.Undefined)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [_vec(LANES)] * 2),
        "llvm.x86.avx512bf16.cvtne2ps2bf16.512",
    )
    return builder.call(function, both[::-1])


@intrinsic
def exp_of(_: Any, x: Any) -> Any:
    """exp(x) of one x <= 0, with the bits that `exp_row` gives."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(_exp(builder, _fill(builder, args[0], 4)), _i32(0))

    return _float(_float), code


@intrinsic
def soft_cap_row(_: Any, row: Any, cap: Any, count: Any) -> Any:
    """In place cap * tanh(x / cap) of `count` floats, a multiple of LANES."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, cap, count = args
        wide, one = _fill(builder, cap, LANES), _const(1.0, LANES)
        with cgutils.for_range(builder, builder.udiv(count, _i64(LANES))) as loop:
            at = _step(builder, row, loop.index, 4 * LANES)
            x = builder.fdiv(_load(builder, at, _vec(LANES)), wide)
            twice = builder.fmul(_call(builder, "fabs", x), _const(-2.0, LANES))
            e = _exp(builder, twice)
            t = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
            _store(builder, builder.fmul(_call(builder, "copysign", t, x), wide), at)
        return context.get_dummy_value()

    return types.void(_int, _float, _int), code
