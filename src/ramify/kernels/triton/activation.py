"""Gated activations: act(gate) * up of the two halves of a row."""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import aligned
from ramify.kernels.triton.rounding import round_to

BLOCK = 1024
_GELU_SCALE = tl.constexpr(1.5957691216057308)  # the root of 8 / π
_ROOT_HALF = tl.constexpr(0.7071067811865476)


@triton.jit
def gated_activation_rows(
    gate_up, experts, out, alpha, limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, HAS_EXPERTS: tl.constexpr,
):  # fmt: skip
    """out = act(gate) * up. Grid: (rows, blocks of a row).

    Args:
        gate_up: [rows, 2 * WIDTH], contiguous: gate, then up.
        experts: [rows] int32, with HAS_EXPERTS: a row with -1 is left.
        out: [rows, WIDTH].
        alpha, limit: of `clamped_swiglu_mul`.
        KIND: a key of `GATED_ACTIVATIONS` in `models.ops.functional`.
    """
    row = tl.program_id(0).to(tl.int64)
    if HAS_EXPERTS:  # noqa: SIM102 - decided when the kernel is compiled
        if tl.load(experts + row) < 0:
            return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = gate_up + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=mask, other=0.0).to(tl.float32)
    if KIND == "clamped_swiglu_mul":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        result = gate / (1.0 + tl.exp(-alpha * gate)) * up
    else:
        if KIND == "silu_mul":
            active = gate / (1.0 + tl.exp(-gate))
        elif KIND == "gelu_tanh_mul":
            argument = _GELU_SCALE * (gate + 0.044715 * (gate * gate * gate))
            active = gate / (1.0 + tl.exp(-argument))
        else:
            tl.static_assert(KIND == "gelu_mul")
            active = gate * 0.5 * (1.0 + tl.erf(gate * _ROOT_HALF))
        result = round_to(active, out) * up
    tl.store(out + row * WIDTH + column, round_to(result, out).to(out.dtype.element_ty), mask=mask)


def gated_activation(
    gate_up: Tensor,
    kind: str,
    *,
    alpha: float = 0.0,
    limit: float = 0.0,
    experts: Tensor | None = None,
) -> Tensor:
    """act(gate) * up of rows [rows, 2 * width], gate before up: [rows, width].

    Args:
        kind: a key of `models.ops.functional.GATED_ACTIVATIONS`, whose arithmetic this is.
        alpha, limit: of `clamped_swiglu_mul`: gate * sigmoid(alpha * gate) * (up + 1), both clamped.
        experts: [rows] int32; where it is -1, the result is undefined.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gated_activation_rows[rows, triton.cdiv(width, BLOCK)](
            aligned(gate_up), gate_up if experts is None else experts, out, alpha, limit,
            WIDTH=width, BLOCK=BLOCK, KIND=kind, HAS_EXPERTS=experts is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
