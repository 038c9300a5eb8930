"""The matrix of one linear layer from its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.packed_formats import fp4, packed_words, scaled_codes
from ramify.models.packed_formats.affine import Decoded

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


def decode_linear(
    name: str,
    tensors: Mapping[str, Tensor],
    shape: tuple[int, int],
    scheme: Scheme,
    *,
    dtype: torch.dtype = torch.float32,
) -> Decoded:
    """The matrix of a quantised linear layer: its codes, or widened with the reason.

    Args:
        name: of the layer, for messages.
        tensors: suffix -> tensor, all that the checkpoint has of this layer.
        shape: (out_width, in_width) that the model expects.
        dtype: that a quantised weight is computed in.

    Raises:
        CheckpointError: a tensor is missing, is one too many, or has another shape or dtype.
    """
    return DECODERS[scheme.packing](name, tensors, shape, scheme, dtype)
