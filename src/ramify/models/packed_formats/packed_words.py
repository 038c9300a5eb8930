"""GPTQ and AWQ: codes of 4 or 8 bits in int32 words, zero points packed likewise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.packed_formats.affine import (
    Decoded,
    WidenedWeight,
    ceil_div,
    finite_scales,
    from_zero_points,
    row_group,
    unpack,
)
from ramify.models.packed_formats.tensor_checks import check_suffixes, checked

# Where column c of eight lies in an AWQ word.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SCATTERED = (
    "act-order scatters its groups over the row (g_idx), so no run of columns shares a scale"
)


def gptq(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """scales[g, o] * (q - z), g = g_idx[i]: qweight is packed along the input, qzeros along the output.

    A zero point of the first format is one more than it is stored as, up to 2 ** bits.
    """
    check_suffixes(name, tensors, ("qweight", "qzeros", "scales"), ("g_idx", "bias"))
    rows, width = shape
    values_per_word, group_size = 32 // scheme.bits, row_group(scheme, width)
    groups = ceil_div(width, group_size)
    _check_divides(name, "in", width, values_per_word)
    _check_divides(name, "out", rows, values_per_word)
    word = (torch.int32,)
    qweight = checked(name, tensors, "qweight", [(width // values_per_word, rows)], word)
    qzeros = checked(name, tensors, "qzeros", [(groups, rows // values_per_word)], word)
    scales = checked(name, tensors, "scales", [(groups, rows)], SCALE_DTYPES).T
    stored = unpack(qweight.T, scheme.bits).flatten(1)
    zeros = unpack(qzeros, scheme.bits).flatten(1).T.to(torch.int16) + scheme.zero_offset
    return _grouped(name, tensors, "g_idx", stored, zeros, scales, scheme, group_size, dtype)


def awq(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """scales[g, o] * (q - z) of the gemm layout: both packed along the output, columns interleaved."""
    check_suffixes(name, tensors, ("qweight", "qzeros", "scales"), ("bias",))
    rows, width = shape
    group_size = row_group(scheme, width)
    groups = ceil_div(width, group_size)
    _check_divides(name, "out", rows, 8)
    word = (torch.int32,)
    qweight = checked(name, tensors, "qweight", [(width, rows // 8)], word)
    qzeros = checked(name, tensors, "qzeros", [(groups, rows // 8)], word)
    scales = checked(name, tensors, "scales", [(groups, rows)], SCALE_DTYPES).T
    stored, zeros = _awq_codes(qweight), _awq_codes(qzeros)
    return from_zero_points(
        name, stored, zeros.to(torch.int16), scales, bits=4, group_size=group_size, dtype=dtype
    )


def pack_quantized(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    dtype: torch.dtype,
) -> Decoded:
    """(q - z) * scale of compressed-tensors: codes packed along the input, zero points along the output."""
    optional = ("weight_g_idx", "bias", "input_scale", "input_zero_point")
    needed = ["weight_packed", "weight_scale", "weight_shape"]
    if not scheme.symmetric:
        needed.append("weight_zero_point")
    check_suffixes(name, tensors, needed, optional)
    rows, width = shape
    values_per_word = 32 // scheme.bits
    word = (torch.int32,)
    sizes = checked(name, tensors, "weight_shape", [(2,)], (torch.int64, torch.int32)).tolist()
    if sizes != [rows, width]:
        raise CheckpointError(f"{name}.weight_shape: expected {[rows, width]}, found {sizes}")
    packed = checked(
        name, tensors, "weight_packed", [(rows, ceil_div(width, values_per_word))], word
    )
    group_size = row_group(scheme, width)
    groups = ceil_div(width, group_size)
    shapes = [(1,), (1, 1), ()] if scheme.group_size == 0 else [(rows, groups)]
    scales = checked(name, tensors, "weight_scale", shapes, SCALE_DTYPES)
    scales = scales.reshape(-1, groups if scheme.group_size else 1).expand(rows, groups)
    zeros: Tensor | int = 2 ** (scheme.bits - 1)
    if not scheme.symmetric:
        packed_rows = ceil_div(rows, values_per_word)
        points = checked(name, tensors, "weight_zero_point", [(packed_rows, groups)], word)
        zeros = unpack(points.T, scheme.bits).flatten(1).T[:rows].to(torch.int16)
    stored = unpack(packed, scheme.bits).flatten(1)[:, :width]
    return _grouped(name, tensors, "weight_g_idx", stored, zeros, scales, scheme, group_size, dtype)


def _grouped(
    name: str,
    tensors: Mapping[str, Tensor],
    suffix: str,
    stored: Tensor,
    zeros: Tensor | int,
    scales: Tensor,
    scheme: Scheme,
    group_size: int,
    dtype: torch.dtype,
) -> Decoded:
    """The matrix whose columns belong to the groups of `g_idx`, if there is one; scattered ones are widened."""
    width, groups = stored.shape[1], scales.shape[1]
    if suffix in tensors and tensors[suffix].numel():
        index = checked(name, tensors, suffix, [(width,)], (torch.int32, torch.int64)).long()
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= groups:
            raise CheckpointError(
                f"{name}.{suffix}: expected groups 0 to {groups - 1}, found {low} to {high}"
            )
        starts = index[::group_size]
        if not torch.equal(starts.repeat_interleave(group_size)[:width], index):
            return WidenedWeight(_scattered(name, stored, zeros, scales, index), SCATTERED)
        scales = scales[:, starts]
        zeros = zeros[:, starts] if isinstance(zeros, Tensor) else zeros
    return from_zero_points(
        name, stored, zeros, scales, bits=scheme.bits, group_size=group_size, dtype=dtype
    )


def _scattered(
    name: str, stored: Tensor, zeros: Tensor | int, scales: Tensor, index: Tensor
) -> Tensor:
    points = zeros[:, index] if isinstance(zeros, Tensor) else zeros
    differences: Tensor = (stored.to(torch.int16) - points).float()
    factors = finite_scales(name, scales)[:, index]
    return torch.mul(differences, factors)


def _awq_codes(words: Tensor) -> Tensor:
    """[n, out / 8] int32 -> [out, n] uint8."""
    columns = words.T.contiguous()
    codes = torch.empty((len(columns), 8, len(words)), dtype=torch.uint8)
    for column, nibble in enumerate(AWQ_NIBBLES):
        codes[:, column] = (columns >> 4 * nibble).bitwise_and_(15)
    return codes.flatten(0, 1)


def _check_divides(name: str, side: str, width: int, values_per_word: int) -> None:
    if width % values_per_word:
        raise CheckpointError(
            f"{name}: its {side}put width of {width} is no multiple of {values_per_word}, the codes "
            "of a word"
        )
