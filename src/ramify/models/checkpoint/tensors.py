"""A checkpoint's tensors: checked as a whole, read one by one when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.checkpoint.packed_layers import FLOAT_DTYPES, PackedLayer, packed_layers
from ramify.models.checkpoint.safetensors_files import read_ahead
from ramify.models.checkpoint.stored_tensor import StoredTensor, stored_tensors
from ramify.models.checkpoint.tensor_names import EMBEDDING, HEAD, HEAD_LAYER, TensorNames
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.ops.quantized import Weight
from ramify.models.ops.weight_part import WeightPart, cut
from ramify.models.packed_formats.affine import WidenedWeight

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PlainTensor:
    """A tensor in a file, and the dtype that it is read to."""

    stored: StoredTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def kind(self) -> str:
        return self.stored.dtype

    def read(self) -> Tensor:
        return self.stored.read().to(self.dtype)


class CheckpointTensors(WeightSource):
    """Weights of safetensors files by name, each read from its files when it is asked for, and not kept.

    The order of names is that of `ModelConfig.stored_shapes`.
    """

    def __init__(self, entries: dict[str, _PlainTensor | PackedLayer], files: set[Path]) -> None:
        self._entries, self._widened = entries, dict[str, str]()
        read_ahead(files)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Weight:
        entry = self._entries[name]
        weight = entry.read()
        if isinstance(weight, WidenedWeight):
            self._widened[name] = weight.reason
            return weight.weight.to(entry.dtype)
        return weight

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._entries[name].shape

    def num_bytes(self, name: str) -> int:
        """See `WeightSource`."""
        return self._entries[name].num_bytes

    def kind(self, name: str) -> str:
        """See `WeightSource`."""
        return self._entries[name].kind

    @property
    def widened(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return self._widened

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """See `WeightSource`; a quantised weight is read whole."""
        entry = self._entries[name]
        if isinstance(entry, PackedLayer):
            return cut(self[name], part)
        return entry.stored.read_ranges(part.axis, part.ranges).to(entry.dtype)

    def part(self, name: str, index: int) -> Tensor:
        """`self[name][index]` of a tensor that is not quantised; reads no more of the file."""
        entry = self._entries[name]
        assert isinstance(entry, _PlainTensor)
        return entry.stored.read_part(index).to(entry.dtype)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a weight is computed in."""
        return self._entries[name].dtype


def load_weights(path: Path, config: ModelConfig, *, dtype: torch.dtype) -> CheckpointTensors:
    """Find and check every tensor of `config.stored_shapes()`.

    Raises:
        CheckpointError: files are missing or truncated; tensors are missing, unexpected or have
            another shape.
        UnsupportedModelError: a tensor's dtype is neither float32, bfloat16 nor float16.
    """
    names = TensorNames(config)
    shapes = names.shapes
    stored = {names.full_name(name): tensor for name, tensor in stored_tensors(path).items()}
    layers = packed_layers(stored, names, config, dtype=dtype)
    entries: dict[str, _PlainTensor | PackedLayer] = {**layers}
    packed = {id(part) for layer in layers.values() for part in layer.parts.values()}
    for name, tensor in stored.items():
        if id(tensor) in packed or (name not in shapes and names.is_ignorable(name)):
            continue
        # lm_head beside tied embeddings: older tools wrote both.
        is_duplicate = name == HEAD and config.tie_word_embeddings
        if name not in shapes and not is_duplicate:
            raise CheckpointError(
                f"{tensor.file} holds the tensor {name}, which {config.architecture} has no "
                "use for with this config.json; is it the right config.json?"
            )
        is_packed = config.is_packed(name)
        _check_dtype(tensor, name, is_packed=is_packed)
        if not is_duplicate:
            _check_shape(tensor, name, shapes[name])
        target = torch.float32 if config.is_float32(name) else dtype
        entries[name] = _PlainTensor(tensor, torch.uint8 if is_packed else target)
    if HEAD in entries and HEAD not in shapes:
        entries.setdefault(EMBEDDING, entries[HEAD])
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shapes)} tensors, the first is {missing[0]} "
            f"with shape {list(shapes[missing[0]])}; is config.json of the same model?"
        )
    files = {tensor.file for tensor in stored.values()}
    return CheckpointTensors({name: entries[name] for name in shapes}, files)


def with_stored_head(path: Path, config: ModelConfig) -> ModelConfig:
    """The configuration with the LM head that the files have, whatever it says.

    As transformers: a head beside the embedding that it should be tied to counts where they differ.
    Where transformers would draw a missing head at random, it is the embedding.

    Raises:
        CheckpointError: see `load_weights`.
    """
    names = TensorNames(config)
    places = {names.full_name(name): stored for name, stored in stored_tensors(path).items()}
    owners = {names.layer_of(name) for name in places}
    has_head = any(owner is not None and owner[0] == HEAD_LAYER for owner in owners)
    if not config.tie_word_embeddings:
        if has_head or EMBEDDING not in places:
            return config
        logger.warning(
            "%s has no %s, though config.json says that it is not tied: %s is used, and answers are "
            "wrong if the head was lost",
            path,
            HEAD,
            EMBEDDING,
        )
        return replace(config, tie_word_embeddings=True)
    if not has_head or EMBEDDING not in places:
        return config
    if HEAD in places and _are_equal(places[HEAD], places[EMBEDDING]):
        return config
    logger.warning(
        "%s has a %s that is not %s, though config.json says that they are one "
        "(tie_word_embeddings): both are used as they are stored",
        path,
        HEAD,
        EMBEDDING,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(left: StoredTensor, right: StoredTensor) -> bool:
    """Whether two stored tensors have the same values, in full precision."""
    are_full = {left.dtype, right.dtype} <= {*FLOAT_DTYPES}
    return are_full and left.shape == right.shape and torch.equal(left.read(), right.read())


def checkpoint_shapes(path: Path, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a model by name, widened where the checkpoint is quantised.

    Raises:
        CheckpointError: see `load_weights`.
    """
    if config.is_native:
        return config.tensor_shapes()
    return {name: stored.shape for name, stored in stored_tensors(path).items()}


def _check_shape(stored: StoredTensor, name: str, expected: tuple[int, ...]) -> None:
    if expected != stored.shape:
        raise CheckpointError(
            f"{stored.file}: tensor {name} has shape {list(stored.shape)} but config.json asks for "
            f"{list(expected)}; is config.json of the same model?"
        )


def _check_dtype(stored: StoredTensor, name: str, *, is_packed: bool) -> None:
    if is_packed:
        if stored.dtype != "U8":
            raise CheckpointError(
                f"{stored.file}: tensor {name} is {stored.dtype}, not U8, but config.json says that it is "
                "quantised; is config.json of the same model?"
            )
    elif stored.dtype not in FLOAT_DTYPES:
        raise UnsupportedModelError(
            f"{stored.file}: tensor {name} is {stored.dtype}; only float32, bfloat16 and float16 weights "
            "are supported, so use the original checkpoint"
        )
