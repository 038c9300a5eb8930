"""RMS norm and rotary positions of one row as LLVM IR, rounded where the reference code rounds.

What is left of a row beyond whole vectors goes through the same operations one element at a time.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import ITEM_BYTES
from ramify.kernels.cpu.elementwise import f32_to_kind, for_each_vector, round_to
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    constant,
    i32,
    i64,
    llvm_intrinsic,
    load_as_f32,
    reduce_lanes,
    store,
)

_int, _float = types.int64, types.float32


def _element_address(builder: Any, address: Any, index: Any, kind: int) -> Any:
    return builder.add(address, builder.mul(index, i64(ITEM_BYTES[kind])))


@intrinsic(prefer_literal=True)
def sum_squares(_: Any, row: Any, width: Any, kind: Any) -> Any:
    """Of `width` elements of `kind`: lane by lane, across lanes, then what is left over."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, width, _ = args
        stored = kind.literal_value
        lanes = {n: cgutils.alloca_once_value(builder, constant(0.0, n)) for n in (LANES, 1)}

        def add(index: Any, n: int) -> None:
            x = load_as_f32(builder, _element_address(builder, row, index, stored), stored, n)
            total = llvm_intrinsic(builder, "fma", x, x, builder.load(lanes[n]))
            builder.store(total, lanes[n])

        for_each_vector(builder, width, add)
        rest = builder.extract_element(builder.load(lanes[1]), i32(0))
        return builder.fadd(reduce_lanes(builder, builder.load(lanes[LANES]), builder.fadd), rest)

    return _float(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def rms_scale_row(
    _: Any, row: Any, weight: Any, into: Any, width: Any, scale: Any, kind: Any, made: Any
) -> Any:
    """into = weight * (row * scale), rounded to `kind` after each product; `made` is into's dtype.

    `into` may be `row`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, weight, into, width, scale, _, _ = args
        stored, to = kind.literal_value, made.literal_value

        def body(index: Any, n: int) -> None:
            x = load_as_f32(builder, _element_address(builder, row, index, stored), stored, n)
            w = load_as_f32(builder, _element_address(builder, weight, index, stored), stored, n)
            y = round_to(builder, builder.fmul(x, broadcast(builder, scale, n)), stored)
            y = round_to(builder, builder.fmul(w, y), stored)
            store(builder, f32_to_kind(builder, y, to), _element_address(builder, into, index, to))

        for_each_vector(builder, width, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _float, kind, made), code


@intrinsic(prefer_literal=True)
def rope_row(_: Any, row: Any, cos: Any, sin: Any, half: Any, kind: Any) -> Any:
    """In place (a, b) -> (a cos - b sin, b cos + a sin), rounded to `kind` after each step.

    a and b are the first and second `half` elements of the row, cos and sin have `half`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, cos, sin, half, _ = args
        stored = kind.literal_value
        other = _element_address(builder, row, half, stored)

        def times(x: Any, y: Any) -> Any:
            return round_to(builder, builder.fmul(x, y), stored)

        def body(index: Any, n: int) -> None:
            at = [_element_address(builder, one, index, stored) for one in (row, other, cos, sin)]
            a, b, c, s = (load_as_f32(builder, one, stored, n) for one in at)
            first = builder.fsub(times(a, c), times(b, s))
            second = builder.fadd(times(b, c), times(a, s))
            store(builder, f32_to_kind(builder, first, stored), at[0])
            store(builder, f32_to_kind(builder, second, stored), at[1])

        for_each_vector(builder, half, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, kind), code
