"""Vector instructions for Numba, written as LLVM IR: what rounds how is fixed here.

Every result is a fixed sequence of operations per element, whatever the tile it was computed in:
LLVM assigns registers, it reorders no sum. Accumulation is float32, by fused multiply-adds or, in
pairs, by dot products (see `HAS_BF16_DOT`).
Addresses are integers, so that one compiled kernel serves every dtype and layout of K/V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import BF16, F16, F32, INT8

_CPU_FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if _CPU_FEATURES.get("avx512f") else 8


def _detect_bf16_dot() -> bool:
    """Whether kernels may use dot products: Numba can be told to compile for another processor."""
    needed, told = ("avx512f", "avx512vl", "avx512dq", "avx512bf16"), config.CPU_FEATURES
    if config.CPU_NAME not in (None, "", llvmlite.binding.get_host_cpu_name()):
        return False
    if told is not None:
        last = {one[1:]: one[:1] for one in told.split(",")}  # what is said of it last
        if not all(last.get(one) == "+" for one in needed):
            return False
    return all(_CPU_FEATURES.get(one) for one in needed)


# Whether the processor multiplies bfloat16 by itself: in words of two, adding both products to a
# float32 in a fixed order. What is computed in such words is "in pairs".
HAS_BF16_DOT = _detect_bf16_dot()
TILE_N_VECTORS = 2
TILE_N = LANES * TILE_N_VECTORS
# 6 x 2 accumulators hide the latency of an FMA and leave some of 16 registers; AVX-512 has 32.
TILE_M = 12 if LANES == 16 else 6


f32, i32, i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_STORAGE_TYPES = (f32, ir.IntType(16), ir.HalfType(), ir.IntType(8), ir.IntType(8))
_int, _float = types.int64, types.float32


def vector_type(lanes: int, scalar: Any = f32) -> Any:
    """The type of a vector of `lanes` elements."""
    return ir.VectorType(scalar, lanes)


def constant(value: float, lanes: int, scalar: Any = f32) -> Any:
    """A vector whose lanes all hold `value`."""
    return ir.Constant(vector_type(lanes, scalar), [value] * lanes)


def shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    """Lanes of a and b by their places in the two, one after the other."""
    return builder.shuffle_vector(a, b, ir.Constant(vector_type(len(places), i32), places))


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector whose lanes all hold `scalar`."""
    kind = vector_type(lanes, scalar.type)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, i32(0))
    return shuffle(builder, one, one, [0] * lanes)


def llvm_intrinsic(builder: Any, name: str, *args: Any) -> Any:
    """An LLVM intrinsic on float vectors of one type."""
    vec = args[0].type
    kind = ir.FunctionType(vec, [vec] * len(args))
    full = f"llvm.{name}.v{vec.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, full), args)


def bf16_dot(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total plus the products of two pairs in each word; subnormals are zeros."""
    if not HAS_BF16_DOT:  # compiled all the same, never called
        return total
    lanes = x.type.count
    words = vector_type(lanes, i32)
    kind = ir.FunctionType(vector_type(lanes), [vector_type(lanes), words, words])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(x, words), builder.bitcast(y, words)])


def fma(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """x * y + total, rounded once."""
    return llvm_intrinsic(builder, "fma", x, y, total)


def load(builder: Any, address: Any, kind: Any) -> Any:
    """What lies at an address, aligned or not."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    """Write a value to an address, aligned or not."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def offset(builder: Any, base: Any, index: Any, size: int) -> Any:
    """base + index * size."""
    return builder.add(base, builder.mul(index, i64(size)))


def maximum(builder: Any, a: Any, b: Any) -> Any:
    """a where a > b, else b: b too where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def bf16_to_f32(builder: Any, x: Any) -> Any:
    """16-bit words as float32."""
    lanes = x.type.count
    wide = builder.shl(builder.zext(x, vector_type(lanes, i32)), constant(16, lanes, i32))
    return builder.bitcast(wide, vector_type(lanes))


def f32_to_bf16(builder: Any, x: Any) -> Any:
    """Float32 to the nearest bfloat16, ties to even; subnormals, which `bf16_dot` takes for zeros, to zero."""
    if not HAS_BF16_DOT:
        return builder.trunc(
            builder.bitcast(x, vector_type(LANES, i32)), vector_type(LANES, ir.IntType(16))
        )
    kind = ir.FunctionType(vector_type(LANES, ir.IntType(16)), [vector_type(LANES)])
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def load_as_f32(builder: Any, address: Any, kind: int, lanes: int = 8) -> Any:
    """Stored elements as float32."""
    raw = load(builder, address, vector_type(lanes, _STORAGE_TYPES[kind]))
    floats, ints = vector_type(lanes), vector_type(lanes, i32)

    def c(value: int) -> Any:
        return constant(value, lanes, i32)

    if kind == F32:
        return raw
    if kind == BF16:
        return bf16_to_f32(builder, raw)
    if kind == F16:
        return builder.fpext(raw, floats)
    if kind == INT8:
        return builder.sitofp(raw, floats)
    # float8 e4m3fn: exponent and mantissa in float32's place are the value times 2^-120, also of
    # subnormals; its NaN becomes 480, and whoever writes one gives its row a scale of NaN
    wide = builder.zext(raw, ints)
    sign = builder.shl(builder.and_(wide, c(0x80)), c(24))
    body = builder.shl(builder.and_(wide, c(0x7F)), c(20))
    size = builder.fmul(builder.bitcast(body, floats), constant(2.0**120, lanes))
    return builder.bitcast(builder.or_(builder.bitcast(size, ints), sign), floats)


def split_bf16_words(builder: Any, pairs: Any) -> list[Any]:
    """Two vectors of bfloat16, in the low and the high halves of 32-bit words, as float32."""
    lanes = pairs.type.count
    low = builder.shl(pairs, constant(16, lanes, i32))
    high = builder.and_(pairs, constant(-(1 << 16), lanes, i32))
    return [builder.bitcast(half, vector_type(lanes)) for half in (low, high)]


def transpose_8x8(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of 8 as columns: interleaved by 1 and 2 within 128-bit halves, then across."""
    pairs = []
    for i in range(0, 8, 2):
        for at in (0, 2):
            places = [at, at + 8, at + 1, at + 9, at + 4, at + 12, at + 5, at + 13]
            pairs.append(shuffle(builder, rows[i], rows[i + 1], places))
    fours = []
    for i in (0, 1, 4, 5):
        for at in (0, 2):
            places = [at, at + 1, at + 8, at + 9, at + 4, at + 5, at + 12, at + 13]
            fours.append(shuffle(builder, pairs[i], pairs[i + 2], places))
    halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    return [shuffle(builder, fours[i], fours[i + 4], half) for half in halves for i in range(4)]


def reduce_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One value of a vector: halves combined until one is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low = shuffle(builder, vector, vector, list(range(lanes)))
        high = shuffle(builder, vector, vector, list(range(lanes, 2 * lanes)))
        vector = combine(low, high)
    return builder.extract_element(vector, i32(0))


@intrinsic
def rescale_add_row(_: Any, into: Any, old: Any, block: Any, new: Any, count: Any) -> Any:
    """into = into * old + block * new for `count` floats, a multiple of LANES."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, old, block, new, count = args
        vec, kept, added = (
            vector_type(LANES),
            broadcast(builder, old, LANES),
            broadcast(builder, new, LANES),
        )
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            at = offset(builder, into, loop.index, 4 * LANES)
            x = builder.fmul(load(builder, at, vec), kept)
            y = load(builder, offset(builder, block, loop.index, 4 * LANES), vec)
            store(builder, llvm_intrinsic(builder, "fma", y, added, x), at)
        return context.get_dummy_value()

    return types.void(_int, _float, _int, _float, _int), code


@intrinsic
def row_is_finite(_: Any, row: Any, count: Any) -> Any:
    """Whether none of `count` floats, a multiple of LANES, is infinite or NaN."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count = args
        vec = vector_type(LANES)
        total = cgutils.alloca_once(builder, vec)
        builder.store(constant(0.0, LANES), total)
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            x = load(builder, offset(builder, row, loop.index, 4 * LANES), vec)
            nothing = builder.fmul(x, constant(0.0, LANES))  # NaN for both
            builder.store(builder.fadd(builder.load(total), nothing), total)
        folded = reduce_lanes(builder, builder.load(total), builder.fadd)
        return builder.fcmp_ordered("==", folded, f32(0.0))

    return types.boolean(_int, _int), code


@intrinsic
def copy_row(_: Any, into: Any, source: Any, count: Any) -> Any:
    """Copy `count` floats."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        into, source = (builder.inttoptr(one, pointer) for one in args[:2])
        cgutils.raw_memcpy(builder, into, source, args[2], 4)
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


def emit_prefetch(builder: Any, address: Any, level: int) -> None:
    """Begin to fetch the cache line of an address; level 3 is the nearest, 2 the one behind it."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, data = i32(0), i32(1)
    builder.call(fetch, [builder.inttoptr(address, pointer), read, i32(level), data])


@intrinsic(prefer_literal=True)
def load_element(_: Any, address: Any, kind: Any) -> Any:
    """One stored element as float32; `kind` is a literal."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(load_as_f32(builder, args[0], kind.literal_value, 1), i32(0))

    return _float(_int, kind), code


@intrinsic
def load_i64(_: Any, address: Any) -> Any:
    """The int64 at an address."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return load(builder, args[0], i64)

    return _int(_int), code


@intrinsic
def store_f32(_: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_int, _float), code


@intrinsic(prefer_literal=True)
def prefetch(_: Any, address: Any, level: Any) -> Any:
    """Begin to fetch the cache line of an address; any address will do. `level`: a literal 2 or 3."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0], level.literal_value)
        return context.get_dummy_value()

    return types.void(_int, level), code
