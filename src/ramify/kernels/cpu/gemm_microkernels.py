"""MR x NR micro-kernels of the packed GEMM as LLVM IR, packing of rows, and epilogues."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    BF16,
    BF16_VNNI,
    CACHE_LINE,
    CLAMPED_SWIGLU_MUL,
    F32,
    GELU_TANH,
    GELU_TANH_MUL,
    ITEM_BYTES,
    SIGMOID,
    SILU_MUL,
    STORE,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
)
from ramify.kernels.cpu.elementwise import f32_to_kind, round_to
from ramify.kernels.cpu.jit import jit
from ramify.kernels.cpu.simd import (
    LANES,
    bf16_dot,
    broadcast,
    constant,
    emit_prefetch,
    f32,
    fma,
    i32,
    i64,
    llvm_intrinsic,
    load,
    load_as_f32,
    row_addresses,
    split_bf16_words,
    store,
    transpose_8x8,
    vector_type,
)
from ramify.kernels.cpu.vector_math import exp_bf16, exp_f32

NR = 2 * LANES
# MR of the tiles. The accumulators of the largest hide the latency of FMA and fit into the registers
# beside a row of weights and one element of A.
MR_TILES = (1, 2, 3, 4, 6) if LANES == 8 else (1, 2, 4, 8, 12)
# micro-panels that each tile computes at once, so that small tiles have enough accumulators, too
PANELS_PER_TILE = (4, 2, 1, 1, 1)
K_UNROLL = 4  # k between two prefetches
_LARGEST = len(MR_TILES) - 1
_int, _float = types.int64, types.float32


def _load_row(builder: Any, address: Any) -> list[Any]:
    """Load NR float32, or words, as two vectors."""
    return [
        load(builder, builder.add(address, i64(4 * LANES * v)), vector_type(LANES)) for v in (0, 1)
    ]


def _load_b_row(builder: Any, address: Any, kind: int) -> list[Any]:
    """Load row k of a micro-panel as two float32 vectors."""
    if kind != BF16:
        return _load_row(builder, address)
    return split_bf16_words(builder, load(builder, address, vector_type(LANES, i32)))


def _accumulate(builder: Any, sums: list[Any], column: Any, vectors: list[Any], kind: int) -> None:
    """sums[r, v] += column[r] * vectors[v] for all rows; `column` is an address."""
    add, accumulators = bf16_dot if kind == BF16_VNNI else fma, iter(sums)
    for r in range(len(sums) // len(vectors)):
        x = load(builder, builder.add(column, i64(4 * r)), f32)
        wide_x = broadcast(builder, x, LANES)
        for b_vector, acc in zip(vectors, accumulators, strict=False):
            builder.store(add(builder, wide_x, b_vector, builder.load(acc)), acc)


def _prefetch_lines(builder: Any, prefetch_at: Any, prefetch_stride: Any, count: int) -> None:
    """Prefetch `count` cache lines into L2, or just one if the next call is at most a line away."""
    emit_prefetch(builder, prefetch_at, 2)
    with builder.if_then(builder.icmp_signed(">", prefetch_stride, i64(CACHE_LINE))):
        for line in range(1, count):
            emit_prefetch(builder, builder.add(prefetch_at, i64(CACHE_LINE * line)), 2)


def _emit_tile(builder: Any, kind: int, num_rows: int, num_panels: int, args: list[Any]) -> None:
    """c[panel, row, :] += sum over k < depth of a[k, row] * b[panel, k, :], k ascending.

    a is [depth, num_rows], c[panel] [num_rows, NR], both float32; VNNI: a has words, and k counts
    words. Strides in bytes from panel to panel.

    Every `K_UNROLL` k, as many bytes as these k read are prefetched (one line if `prefetch_stride`
    is at most a line), from `prefetch_at` on in steps of `prefetch_stride`. Tiles of several panels
    do not prefetch: the hardware keeps up with them.

    Args:
        args: a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth.
    """
    a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth = args
    line_bytes = NR * (2 if kind == BF16 else 4)
    sums = [
        cgutils.alloca_once(builder, vector_type(LANES)) for _ in range(2 * num_rows * num_panels)
    ]
    for acc in sums:
        builder.store(constant(0.0, LANES), acc)
    panels = [builder.add(b, builder.mul(b_stride, i64(p))) for p in range(num_panels)]

    def add_row(k: Any) -> None:
        step = builder.mul(k, i64(line_bytes))
        b_rows = [_load_b_row(builder, builder.add(panel, step), kind) for panel in panels]
        a_column = builder.add(a, builder.mul(k, i64(4 * num_rows)))
        b_vectors = [vector for b_row in b_rows for vector in b_row]
        _accumulate(builder, sums, a_column, b_vectors, kind)

    rounds = builder.udiv(depth, i64(K_UNROLL))
    with cgutils.for_range(builder, rounds) as loop:
        if num_panels == 1:
            address = builder.add(prefetch_at, builder.mul(loop.index, prefetch_stride))
            _prefetch_lines(builder, address, prefetch_stride, K_UNROLL * line_bytes // CACHE_LINE)
        first = builder.mul(loop.index, i64(K_UNROLL))
        for k in range(K_UNROLL):
            add_row(builder.add(first, i64(k)))
    done = builder.mul(rounds, i64(K_UNROLL))
    with cgutils.for_range(builder, builder.sub(depth, done)) as loop:
        add_row(builder.add(done, loop.index))
    accumulators = iter(sums)
    for r in range(num_rows):
        for p in range(num_panels):
            into = builder.add(c, builder.mul(c_stride, i64(p)))
            for v in range(2):
                address = builder.add(into, i64(4 * LANES * (2 * r + v)))
                before = load(builder, address, vector_type(LANES))
                store(builder, builder.fadd(before, builder.load(next(accumulators))), address)


def emit_cases(builder: Any, value: Any, keys: Sequence[int], emit: Callable[[int], None]) -> None:
    """Emit `emit(key)` for the key that equals `value`, for the last key otherwise."""
    key, *others = keys
    if not others:
        emit(key)
        return
    with builder.if_else(builder.icmp_signed("==", value, i64(key))) as (then, otherwise):
        with then:
            emit(key)
        with otherwise:
            emit_cases(builder, value, others, emit)


@intrinsic
def _select_tile(
    _: Any, kind: Any, tile: Any, group: Any, a: Any, b: Any, b_stride: Any, prefetch_at: Any, prefetch_stride: Any,
    c: Any, c_stride: Any, depth: Any,
) -> Any:  # fmt: skip
    """See `run_microkernel`."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind, tile, group, *operands = args

        def emit_kind(stored: int) -> None:
            def emit_size(size: int) -> None:
                def emit_group(num_panels: int) -> None:
                    _emit_tile(builder, stored, MR_TILES[size], num_panels, operands)

                emit_cases(builder, group, sorted({1, PANELS_PER_TILE[size]}), emit_group)

            emit_cases(builder, tile, range(len(MR_TILES))[::-1], emit_size)

        emit_cases(builder, kind, (F32, BF16_VNNI, BF16), emit_kind)
        return context.get_dummy_value()

    return types.void(*[_int] * 11), code


@jit
def run_microkernel(
    kind: int, tile: int, group: int, a: int, b: int, b_stride: int, prefetch_at: int, prefetch_stride: int, c: int,
    c_stride: int, depth: int,
) -> None:  # fmt: skip
    """Run the micro-kernel MR_TILES[tile] for `group` panels: 1, or PANELS_PER_TILE[tile]."""
    _select_tile(
        kind, tile, group, a, b, b_stride, prefetch_at, prefetch_stride, c, c_stride, depth
    )


@jit
def num_edge_tiles(tile: int, rows: int) -> int:
    """How many tiles of a block should have the next smaller MR, to compute the fewest padding rows."""
    best, least = 0, -(-rows // MR_TILES[tile]) * MR_TILES[tile]
    if tile == _LARGEST:
        for count in (1, 2):
            left = max(0, rows - count * MR_TILES[tile - 1])
            padded = count * MR_TILES[tile - 1] + -(-left // MR_TILES[tile]) * MR_TILES[tile]
            if padded < least:
                best, least = count, padded
    return best


@intrinsic(prefer_literal=True)
def pack_a_rows(
    _: Any, source: Any, stride: Any, count: Any, into: Any, tile: Any, steps: Any, kind: Any
) -> Any:
    """into[k, r] = source[r, k] in float32, for k < 8 * steps and r < 8.

    Args:
        stride: bytes from row to row.
        count: rows of `source`; the last repeats up to eight.
        tile: floats from k to k. If less than eight, each k overwrites the excess of the one
            before, and the last k writes up to seven floats past the end.
        kind: a literal, F32 or BF16.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        source, stride, count, into, tile, steps, _ = args
        stored, last = kind.literal_value, builder.sub(count, i64(1))
        starts = row_addresses(builder, source, stride, last, 8)
        with cgutils.for_range(builder, steps) as loop:
            step = builder.mul(loop.index, i64(8 * ITEM_BYTES[stored]))
            rows = [load_as_f32(builder, builder.add(start, step), stored) for start in starts]
            target = builder.add(into, builder.mul(loop.index, builder.mul(tile, i64(32))))
            for k, column in enumerate(transpose_8x8(builder, rows)):
                store(builder, column, builder.add(target, builder.mul(tile, i64(4 * k))))
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _int, _int, kind), code


@intrinsic
def init_accumulators(_: Any, into: Any, bias: Any, num_rows: Any) -> Any:
    """into[:num_rows, :NR] = the NR floats at address `bias`, or zeros if it is 0."""

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        into, bias, num_rows = args
        vectors = [cgutils.alloca_once_value(builder, constant(0.0, LANES)) for _ in range(2)]
        with builder.if_then(builder.icmp_signed("!=", bias, i64(0))):
            for v, vector in enumerate(vectors):
                builder.store(
                    load(builder, builder.add(bias, i64(4 * LANES * v)), vector_type(LANES)), vector
                )
        values = [builder.load(vector) for vector in vectors]
        with cgutils.for_range(builder, num_rows) as loop:
            for v, value in enumerate(values):
                row = builder.add(into, builder.mul(loop.index, i64(4 * NR)))
                store(builder, value, builder.add(row, i64(4 * LANES * v)))
        return context.get_dummy_value()

    return types.void(_int, _int, _int), code


def _emit_epilogue(builder: Any, kind: int, mode: int, args: list[Any]) -> None:
    """See `run_epilogue`; `args` are scale, sums, ups, into."""
    scale, sums, ups, into = args
    vectors = _load_row(builder, sums)
    up_vectors = _load_row(builder, ups) if mode >= SILU_MUL else vectors
    addresses = [builder.add(into, i64(ITEM_BYTES[kind] * LANES * v)) for v in (0, 1)]
    for x, up, address in zip(vectors, up_vectors, addresses, strict=True):
        if mode == STORE:
            result = x
        elif mode == ADD_RESIDUAL:
            scaled = builder.fmul(round_to(builder, x, kind), broadcast(builder, scale, LANES))
            before = load_as_f32(builder, address, kind, LANES)
            result = builder.fadd(before, round_to(builder, scaled, kind))
        elif mode == GELU_TANH:
            result = gelu_tanh(builder, round_to(builder, x, kind), kind)
        elif mode == SIGMOID:
            rounded = round_to(builder, x, kind)
            result = _times_sigmoid(builder, constant(1.0, LANES), rounded, kind)
        elif mode == CLAMPED_SWIGLU_MUL:
            result = clamped_swiglu(
                builder, round_to(builder, x, kind), round_to(builder, up, kind)
            )
        else:
            activation = silu if mode == SILU_MUL else gelu_tanh
            active = activation(builder, round_to(builder, x, kind), kind)
            result = builder.fmul(active, round_to(builder, up, kind))
        store(builder, f32_to_kind(builder, result, kind), address)


@intrinsic
def run_epilogue(_: Any, kind: Any, mode: Any, scale: Any, sums: Any, ups: Any, into: Any) -> Any:
    """Epilogue of NR sums into a row of the result: float32 if `kind` is F32, else bfloat16.

    - STORE: into = sums.
    - ADD_RESIDUAL: into += scale * sums; sums, product and result are rounded.
    - GELU_TANH, SIGMOID: into = gelu(sums), or sigmoid; both are rounded.
    - SILU_MUL, GELU_TANH_MUL: into = silu(sums) * ups, or gelu; sums, ups, activation and product are
      rounded.
    - CLAMPED_SWIGLU_MUL: see `clamped_swiglu`; sums, ups and result are rounded.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        kind, mode, *operands = args

        def emit_kind(stored: int) -> None:
            def emit_mode(case: int) -> None:
                _emit_epilogue(builder, stored, case, operands)

            gated = SILU_MUL, GELU_TANH_MUL, CLAMPED_SWIGLU_MUL
            plain = STORE, ADD_RESIDUAL, GELU_TANH, SIGMOID
            emit_cases(builder, mode, (*plain, *gated), emit_mode)

        emit_cases(builder, kind, (F32, BF16), emit_kind)
        return context.get_dummy_value()

    return types.void(_int, _int, _float, *[_int] * 3), code


def silu(builder: Any, x: Any, kind: int) -> Any:
    """x / (1 + exp(-x)) of a float32 vector, rounded to `kind`; takes exp of -|x| only."""
    return _times_sigmoid(builder, x, x, kind)


def gelu_tanh(builder: Any, x: Any, kind: int) -> Any:
    """gelu(x) in the tanh approximation, x * sigmoid(sqrt(8 / pi) (x + 0.044715 x^3)), rounded to `kind`."""
    cube = builder.fmul(builder.fmul(x, x), x)
    inner = llvm_intrinsic(builder, "fma", cube, constant(0.044715, LANES), x)
    gate = builder.fmul(inner, constant(math.sqrt(8 / math.pi), LANES))
    return _times_sigmoid(builder, x, gate, kind)


def clamped_swiglu(builder: Any, gate: Any, up: Any) -> Any:
    """gate * sigmoid(SWIGLU_ALPHA * gate) * (up + 1), gate clamped from above, up on both sides; float32."""
    limit, minus_limit = constant(SWIGLU_LIMIT, LANES), constant(-SWIGLU_LIMIT, LANES)
    gate = builder.select(builder.fcmp_ordered(">", gate, limit), limit, gate)
    up = builder.select(builder.fcmp_ordered(">", up, limit), limit, up)
    up = builder.select(builder.fcmp_ordered("<", up, minus_limit), minus_limit, up)
    argument = builder.fmul(gate, constant(SWIGLU_ALPHA, LANES))
    active = _times_sigmoid(builder, gate, argument, F32)
    return builder.fmul(active, builder.fadd(up, constant(1.0, LANES)))


def _times_sigmoid(builder: Any, x: Any, gate: Any, kind: int) -> Any:
    """x / (1 + exp(-gate)), rounded to `kind`. Takes exp of -|gate| only."""
    exp = exp_f32 if kind == F32 else exp_bf16
    zero, ones = constant(0.0, LANES), constant(1.0, LANES)
    e = exp(builder, builder.fsub(zero, llvm_intrinsic(builder, "fabs", gate)))
    negative = builder.fcmp_ordered("<", gate, zero)
    numerator = builder.select(negative, builder.fmul(x, e), x)
    return round_to(builder, builder.fdiv(numerator, builder.fadd(ones, e)), kind)
