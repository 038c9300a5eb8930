"""Weights of 16 levels: bitsandbytes nf4 and fp4, widened; MXFP4, whose doubled levels are integers."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.fields import shown
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat
from ramify.models.packed_formats.affine import (
    Decoded,
    WidenedWeight,
    ceil_div,
    finite_scales,
    spread,
)
from ramify.models.packed_formats.tensor_checks import check_suffixes, checked

# E2M1: sign, two bits of exponent, one of mantissa.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BIAS = 127  # of the exponent that a block's scale byte is
MXFP4_LEVELS = tuple(int(sign * 2 * value) for sign in (1, -1) for value in FP4_VALUES)
MXFP4_GROUP = 32
QUANT_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
NF4 = "the 16 values of nf4 and fp4 of bitsandbytes are no multiples of one step"
STATE_BYTES = 1 << 16
NESTED_LEVELS = 256


def bnb_4bit(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """map[q] * absmax[block], widened: blocks run over the flattened matrix, element 2i in the high nibble.

    Nested scales are absmax = nested_map[a] * nested_absmax[a div nested block] + nested offset.
    """
    del dtype
    state_suffix = next((suffix for suffix in QUANT_STATES if suffix in tensors), QUANT_STATES[0])
    needed = ["weight", "weight.absmax", "weight.quant_map", state_suffix]
    if scheme.nested:
        needed += ["weight.nested_absmax", "weight.nested_quant_map"]
    check_suffixes(name, tensors, needed, ("bias",))
    state = _quant_state(name, state_suffix, tensors[state_suffix])
    count, block = shape[0] * shape[1], _positive(name, state_suffix, state, "blocksize")
    if state.get("shape") != list(shape):
        raise CheckpointError(
            f"{name}.{state_suffix}: expected shape {list(shape)}, found {shown(state.get('shape'))}"
        )
    half = ceil_div(count, 2)
    packed = checked(name, tensors, "weight", [(half, 1), (1, half)], (torch.uint8,)).flatten()
    levels = checked(name, tensors, "weight.quant_map", [(16,)], (torch.float32,))
    blocks = ceil_div(count, block)
    if scheme.nested:
        scales = _nested_scales(name, tensors, state_suffix, state, blocks)
    else:
        scales = checked(name, tensors, "weight.absmax", [(blocks,)], (torch.float32,))
    scales = finite_scales(name, scales)
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten()[:count]
    wide = levels[codes.int()].mul_(spread(scales, block, count))
    return WidenedWeight(wide.view(shape), NF4)


def mxfp4(
    name: str, blocks: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> QuantizedWeight:
    """E2M1 values times 2 ** (scale - 127), as twice the values and half the scales.

    Args:
        name: of the matrix, for messages.
        blocks: [rows, groups, 16] uint8, the low nibble first.
        scales: [rows, groups] uint8.
        dtype: that the result is computed in.

    Raises:
        CheckpointError: shapes or dtypes disagree, or a scale is NaN (255).
    """
    rows, groups = shape[0], ceil_div(shape[1], MXFP4_GROUP)
    byte, parts = (torch.uint8,), {"blocks": blocks, "scales": scales}
    checked(name, parts, "blocks", [(rows, groups, MXFP4_GROUP // 2)], byte)
    checked(name, parts, "scales", [(rows, groups)], byte)
    if bool((scales == 255).any()):
        raise CheckpointError(
            f"{name}.scales: expected exponents 0 to 254, found 255, which is NaN"
        )
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)[:, : shape[1]]
    codes = torch.tensor(MXFP4_LEVELS, dtype=torch.int8)[nibbles.int()]
    powers = torch.pow(2.0, torch.arange(256, dtype=torch.float64) - MXFP4_BIAS - 1).float()
    halves = powers[scales.int()]
    kind = WeightFormat(4, MXFP4_GROUP, levels=MXFP4_LEVELS)
    return QuantizedWeight(kind, codes, halves, None, dtype)


def _nested_scales(
    name: str, tensors: Mapping[str, Tensor], source: str, state: Mapping[str, object], blocks: int
) -> Tensor:
    size = _positive(name, source, state, "nested_blocksize")
    offset = state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise CheckpointError(
            f"{name}.{source}: expected a number as nested_offset, found {shown(offset)}"
        )
    codes = checked(name, tensors, "weight.absmax", [(blocks,)], (torch.uint8,))
    levels = checked(name, tensors, "weight.nested_quant_map", [(NESTED_LEVELS,)], (torch.float32,))
    outer = ceil_div(blocks, size)
    scales = checked(name, tensors, "weight.nested_absmax", [(outer,)], (torch.float32,))
    return levels[codes.int()].mul_(spread(scales, size, blocks)).add_(offset)


def _quant_state(name: str, suffix: str, data: Tensor) -> dict[str, object]:
    try:
        if data.dtype != torch.uint8 or data.numel() > STATE_BYTES:
            raise ValueError
        state = json.loads(bytes(data.flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{name}.{suffix}: expected a JSON object in at most {STATE_BYTES} bytes (uint8), found "
            f"{data.numel()} x {str(data.dtype).removeprefix('torch.')}"
        )
    return state


def _positive(name: str, suffix: str, state: Mapping[str, object], field: str) -> int:
    value = state.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise CheckpointError(
            f"{name}.{suffix}: expected an integer > 0 as {field}, found {shown(value)}"
        )
    return value
