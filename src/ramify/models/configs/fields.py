"""Typed reads of a parsed `config.json`; error messages name the file and the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.checkpoint_files import MAX_JSON_BYTES, read_checkpoint_file
from ramify.reasons import reason_of

# Above any size of a real model; floats and int64 hold it, and products with another.
MAX_COUNT = 2**31 - 1
# Far above real models; beyond them a damaged config.json would take all memory before the missing
# tensors are noticed. Parts: heads, or experts, of all layers.
MAX_LAYERS, MAX_PARTS, MAX_POSITIONS = 10_000, 1_000_000, 2**24
MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A parsed JSON file, or an object inside it, and the name it has in error messages."""

    config: Mapping[str, Any]
    source: str

    def count(self, name: str, default: int | None = None, *, limit: int = MAX_COUNT) -> int:
        """An integer in 1..limit; null counts as absent. CheckpointError for anything else."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            state = "is missing" if value is None else f"is {shown(value)}"
            raise CheckpointError(f"{self.source}: {name} {state}; it must be an integer >= 1")
        if value > limit:
            raise CheckpointError(
                f"{self.source}: {name} is {shown(value)}; it must be at most {limit}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number; null counts as absent. CheckpointError for anything else."""
        value = self.config.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value <= sys.float_info.max:
            state = "is missing" if value is None else f"is {shown(value)}"
            raise CheckpointError(f"{self.source}: {name} {state}; it must be a number > 0")
        return float(value)

    def factor(self, name: str) -> float | None:
        """As `number`, but None for null, for 0 and where it is absent."""
        value = self.config.get(name)
        is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
        return None if value is None or is_zero else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """True or false; null is false, as in transformers, and `default` replaces an absent field."""
        value = self.config.get(name, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(
                f"{self.source}: {name} is {shown(value)}; it must be true or false"
            )
        return bool(value)

    def items(self, name: str) -> list[Any] | None:
        """A list; None for null and where it is absent. CheckpointError for anything else."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, list):
            raise CheckpointError(f"{self.source}: {name} is {shown(value)}; it must be a list")
        return value

    def layer_kinds(self, name: str, num_layers: int, known: Collection[str]) -> list[Any] | None:
        """A list with one of `known` for each layer; None for null and where it is absent.

        Raises:
            UnsupportedModelError: it is anything else.
        """
        kinds = self.config.get(name)
        if kinds is not None and (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or set(map(str, kinds)) - set(known)
        ):
            raise UnsupportedModelError(
                f"{self.source}: {name} must name {num_layers} layers, each "
                f"{' or '.join(known)}; it is {shown(kinds)}"
            )
        return kinds


def is_token_id(value: object) -> TypeGuard[int]:
    """Whether a JSON value can be a token id of any vocabulary."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def shown(value: object) -> str:
    """A JSON value as error messages show it: short, whatever its size."""
    if isinstance(value, int) and value.bit_length() > 64:
        sign = "below -" if value < 0 else "above "
        return f"{sign}2**{value.bit_length() - 1}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing, or not a JSON object.
    """
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object")
    return content


def read_optional_json(path: Path) -> dict[str, Any]:
    """`read_json`; {} if there is no file."""
    try:
        path.stat()
    except FileNotFoundError:
        return {}
    except OSError:
        pass  # `read_json` says why
    return read_json(path)


def read_json_value(path: Path) -> Any:
    """The value in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing, or no JSON.
    """
    try:
        return json.loads(read_checkpoint_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint directory holds config.json, safetensors weights "
            "and tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {reason_of(error, path)}; download it again"
        ) from error
