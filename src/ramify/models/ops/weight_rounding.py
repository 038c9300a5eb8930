"""Matrices in full precision rounded at load: int8 by the largest element, int4 by a search for the scale."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kv.quantize import quantize
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat

INT4_LEVELS = tuple(range(-8, 8))
# What a group's largest element is divided into steps by; plain rounding is 8, above it is clipped.
INT4_STEPS = tuple(7 + 0.25 * index for index in range(20))
PLAIN_STEPS = 8.0
# Elements that are rounded together: 1 MiB for each intermediate result.
CHUNK_ELEMENTS = 1 << 18
FLOAT16 = torch.finfo(torch.float16)


def quantize_weight(weight: Tensor, bits: Literal[4, 8], group_size: int = -1) -> QuantizedWeight:
    """Round a matrix to 4 or 8 bits with a scale for each group of a row.

    8 bits: the largest element of a group is 127. 4 bits: of the steps in `INT4_STEPS`, each with the
    scale of least squares, those with the least squared error; scales are rounded to float16 if all are
    within its normal range. A group with a NaN or an infinity becomes NaN.

    Args:
        weight: [out_width, in_width] float32, bfloat16 or float16.
        group_size: consecutive elements of a row; -1: the whole row. The last group may be shorter.

    Raises:
        ConfigError: bits or group_size cannot be.
    """
    if bits not in (4, 8) or not (group_size == -1 or group_size > 0):
        raise ConfigError(
            f"bits={bits}, group_size={group_size}: use 4 or 8 bits, and a group_size >= 1 or -1"
        )
    rows, width = weight.shape
    size = width if group_size == -1 else min(group_size, width)
    groups = -(-width // size)
    codes = torch.empty(rows, width, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, groups, device=weight.device)
    chunk_rows = max(1, CHUNK_ELEMENTS // width)
    for start in range(0, rows, chunk_rows):
        part = slice(start, start + chunk_rows)
        values = torch.nn.functional.pad(weight[part].float(), (0, groups * size - width))
        grouped = values.unflatten(1, (groups, size))
        whole, scales[part] = quantize(grouped, torch.int8) if bits == 8 else _int4(grouped)
        codes[part] = whole.flatten(1)[:, :width]
    if bits == 8:
        return QuantizedWeight(WeightFormat(8, size), codes, scales, None, weight.dtype)
    sizes = scales[scales != 0].abs()
    if bool(((sizes >= FLOAT16.tiny) & (sizes <= FLOAT16.max)).all()):
        scales = scales.half().float()
    return QuantizedWeight(
        WeightFormat(4, size, levels=INT4_LEVELS), codes, scales, None, weight.dtype
    )


def _int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [rows, groups, size] int8 and scales [rows, groups] of least squared error among the steps.

    With codes q, the scale of least squares is sum(x q) / sum(q q), and the error that it leaves is
    sum(x x) less sum(x q) ** 2 / sum(q q). Groups are divided by their largest element first, so that
    squares neither overflow nor vanish.
    """
    # Elements of a group lie one below the other, which makes sums over them fast.
    values = values.movedim(-1, 0).contiguous()
    largest = values.gather(0, values.abs().argmax(0, keepdim=True))
    unit = values / torch.where(largest == 0, 1, largest)
    best_gain = torch.full(values.shape[1:], -1.0, device=values.device)
    best_steps = torch.full_like(best_gain, PLAIN_STEPS)
    best_scale = torch.zeros_like(best_gain)
    for steps in INT4_STEPS:
        codes = _rounded(unit, steps)
        products, squares = (unit * codes).sum(0), (codes * codes).sum(0)
        scale = products / squares
        gain = products * scale
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        best_steps = torch.where(is_better, steps, best_steps)
        best_scale = torch.where(is_better, scale, best_scale)
    codes = _rounded(unit, best_steps)
    is_finite = values.isfinite().all(0)
    scales = torch.where(is_finite, best_scale * largest[0], torch.nan)
    return codes.nan_to_num_(0.0).to(torch.int8).movedim(0, -1), scales


def _rounded(unit: Tensor, steps: Tensor | float) -> Tensor:
    """The codes of groups whose largest element is 1, which becomes -8."""
    codes: Tensor = unit * -steps
    return codes.round_().clamp_(-8, 7)
