"""The matrix of one linear layer from its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.packed_formats import fp4, packed_words, scaled_codes
from ramify.models.packed_formats.affine import Decoded
from ramify.models.packed_formats.tensor_checks import check_suffixes

_Decoder = Callable[[str, Mapping[str, Tensor], tuple[int, int], Scheme, torch.dtype], Decoded]
DECODERS: dict[str, _Decoder] = {
    "gptq": packed_words.gptq,
    "awq": packed_words.awq,
    "pack-quantized": packed_words.pack_quantized,
    "int-quantized": scaled_codes.int_quantized,
    "float-quantized": scaled_codes.float8,
    "fp8": scaled_codes.float8,
    "bnb-4bit": fp4.bnb_4bit,
    "bnb-8bit": scaled_codes.bnb_int8,
}
FULL_PRECISION = (torch.float16, torch.bfloat16, torch.float32)


def decode_linear(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme | None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Decoded | Tensor:
    """The matrix of a linear layer: quantised, widened with the reason, or as it is.

    A layer in full precision is returned unchanged, whatever the scheme says of it: its tensors are
    complete.

    Args:
        name: of the layer, for messages.
        tensors: suffix -> tensor, all that the checkpoint has of this layer.
        shape: (out_width, in_width) that the model expects.
        scheme: of the layer; None: it is not quantised.
        dtype: that a quantised weight is computed in.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has another shape or dtype.
    """
    weight = tensors.get("weight")
    if scheme is None or (
        weight is not None
        and weight.dtype in FULL_PRECISION
        and not set(tensors) - {"weight", "bias"}
    ):
        return _full_precision(name, tensors, shape)
    return DECODERS[scheme.packing](name, tensors, shape, scheme, dtype)


def _full_precision(name: str, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    check_suffixes(name, tensors, ("weight",), ("bias",))
    weight = tensors["weight"]
    if weight.dtype not in FULL_PRECISION or tuple(weight.shape) != shape:
        raise CheckpointError(
            f"{name}.weight: expected {list(shape)} in float16, bfloat16 or float32, as the layer is "
            f"not quantised; found {list(weight.shape)} {str(weight.dtype).removeprefix('torch.')}"
        )
    return weight
