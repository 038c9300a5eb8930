"""Residual addition and RMS norm in one kernel."""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import aligned, padded, row_warps
from ramify.kernels.triton.rounding import round_to

MAX_WIDTH = 1 << 15  # a program holds a row in registers


@triton.jit
def add_rms_norm_rows(
    x, residual, weight, out, eps, offset,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """out = rms_norm(residual += x); without a residual out = rms_norm(x). Grid: (rows,).

    Args:
        x, residual, out: [rows, WIDTH] of one dtype, contiguous.
        weight: [WIDTH].
    """
    row = tl.program_id(0).to(tl.int64) * WIDTH
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    wide = tl.load(x + row + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row + column, mask=mask, other=0.0).to(tl.float32)
        wide = round_to(wide, residual)
        tl.store(residual + row + column, wide.to(residual.dtype.element_ty), mask=mask)
    mean = tl.sum(wide * wide, 0) / WIDTH
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    factor = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        result = wide * scale * (offset + factor)
    else:
        result = factor * round_to(wide * scale, out)
    tl.store(out + row + column, round_to(result, out).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, residual: Tensor | None = None
) -> Tensor:
    """RMS norm of rows, as `models.ops.functional.rms_norm`, after the addition to a residual.

    Args:
        x: [rows, width] of at most `MAX_WIDTH`, float32, bfloat16 or float16.
        weight: [width].
        residual: like x, contiguous; x is added to it in place, rounded to its dtype, and the norm
            is that of the sum.

    Returns:
        [rows, width] in x's dtype. A row's bits depend on that row alone.
    """
    rows, width = x.shape
    assert width <= MAX_WIDTH, f"width {width} exceeds {MAX_WIDTH}"
    assert residual is None or residual.is_contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not rows:
        return out
    x = aligned(x)
    block = padded(width)
    options: dict[str, Any] = {"num_warps": row_warps(block), "enable_fp_fusion": False}
    add_rms_norm_rows[(rows,)](
        x, x if residual is None else residual, weight, out, eps, offset,
        WIDTH=width, BLOCK=block, HAS_RESIDUAL=residual is not None, HAS_OFFSET=offset != 0.0,
        **options,
    )  # fmt: skip
    return out
