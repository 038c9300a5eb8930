"""Vector instructions for Numba, written as LLVM IR: what rounds how is fixed here.

Every result is a fixed sequence of operations per element, whatever the tile it was computed in:
LLVM assigns registers, it reorders no sum. Accumulation is float32, by fused multiply-adds or, in
pairs, by dot products (see `DOTS`).
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

_HAS = llvmlite.binding.get_host_cpu_features()
LANES = 16 if _HAS.get("avx512f") else 8


def _multiplies_pairs() -> bool:
    """Whether kernels may use dot products: Numba can be told to compile for another processor."""
    needed, told = ("avx512f", "avx512vl", "avx512dq", "avx512bf16"), config.CPU_FEATURES
    if config.CPU_NAME not in (None, "", llvmlite.binding.get_host_cpu_name()):
        return False
    if told is not None:
        last = {one[1:]: one[:1] for one in told.split(",")}  # what is said of it last
        if not all(last.get(one) == "+" for one in needed):
            return False
    return all(_HAS.get(one) for one in needed)


# Whether the processor multiplies bfloat16 by itself: in words of two, adding both products to a
# float32 in a fixed order. What is computed in such words is "in pairs".
DOTS = _multiplies_pairs()
TILE_VECTORS = 2
TILE_COLUMNS = LANES * TILE_VECTORS
# 6 x 2 accumulators hide the latency of an FMA and leave some of 16 registers; AVX-512 has 32.
TILE_ROWS = 12 if LANES == 16 else 6

F32, BF16, F16, INT8, FP8 = range(5)  # what K/V is stored in
SIZES = (4, 2, 2, 1, 1)  # bytes of each
LINE = 64  # bytes of a cache line

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_STORED = (_f32, ir.IntType(16), ir.HalfType(), ir.IntType(8), ir.IntType(8))
_int, _float = types.int64, types.float32


def _vec(lanes: int, scalar: Any = _f32) -> Any:
    return ir.VectorType(scalar, lanes)


def _const(value: float, lanes: int, scalar: Any = _f32) -> Any:
    return ir.Constant(_vec(lanes, scalar), [value] * lanes)


def _shuffle(builder: Any, a: Any, b: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(_vec(len(places), _i32), places))


def _fill(builder: Any, scalar: Any, lanes: int) -> Any:
    kind = _vec(lanes, scalar.type)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _i32(0))
    return _shuffle(builder, one, one, [0] * lanes)


def _call(builder: Any, name: str, *args: Any) -> Any:
    """An LLVM intrinsic on float vectors of one type."""
    vec = args[0].type
    kind = ir.FunctionType(vec, [vec] * len(args))
    full = f"llvm.{name}.v{vec.count}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, full), args)


def _dot(builder: Any, x: Any, y: Any, total: Any) -> Any:
    """total plus the products of two pairs in each word; subnormals are zeros."""
    if not DOTS:  # compiled all the same, never called
        return total
    lanes = x.type.count
    words = _vec(lanes, _i32)
    kind = ir.FunctionType(_vec(lanes), [_vec(lanes), words, words])
    name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, builder.bitcast(x, words), builder.bitcast(y, words)])


def _fma(builder: Any, x: Any, y: Any, total: Any) -> Any:
    return _call(builder, "fma", x, y, total)


def _load(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=1)


def _step(builder: Any, base: Any, index: Any, size: int) -> Any:
    return builder.add(base, builder.mul(index, _i64(size)))


def _max(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _from_bf16(builder: Any, x: Any) -> Any:
    """16-bit words as float32."""
    lanes = x.type.count
    wide = builder.shl(builder.zext(x, _vec(lanes, _i32)), _const(16, lanes, _i32))
    return builder.bitcast(wide, _vec(lanes))


def _to_bf16(builder: Any, x: Any) -> Any:
    """Float32 to the nearest bfloat16, ties to even; subnormals, which `_dot` takes for zeros, to zero."""
    if not DOTS:
        return builder.trunc(builder.bitcast(x, _vec(LANES, _i32)), _vec(LANES, ir.IntType(16)))
    kind = ir.FunctionType(_vec(LANES, ir.IntType(16)), [_vec(LANES)])
    name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [x])


def _widen(builder: Any, address: Any, kind: int, lanes: int = 8) -> Any:
    """Stored elements as float32."""
    raw = _load(builder, address, _vec(lanes, _STORED[kind]))
    floats, ints = _vec(lanes), _vec(lanes, _i32)

    def c(value: int) -> Any:
        return _const(value, lanes, _i32)

    if kind == F32:
        return raw
    if kind == BF16:
        return _from_bf16(builder, raw)
    if kind == F16:
        return builder.fpext(raw, floats)
    if kind == INT8:
        return builder.sitofp(raw, floats)
    # float8 e4m3fn: exponent and mantissa in float32's place are the value times 2^-120, also of
    # subnormals; its NaN becomes 480, and whoever writes one gives its row a scale of NaN
    wide = builder.zext(raw, ints)
    sign = builder.shl(builder.and_(wide, c(0x80)), c(24))
    body = builder.shl(builder.and_(wide, c(0x7F)), c(20))
    size = builder.fmul(builder.bitcast(body, floats), _const(2.0**120, lanes))
    return builder.bitcast(builder.or_(builder.bitcast(size, ints), sign), floats)


def _halves_of(builder: Any, pairs: Any) -> list[Any]:
    """Two vectors of bfloat16, in the low and the high halves of 32-bit words, as float32."""
    lanes = pairs.type.count
    low = builder.shl(pairs, _const(16, lanes, _i32))
    high = builder.and_(pairs, _const(-(1 << 16), lanes, _i32))
    return [builder.bitcast(half, _vec(lanes)) for half in (low, high)]


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Eight vectors of 8 as columns: interleaved by 1 and 2 within 128-bit halves, then across."""
    pairs = []
    for i in range(0, 8, 2):
        for at in (0, 2):
            places = [at, at + 8, at + 1, at + 9, at + 4, at + 12, at + 5, at + 13]
            pairs.append(_shuffle(builder, rows[i], rows[i + 1], places))
    fours = []
    for i in (0, 1, 4, 5):
        for at in (0, 2):
            places = [at, at + 1, at + 8, at + 9, at + 4, at + 5, at + 12, at + 13]
            fours.append(_shuffle(builder, pairs[i], pairs[i + 2], places))
    halves = ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    return [_shuffle(builder, fours[i], fours[i + 4], half) for half in halves for i in range(4)]


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One value of a vector: halves combined until one is left."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        low = _shuffle(builder, vector, vector, list(range(lanes)))
        high = _shuffle(builder, vector, vector, list(range(lanes, 2 * lanes)))
        vector = combine(low, high)
    return builder.extract_element(vector, _i32(0))


def _make_tile(num_rows: int) -> Any:
    @intrinsic
    def tile(
        _: Any, part: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any,
        scale: Any,
    ) -> Any:  # fmt: skip
        """c[r, :TILE_COLUMNS] = scale * sum over k < depth of a[r, k] * b[k, :], k ascending.

        Strides in floats, or in words of pairs if `part`, the plane that b is made of, is one; without pairs `scale` is not looked at. The +0 at the end
        makes a sum of zeros +0 however many there were, so that trailing products by zero may be
        left out.
        """
        pairs = part.instance_class.pairs
        add = _dot if pairs else _fma

        def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
            _, a, a_stride, b, b_stride, c, c_stride, depth, scale = args
            zero = _const(0.0, LANES)
            sums = [
                [cgutils.alloca_once(builder, _vec(LANES)) for _ in range(TILE_VECTORS)]
                for _ in range(num_rows)
            ]
            for row in sums:
                for one in row:
                    builder.store(zero, one)
            starts = [builder.add(a, builder.mul(a_stride, _i64(4 * r))) for r in range(num_rows)]
            with cgutils.for_range(builder, depth) as loop:
                line = _step(builder, b, builder.mul(loop.index, b_stride), 4)
                lines = [
                    _load(builder, builder.add(line, _i64(4 * LANES * v)), _vec(LANES))
                    for v in range(TILE_VECTORS)
                ]
                for row, start in zip(sums, starts, strict=True):
                    x = _load(builder, _step(builder, start, loop.index, 4), _f32)
                    wide = _fill(builder, x, LANES)
                    for one, other in zip(row, lines, strict=True):
                        builder.store(add(builder, wide, other, builder.load(one)), one)
            factor = _fill(builder, scale, LANES)
            for r, row in enumerate(sums):
                into = builder.add(c, builder.mul(c_stride, _i64(4 * r)))
                for v, one in enumerate(row):
                    total = builder.load(one)
                    if pairs:
                        total = builder.fmul(total, factor)
                    total = builder.fadd(total, zero)
                    _store(builder, total, builder.add(into, _i64(4 * LANES * v)))
            return context.get_dummy_value()

        return types.void(part, *[_int] * 7, _float), code

    return tile


tile_1, tile_2, tile_4, tile_all = (_make_tile(num_rows) for num_rows in (1, 2, 4, TILE_ROWS))


@intrinsic
def fold_row(_: Any, into: Any, old: Any, block: Any, new: Any, count: Any) -> Any:
    """into = into * old + block * new for `count` floats, a multiple of LANES."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, old, block, new, count = args
        vec, kept, added = _vec(LANES), _fill(builder, old, LANES), _fill(builder, new, LANES)
        with cgutils.for_range(builder, builder.udiv(count, _i64(LANES))) as loop:
            at = _step(builder, into, loop.index, 4 * LANES)
            x = builder.fmul(_load(builder, at, vec), kept)
            y = _load(builder, _step(builder, block, loop.index, 4 * LANES), vec)
            _store(builder, _call(builder, "fma", y, added, x), at)
        return context.get_dummy_value()

    return types.void(_int, _float, _int, _float, _int), code


@intrinsic
def is_finite(_: Any, row: Any, count: Any) -> Any:
    """Whether none of `count` floats, a multiple of LANES, is infinite or NaN."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, count = args
        vec = _vec(LANES)
        total = cgutils.alloca_once(builder, vec)
        builder.store(_const(0.0, LANES), total)
        with cgutils.for_range(builder, builder.udiv(count, _i64(LANES))) as loop:
            x = _load(builder, _step(builder, row, loop.index, 4 * LANES), vec)
            nothing = builder.fmul(x, _const(0.0, LANES))  # NaN for both
            builder.store(builder.fadd(builder.load(total), nothing), total)
        folded = _fold(builder, builder.load(total), builder.fadd)
        return builder.fcmp_ordered("==", folded, _f32(0.0))

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


def _prefetch(builder: Any, address: Any, level: int) -> None:
    """Begin to fetch the cache line of an address; level 3 is the nearest, 2 the one behind it."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _i32, _i32, _i32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, data = _i32(0), _i32(1)
    builder.call(fetch, [builder.inttoptr(address, pointer), read, _i32(level), data])


@intrinsic(prefer_literal=True)
def element_at(_: Any, address: Any, kind: Any) -> Any:
    """One stored element as float32; `kind` is a literal."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return builder.extract_element(_widen(builder, args[0], kind.literal_value, 1), _i32(0))

    return _float(_int, kind), code


@intrinsic
def int_at(_: Any, address: Any) -> Any:
    """The int64 at an address."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        return _load(builder, args[0], _i64)

    return _int(_int), code


@intrinsic
def put_float(_: Any, address: Any, value: Any) -> Any:
    """Store a float32."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _store(builder, args[1], args[0])
        return context.get_dummy_value()

    return types.void(_int, _float), code


@intrinsic(prefer_literal=True)
def prefetch(_: Any, address: Any, level: Any) -> Any:
    """Begin to fetch the cache line of an address; any address will do. `level`: a literal 2 or 3."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _prefetch(builder, args[0], level.literal_value)
        return context.get_dummy_value()

    return types.void(_int, level), code
