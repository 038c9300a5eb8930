"""Integers with scales and zero points, made a `QuantizedWeight` without losing a bit, or widened."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat

# Products of such a scale and an integer of 9 bits or fewer are exact in float32, and so is the sum of two.
EXACT_SCALE_BITS = 0xFFF  # of the mantissa, which must be 0
EXACT_SCALE_MAX = 2.0**100


@dataclass(frozen=True, slots=True)
class WidenedWeight:
    """A matrix that no `QuantizedWeight` holds exactly: its values, and why it takes 32 bits."""

    weight: Tensor  # [out_width, in_width] float32
    reason: str


Decoded = QuantizedWeight | WidenedWeight


def from_zero_points(
    name: str,
    stored: Tensor,
    zeros: Tensor | int,
    scales: Tensor,
    *,
    bits: Literal[4, 8],
    group_size: int,
    dtype: torch.dtype,
) -> Decoded:
    """The matrix scales * (stored - zeros): the same bits from `QuantizedWeight.dequantize`, but for the sign of 0.

    With one zero point everywhere it is part of the codes. Others become offsets if the product of scale
    and zero point is exact, else codes of 8 bits if all differences fit, else the matrix is widened.

    Args:
        name: of the layer, for messages.
        stored: [out_width, in_width] uint8, 0 .. 2 ** bits - 1.
        zeros: [out_width, groups] int16, 0 .. 2 ** bits, or one integer.
        scales: [out_width, groups] float.
        dtype: that the result is computed in.

    Raises:
        CheckpointError: a scale is no finite number.
    """
    scales = finite_scales(name, scales)
    if isinstance(zeros, Tensor) and bool((zeros == zeros.flatten()[0]).all()):
        zeros = int(zeros.flatten()[0])
    if isinstance(zeros, int) and (bits == 4 or zeros == 128):
        levels = tuple(range(-zeros, 16 - zeros)) if bits == 4 else ()
        codes = (stored - zeros).view(torch.int8)
        return QuantizedWeight(
            WeightFormat(bits, group_size, levels=levels), codes, scales, None, dtype
        )
    if isinstance(zeros, int):
        zeros = torch.full(scales.shape, zeros, dtype=torch.int16)
    if _products_are_exact(scales):
        offset = 128 if bits == 8 else 0
        mins = scales * (offset - zeros)
        levels = tuple(range(16)) if bits == 4 else ()
        codes = (stored - offset).view(torch.int8)
        kind = WeightFormat(bits, group_size, has_min=True, levels=levels)
        return QuantizedWeight(kind, codes, scales, mins, dtype)
    differences = stored - spread(zeros, group_size, stored.shape[1])
    if int(differences.min()) >= -128 and int(differences.max()) <= 127:
        codes = differences.to(torch.int8)
        return QuantizedWeight(WeightFormat(8, group_size), codes, scales, None, dtype)
    wide = differences.float().mul_(spread(scales, group_size, stored.shape[1]))
    return WidenedWeight(
        wide, "its zero points leave 8 bits, and its scales are too fine for offsets"
    )


def from_int8(
    name: str, codes: Tensor, scales: Tensor, *, group_size: int, dtype: torch.dtype
) -> QuantizedWeight:
    """The matrix scales * codes.

    Args:
        name, scales, dtype: see `from_zero_points`.
        codes: [out_width, in_width] int8.

    Raises:
        CheckpointError: a scale is no finite number.
    """
    kind = WeightFormat(8, group_size)
    return QuantizedWeight(kind, codes, finite_scales(name, scales), None, dtype)


def ceil_div(count: int, size: int) -> int:
    """count / size, rounded up."""
    return -(-count // size)


def row_group(scheme: Scheme, width: int) -> int:
    """Elements of a row of `width` that share a scale."""
    return width if scheme.group_size < 1 else min(scheme.group_size, width)


def finite_scales(name: str, scales: Tensor) -> Tensor:
    """Scales in float32; CheckpointError if one is NaN or infinite."""
    scales = scales.float().contiguous()
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{name}: its scales hold NaN or infinity; the file is damaged")
    return scales


def spread(groups: Tensor, group_size: int, width: int, dim: int = -1) -> Tensor:
    """Values of groups for each of `width` elements along `dim`, however large a group is."""
    return groups.repeat_interleave(min(group_size, width), dim).narrow(dim, 0, width)


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unsigned integers of 4 or 8 bits in int32 words, lowest bits first.

    Args:
        words: [rows, n] int32.

    Returns:
        [rows, n, 32 / bits] uint8.
    """
    parts = words.flatten().view(torch.uint8)
    if bits == 4:
        # A byte 0xHL becomes the word 0x0H0L, whose bytes are L and H.
        wide = parts.to(torch.int16)
        parts = (wide | wide << 4).bitwise_and_(0x0F0F).view(torch.uint8)
    return parts.view(*words.shape, 32 // bits)


def _products_are_exact(scales: Tensor) -> bool:
    fine_bits = scales.view(torch.int32) & EXACT_SCALE_BITS
    return not bool(fine_bits.any()) and float(scales.abs().max()) <= EXACT_SCALE_MAX
