"""Matrices in full precision rounded at load: int8 by the largest element, int4 by a search for the scale."""

from __future__ import annotations

import importlib.util
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import NORMAL_LEVELS
from ramify.models.ops.blocks_of_rows import ONE_THREAD_ELEMENTS, for_blocks
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat

INT4_GROUP = 32
# Which level a group's largest element is put at: the first ones at the low end, the others at the high
# end, where beyond -127 or 113 it is clipped.
INT4_STEPS = (-112, -120, -128, -136, -144, 100, 107, 114, 121, 128)
INT8_LARGEST = 127
# Elements that are rounded together: by numpy, in torch, by the kernel, which has threads of its own.
INT8_CHUNK, TORCH_CHUNK, KERNEL_CHUNK = 1 << 18, ONE_THREAD_ELEMENTS, 1 << 20
FLOAT16 = torch.finfo(torch.float16)
# The least scale that becomes a float16; less loses more than a sixteenth.
SMALLEST_FLOAT16 = 2.0**-20
# In groups of int4: units of a largest element, and the least largest element that is not zero.
UNITS, SMALLEST_INT4 = 2.0**12, 2.0**-120
# A number takes the last level whose border is below it.
BORDERS = tuple((low + high) / 2 for low, high in pairwise(NORMAL_LEVELS))


def quantize_weight(weight: Tensor, bits: Literal[4, 8], group_size: int) -> QuantizedWeight:
    """Round a matrix to 4 or 8 bits with a scale for each group of a row.

    8 bits: the largest element of a group is 127. 4 bits: `NORMAL_LEVELS`; of the steps in `INT4_STEPS`,
    each with the scale of least squares, the one with the least squared error. Scales are float16, but where that
    would lose much or overflow. A group depends on its own elements alone, and its bits neither on
    threads nor on the instruction set. The scale of a group with a NaN or an infinity is not finite.

    Args:
        weight: [out_width, in_width] float32, bfloat16 or float16, on CPU.
        group_size: consecutive elements of a row; -1: the whole row; `INT4_GROUP` for 4 bits. The last
            group may be shorter.

    Raises:
        ConfigError: bits or group_size cannot be.
    """
    is_possible = group_size == INT4_GROUP if bits == 4 else group_size == -1 or group_size > 0
    if bits not in (4, 8) or not is_possible:
        raise ConfigError(
            f"bits={bits}, group_size={group_size}: use 4 bits in groups of {INT4_GROUP}, or 8 bits "
            "with a group_size >= 1 or -1"
        )
    rows, width = weight.shape
    size = group_size if bits == 4 else width if group_size == -1 else min(group_size, width)
    codes = np.empty((rows, width), np.int8)
    scales = np.empty((rows, -(-width // size) if width else 0), np.float32)
    round_groups, chunk = _int8, INT8_CHUNK
    if bits == 4:
        round_groups, chunk = (
            (_int4_by_kernel, KERNEL_CHUNK) if _has_kernel() else (_int4_by_torch, TORCH_CHUNK)
        )
    padding = scales.shape[1] * size - width

    def round_rows(start: int, end: int) -> None:
        values = _as_float32(weight[start:end])
        if padding:
            values = np.pad(values, ((0, 0), (0, padding)))
        whole, scale = round_groups(values.reshape(-1, size))
        scales[start:end] = scale.reshape(end - start, -1)
        codes[start:end] = whole.reshape(end - start, -1)[:, :width]

    chunk_rows = max(1, chunk // max(width, 1))
    if round_groups is _int4_by_kernel:
        for start in range(0, rows, chunk_rows):
            round_rows(start, min(rows, start + chunk_rows))
    else:
        for_blocks(round_rows, rows, chunk_rows)
    levels = NORMAL_LEVELS if bits == 4 else ()
    weight_format = WeightFormat(bits, size, levels=levels)
    return QuantizedWeight(
        weight_format, torch.from_numpy(codes), torch.from_numpy(scales), None, weight.dtype
    )


def _as_float32(weight: Tensor) -> NDArray[np.float32]:
    if weight.dtype != torch.bfloat16:
        return weight.numpy().astype(np.float32)
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


# Infinities and NaN have scales that are not finite; a group of zeros has the scale 0.
@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _int8(values: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """[groups, size] float32 -> codes int8 and scales [groups]; scales are rounded up."""
    scale = _largest(np.abs(values)) / np.float32(INT8_LARGEST)
    near = scale.astype(np.float16)
    # The next float16: positive ones are ordered as their bits are.
    bits = near.view(np.int16) + (near.astype(np.float32) < scale)
    fits = (scale >= SMALLEST_FLOAT16) & (scale <= FLOAT16.max)
    scale = np.where(fits, bits.view(np.float16).astype(np.float32), scale)
    codes = values / scale[:, None]
    np.rint(codes, out=codes)
    if not np.all((scale > 0) & np.isfinite(scale)):
        np.nan_to_num(codes, copy=False, nan=0.0)
    # A scale below the normal numbers is rounded down now and then.
    np.clip(codes, -INT8_LARGEST, INT8_LARGEST, out=codes)
    return codes.astype(np.int8), scale


def _largest(sizes: NDArray[np.float32]) -> NDArray[np.float32]:
    """The largest number of each row [rows, width]; halves first, which is faster for short rows."""
    while sizes.shape[1] > 8 and sizes.shape[1] % 2 == 0:
        half = sizes.shape[1] // 2
        sizes = np.maximum(sizes[:, :half], sizes[:, half:])
    largest: NDArray[np.float32] = np.maximum.reduce(sizes, axis=1)
    return largest


@cache
def _has_kernel() -> bool:
    return importlib.util.find_spec("numba") is not None


def _int4_by_kernel(
    values: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """The same as `int4_by_torch`, bit for bit."""
    from ramify.kernels.cpu import round_weights as kernel
    from ramify.kernels.cpu.simd import LANES
    from ramify.kernels.cpu.threads import set_num_threads

    num_workers = torch.get_num_threads()
    set_num_threads(num_workers)
    codes = np.empty(values.shape, np.int8)
    scales = np.empty(len(values), np.float32)
    scratch = np.empty((num_workers, kernel.SCRATCH_ROWS, LANES), np.float32)
    steps = np.array(INT4_STEPS, np.float32) / np.float32(UNITS)
    kernel.round_groups(values, codes, scales, steps, num_workers, scratch)
    return codes, scales


def _int4_by_torch(
    values: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    codes, scales = int4_by_torch(torch.from_numpy(values))
    return codes.numpy(), scales.numpy()


def int4_by_torch(values: Tensor) -> tuple[Tensor, Tensor]:
    """[groups, INT4_GROUP] float32 -> codes int8 and scales [groups] of least squared error.

    With u = x / largest, in units of 2^-12, and codes q, the scale of least squares is
    sum(u q) / sum(q q), and it takes sum(u q) ** 2 / sum(q q) off the squared error. The sums are
    integers up to 2^24, so exact in any order.
    """
    # Elements of a group lie one below the other, which makes sums over them fast.
    values = values.T.contiguous()
    high, low = values.amax(0).clamp(min=0), values.amin(0).clamp(max=0)
    # The sum makes zero of -0.
    largest = torch.where(high >= -low, high, low) + 0.0
    largest = torch.where(values.isfinite().all(0), largest, torch.nan)
    is_zero = largest.abs() < SMALLEST_INT4
    units = torch.where(is_zero, 0, UNITS)
    unit = (values / torch.where(is_zero, 1, largest) * units).round_()
    best_gain = torch.full_like(largest, -1.0)
    best_scale = torch.zeros_like(largest)
    for steps in INT4_STEPS:
        codes = _rounded(unit, steps / UNITS)
        products, squares = (unit * codes).sum(0), (codes * codes).sum(0)
        scale = products / squares
        gain = products * scale
        is_better = gain > best_gain
        best_gain = torch.where(is_better, gain, best_gain)
        best_scale = torch.where(is_better, scale, best_scale)
    scales = _as_float16(best_scale * (largest / UNITS))
    step = largest / scales / UNITS
    codes = _rounded(unit, torch.where(step.abs() < 1, step, 0))
    return codes.to(torch.int8).T.contiguous(), scales


def _rounded(unit: Tensor, step: Tensor | float) -> Tensor:
    """The level of each number; the first of what is not a number."""
    number = unit * step
    codes = torch.full_like(number, NORMAL_LEVELS[0])
    for border, level in zip(BORDERS, NORMAL_LEVELS[1:], strict=True):
        codes[number > border] = level
    return codes


def _as_float16(scales: Tensor) -> Tensor:
    size = scales.abs()
    fits = (size >= SMALLEST_FLOAT16) & (size <= FLOAT16.max)
    return torch.where(fits, scales.half().float(), scales)
