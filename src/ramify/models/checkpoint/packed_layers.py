"""Quantised linear layers of safetensors files: the tensors of each, and their matrix when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ramify.errors import CheckpointError
from ramify.models.checkpoint.stored_tensor import StoredTensor
from ramify.models.checkpoint.tensor_names import TensorNames
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.packed_formats.affine import Decoded
from ramify.models.packed_formats.decode import decode_linear

FLOAT_DTYPES = ("F32", "BF16", "F16")
# For all names of a model with the regular expressions of its configuration, which take milliseconds.
MAX_PATTERN_S = 60.0


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The tensors of a quantised linear layer, by what follows its name, and how they are read."""

    name: str
    parts: Mapping[str, StoredTensor]
    scheme: Scheme
    shape: tuple[int, int]
    dtype: torch.dtype  # that the matrix is computed in

    @property
    def num_bytes(self) -> int:
        """In the files."""
        return sum(part.num_bytes for part in self.parts.values())

    @property
    def kind(self) -> str:
        """The scheme, in words."""
        return str(self.scheme)

    def read(self) -> Decoded:
        """The matrix.

        Raises:
            CheckpointError: a tensor is missing, is one too many, or has another shape or dtype; or the
                layer has a bias, which the model has none of, that is not zero.
        """
        tensors = {suffix: part.read() for suffix, part in self.parts.items()}
        if "bias" in tensors and bool(tensors["bias"].any()):
            raise CheckpointError(
                f"{self.parts['bias'].file} holds the tensor {self.name}.bias, which the model has no use for "
                "with this config.json, and which is not zero; is it the right config.json?"
            )
        return decode_linear(self.name, tensors, self.shape, self.scheme, dtype=self.dtype)


def packed_layers(
    stored: Mapping[str, StoredTensor],
    names: TensorNames,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
) -> dict[str, PackedLayer]:
    """The quantised layers among a checkpoint's tensors, by the name of their matrix.

    A layer whose scheme is to be quantised but whose file has it in full precision is none of them.

    Args:
        stored: by the names of `TensorNames.full_name`.
        dtype: that matrices are computed in.

    Raises:
        CheckpointError: the regular expressions of the configuration take too long.
    """
    quantization = config.quantization
    if quantization is None or quantization.method == "mxfp4":
        return {}
    groups: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        owner = names.layer_of(name)
        is_part = name not in names.shapes or name.endswith(".weight")
        if owner is not None and is_part and not names.is_ignorable(name):
            groups.setdefault(owner[0], {})[owner[1]] = tensor
    layers: dict[str, PackedLayer] = {}
    end = time.monotonic() + MAX_PATTERN_S
    for layer, parts in groups.items():
        weight = parts.get("weight")
        is_plain = weight is not None and weight.dtype in FLOAT_DTYPES
        matrix = f"{layer}.weight"
        # A bias that the model has no use for is refused as that of any other layer.
        if (is_plain and parts.keys() <= {"weight", "bias"}) or matrix not in names.shapes:
            continue
        suffix, tensor = next(iter(parts.items()))
        scheme = quantization.scheme(tensor.name.removesuffix(f".{suffix}"))
        if time.monotonic() > end:
            raise CheckpointError(
                f"the regular expressions of quantization_config took more than {MAX_PATTERN_S:.0f} s; name "
                "the modules instead"
            )
        if scheme is not None:
            rows, width = names.shapes[matrix]
            own_dtype = torch.float32 if config.is_float32(matrix) else dtype
            layers[matrix] = PackedLayer(layer, parts, scheme, (rows, width), own_dtype)
    return layers
