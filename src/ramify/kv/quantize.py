"""K/V in 8 bits: every token and head on its own, so that bits never depend on neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

# the largest code of each dtype, to which the largest element of a row is mapped
SCALED_DTYPES: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows; a row is the last axis.

    A row is divided by scale = max |x| / c and rounded to the nearest code, ties to even; c is 127
    for int8, 448 for float8_e4m3fn. What `dequantize` makes of it differs from x (up to half of
    float32's largest number) by at most

    - int8: 0.50002 × scale (half a step, and the rounding of float32);
    - float8_e4m3fn: the larger of |x| / 16 and scale / 1024, which is half the step of its
      subnormal numbers, times 1 + 2⁻²⁰.

    Scales below float32's smallest normal number are raised to it. A row with a NaN or an infinity
    comes back as NaN throughout: damage stays visible.

    Args:
        values: [..., width] float32, bfloat16 or float16.
        dtype: int8 or float8_e4m3fn.

    Returns:
        codes [..., width] in `dtype`, and scales [...] float32.
    """
    rows = values.float()
    scale = rows.abs().amax(-1) / SCALED_DTYPES[dtype]
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)  # NaN and infinity stay
    codes = rows / scale[..., None]
    if dtype == torch.int8:
        codes = codes.round_().nan_to_num_(0.0)  # the scale says NaN, and 0 × infinity is one
    return codes.to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 of codes [..., width] and their scales [...]."""
    return codes.float() * scale[..., None]
