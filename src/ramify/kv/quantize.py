"""8-bit K/V, int8 or fp8: a scale for each token and head, so bits do not depend on other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest code of each dtype, to which a row's largest element is mapped.
SCALED_DTYPES: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise rows along the last axis: codes = round(x / scale), scale = max |x| / c.

    Rounds to nearest, ties to even; c is 127 for int8, 448 for float8_e4m3fn. For |x| up to half of
    float32's largest number, `dequantize` differs from x by at most

    - int8: 0.50002 × scale (half a step, and the rounding of float32);
    - float8_e4m3fn: (1 + 2⁻²⁰) × max(|x| / 16, scale / 1024); scale / 1024 is half the step of its
      subnormal numbers.

    Scales are at least float32's smallest normal number. A row with a NaN or an infinity dequantises
    to NaN throughout, so that damage stays visible.

    Args:
        values: [..., width] float32, bfloat16 or float16.
        dtype: int8 or float8_e4m3fn.

    Returns:
        codes [..., width] in `dtype`, and scales [...] float32.
    """
    rows = values.float()
    # By a tensor: CUDA multiplies by the reciprocal of a number, and would round otherwise.
    scale = rows.abs().amax(-1) / rows.new_full((), SCALED_DTYPES[dtype])
    # clamp keeps NaN and infinity.
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    codes = rows / scale[..., None]
    if dtype == torch.int8:
        # int8 has no NaN: the row's scale is NaN or infinity, and 0 × infinity is NaN.
        codes = codes.round_().nan_to_num_(0.0)
    return codes.to(dtype), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """codes [..., width] * scale [...] -> [..., width] float32."""
    return codes.float() * scale[..., None]
