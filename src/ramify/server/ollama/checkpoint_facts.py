"""What the files of a checkpoint say of it: architecture, sizes, the type of its weights."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ramify.errors import ModelError
from ramify.models.configs.fields import read_optional_json
from ramify.models.gguf.container import is_gguf, read_container

MAX_HEADER_BYTES = 64 << 20  # of a safetensors file
# Keys of `model_info`, behind the architecture → fields of config.json.
DIMENSIONS = {
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}


UNKNOWN = "ramify"  # the architecture of a checkpoint that does not name it


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """Facts of a checkpoint; the defaults are those of one that is elsewhere.

    Args:
        dimensions: sizes by the end of their key in `model_info`.
        form: of its files: "safetensors" or "gguf".
        num_bytes: of the weights.
        num_parameters: 0 if they are not known.
        weight_type: of most elements: "BF16", "Q4_K"; empty if it is not known.
    """

    architecture: str = UNKNOWN
    dimensions: tuple[tuple[str, int], ...] = ()
    form: str = "safetensors"
    num_bytes: int = 0
    num_parameters: int = 0
    weight_type: str = ""


@lru_cache(4)
def read_facts(path: Path) -> CheckpointFacts:
    """Read them; what cannot be read is left at its default, as the model runs all the same."""
    try:
        return _gguf_facts(path) if path.is_file() and is_gguf(path) else _folder_facts(path)
    except (ModelError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return CheckpointFacts()


def _gguf_facts(path: Path) -> CheckpointFacts:
    container = read_container(path)
    metadata, tensors = container.metadata, container.tensors.values()
    arch = str(metadata.get("general.architecture", UNKNOWN))
    sizes = {name: metadata.get(f"{arch}.{name}") for name in DIMENSIONS}
    elements = Counter[str]()
    for tensor in tensors:
        elements[tensor.kind.name] += math.prod(tensor.shape)
    return CheckpointFacts(
        architecture=arch,
        dimensions=_whole_numbers(sizes),
        form="gguf",
        num_bytes=sum(file.stat().st_size for file in container.files),
        num_parameters=elements.total(),
        weight_type=max(elements, key=lambda name: elements[name], default=""),
    )


def _folder_facts(path: Path) -> CheckpointFacts:
    config = read_optional_json(path / "config.json")
    files, elements = sorted(path.glob("*.safetensors")), Counter[str]()
    for file in files:
        for entry in _header(file).values():
            if "shape" in entry:
                elements[str(entry["dtype"])] += math.prod(entry["shape"])
    return CheckpointFacts(
        architecture=str(config.get("model_type", UNKNOWN)),
        dimensions=_whole_numbers({key: config.get(field) for key, field in DIMENSIONS.items()}),
        num_bytes=sum(file.stat().st_size for file in files),
        num_parameters=elements.total(),
        weight_type=max(elements, key=lambda name: elements[name], default=""),
    )


def _header(file: Path) -> dict[str, Any]:
    """The entries of a safetensors file, by name.

    Raises:
        OSError, ValueError: it has none.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {length} bytes")
        entries: dict[str, Any] = json.loads(stream.read(length))
    return entries


def _whole_numbers(values: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    return tuple((name, value) for name, value in values.items() if type(value) is int)
