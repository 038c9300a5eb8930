"""SIMD primitives for Numba as LLVM IR. They fix the order of operations and every rounding.

Each element of a result is a fixed sequence of operations, whatever tile it is computed in: LLVM
assigns registers but reorders no sum. Sums are float32, by FMA or by bf16 dot products
(`HAS_BF16_DOT`). Addresses are integers, so that one kernel serves every dtype and layout of K/V.

Functions that take a `builder` emit IR; `@intrinsic` functions are called from kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu import targets
from ramify.kernels.cpu.abi import BF16, F16, F32, INT8

LANES = 16 if targets.has_avx512() else 8

# Whether the CPU has AVX-512 BF16: `vdpbf16ps` adds the two products of 32-bit words of two bf16 to
# a float32, in a fixed order. "VNNI" in this package: data in such words.
HAS_BF16_DOT = targets.has_bf16_dot()
_CONVERTS_HALF = targets.has_half_conversion()
TILE_N_VECTORS = 2
TILE_N = LANES * TILE_N_VECTORS
# 6 x 2 accumulators hide the latency of FMA and fit into 16 registers; AVX-512 has 32.
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


def shuffle(builder: Any, a: Any, b: Any, indices: list[int]) -> Any:
    """Lanes of a and b; indices count through a, then b."""
    return builder.shuffle_vector(a, b, ir.Constant(vector_type(len(indices), i32), indices))


def broadcast(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector whose lanes all hold `scalar`."""
    vector = vector_type(lanes, scalar.type)
    first_lane = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, i32(0))
    return shuffle(builder, first_lane, first_lane, [0] * lanes)


def call_function(builder: Any, name: str, returns: Any, *args: Any) -> Any:
    """Call an LLVM intrinsic or a C function by its name."""
    signature = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def llvm_intrinsic(builder: Any, name: str, *args: Any) -> Any:
    """Call an LLVM intrinsic on float32 vectors of the same length."""
    vector = args[0].type
    return call_function(builder, f"llvm.{name}.v{vector.count}f32", vector, *args)


def bf16_dot(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total + x[2i] * y[2i] + x[2i + 1] * y[2i + 1] by 32-bit word; subnormals count as zero."""
    if not HAS_BF16_DOT:  # compiled all the same, never executed
        return total
    lanes = x.type.count
    words = (builder.bitcast(vector, vector_type(lanes, i32)) for vector in (x, y))
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    return call_function(builder, name, vector_type(lanes), total, *words)


def fma(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """x * y + total, rounded once."""
    return llvm_intrinsic(builder, "fma", x, y, total)


def load(builder: Any, address: Any, kind: Any) -> Any:
    """Load a value of type `kind`; the address need not be aligned."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def store(builder: Any, value: Any, address: Any) -> None:
    """Store a value; the address need not be aligned."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def offset(builder: Any, base: Any, index: Any, size: int) -> Any:
    """base + index * size."""
    return builder.add(base, builder.mul(index, i64(size)))


def row_addresses(builder: Any, base: Any, stride: Any, last: Any, count: int) -> list[Any]:
    """Addresses of `count` rows; row `last` repeats. `stride` in bytes."""
    addresses = []
    for r in range(count):
        row = builder.select(builder.icmp_signed("<", i64(r), last), i64(r), last)
        addresses.append(builder.add(base, builder.mul(stride, row)))
    return addresses


def maximum(builder: Any, a: Any, b: Any) -> Any:
    """a where a > b, else b; b where either is NaN."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def bf16_to_f32(builder: Any, x: Any) -> Any:
    """Bfloat16, as 16-bit words, to float32."""
    lanes = x.type.count
    wide = builder.shl(builder.zext(x, vector_type(lanes, i32)), constant(16, lanes, i32))
    return builder.bitcast(wide, vector_type(lanes))


def f32_to_bf16(builder: Any, x: Any) -> Any:
    """Float32 to the nearest bfloat16, ties to even; subnormals to zero, as `bf16_dot` reads them."""
    if not HAS_BF16_DOT:
        return builder.trunc(
            builder.bitcast(x, vector_type(LANES, i32)), vector_type(LANES, ir.IntType(16))
        )
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return call_function(builder, name, vector_type(LANES, ir.IntType(16)), x)


def half_to_f32(builder: Any, raw: Any) -> Any:
    """float16, a vector or one, as float32."""
    is_vector = isinstance(raw.type, ir.VectorType)

    def of(scalar: Any) -> Any:
        return vector_type(raw.type.count, scalar) if is_vector else scalar

    def c(value: float, scalar: Any = i32) -> Any:
        return constant(value, raw.type.count, scalar) if is_vector else ir.Constant(scalar, value)

    if _CONVERTS_HALF:
        return builder.fpext(raw, of(f32))
    # Exponent and mantissa, shifted to float32's, are the value times 2^-112, subnormals included.
    bits = builder.zext(builder.bitcast(raw, of(ir.IntType(16))), of(i32))
    size = builder.shl(builder.and_(bits, c(0x7FFF)), c(13))
    finite = builder.fmul(builder.bitcast(size, of(f32)), c(2.0**112, f32))
    special = builder.or_(size, c(0x7F800000))
    is_finite = builder.icmp_signed("<", size, c(0x7C00 << 13))
    wide = builder.select(is_finite, builder.bitcast(finite, of(i32)), special)
    sign = builder.shl(builder.and_(bits, c(0x8000)), c(16))
    return builder.bitcast(builder.or_(wide, sign), of(f32))


def load_as_f32(builder: Any, address: Any, kind: int, lanes: int = 8) -> Any:
    """Load `lanes` elements of storage kind `kind` as float32."""
    raw = load(builder, address, vector_type(lanes, _STORAGE_TYPES[kind]))
    floats, ints = vector_type(lanes), vector_type(lanes, i32)

    def c(value: int) -> Any:
        return constant(value, lanes, i32)

    if kind == F32:
        return raw
    if kind == BF16:
        return bf16_to_f32(builder, raw)
    if kind == F16:
        return half_to_f32(builder, raw)
    if kind == INT8:
        return builder.sitofp(raw, floats)
    # float8 e4m3fn: its exponent and mantissa, shifted to float32's, are the value times 2^-120,
    # subnormals included. Its NaN becomes 480; quantization gives such a row a scale of NaN.
    bits = builder.zext(raw, ints)
    sign = builder.shl(builder.and_(bits, c(0x80)), c(24))
    body = builder.shl(builder.and_(bits, c(0x7F)), c(20))
    magnitude = builder.fmul(builder.bitcast(body, floats), constant(2.0**120, lanes))
    return builder.bitcast(builder.or_(builder.bitcast(magnitude, ints), sign), floats)


def split_bf16_words(builder: Any, words: Any) -> list[Any]:
    """The low and the high bfloat16 of 32-bit words, as two float32 vectors."""
    lanes = words.type.count
    low = builder.shl(words, constant(16, lanes, i32))
    high = builder.and_(words, constant(-(1 << 16), lanes, i32))
    return [builder.bitcast(half, vector_type(lanes)) for half in (low, high)]


def transpose_8x8(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose 8 vectors of 8: interleave by 1 and by 2 within 128-bit halves, then swap halves."""
    pairs = []
    for i in range(0, 8, 2):
        for k in (0, 2):
            indices = [k, k + 8, k + 1, k + 9, k + 4, k + 12, k + 5, k + 13]
            pairs.append(shuffle(builder, rows[i], rows[i + 1], indices))
    quads = []
    for i in (0, 1, 4, 5):
        for k in (0, 2):
            indices = [k, k + 1, k + 8, k + 9, k + 4, k + 5, k + 12, k + 13]
            quads.append(shuffle(builder, pairs[i], pairs[i + 2], indices))
    halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    return [shuffle(builder, quads[i], quads[i + 4], half) for half in halves for i in range(4)]


def reduce_lanes(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce a vector to a scalar: combine its low and high halves until one lane is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low = shuffle(builder, vector, vector, list(range(lanes)))
        high = shuffle(builder, vector, vector, list(range(lanes, 2 * lanes)))
        vector = combine(low, high)
    return builder.extract_element(vector, i32(0))


@intrinsic
def rescale_add_row(_: Any, into: Any, scale: Any, block: Any, block_scale: Any, count: Any) -> Any:
    """into = into * scale + block * block_scale for `count` floats, a multiple of LANES."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, scale, block, block_scale, count = args
        vec = vector_type(LANES)
        wide_scale = broadcast(builder, scale, LANES)
        wide_block_scale = broadcast(builder, block_scale, LANES)
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            address = offset(builder, into, loop.index, 4 * LANES)
            x = builder.fmul(load(builder, address, vec), wide_scale)
            y = load(builder, offset(builder, block, loop.index, 4 * LANES), vec)
            store(builder, llvm_intrinsic(builder, "fma", y, wide_block_scale, x), address)
        return context.get_dummy_value()

    return types.void(_int, _float, _int, _float, _int), code


@intrinsic
def row_is_finite(_: Any, row: Any, count: Any) -> Any:
    """Whether all `count` floats, a multiple of LANES, are finite."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count = args
        vec = vector_type(LANES)
        total = cgutils.alloca_once(builder, vec)
        builder.store(constant(0.0, LANES), total)
        with cgutils.for_range(builder, builder.udiv(count, i64(LANES))) as loop:
            x = load(builder, offset(builder, row, loop.index, 4 * LANES), vec)
            zero_or_nan = builder.fmul(x, constant(0.0, LANES))  # NaN for infinity and NaN
            builder.store(builder.fadd(builder.load(total), zero_or_nan), total)
        lanes_total = reduce_lanes(builder, builder.load(total), builder.fadd)
        return builder.fcmp_ordered("==", lanes_total, f32(0.0))

    return types.boolean(_int, _int), code


def _make_copy(item_bytes: int) -> Any:
    @intrinsic
    def copy(_: Any, into: Any, source: Any, count: Any) -> Any:
        """Copy `count` elements of `item_bytes` bytes."""

        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            pointer = ir.IntType(8).as_pointer()
            into, source = (builder.inttoptr(address, pointer) for address in args[:2])
            cgutils.raw_memcpy(builder, into, source, args[2], item_bytes)
            return context.get_dummy_value()

        return types.void(_int, _int, _int), code

    return copy


copy_row, copy_bytes = _make_copy(4), _make_copy(1)  # a row is float32


def emit_prefetch(builder: Any, address: Any, level: int) -> None:
    """Prefetch the cache line of an address for reading; level 3 is L1, 2 is L2."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    read, data = i32(0), i32(1)
    call_function(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, read, i32(level), data)


@intrinsic(prefer_literal=True)
def load_element(_: Any, address: Any, kind: Any) -> Any:
    """Load one element of storage kind `kind`, a literal, as float32."""

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
def store_i64(_: Any, address: Any, value: Any) -> Any:
    """Store an int64."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_int, _int), code


@intrinsic
def store_f32(_: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_int, _float), code


@intrinsic(prefer_literal=True)
def prefetch(_: Any, address: Any, level: Any) -> Any:
    """Prefetch the cache line of an address, which may be invalid. `level`: a literal 2 (L2) or 3 (L1)."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0], level.literal_value)
        return context.get_dummy_value()

    return types.void(_int, level), code
