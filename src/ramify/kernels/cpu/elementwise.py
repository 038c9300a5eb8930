"""Row loops as LLVM IR: conversion, scaling and division between float32 and the model's dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, F32, ITEM_BYTES
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    HAS_BF16_DOT,
    LANES,
    bf16_to_f32,
    broadcast,
    constant,
    f32_to_bf16,
    i32,
    i64,
    load_as_f32,
    offset,
    store,
    vector_type,
)

_int, _float = types.int64, types.float32


def for_each_vector(builder: Any, width: Any, body: Callable[[Any, int], None]) -> None:
    """Emit `body(index, lanes)` over whole vectors of a row, then over its remaining elements."""
    num_vectors = builder.udiv(width, i64(LANES))
    with cgutils.for_range(builder, num_vectors) as loop:
        body(builder.mul(loop.index, i64(LANES)), LANES)
    done = builder.mul(num_vectors, i64(LANES))
    with cgutils.for_range(builder, builder.sub(width, done)) as loop:
        body(builder.add(done, loop.index), 1)


def round_to(builder: Any, x: Any, kind: int) -> Any:
    """A float32 vector, rounded to values of storage kind `kind`."""
    if kind == F32:
        return x
    return bf16_to_f32(builder, f32_to_kind(builder, x, kind))


def f32_to_kind(builder: Any, x: Any, kind: int) -> Any:
    """Convert a float32 vector to storage kind `kind`, to the nearest, ties to even.

    With `HAS_BF16_DOT`, subnormals in whole vectors become zeros.
    """
    if kind == F32:
        return x
    lanes = x.type.count
    if HAS_BF16_DOT and lanes == LANES:
        return f32_to_bf16(builder, x)

    def c(value: int) -> Any:
        return constant(value, lanes, i32)

    bits = builder.bitcast(x, vector_type(lanes, i32))
    odd = builder.and_(builder.lshr(bits, c(16)), c(1))
    nearest = builder.add(builder.add(bits, c(0x7FFF)), odd)
    nearest = builder.select(builder.fcmp_unordered("uno", x, x), c(0x7FC00000), nearest)
    return builder.trunc(builder.lshr(nearest, c(16)), vector_type(lanes, ir.IntType(16)))


def load_elements(builder: Any, row: Any, index: Any, kind: int, lanes: int) -> Any:
    """Load `lanes` elements of a row of storage kind `kind`, from `index` on, as float32."""
    return load_as_f32(builder, offset(builder, row, index, ITEM_BYTES[kind]), kind, lanes)


def store_elements(builder: Any, x: Any, row: Any, index: Any, kind: int) -> None:
    """Store a float32 vector into a row of storage kind `kind`, from `index` on."""
    store(builder, f32_to_kind(builder, x, kind), offset(builder, row, index, ITEM_BYTES[kind]))


def _convert(
    builder: Any,
    row: tuple[Any, int],
    into: tuple[Any, int],
    width: Any,
    transform: Callable[[Any, Any], Any],
    scalar: Any,
) -> None:
    """into = transform(row, scalar) in float32; both are an address and a storage kind."""
    (source, stored), (target, kind) = row, into

    def body(index: Any, lanes: int) -> None:
        x = load_elements(builder, source, index, stored, lanes)
        x = transform(x, broadcast(builder, scalar, lanes))
        store_elements(builder, x, target, index, kind)

    for_each_vector(builder, width, body)


@intrinsic(prefer_literal=True)
def _scale_to_f32(_: Any, source: Any, into: Any, width: Any, scale: Any, kind: Any) -> Any:
    """`scale_to_f32` for a literal `kind`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, into, width, scale, _ = args
        row, target = (source, kind.literal_value), (into, F32)
        _convert(builder, row, target, width, builder.fmul, scale)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _float, kind), code


@jit
def scale_to_f32(source: int, into: int, width: int, scale: float, kind: int) -> None:
    """into = source * scale in float32; `kind` is the source's: F32 or BF16."""
    if kind == F32:
        _scale_to_f32(source, into, width, scale, F32)
    else:
        _scale_to_f32(source, into, width, scale, BF16)


@intrinsic(prefer_literal=True)
def _add_scaled_row(_: Any, into: Any, source: Any, width: Any, scale: Any, kind: Any) -> Any:
    """`add_scaled_row` for a literal `kind`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, source, width, scale, _ = args
        stored = kind.literal_value

        def body(index: Any, lanes: int) -> None:
            x = load_elements(builder, source, index, stored, lanes)
            x = round_to(builder, builder.fmul(x, broadcast(builder, scale, lanes)), stored)
            x = builder.fadd(load_elements(builder, into, index, stored, lanes), x)
            store_elements(builder, x, into, index, stored)

        for_each_vector(builder, width, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _float, kind), code


@jit
def add_scaled_row(into: int, source: int, width: int, scale: float, kind: int) -> None:
    """into += source * scale; rounds the product to `kind` (F32 or BF16), then the sum."""
    if kind == F32:
        _add_scaled_row(into, source, width, scale, F32)
    else:
        _add_scaled_row(into, source, width, scale, BF16)


@intrinsic(prefer_literal=True)
def divide_f32(_: Any, source: Any, divisor: Any, into: Any, width: Any, kind: Any) -> Any:
    """into = source / divisor in float32, rounded to `kind`, a literal."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, divisor, into, width, _ = args
        row, target = (source, F32), (into, kind.literal_value)
        _convert(builder, row, target, width, builder.fdiv, divisor)
        return context.get_dummy_value()

    return types.void(_int, _float, _int, _int, kind), code
