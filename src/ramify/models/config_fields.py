"""Typed reads of a parsed `config.json`; error messages name the file and the field."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import CheckpointError

# Above any size of a real model; floats and int64 hold it, and products with another.
MAX_COUNT = 2**31 - 1


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
            state = "is missing" if value is None else f"is {value!r}"
            raise CheckpointError(f"{self.source}: {name} {state}; it must be an integer >= 1")
        if value > limit:
            digits = (
                str(value) if value.bit_length() <= 64 else f"above 2**{value.bit_length() - 1}"
            )
            raise CheckpointError(f"{self.source}: {name} is {digits}; it must be at most {limit}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive, finite number; null counts as absent. CheckpointError for anything else."""
        value = self.config.get(name)
        value = default if value is None else value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value <= sys.float_info.max:
            state = "is missing" if value is None else f"is {value!r}"
            raise CheckpointError(f"{self.source}: {name} {state}; it must be a number > 0")
        return float(value)

    def token(self, name: str, default: int | None) -> int | None:
        """A token id or None; null is a value here, `default` only replaces an absent field."""
        value = self.config.get(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise CheckpointError(f"{self.source}: {name} {value!r} is not a token id")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing, or no JSON object.
    """
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not an object")
    return content


def read_json_value(path: Path) -> Any:
    """The value in a JSON file of a checkpoint.

    Raises:
        CheckpointError: it is missing, or no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; a checkpoint directory holds config.json, safetensors weights "
            "and tokenizer.json"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again") from error
