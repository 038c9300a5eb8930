"""RMS norm and rotary positions of one row as LLVM IR, rounded where the reference code rounds.

What is left of a row beyond whole vectors goes through the same operations one element at a time.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.attention.row_ops import narrow, rounded, sweep
from ramify.attention.simd import (
    LANES,
    SIZES,
    _call,
    _const,
    _fill,
    _fold,
    _i32,
    _i64,
    _store,
    _widen,
)

_int, _float = types.int64, types.float32


def _at(builder: Any, address: Any, index: Any, kind: int) -> Any:
    return builder.add(address, builder.mul(index, _i64(SIZES[kind])))


@intrinsic(prefer_literal=True)
def sum_squares(_: Any, row: Any, width: Any, kind: Any) -> Any:
    """Of `width` elements of `kind`: lane by lane, across lanes, then what is left over."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, width, _ = args
        stored = kind.literal_value
        lanes = {n: cgutils.alloca_once_value(builder, _const(0.0, n)) for n in (LANES, 1)}

        def add(index: Any, n: int) -> None:
            x = _widen(builder, _at(builder, row, index, stored), stored, n)
            total = _call(builder, "fma", x, x, builder.load(lanes[n]))
            builder.store(total, lanes[n])

        sweep(builder, width, add)
        rest = builder.extract_element(builder.load(lanes[1]), _i32(0))
        return builder.fadd(_fold(builder, builder.load(lanes[LANES]), builder.fadd), rest)

    return _float(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def scale_row(
    _: Any, row: Any, weight: Any, into: Any, width: Any, scale: Any, kind: Any, made: Any
) -> Any:
    """into = weight * (row * scale), rounded to `kind` after each product; `made` is into's dtype.

    `into` may be `row`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, weight, into, width, scale, _, _ = args
        stored, to = kind.literal_value, made.literal_value

        def body(index: Any, n: int) -> None:
            x = _widen(builder, _at(builder, row, index, stored), stored, n)
            w = _widen(builder, _at(builder, weight, index, stored), stored, n)
            y = rounded(builder, builder.fmul(x, _fill(builder, scale, n)), stored)
            y = rounded(builder, builder.fmul(w, y), stored)
            _store(builder, narrow(builder, y, to), _at(builder, into, index, to))

        sweep(builder, width, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _float, kind, made), code


@intrinsic(prefer_literal=True)
def turn_row(_: Any, row: Any, cos: Any, sin: Any, half: Any, kind: Any) -> Any:
    """In place (a, b) -> (a cos - b sin, b cos + a sin), rounded to `kind` after each step.

    a and b are the first and second `half` elements of the row, cos and sin have `half`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, cos, sin, half, _ = args
        stored = kind.literal_value
        other = _at(builder, row, half, stored)

        def times(x: Any, y: Any) -> Any:
            return rounded(builder, builder.fmul(x, y), stored)

        def body(index: Any, n: int) -> None:
            at = [_at(builder, one, index, stored) for one in (row, other, cos, sin)]
            a, b, c, s = (_widen(builder, one, stored, n) for one in at)
            first = builder.fsub(times(a, c), times(b, s))
            second = builder.fadd(times(b, c), times(a, s))
            _store(builder, narrow(builder, first, stored), at[0])
            _store(builder, narrow(builder, second, stored), at[1])

        sweep(builder, half, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, kind), code
