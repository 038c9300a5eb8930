"""RMS norm, layer norm and rotary embedding: of a row as LLVM IR; of rows, and of all heads of tokens, as ops.

Rounded to the model's dtype after each step, as the reference (transformers) rounds. Elements
beyond whole vectors go through the same operations one at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    BF16,
    F32,
    ITEM_BYTES,
    LAYER_NORM,
    QK_NORM_AFTER_ROPE,
    QK_NORM_HEAD,
    QK_NORM_WIDTH,
)
from ramify.kernels.cpu.elementwise import (
    add_scaled_row,
    for_each_vector,
    load_elements,
    round_to,
    scale_to_f32,
    store_elements,
)
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.op_records import NORM, NORM_ROPE, OP_NUM_TASKS
from ramify.kernels.cpu.simd import (
    LANES,
    broadcast,
    constant,
    i32,
    llvm_intrinsic,
    offset,
    reduce_lanes,
)

_int, _float = types.int64, types.float32


def _emit_sum(
    builder: Any, row: Any, width: Any, stored: int, add: Callable[[Any, Any, int], Any]
) -> Any:
    """Sum over elements: by lane, across lanes, then the remainder; `add(x, sum, lanes)` adds to a sum."""
    sums = {n: cgutils.alloca_once_value(builder, constant(0.0, n)) for n in (LANES, 1)}

    def body(index: Any, n: int) -> None:
        x = load_elements(builder, row, index, stored, n)
        builder.store(add(x, builder.load(sums[n]), n), sums[n])

    for_each_vector(builder, width, body)
    tail = builder.extract_element(builder.load(sums[1]), i32(0))
    return builder.fadd(reduce_lanes(builder, builder.load(sums[LANES]), builder.fadd), tail)


@intrinsic(prefer_literal=True)
def sum_squares(_: Any, row: Any, width: Any, kind: Any) -> Any:
    """Sum of squares of `width` elements of `kind`."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        def add(x: Any, total: Any, _lanes: int) -> Any:
            return llvm_intrinsic(builder, "fma", x, x, total)

        return _emit_sum(builder, args[0], args[1], kind.literal_value, add)

    return _float(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def sum_row(_: Any, row: Any, width: Any, kind: Any) -> Any:
    """Sum of `width` elements of `kind`."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        def add(x: Any, total: Any, _lanes: int) -> Any:
            return builder.fadd(total, x)

        return _emit_sum(builder, args[0], args[1], kind.literal_value, add)

    return _float(_int, _int, kind), code


@intrinsic(prefer_literal=True)
def sum_squared_deviations(_: Any, row: Any, width: Any, mean: Any, kind: Any) -> Any:
    """Sum of (x - mean)^2 over `width` elements of `kind`."""

    def code(_: Any, builder: Any, __: Any, args: Any) -> Any:
        row, width, mean, _ = args

        def add(x: Any, total: Any, lanes: int) -> Any:
            deviation = builder.fsub(x, broadcast(builder, mean, lanes))
            return llvm_intrinsic(builder, "fma", deviation, deviation, total)

        return _emit_sum(builder, row, width, kind.literal_value, add)

    return _float(_int, _int, _float, kind), code


@intrinsic(prefer_literal=True)
def layer_scale_row(
    _: Any, row: Any, norm: Any, into: Any, width: Any, mean: Any, scale: Any, kind: Any, target_kind: Any
) -> Any:  # fmt: skip
    """into = (row - mean) * scale * weight + bias in float32, rounded to `kind`; `into` may be `row`.

    `norm`: address of weights and biases, float32 [2, width]. `target_kind`: storage kind of `into`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, norm, into, width, mean, scale, *_ = args
        stored, to_kind = kind.literal_value, target_kind.literal_value
        biases = offset(builder, norm, width, ITEM_BYTES[F32])

        def body(index: Any, lanes: int) -> None:
            x = load_elements(builder, row, index, stored, lanes)
            weight = load_elements(builder, norm, index, F32, lanes)
            bias = load_elements(builder, biases, index, F32, lanes)
            y = builder.fsub(x, broadcast(builder, mean, lanes))
            y = builder.fmul(builder.fmul(y, broadcast(builder, scale, lanes)), weight)
            y = round_to(builder, builder.fadd(y, bias), stored)
            store_elements(builder, y, into, index, to_kind)

        for_each_vector(builder, width, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _float, _float, kind, target_kind), code


@intrinsic(prefer_literal=True)
def rms_scale_row(
    _: Any, row: Any, weight: Any, into: Any, width: Any, scale: Any, kind: Any, target_kind: Any,
    weight_kind: Any,
) -> Any:  # fmt: skip
    """into = weight * (row * scale), rounded to `kind` after each product; `into` may be `row`.

    Weights of another storage kind, float32 then, are multiplied with before the only rounding.
    `target_kind` is the storage kind of `into`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, weight, into, width, scale, *_ = args
        stored, to_kind = kind.literal_value, target_kind.literal_value
        weight_stored = weight_kind.literal_value

        def body(index: Any, lanes: int) -> None:
            x = load_elements(builder, row, index, stored, lanes)
            w = load_elements(builder, weight, index, weight_stored, lanes)
            y = builder.fmul(x, broadcast(builder, scale, lanes))
            if weight_stored == stored:
                y = round_to(builder, y, stored)
            y = round_to(builder, builder.fmul(w, y), stored)
            store_elements(builder, y, into, index, to_kind)

        for_each_vector(builder, width, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, _float, kind, target_kind, weight_kind), code


@intrinsic(prefer_literal=True)
def rope_row(_: Any, row: Any, cos: Any, sin: Any, half: Any, kind: Any) -> Any:
    """(a, b) -> (a cos - b sin, b cos + a sin) in place, rounded to `kind` after each step.

    a and b are the first and the second `half` elements of the row; cos and sin have `half`.
    """

    def code(context: Any, builder: Any, _: Any, args: Any) -> Any:
        row, cos, sin, half, _ = args
        stored = kind.literal_value
        second_half = offset(builder, row, half, ITEM_BYTES[stored])

        def multiply(x: Any, y: Any) -> Any:
            return round_to(builder, builder.fmul(x, y), stored)

        def body(index: Any, lanes: int) -> None:
            a, b, c, s = (
                load_elements(builder, address, index, stored, lanes)
                for address in (row, second_half, cos, sin)
            )
            rotated_a = builder.fsub(multiply(a, c), multiply(b, s))
            rotated_b = builder.fadd(multiply(b, c), multiply(a, s))
            store_elements(builder, rotated_a, row, index, stored)
            store_elements(builder, rotated_b, second_half, index, stored)

        for_each_vector(builder, half, body)
        return context.get_dummy_value()

    return types.void(_int, _int, _int, _int, kind), code


@jit
def inverse_rms(total: float, width: int, eps: float) -> Any:
    """1 / sqrt(mean square + eps) in float32."""
    return np.float32(1.0) / np.sqrt(total / np.float32(width) + np.float32(eps))


@jit
def norm_row(
    kind: int, row: int, width: int, norm: int, norm_kind: int, eps: float, into: int, target_kind: int
) -> None:  # fmt: skip
    """RMS norm or layer norm (LAYER_NORM) of a row with the weights at `norm`; `into` may be `row`.

    Args:
        kind, target_kind: storage kinds of the row and of `into`; the result is rounded to `kind`.
    """
    if norm_kind == LAYER_NORM:
        _layer_norm_row(kind, row, width, norm, eps, into, target_kind)
    elif kind == F32:
        scale = inverse_rms(sum_squares(row, width, F32), width, eps)
        rms_scale_row(row, norm, into, width, scale, F32, F32, F32)
    else:
        scale = inverse_rms(sum_squares(row, width, BF16), width, eps)
        if target_kind == BF16:
            if norm_kind == F32:
                rms_scale_row(row, norm, into, width, scale, BF16, BF16, F32)
            else:
                rms_scale_row(row, norm, into, width, scale, BF16, BF16, BF16)
        elif norm_kind == F32:
            rms_scale_row(row, norm, into, width, scale, BF16, F32, F32)
        else:
            rms_scale_row(row, norm, into, width, scale, BF16, F32, BF16)


@jit
def _layer_norm_row(
    kind: int, row: int, width: int, norm: int, eps: float, into: int, target_kind: int
) -> None:
    if kind == F32:
        mean = sum_row(row, width, F32) / np.float32(width)
        scale = inverse_rms(sum_squared_deviations(row, width, mean, F32), width, eps)
        layer_scale_row(row, norm, into, width, mean, scale, F32, F32)
    else:
        mean = sum_row(row, width, BF16) / np.float32(width)
        scale = inverse_rms(sum_squared_deviations(row, width, mean, BF16), width, eps)
        if target_kind == BF16:
            layer_scale_row(row, norm, into, width, mean, scale, BF16, BF16)
        else:
            layer_scale_row(row, norm, into, width, mean, scale, BF16, F32)


@jit
def task_rows(op: Any, num_rows: int, task: int) -> Any:
    """Rows [begin, end) of a task of an op over `num_rows` rows."""
    return num_rows * task // op[OP_NUM_TASKS], num_rows * (task + 1) // op[OP_NUM_TASKS]


@jit
def norm_rows(op: Any, eps: float, scratch: Any, task: int) -> None:
    """Norm of a task's rows, see `norm_row`; stored or added to the result.

    Args:
        op: [OP_FIELDS] int64: a `NormOp`.
        scratch: at least `width` floats of this worker.
    """
    kind, mode, num_rows, width = op[NORM.dtype], op[NORM.mode], op[NORM.num_rows], op[NORM.width]
    norm, norm_kind, copy = op[NORM.norm], op[NORM.norm_kind], op[NORM.f32_copy]
    x, x_stride, out_rows, out_stride = (
        op[NORM.x],
        op[NORM.x_stride],
        op[NORM.out],
        op[NORM.out_stride],
    )
    buffer = data_address(scratch)
    begin, end = task_rows(op, num_rows, task)
    for r in range(begin, end):
        row, out = x + x_stride * r, out_rows + out_stride * r
        into = buffer if mode == ADD_RESIDUAL else out
        norm_row(kind, row, width, norm, norm_kind, eps, into, kind)
        if mode == ADD_RESIDUAL:
            add_scaled_row(out, into, width, np.float32(1.0), kind)
        elif copy:
            scale_to_f32(into, copy + 4 * width * r, width, np.float32(1.0), kind)


@jit
def _norm_rope_heads(op: Any, eps: float, row: int, num_heads: int, norm: int, angles: Any) -> None:
    """RMS norm, if `norm` (address of its weights) is not 0, and rope of heads from `row` on, in place."""
    kind, head_dim = op[NORM_ROPE.dtype], op[NORM_ROPE.head_dim]
    form, norm_kind = op[NORM_ROPE.form], op[NORM_ROPE.norm_kind]
    cos, sin = angles
    if norm and form == QK_NORM_WIDTH:
        norm_row(kind, row, num_heads * head_dim, norm, norm_kind, eps, row, kind)
    for index in range(num_heads):
        head = row + (4 if kind == F32 else 2) * head_dim * index
        if norm and form == QK_NORM_HEAD:
            norm_row(kind, head, head_dim, norm, norm_kind, eps, head, kind)
        if kind == F32:
            rope_row(head, cos, sin, head_dim // 2, F32)
        else:
            rope_row(head, cos, sin, head_dim // 2, BF16)
        if norm and form == QK_NORM_AFTER_ROPE:
            norm_row(kind, head, head_dim, norm, norm_kind, eps, head, kind)


@jit
def norm_rope(op: Any, eps: float, positions: Any, task: int) -> None:
    """Norm and rope of the queries and keys of a task's tokens, in place in their QKV rows.

    Args:
        op: [OP_FIELDS] int64: a `NormRopeOp`. The row of a position that is out of range is left
            unchanged.
        positions: [num_rows] int64.
    """
    rows, stride = op[NORM_ROPE.rows], op[NORM_ROPE.row_stride]
    num_q, num_k, head_dim = op[NORM_ROPE.num_q], op[NORM_ROPE.num_k], op[NORM_ROPE.head_dim]
    q_norm, k_norm = op[NORM_ROPE.q_norm], op[NORM_ROPE.k_norm]
    cos, sin, limit = op[NORM_ROPE.cos], op[NORM_ROPE.sin], op[NORM_ROPE.limit]
    size = 4 if op[NORM_ROPE.dtype] == F32 else 2
    first, end = task_rows(op, len(positions), task)
    for token in range(first, end):
        if positions[token] < 0 or positions[token] >= limit:
            op[NORM_ROPE.out_of_range] = 1
            continue
        angle_offset = positions[token] * (head_dim // 2) * size
        row, angles = rows + stride * token, (cos + angle_offset, sin + angle_offset)
        _norm_rope_heads(op, eps, row, num_q, q_norm, angles)
        _norm_rope_heads(op, eps, row + size * head_dim * num_q, num_k, k_norm, angles)
