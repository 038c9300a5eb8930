"""A byte for each weight, with scales: int8 and float8 of compressed-tensors, fp8, bitsandbytes int8."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from ramify.errors import UnsupportedModelError
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.packed_formats.affine import (
    Decoded,
    WidenedWeight,
    ceil_div,
    finite_scales,
    from_int8,
    from_zero_points,
    row_group,
    spread,
)
from ramify.models.packed_formats.tensor_checks import check_suffixes, checked

SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
E8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)
# By the number that `weight_format` holds.
BNB_LAYOUTS = {0: "row", 1: "col32", 2: "col_turing", 3: "col_ampere"}
FLOAT8 = "float8 values are no integers, so they are multiplied by their scales in float32"


def int_quantized(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """(q - z) * scale of compressed-tensors, q and z int8."""
    needed = ["weight", "weight_scale"]
    if not scheme.symmetric:
        needed.append("weight_zero_point")
    check_suffixes(name, tensors, needed, ("bias", "input_scale", "input_zero_point"))
    rows, width = shape
    codes = checked(name, tensors, "weight", [shape], (torch.int8,))
    group_size = row_group(scheme, width)
    groups = ceil_div(width, group_size)
    shapes = [(1,), (1, 1), ()] if scheme.group_size == 0 else [(rows, groups)]
    scales = checked(name, tensors, "weight_scale", shapes, SCALE_DTYPES)
    scales = scales.reshape(-1, groups).expand(rows, groups)
    if scheme.symmetric:
        return from_int8(name, codes, scales, group_size=group_size, dtype=dtype)
    points = checked(name, tensors, "weight_zero_point", shapes, (torch.int8,))
    zeros = points.reshape(-1, groups).expand(rows, groups).to(torch.int16) + 128
    stored = codes.view(torch.uint8) ^ 128
    return from_zero_points(name, stored, zeros, scales, bits=8, group_size=group_size, dtype=dtype)


def bnb_int8(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """q * (SCB / 127) of bitsandbytes: a scale for each row, divided in float32."""
    del scheme
    check_suffixes(name, tensors, ("weight", "SCB"), ("bias", "weight_format"))
    if "weight_format" in tensors:
        layout = checked(name, tensors, "weight_format", [(), (1,)], (torch.uint8,)).item()
        if layout != 0:
            raise UnsupportedModelError(
                f"{name}.weight_format: the layout {BNB_LAYOUTS.get(int(layout), layout)} is not read, only "
                "row; save the model again with a newer bitsandbytes, or use the original checkpoint"
            )
    codes = checked(name, tensors, "weight", [shape], (torch.int8,))
    scales = checked(name, tensors, "SCB", [(shape[0],)], (torch.float32,))[:, None] / 127
    return from_int8(name, codes, scales, group_size=shape[1], dtype=dtype)


def float8(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """weight * scale, widened: a scale for the matrix, each row, groups of a row, or blocks.

    The scales are `weight_scale` or `weight_scale_inv`, which multiplies too; powers of two may be stored
    as their exponents.
    """
    del dtype
    suffix = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    optional = (
        ("bias", "input_scale")
        if scheme.packing != "fp8"
        else ("bias", "input_scale", "activation_scale")
    )
    check_suffixes(name, tensors, ("weight", suffix), optional)
    rows, width = shape
    weight = checked(name, tensors, "weight", [shape], (torch.float8_e4m3fn,))
    if scheme.block is not None:
        high, wide = scheme.block
        grid = (ceil_div(rows, high), ceil_div(width, wide))
        scales = _float_scales(
            name, checked(name, tensors, suffix, [grid], (*SCALE_DTYPES, *E8M0_DTYPES))
        )
        factors = spread(spread(scales, high, rows, 0), wide, width)
    elif scheme.group_size > 0:
        groups = ceil_div(width, scheme.group_size)
        scales = finite_scales(name, checked(name, tensors, suffix, [(rows, groups)], SCALE_DTYPES))
        factors = spread(scales, scheme.group_size, width)
    else:
        per_matrix, per_row = [(1,), (), (1, 1)], [(rows, 1)]
        shapes = per_matrix if scheme.group_size == 0 else per_row
        if scheme.packing == "fp8":
            shapes = [*per_matrix, *per_row]
        factors = finite_scales(name, checked(name, tensors, suffix, shapes, SCALE_DTYPES))
        factors = factors.reshape(-1, 1)
    return WidenedWeight(_float32_of(weight).mul_(factors), FLOAT8)


def _float32_of(weight: Tensor) -> Tensor:
    """float8_e4m3fn in float32; two values of a table at a time, as `Tensor.float` takes twice as long."""
    if weight.numel() % 2:
        return weight.float()
    pairs = weight.flatten().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return _float8_pairs().index_select(0, pairs).view(torch.float32).view(weight.shape)


@cache
def _float8_pairs() -> Tensor:
    """[65536] float64, each of which is a pair of float32: the values of two bytes, the low one first."""
    values = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    pair = torch.arange(1 << 16)
    return torch.stack((values[pair & 255], values[pair >> 8]), 1).flatten().view(torch.float64)


def _float_scales(name: str, scales: Tensor) -> Tensor:
    """Scales in float32, of exponents too: 2 ** (e - 127), 255 is NaN."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return finite_scales(name, scales)
