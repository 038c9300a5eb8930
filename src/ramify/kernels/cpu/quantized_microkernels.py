"""MR x NR micro-kernels over packed 8- and 4-bit integers as LLVM IR, and rows of x as integers.

Products of a group are summed exactly in int32, so no tile, vector width or instruction set changes a bit
of them. What is rounded is one chain of float32 FMA over groups, in ascending order.

Four elements of a row of x (k to k + 3) are the words (k, k + 2) and (k + 1, k + 3): what shifts of a
32-bit lane of weights give as pairs of 16-bit integers. Where `vpdpbusd` is, rows of 8 bits are words of four
bytes x + 128, and a column's sum of codes times 128 is subtracted: the same exact sums.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu import targets
from ramify.kernels.cpu.abi import CODES4, CODES8
from ramify.kernels.cpu.gemm_microkernels import MR_TILES, NR, PANELS_PER_TILE, emit_cases
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    call_function,
    constant,
    f32,
    fma,
    half_to_f32,
    i32,
    i64,
    load,
    load_as_f32,
    offset,
    reduce_lanes,
    shuffle,
    store,
    vector_type,
)

i16 = ir.IntType(16)
_HAS_DOT = targets.has_int16_dot()
_HAS_INTEGERS = targets.has_integer_vectors()
_HAS_WORD_TABLE = _HAS_INTEGERS and LANES == 16
# Without AVX-512 a look-up costs more than the products of a row: integers that follow each other need none.
HAS_PLAIN_CODES = LANES < 16
HAS_BYTE_DOT = _HAS_DOT and _HAS_INTEGERS and LANES == 16  # `vpdpbusd` comes with `vpdpwssd`
_byte = ir.IntType(8)
_X_OFFSET = 128  # of the bytes of rows
_int, _float = types.int64, types.float32
CODES8_PAIRS, CODES4_PAIRS = 2, 4  # words of x for a word of codes
_WORD_ORDER = [0, 2, 1, 3, 4, 6, 5, 7]


def _dot(builder: Any, total: Any, x: Any, y: Any) -> Any:
    """total + x[2i] * y[2i] + x[2i + 1] * y[2i + 1] by 32-bit lane, of 16-bit integers, exact."""
    words, halves = vector_type(LANES, i32), vector_type(2 * LANES, i16)
    if _HAS_DOT:
        args = (total, builder.bitcast(x, words), builder.bitcast(y, words))
        return call_function(builder, "llvm.x86.avx512.vpdpwssd.512", words, *args)
    if _HAS_INTEGERS:
        name = "llvm.x86.avx512.pmaddw.d.512" if LANES == 16 else "llvm.x86.avx2.pmadd.wd"
        return builder.add(total, call_function(builder, name, words, x, y))
    wide = vector_type(2 * LANES, i32)
    products = builder.mul(builder.sext(x, wide), builder.sext(y, wide))
    assert halves.count == products.type.count
    even, odd = (
        shuffle(builder, products, products, list(range(first, 2 * LANES, 2))) for first in (0, 1)
    )
    return builder.add(total, builder.add(even, odd))


def split_codes(builder: Any, kind: int, lanes: Any, levels: Any) -> list[Any]:
    """Pairs of 16-bit integers of each column: 2 of 8-bit, 4 of 4-bit codes in a 32-bit lane.

    Args:
        levels: `load_levels` of words; None: 4-bit codes are 0 to 15.
    """
    halves = builder.bitcast(lanes, vector_type(2 * LANES, i16))

    def c(value: int) -> Any:
        return constant(value, 2 * LANES, i16)

    def split(both: Any) -> list[Any]:
        return [builder.ashr(builder.shl(both, c(8)), c(8)), builder.ashr(both, c(8))]

    if kind == CODES8:
        return split(halves)
    shifted = [halves] + [builder.lshr(halves, c(shift)) for shift in (4, 8, 12)]
    if levels is None:
        return [builder.and_(nibbles, c(15)) for nibbles in shifted]
    if _HAS_WORD_TABLE:
        # It reads five bits of each index; the levels are there twice.
        name = "llvm.x86.avx512.permvar.hi.512"
        return [call_function(builder, name, levels.type, levels, nibbles) for nibbles in shifted]
    pairs = [
        split(builder.bitcast(word, halves.type))
        for word in _split_bytes(builder, kind, lanes, levels)
    ]
    return [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]


def _split_bytes(builder: Any, kind: int, lanes: Any, levels: Any) -> list[Any]:
    """Words of four signed bytes of each column: 1 of 8-bit, 2 of 4-bit codes in a 32-bit lane.

    Args:
        levels: `load_levels` of bytes.
    """
    if kind == CODES8:
        return [lanes]
    low = constant(0x0F0F0F0F, LANES, i32)
    nibbles = lanes, builder.lshr(lanes, constant(4, LANES, i32))
    bytes_of = vector_type(4 * LANES, _byte)
    indices = [builder.bitcast(builder.and_(word, low), bytes_of) for word in nibbles]
    return [builder.bitcast(_look_up(builder, levels, index), lanes.type) for index in indices]


def _look_up(builder: Any, levels: Any, indices: Any) -> Any:
    """levels[index] of each byte, indices below 16; `levels` has them in each 16 bytes."""
    if _HAS_INTEGERS:
        name = "avx512.pshuf.b.512" if LANES == 16 else "avx2.pshuf.b"
        return call_function(builder, f"llvm.x86.{name}", levels.type, levels, indices)
    size = indices.type.count
    if targets.IS_ARM64:
        table = shuffle(builder, levels, levels, [*range(16)])
        parts = [
            shuffle(builder, indices, indices, [*range(start, start + 16)])
            for start in range(0, size, 16)
        ]
        name = "llvm.aarch64.neon.tbl1.v16i8"
        halves = [call_function(builder, name, table.type, table, part) for part in parts]
        return shuffle(builder, halves[0], halves[-1], [*range(size)])
    result = levels
    for place in range(size):
        level = builder.extract_element(levels, builder.extract_element(indices, i32(place)))
        result = builder.insert_element(result, level, i32(place))
    return result


def load_levels(builder: Any, address: Any, *, is_bytes: bool) -> Any:
    """The levels of 4-bit codes at `address`, 32 int16, as `split_codes` or, of bytes, `_split_bytes` takes them."""
    if _HAS_WORD_TABLE and not is_bytes:
        return load(builder, address, vector_type(2 * LANES, i16))
    halves = load(builder, address, vector_type(16, i16))
    narrow = builder.trunc(halves, vector_type(16, _byte))
    return shuffle(builder, narrow, narrow, [*range(16)] * (LANES // 4))


def _byte_dot(builder: Any, total: Any, x: Any, codes: Any) -> Any:
    """total + the four products of bytes by 32-bit lane, x unsigned, codes signed, exact."""
    name = "llvm.x86.avx512.vpdpbusd.512"
    return call_function(builder, name, total.type, total, x, codes)


def _emit_tile(
    builder: Any,
    kind: int,
    num_rows: int,
    num_panels: int,
    args: list[Any],
    *,
    is_bytes: bool,
    is_plain: bool,
) -> None:
    """See `run_quantized_microkernel`; `is_plain`: 4-bit codes without levels."""
    a, b, b_stride, c, c_stride, groups, words, scales, mins = args[:9]
    scales_stride, scales_step, x_scales, block_shift, x_sums, levels_at = args[9:]
    floats, ints = vector_type(LANES), vector_type(LANES, i32)
    num_pairs = CODES8_PAIRS if kind == CODES8 else CODES4_PAIRS
    num_words = num_pairs // 2 if is_bytes else num_pairs  # of x, for a word of codes
    columns = [(p, v) for p in range(num_panels) for v in range(2)]
    cells = [(r, column) for r in range(num_rows) for column in columns]
    sums = {cell: cgutils.alloca_once(builder, ints) for cell in cells}
    totals = {cell: cgutils.alloca_once(builder, floats) for cell in cells}

    def result(r: int, p: int, v: int) -> Any:
        return builder.add(
            builder.add(c, builder.mul(c_stride, i64(p))), i64(4 * LANES * (2 * r + v))
        )

    for r, (p, v) in cells:
        builder.store(load(builder, result(r, p, v), floats), totals[r, (p, v)])
    # of bytes: the sum of codes times the offset of x
    excess = {column: cgutils.alloca_once(builder, ints) for column in columns if is_bytes}
    levels = None
    if kind == CODES4 and not is_plain:
        levels = load_levels(builder, levels_at, is_bytes=is_bytes)
    panels = [builder.add(b, builder.mul(b_stride, i64(p))) for p in range(num_panels)]
    units = builder.udiv(words, i64(num_pairs))
    with cgutils.for_range(builder, groups) as group:
        row_sums = offset(builder, x_sums, group.index, 4 * num_rows)
        for r in range(num_rows):
            start = constant(0, LANES, i32)
            if is_plain:
                # Of the rows' sums times the offset; with `mins` the sums are float32, the offset is 0.
                x_sum = load(builder, builder.add(row_sums, i64(4 * r)), i32)
                has_mins = builder.icmp_signed("!=", mins, i64(0))
                start = broadcast(builder, builder.select(has_mins, i32(0), x_sum), LANES)
            for column in columns:
                builder.store(start, sums[r, column])
        for at in excess.values():
            builder.store(constant(0, LANES, i32), at)
        first_unit = builder.mul(group.index, units)
        with cgutils.for_range(builder, units) as loop:
            unit = builder.add(first_unit, loop.index)
            pieces = {}
            for p, v in columns:
                address = builder.add(offset(builder, panels[p], unit, 4 * NR), i64(4 * LANES * v))
                split = _split_bytes if is_bytes else split_codes
                pieces[p, v] = split(builder, kind, load(builder, address, ints), levels)
            word = offset(builder, a, unit, 4 * num_rows * num_words)
            for pair in range(num_words):
                for column, at in excess.items():
                    x = constant(0x01010101 * _X_OFFSET, LANES, i32)
                    total = _byte_dot(builder, builder.load(at), x, pieces[column][pair])
                    builder.store(total, at)
                for r in range(num_rows):
                    element = load(builder, builder.add(word, i64(4 * (num_rows * pair + r))), i32)
                    x = broadcast(builder, element, LANES)
                    if not is_bytes:
                        x = builder.bitcast(x, vector_type(2 * LANES, i16))
                    dot = _byte_dot if is_bytes else _dot
                    for column in columns:
                        at = sums[r, column]
                        builder.store(dot(builder, builder.load(at), x, pieces[column][pair]), at)
        row_scales = offset(builder, x_scales, builder.lshr(group.index, block_shift), 4 * num_rows)
        weight_scales = builder.mul(scales_step, group.index)
        for p, v in columns:
            place = builder.add(weight_scales, builder.mul(scales_stride, i64(p)))
            place = builder.add(place, i64(4 * LANES * v))
            scale = load(builder, builder.add(scales, place), floats)
            for r in range(num_rows):
                x_scale = load(builder, builder.add(row_scales, i64(4 * r)), f32)
                factor = builder.fmul(scale, broadcast(builder, x_scale, LANES))
                total = builder.load(sums[r, (p, v)])
                if is_bytes:
                    total = builder.sub(total, builder.load(excess[p, v]))
                total = builder.sitofp(total, floats)
                at = totals[r, (p, v)]
                builder.store(fma(builder, total, factor, builder.load(at)), at)
        with builder.if_then(builder.icmp_signed("!=", mins, i64(0))):
            for p, v in columns:
                place = builder.add(weight_scales, builder.mul(scales_stride, i64(p)))
                place = builder.add(place, i64(4 * LANES * v))
                minimum = load(builder, builder.add(mins, place), floats)
                for r in range(num_rows):
                    x_sum = load(builder, builder.add(row_sums, i64(4 * r)), f32)
                    at = totals[r, (p, v)]
                    wide = broadcast(builder, x_sum, LANES)
                    builder.store(fma(builder, minimum, wide, builder.load(at)), at)
    for r, (p, v) in cells:
        store(builder, builder.load(totals[r, (p, v)]), result(r, p, v))


@intrinsic
def _select_tile(
    _: Any, kind: Any, is_bytes: Any, tile: Any, panels: Any, a: Any, b: Any, b_stride: Any, c: Any,
    c_stride: Any, groups: Any, words: Any, scales: Any, mins: Any, scales_stride: Any, scales_step: Any, x_scales: Any,
    block_shift: Any, x_sums: Any, levels: Any,
) -> Any:  # fmt: skip
    """See `run_quantized_microkernel`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind, is_bytes, tile, panels, *operands = args
        # whether x is bytes, and whether codes have no levels
        variants = [(CODES8, False, False), (CODES4, False, False)]
        if HAS_BYTE_DOT:
            variants += [(CODES8, True, False), (CODES4, True, False)]
        if HAS_PLAIN_CODES:
            variants.append((CODES4, False, True))

        def emit_variant(index: int) -> None:
            stored, has_bytes, is_plain = variants[index]

            def emit_size(size: int) -> None:
                def emit_panels(num_panels: int) -> None:
                    rows = MR_TILES[size]
                    _emit_tile(
                        builder, stored, rows, num_panels, operands, is_bytes=has_bytes, is_plain=is_plain
                    )  # fmt: skip

                emit_cases(builder, panels, sorted({1, PANELS_PER_TILE[size]}), emit_panels)

            emit_cases(builder, tile, range(len(MR_TILES))[::-1], emit_size)

        is_narrow = builder.icmp_signed("==", kind, i64(CODES4))
        index = builder.zext(is_narrow, i64)
        if HAS_BYTE_DOT:
            index = builder.add(index, builder.mul(builder.zext(is_bytes, i64), i64(2)))
        if HAS_PLAIN_CODES:
            has_levels = builder.icmp_signed("!=", operands[-1], i64(0))
            is_plain = builder.and_(is_narrow, builder.not_(has_levels))
            index = builder.select(is_plain, i64(len(variants) - 1), index)
        emit_cases(builder, index, range(len(variants)), emit_variant)
        return context.get_dummy_value()

    return types.void(_int, types.boolean, *[_int] * 17), code


@jit
def run_quantized_microkernel(
    kind: int, is_bytes: bool, tile: int, panels: int, a: int, b: int, b_stride: int, c: int, c_stride: int,
    groups: int, words: int, scales: int, mins: int, scales_stride: int, scales_step: int, x_scales: int,
    block_shift: int, x_sums: int, levels: int,
) -> None:  # fmt: skip
    """c[panel, row, :] += for each group: scales * x_scale * (sum of codes * x) + mins * x_sum.

    Args:
        kind: CODES8 or CODES4.
        is_bytes: words of x are four bytes x + 128, half as many.
        tile: index in MR_TILES; `panels` is 1, or PANELS_PER_TILE[tile].
        a: address of words of two int16 [groups * words, MR], or of bytes, half as many.
        b, b_stride: codes of the first panel, and bytes from panel to panel.
        c, c_stride: sums [MR, NR] float32 of the first panel, and bytes from panel to panel.
        words: of int16 of a group, a multiple of 4.
        scales, mins: addresses of float32 [groups, NR] of the first panel; `mins` may be 0.
        scales_stride, scales_step: their bytes from panel to panel, and from group to group.
        x_scales: float32 [blocks, MR]; a block has 2 ** block_shift groups.
        x_sums: [groups, MR]: with `mins` float32 sums of x; else, of 4-bit codes without levels, int32 sums of
            x's integers times the offset of the codes.
        levels: address of 32 int16: the levels of 4-bit codes, twice; 0, with HAS_PLAIN_CODES: they are 0 to
            15 plus an offset, which is 0 with `mins`.
    """
    _select_tile(
        kind, is_bytes, tile, panels, a, b, b_stride, c, c_stride, groups, words, scales, mins,
        scales_stride, scales_step, x_scales, block_shift, x_sums, levels,
    )  # fmt: skip


@intrinsic(prefer_literal=True)
def absolute_maximum(_: Any, source: Any, count: Any, kind: Any) -> Any:
    """The largest |x| of `count` elements, a multiple of 8, of kind F32 or BF16; NaN if one is NaN."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        source, count, _ = args
        stored, ints = kind.literal_value, vector_type(8, i32)
        item = 4 if stored == 0 else 2
        best = cgutils.alloca_once_value(builder, constant(0, 8, i32))
        with cgutils.for_range(builder, builder.udiv(count, i64(8))) as loop:
            x = load_as_f32(builder, offset(builder, source, loop.index, 8 * item), stored)
            bits = builder.and_(builder.bitcast(x, ints), constant(0x7FFFFFFF, 8, i32))
            before = builder.load(best)
            larger = builder.icmp_signed(">", bits, before)  # of floats >= 0, so are their bits
            builder.store(builder.select(larger, bits, before), best)

        def larger_of(left: Any, right: Any) -> Any:
            return builder.select(builder.icmp_signed(">", left, right), left, right)

        return builder.bitcast(reduce_lanes(builder, builder.load(best), larger_of), f32)

    return _float(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def round_to_words(_: Any, source: Any, count: Any, factor: Any, into: Any, kind: Any) -> Any:
    """into = round(x * factor) as int16, in the order of words; `count` is a multiple of 8.

    `into` may be `source`. Numbers that are not finite become any integers.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, count, factor, into, _ = args
        stored = kind.literal_value
        item = 4 if stored == 0 else 2
        wide = broadcast(builder, factor, 8)
        with cgutils.for_range(builder, builder.udiv(count, i64(8))) as loop:
            x = load_as_f32(builder, offset(builder, source, loop.index, 8 * item), stored)
            name = "llvm.rint.v8f32"
            rounded = call_function(builder, name, vector_type(8), builder.fmul(x, wide))
            name = "llvm.fptosi.sat.v8i32.v8f32"
            whole = call_function(builder, name, vector_type(8, i32), rounded)
            words = shuffle(builder, whole, whole, _WORD_ORDER)
            halves = builder.trunc(words, vector_type(8, i16))
            store(builder, halves, offset(builder, into, loop.index, 16))
        return context.get_dummy_value()

    return types.void(_int, _int, _float, _int, kind), code


@intrinsic
def words_to_bytes(_: Any, words: Any, width: Any, kind: Any) -> Any:
    """Turn a row of words of int16 [width / 2] of integers of 8 bits into bytes x + 128 in their place.

    Eight elements are bytes in the order 0 to 7 beside 8-bit codes, 0, 4, 2, 6, 1, 5, 3, 7 beside 4-bit ones.

    Args:
        width: a multiple of 8.
        kind: of the weights.
    """
    orders = {CODES8: [0, 2, 1, 3, 4, 6, 5, 7], CODES4: [0, 4, 1, 5, 2, 6, 3, 7]}

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        words, width, kind = args
        narrow = builder.icmp_signed("==", kind, i64(CODES4))
        with cgutils.for_range(builder, builder.udiv(width, i64(8))) as loop:
            x = load(builder, offset(builder, words, loop.index, 16), vector_type(8, i16))
            x = builder.add(x, constant(_X_OFFSET, 8, i16))
            ordered = [shuffle(builder, x, x, orders[which]) for which in (CODES4, CODES8)]
            chosen = builder.trunc(builder.select(narrow, *ordered), vector_type(8, _byte))
            store(builder, chosen, offset(builder, words, loop.index, 8))
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


@intrinsic
def sum_words(_: Any, words: Any, count: Any) -> Any:
    """The sum of the integers of `count` words, a multiple of 4."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        words, count = args
        ints = vector_type(8, i32)
        total = cgutils.alloca_once_value(builder, constant(0, 8, i32))
        with cgutils.for_range(builder, builder.udiv(count, i64(4))) as loop:
            halves = load(builder, offset(builder, words, loop.index, 16), vector_type(8, i16))
            builder.store(builder.add(builder.load(total), builder.sext(halves, ints)), total)
        return builder.sext(reduce_lanes(builder, builder.load(total), builder.add), i64)

    return _int(_int, _int), code


@intrinsic(prefer_literal=True)
def widen_scales(_: Any, source: Any, count: Any, into: Any, kind: Any) -> Any:
    """into = `count` numbers of storage kind `kind` as float32; a multiple of 8."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, count, into, _ = args
        stored = kind.literal_value
        with cgutils.for_range(builder, builder.udiv(count, i64(8))) as loop:
            x = load_as_f32(builder, offset(builder, source, loop.index, 16), stored)
            store(builder, x, offset(builder, into, loop.index, 32))
        return context.get_dummy_value()

    return types.void(_int, _int, _int, kind), code


@intrinsic
def multiply_scales(_: Any, source: Any, groups: Any, factors: Any, into: Any) -> Any:
    """into [groups, NR] = int8 [groups, NR] at `source` times float16 [NR] at `factors`, float32."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, groups, factors, into = args
        for v in range(NR // LANES):
            at = builder.add(factors, i64(2 * LANES * v))
            factor = half_to_f32(builder, load(builder, at, vector_type(LANES, ir.HalfType())))
            with cgutils.for_range(builder, groups) as loop:
                begin = builder.add(offset(builder, source, loop.index, NR), i64(LANES * v))
                x = load(builder, begin, vector_type(LANES, _byte))
                product = builder.fmul(builder.sitofp(x, vector_type(LANES)), factor)
                target = builder.add(offset(builder, into, loop.index, 4 * NR), i64(4 * LANES * v))
                store(builder, product, target)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int), code


@intrinsic
def store_i32(_: Any, address: Any, value: Any) -> Any:
    """Store the low 32 bits of an int64."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        store(builder, builder.trunc(args[1], i32), args[0])
        return context.get_dummy_value()

    return types.void(_int, _int), code
