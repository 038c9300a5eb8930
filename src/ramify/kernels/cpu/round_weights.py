"""Round groups of weights to 4 bits with the scale of least squared error: the kernel of `weight_rounding`.

A tile of `LANES` groups, one a lane, element i of all of them in row i. With u = x / largest in units of
2^-12 and codes q, sums of u * q and q * q are integers up to 2^24, so exact in float32: no order of
additions, number of threads or vector width changes a bit.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import NORMAL_LEVELS
from ramify.kernels.cpu.jit import compile_cached, data_address, jit
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    constant,
    fma,
    i64,
    load,
    maximum,
    store,
    vector_type,
)
from ramify.kernels.cpu.workers import run_workers

GROUP = 32
UNITS = np.float32(4096.0)  # of u in the largest element of a group
SMALLEST = np.float32(2.0**-120)  # a group without an element as large becomes zeros
# Rows of a worker's scratch [SCRATCH_ROWS, LANES] behind the GROUP rows of elements.
_GAIN, _SCALE, _LARGEST, _STEP = range(GROUP, GROUP + 4)
SCRATCH_ROWS = GROUP + 4
# Adding it to |x| < 2^22 and subtracting it rounds to the nearest integer, ties to even.
_TO_INTEGER = 1.5 * 2**23
_VELTKAMP = np.float32(2**13 + 1)  # leaves 11 of the 24 bits of a float32: those of float16
_MIN_NORMAL, _MAX, _MIN = np.float32(2.0**-14), np.float32(65504.0), np.float32(2.0**-20)
_SUBNORMAL = np.float32(0.75)  # adding and subtracting it rounds to multiples of 2^-24
_int, _float = types.int64, types.float32


def _row(builder: Any, tile: Any, index: int) -> Any:
    """The vector in a row of a tile."""
    return load(builder, builder.add(tile, i64(4 * LANES * index)), vector_type(LANES))


def _set_row(builder: Any, tile: Any, index: int, value: Any) -> None:
    store(builder, value, builder.add(tile, i64(4 * LANES * index)))


def _minimum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _code(builder: Any, number: Any) -> Any:
    """The level that is next to each number; the first of what is not a number."""
    q = constant(float(NORMAL_LEVELS[0]), LANES)
    for low, high in pairwise(NORMAL_LEVELS):
        is_above = builder.fcmp_ordered(">", number, constant((low + high) / 2, LANES))
        q = builder.select(is_above, constant(float(high), LANES), q)
    return q


@intrinsic
def _to_units(_: Any, tile: Any) -> Any:
    """Replace elements x by u = round(x / largest * UNITS); all are NaN if an x is not finite.

    Of two elements of equal size the positive one is the largest.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        [tile] = args
        zero, rounding = constant(0.0, LANES), constant(_TO_INTEGER, LANES)
        high = low = checked = zero
        for i in range(GROUP):
            x = _row(builder, tile, i)
            high, low = maximum(builder, x, high), _minimum(builder, x, low)
            checked = builder.fadd(checked, builder.fmul(x, zero))
        size = builder.fsub(zero, low)
        largest = builder.select(builder.fcmp_ordered(">=", high, size), high, low)
        largest = builder.fadd(largest, checked)
        size = builder.fadd(maximum(builder, high, size), checked)
        is_zero = builder.fcmp_ordered("<", size, constant(float(SMALLEST), LANES))
        divisor = builder.select(is_zero, constant(1.0, LANES), largest)
        units = builder.select(is_zero, zero, constant(float(UNITS), LANES))
        for i in range(GROUP):
            u = builder.fmul(builder.fdiv(_row(builder, tile, i), divisor), units)
            _set_row(builder, tile, i, builder.fsub(builder.fadd(u, rounding), rounding))
        _set_row(builder, tile, _LARGEST, largest)
        _set_row(builder, tile, _GAIN, constant(-1.0, LANES))
        _set_row(builder, tile, _SCALE, zero)
        return context.get_dummy_value()

    return types.void(_int), code


@intrinsic
def _try_step(_: Any, tile: Any, step: Any) -> Any:
    """Keep the scale of least squares for the levels of u * step where it is better than those before.

    That scale is sum(u q) / sum(q q); it takes sum(u q) ** 2 / sum(q q) off the squared error.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        tile, step = args[0], broadcast(builder, args[1], LANES)
        products = squares = constant(0.0, LANES)
        for i in range(GROUP):
            u = _row(builder, tile, i)
            q = _code(builder, builder.fmul(u, step))
            products = fma(builder, u, q, products)
            squares = fma(builder, q, q, squares)
        scale = builder.fdiv(products, squares)
        gain, best = builder.fmul(products, scale), _row(builder, tile, _GAIN)
        is_better = builder.fcmp_ordered(">", gain, best)
        _set_row(builder, tile, _GAIN, builder.select(is_better, gain, best))
        scale = builder.select(is_better, scale, _row(builder, tile, _SCALE))
        _set_row(builder, tile, _SCALE, scale)
        return context.get_dummy_value()

    return types.void(_int, _float), code


@intrinsic
def _to_codes(_: Any, tile: Any) -> Any:
    """Replace u by the level of u * step, the step of each group in row `_STEP`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        [tile] = args
        step = _row(builder, tile, _STEP)
        for i in range(GROUP):
            number = builder.fmul(_row(builder, tile, i), step)
            _set_row(builder, tile, i, _code(builder, number))
        return context.get_dummy_value()

    return types.void(_int), code


@jit
def _as_float16(scale: Any) -> Any:
    """The nearest float16, if that is within 2^-5 of the scale; else the scale."""
    size = abs(scale)
    if size > _MAX or size < _MIN:
        return scale
    if size < _MIN_NORMAL:
        near = size + _SUBNORMAL
        near -= _SUBNORMAL
    else:
        wide = size * _VELTKAMP
        near = wide - (wide - size)
    return near if scale >= 0 else -near


@jit
def _round_tile(
    values: Any, codes: Any, scales: Any, steps: Any, tile: Any, first: int, count: int
) -> None:
    """Round groups [first, first + count), count <= LANES."""
    address = data_address(tile)
    for lane in range(count):
        for i in range(GROUP):
            tile[i, lane] = values[first + lane, i]
    _to_units(address)
    for k in range(len(steps)):
        _try_step(address, steps[k])
    for lane in range(count):
        largest = tile[_LARGEST, lane]
        scale = _as_float16(tile[_SCALE, lane] * (largest / UNITS))
        scales[first + lane] = scale
        step = largest / scale / UNITS
        # of zeros, or without a finite scale
        tile[_STEP, lane] = step if abs(step) < np.float32(1.0) else np.float32(0.0)
    _to_codes(address)
    for lane in range(count):
        for i in range(GROUP):
            codes[first + lane, i] = np.int8(tile[i, lane])


@jit
def _round_share(
    values: Any, codes: Any, scales: Any, steps: Any, scratch: Any, num_workers: int, worker: int
) -> None:
    """A worker's share: a run of whole tiles."""
    num_tiles = -(-len(values) // LANES)
    begin, end = num_tiles * worker // num_workers, num_tiles * (worker + 1) // num_workers
    for tile in range(begin, end):
        first = tile * LANES
        count = min(LANES, len(values) - first)
        _round_tile(values, codes, scales, steps, scratch[worker], first, count)


def _round_groups(
    values: Any, codes: Any, scales: Any, steps: Any, num_workers: int, scratch: Any
) -> None:
    """Round groups of `GROUP` weights to `NORMAL_LEVELS` and a scale each; see `weight_rounding`.

    Args:
        values: [groups, GROUP] float32.
        codes: [groups, GROUP] int8, written.
        scales: [groups] float32, written; NaN where a group holds a NaN or an infinity.
        steps: [n] float32: what u, at most `UNITS`, is multiplied by; the best counts.
        scratch: [>= num_workers, SCRATCH_ROWS, LANES] float32.
    """
    args = (values, codes, scales, steps, scratch, num_workers)
    run_workers(_round_share, args, num_workers)


round_groups = compile_cached(_round_groups)
