"""Row functions in plain torch: norms, activation, rope, per-head matmul.

Reference of the compiled kernels, and what runs where there is no kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import (
    BLOCK_ROWS,
    FP32_ROW_MULTIPLE,
    matmul_needs_blocks,
    pad_to_tiles,
)
from ramify.models.configs.moe import SWIGLU_ALPHA, SWIGLU_LIMIT


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / RMS(x) * (offset + weight) over the last dimension.

    Mean and division are float32. Without an offset their result is rounded to x's dtype before the
    multiplication with the weight, with one after it, as in the models' reference code.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (wide * (offset + weight.float())).to(x.dtype)
    return weight * wide.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / deviation * weight + bias over the last dimension, in float32."""
    wide = x.float()
    wide = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = wide * scale * weight.float()
    return (wide if bias is None else wide + bias.float()).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) over any shape.

    Not torch's silu: its float32 kernel computes the last few elements with scalar code that rounds
    differently from the vector code, so a row's bits depend on the rows beside it.
    """
    wide = x.float()
    return (wide / (1 + torch.exp(-wide))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """gelu(x) in the tanh approximation; by `exp`, as in `silu`."""
    wide = x.float()
    argument = math.sqrt(8 / math.pi) * (wide + 0.044715 * wide.pow(3))
    return (wide / (1 + torch.exp(-argument))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x * Φ(x), Φ the standard normal distribution function."""
    wide = x.float()
    return (wide * 0.5 * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), not torch's for the reason of `silu`."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "sigmoid": sigmoid,
}


def silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, all [rows, width]."""
    return silu(gate) * up


def gelu_tanh_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up in the tanh approximation, all [rows, width]."""
    return gelu_tanh(gate) * up


def gelu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, all [rows, width]."""
    return gelu(gate) * up


def clamped_swiglu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 * gate) * (up + 1), gate clamped from above and up on both sides to 7."""
    wide = gate.float().clamp(max=SWIGLU_LIMIT)
    lifted = up.float().clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1
    return (wide / (1 + torch.exp(-SWIGLU_ALPHA * wide)) * lifted).to(gate.dtype)


GATED_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu_mul": silu_and_mul,
    "gelu_tanh_mul": gelu_tanh_and_mul,
    "gelu_mul": gelu_and_mul,
    "clamped_swiglu_mul": clamped_swiglu_and_mul,
}


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), by `exp`, as in `silu`."""
    return cap * (1 - 2 / (1 + torch.exp(2 * logits / cap)))


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin for x [rows, heads, head_dim]; cos, sin of `RotaryTable.cos_sin`."""
    first, second = x.chunk(2, -1)
    return (x * cos).add_(torch.cat((second, first), -1).mul_(signed_sin))


def deinterleave_rope(x: Tensor) -> Tensor:
    """Reorder x [..., dim] from interleaved rotary pairs to halves, as `apply_rotary` expects them.

    Queries and keys are reordered alike, so that their dot products do not change.
    """
    halves: Tensor = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves


def per_head_matmul(x: Tensor, matrices: Tensor) -> Tensor:
    """x [T, heads, n] times a matrix per head [heads, n, m] -> [T, heads, m].

    Pads T as the `padded` linear does, or takes `BLOCK_ROWS` a call as `blocks` where that is needed.
    """
    needs_blocks, num_rows = matmul_needs_blocks(x.dtype, x.device), x.shape[0]
    missing = -num_rows % (BLOCK_ROWS if needs_blocks else FP32_ROW_MULTIPLE)
    rows = F.pad(pad_to_tiles(x), (0, 0, 0, 0, 0, missing)).transpose(0, 1)
    matrices = pad_to_tiles(matrices.mT).mT
    if not needs_blocks:
        return torch.bmm(rows.contiguous(), matrices)[:, :num_rows].transpose(0, 1)
    blocks = [torch.bmm(block.contiguous(), matrices) for block in rows.split(BLOCK_ROWS, dim=1)]
    return torch.cat(blocks, 1)[:, :num_rows].transpose(0, 1)


def mark_nonfinite_rows(hidden: Tensor, *kv: Tensor) -> None:
    """Fill a row of hidden [T, hidden_size] with NaN if its row of a kv tensor [T, ...] is not finite."""
    for plane in kv:
        # An inf or NaN anywhere makes the sum inf or NaN.
        if not math.isfinite(plane.sum(dtype=torch.float32).item()):
            hidden[~plane.isfinite().flatten(1).all(-1)] = torch.nan
