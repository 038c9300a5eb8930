"""QK norm, rope and K/V write in one kernel: from QKV rows to rotated queries and paged K/V."""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import padded
from ramify.kernels.triton.rounding import (
    code_scale,
    float8_e4m3_bits,
    is_nan,
    round_to,
    round_whole,
)
from ramify.kv.quantize import SCALED_DTYPES

HEADS_TILE = 8  # heads of a program
_NORM_BEFORE = tl.constexpr(1)
_NORM_AFTER = tl.constexpr(2)
FLOATS, INT8, FLOAT8 = 0, 1, 2  # what planes hold
_FLOATS = tl.constexpr(FLOATS)
_INT8 = tl.constexpr(INT8)
_FLOAT8 = tl.constexpr(FLOAT8)


@triton.jit
def _load_weight(q_norm, k_norm, is_q, dim, in_half):
    """Half of the norm's weights of q or of k: [1, dim] float32."""
    q_weight = tl.load(q_norm + dim, mask=in_half, other=0.0)
    k_weight = tl.load(k_norm + dim, mask=in_half, other=0.0)
    return tl.where(is_q, q_weight.to(tl.float32), k_weight.to(tl.float32))[None, :]


@triton.jit
def _head_norm(
    first, second, q_norm, k_norm, is_q, dim, eps, offset, like,
    HALF: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """RMS norm of heads of q or of k [heads, dim], given in halves."""
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    scale = tl.div_rn(tl.full(mean.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))[:, None]
    w_first = _load_weight(q_norm, k_norm, is_q, dim, dim < HALF)
    w_second = _load_weight(q_norm + HALF, k_norm + HALF, is_q, dim, dim < HALF)
    if HAS_OFFSET:
        first, second = first * scale * (offset + w_first), second * scale * (offset + w_second)
    else:
        first = w_first * round_to(first * scale, like)
        second = w_second * round_to(second * scale, like)
    return round_to(first, like), round_to(second, like)


@triton.jit
def _store_kv(
    plane, scale_plane, at, scale_at, first, second, mask, in_head,
    HALF: tl.constexpr, KIND: tl.constexpr, MAX_CODE: tl.constexpr,
):  # fmt: skip
    """Write heads [heads, dim], given in halves, to a plane: floats, or codes and their scale."""
    if KIND == _FLOATS:
        tl.store(plane + at, first.to(plane.dtype.element_ty), mask=mask)
        tl.store(plane + at + HALF, second.to(plane.dtype.element_ty), mask=mask)
    else:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        has_nan = tl.max((is_nan(first) | is_nan(second)).to(tl.int32), 1) > 0
        scale = code_scale(largest, has_nan, MAX_CODE)
        divisor = tl.broadcast_to(scale[:, None], first.shape)
        first, second = tl.div_rn(first, divisor), tl.div_rn(second, divisor)
        if KIND == _INT8:
            # int8 has no NaN: the scale has it
            first = round_whole(tl.where(is_nan(first), 0.0, first)).to(tl.int8)
            second = round_whole(tl.where(is_nan(second), 0.0, second)).to(tl.int8)
        else:
            tl.static_assert(KIND == _FLOAT8)
            first, second = float8_e4m3_bits(first), float8_e4m3_bits(second)
        tl.store(plane + at, first, mask=mask)
        tl.store(plane + at + HALF, second, mask=mask)
        tl.store(scale_plane + scale_at, scale, mask=in_head)


@triton.jit
def rope_and_write_kv(
    qkv, positions, cos, sin, slots, k, v, k_scale, v_scale, q_norm, k_norm, eps, offset,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, NORM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    KIND: tl.constexpr, MAX_CODE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate q and k in place, and write k and v to their slots. Grid: (rows, head tiles).

    The tiles of a row are those of q, then of k, then of v.

    Args:
        qkv: [rows, NUM_Q + 2 * NUM_KV, 2 * HALF], contiguous.
        positions, slots: [rows] int64; a row whose slot is below 0 is not written.
        cos, sin: [positions, HALF].
        k, v: planes [slots, NUM_KV, 2 * HALF]; k_scale, v_scale [slots, NUM_KV] float32 for codes.
        q_norm, k_norm: weights [2 * HALF], for NORM 1 (before rope) and 2 (after it).
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (NUM_Q + TILE - 1) // TILE
    kv_tiles: tl.constexpr = (NUM_KV + TILE - 1) // TILE
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + kv_tiles
    num_heads = tl.where(is_q, NUM_Q, NUM_KV)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_Q + NUM_KV, NUM_Q))
    first_tile = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))
    head = (tile - first_tile) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, BLOCK)
    in_head = head < num_heads
    mask = in_head[:, None] & (dim < HALF)[None, :]
    source = (row * (NUM_Q + 2 * NUM_KV) + first_head + head)[:, None] * (2 * HALF) + dim[None, :]
    first = tl.load(qkv + source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv + source + HALF, mask=mask, other=0.0).to(tl.float32)
    if not is_v:
        if NORM == _NORM_BEFORE:
            first, second = _head_norm(
                first, second, q_norm, k_norm, is_q, dim, eps, offset, qkv, HALF, HAS_OFFSET
            )
        angle = tl.load(positions + row) * HALF + dim
        c = tl.load(cos + angle, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        s = tl.load(sin + angle, mask=dim < HALF, other=0.0).to(tl.float32)[None, :]
        # each product is rounded, as in `models.ops.functional.apply_rotary`
        rotated = round_to(round_to(first * c, qkv) - round_to(second * s, qkv), qkv)
        second = round_to(round_to(second * c, qkv) + round_to(first * s, qkv), qkv)
        first = rotated
        if NORM == _NORM_AFTER:
            first, second = _head_norm(
                first, second, q_norm, k_norm, is_q, dim, eps, offset, qkv, HALF, HAS_OFFSET
            )
        tl.store(qkv + source, first.to(qkv.dtype.element_ty), mask=mask)
        tl.store(qkv + source + HALF, second.to(qkv.dtype.element_ty), mask=mask)
    if not is_q:
        slot = tl.load(slots + row + head * 0)
        in_head = in_head & (slot >= 0)
        mask = mask & (slot >= 0)[:, None]
        scale_at = slot * NUM_KV + head
        at = scale_at[:, None] * (2 * HALF) + dim[None, :]
        if is_v:
            _store_kv(v, v_scale, at, scale_at, first, second, mask, in_head, HALF, KIND, MAX_CODE)
        else:
            _store_kv(k, k_scale, at, scale_at, first, second, mask, in_head, HALF, KIND, MAX_CODE)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head of q and of k."""

    q_weight: Tensor  # [head_dim]
    k_weight: Tensor  # [head_dim]
    eps: float
    offset: float = 0.0
    is_after_rope: bool = False


def rope_kv(
    qkv: Tensor,
    num_heads: tuple[int, int],
    positions: Tensor,
    table: tuple[Tensor, Tensor],
    slots: Tensor,
    planes: Mapping[str, Tensor],
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate q and k of QKV rows in place, write k and v to their slots of a layer's planes.

    A page that this writes has the bits that `KVPool.write_kv` writes of the same k and v.

    Args:
        qkv: [T, (num_q + 2 * num_kv) * head_dim], contiguous.
        num_heads: (num_q, num_kv).
        positions, slots: [T] int64.
        table: cos and sin [max_len, head_dim / 2], of `RotaryTable`.
        planes: `k` and `v` [pages, page_size, num_kv, head_dim] in qkv's dtype, or int8 or
            float8_e4m3fn with `k_scale` and `v_scale`.

    Returns:
        q [T, num_q, head_dim], k and v [T, num_kv, head_dim]: views of qkv.
    """
    num_q, num_kv = num_heads
    rows = qkv.unflatten(-1, (num_q + 2 * num_kv, -1))
    head_dim = rows.shape[-1]
    k, v = planes["k"], planes["v"]
    kind = {torch.int8: INT8, torch.float8_e4m3fn: FLOAT8}.get(k.dtype, FLOATS)
    assert k.dtype == v.dtype and (kind != FLOATS or k.dtype == qkv.dtype)
    assert qkv.is_contiguous() and positions.dtype == slots.dtype == torch.int64
    if len(qkv):
        cos, sin = table
        weights = (qkv, qkv) if norms is None else (norms.q_weight, norms.k_weight)
        tiles = triton.cdiv(num_q, HEADS_TILE) + 2 * triton.cdiv(num_kv, HEADS_TILE)
        rope_and_write_kv[len(qkv), tiles](
            qkv, positions, cos, sin, slots, _as_bytes(k), _as_bytes(v),
            planes.get("k_scale", qkv), planes.get("v_scale", qkv), *weights,
            0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.offset,
            NUM_Q=num_q, NUM_KV=num_kv, HALF=head_dim // 2, BLOCK=padded(head_dim // 2),
            TILE=HEADS_TILE, NORM=0 if norms is None else 1 + norms.is_after_rope,
            HAS_OFFSET=norms is not None and norms.offset != 0.0,
            KIND=kind, MAX_CODE=SCALED_DTYPES.get(k.dtype, 0.0), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    q, k_rows, v_rows = rows.split((num_q, num_kv, num_kv), 1)
    return q, k_rows, v_rows


def _as_bytes(plane: Tensor) -> Tensor:
    """View a float8 plane as bytes, which the kernel converts to itself."""
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane
