"""Rounding inside kernels: to the dtype of a tensor, to whole numbers, to 8-bit floats."""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

# Whether kernels of this process run in the interpreter, which `triton.jit` decides at import, too.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# 1.5 * 2 ** 23: adding it leaves no bits behind the point, rounded to nearest, ties to even
_WHOLE = tl.constexpr(12582912.0)
_FP8_MIN_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def round_to(x, like):
    """float32 `x` rounded to the dtype that the pointer `like` points to, ties to even, as float32.

    The interpreter cuts bfloat16 off instead, and computes with its bits as integers: round before
    every store, and compute in float32.
    """
    if INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(is_nan(x), x, bits.to(tl.float32, bitcast=True))
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def is_nan(x):
    """Whether floats are NaN."""
    return x != x  # noqa: PLR0124


@triton.jit
def round_whole(x):
    """Nearest whole number of |x| < 2 ** 22, ties to even."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def float8_e4m3_bits(x):
    """float32 of at most 448 in magnitude to the nearest float8_e4m3fn, ties to even, as uint8.

    Computed by integers, so that it exists on devices without such a conversion. NaN becomes 0x7f.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # from 23 to 3 bits of mantissa; the exponent's bias from 127 to 7
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    magnitude = size.to(tl.float32, bitcast=True)
    subnormal = round_whole(magnitude * 512.0).to(tl.uint32)
    code = tl.where(magnitude < _FP8_MIN_NORMAL, subnormal, normal)
    code = tl.where(is_nan(magnitude), 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def code_scale(largest, has_nan, MAX_CODE: tl.constexpr):
    """The scale of a row whose largest magnitude is `largest`: see `ramify.kv.quantize.quantize`."""
    scale = tl.div_rn(largest, tl.full(largest.shape, MAX_CODE, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    return tl.where(has_nan, float("nan"), scale)
