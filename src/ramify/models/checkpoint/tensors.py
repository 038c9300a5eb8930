"""A checkpoint's tensors: checked as a whole, read one by one when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.checkpoint.safetensors_files import read_ahead
from ramify.models.checkpoint.stored_tensor import StoredTensor, stored_tensors
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.wrappers import is_other_part, text_tensor_name

logger = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOAT_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor in a file, and the dtype that it is read to."""

    stored: StoredTensor
    dtype: torch.dtype


class CheckpointTensors(WeightSource):
    """Tensors of safetensors files by name, each read from its file when it is asked for, and not kept.

    The order of names is that of `ModelConfig.stored_shapes`.
    """

    def __init__(self, entries: dict[str, _Entry]) -> None:
        self._entries = entries
        read_ahead({entry.stored.file for entry in entries.values()})

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        return entry.stored.read().to(entry.dtype)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `WeightSource`."""
        return self._entries[name].stored.shape

    def num_bytes(self, name: str) -> int:
        """See `WeightSource`."""
        return self._entries[name].stored.num_bytes

    def kind(self, name: str) -> str:
        """See `WeightSource`."""
        return self._entries[name].stored.dtype

    @property
    def widened(self) -> Mapping[str, str]:
        """See `WeightSource`."""
        return {}

    def part(self, name: str, index: int) -> Tensor:
        """`self[name][index]`; reads no more of the file."""
        entry = self._entries[name]
        return entry.stored.read_part(index).to(entry.dtype)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that a tensor has once it is read."""
        return self._entries[name].dtype


def load_weights(path: Path, config: ModelConfig, *, dtype: torch.dtype) -> CheckpointTensors:
    """Find and check every tensor of `config.stored_shapes()`.

    Raises:
        CheckpointError: files are missing or truncated; tensors are missing, unexpected or have
            another shape.
        UnsupportedModelError: a tensor's dtype is neither float32, bfloat16 nor float16.
    """
    entries: dict[str, _Entry] = {}
    shapes = config.stored_shapes()
    # lm_head beside tied embeddings: older tools wrote both.
    duplicate_head: _Entry | None = None
    for stored_name, stored in stored_tensors(path).items():
        name = _full_name(stored_name, shapes, config)
        is_duplicate = name == HEAD and config.tie_word_embeddings
        if name not in shapes and not is_duplicate:
            if _is_ignorable(name, config):
                continue
            raise CheckpointError(
                f"{stored.file} holds the tensor {name}, which {config.architecture} has no "
                "use for with this config.json; is it the right config.json?"
            )
        if not is_duplicate:
            _check_shape(stored, name, shapes[name])
        is_packed = config.is_packed(name)
        _check_dtype(stored, name, is_packed=is_packed)
        target = torch.float32 if config.is_float32(name) else dtype
        entry = _Entry(stored, torch.uint8 if is_packed else target)
        if is_duplicate:
            duplicate_head = entry
        else:
            entries[name] = entry
    if duplicate_head is not None:
        entries.setdefault(EMBEDDING, duplicate_head)
    missing = [name for name in shapes if name not in entries]
    if missing:
        raise CheckpointError(
            f"{path} lacks {len(missing)} of {len(shapes)} tensors, the first is {missing[0]} "
            f"with shape {list(shapes[missing[0]])}; is config.json of the same model?"
        )
    return CheckpointTensors({name: entries[name] for name in shapes})


def with_stored_head(path: Path, config: ModelConfig) -> ModelConfig:
    """The configuration with the LM head that the files have, whatever it says.

    As transformers: a head beside the embedding that it should be tied to counts where they differ.
    Where transformers would draw a missing head at random, it is the embedding.

    Raises:
        CheckpointError: see `load_weights`.
    """
    shapes = config.stored_shapes()
    places = {
        _full_name(name, shapes, config): stored for name, stored in stored_tensors(path).items()
    }
    if not config.tie_word_embeddings:
        if HEAD in places or EMBEDDING not in places:
            return config
        logger.warning(
            "%s has no %s, though config.json says that it is not tied: %s is used, and answers are "
            "wrong if the head was lost",
            path,
            HEAD,
            EMBEDDING,
        )
        return replace(config, tie_word_embeddings=True)
    if not {HEAD, EMBEDDING} <= places.keys() or _are_equal(places[HEAD], places[EMBEDDING]):
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
    """Whether two stored tensors have the same values."""
    return left.shape == right.shape and torch.equal(left.read(), right.read())


def _full_name(name: str, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig) -> str:
    """The name of a tensor in a text model: base models, as for embeddings, leave out `model.`."""
    if config.wrapper is not None:
        name = text_tensor_name(name)
    full = f"model.{name}"
    return full if name not in shapes and full in shapes else name


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


def _is_ignorable(name: str, config: ModelConfig) -> bool:
    """Whether to skip a tensor: a buffer that older tools saved, a draft layer, an encoder of images."""
    if config.wrapper is not None and is_other_part(name):
        return True
    layer = name.removeprefix("model.layers.").split(".")[0]
    has_mtp = FAMILIES[config.architecture].has_mtp_layers
    if has_mtp and layer.isdecimal() and int(layer) >= config.num_layers:
        # Multi-token-prediction layers are numbered after the last decoder layer.
        return True
    return name.endswith((".rotary_emb.inv_freq", ".attn.masked_bias"))
