"""Typed reads of a GGUF file's metadata; error messages name the file and the key. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.fields import shown
from ramify.models.gguf.container import Container

ARCHITECTURE = "general.architecture"
# Keys of an architecture that say nothing of the arithmetic of a text decoder.
DESCRIPTIVE = {
    "vocab_size",
    "tensor_data_layout",
    "pooling_type",
    "rope.scaling.finetuned",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
}
# Values that change nothing, of keys that nobody read; 0 and false change nothing in any.
NEUTRAL: dict[str, Any] = {
    "expert_weights_scale": 1.0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_gating_func": 1,
    "rope.scaling.yarn_ext_factor": 1.0,
}
OTHER_PARTS = ("vision.", "mm.", "audio.")


class Metadata:
    """The keys of one architecture; remembers which were read.

    Keys are given without the name of the architecture before them: `block_count` is
    `llama.block_count`.
    """

    def __init__(self, container: Container, architecture: str) -> None:
        self.container, self._architecture = container, architecture
        self._read: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether the file has a key."""
        return f"{self._architecture}.{key}" in self.container.metadata

    def get(self, key: str) -> Any:
        """A value as it is; None if there is none."""
        self._read.add(key)
        return self.container.metadata.get(f"{self._architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer >= 0; arrays with a value for each layer must have one value.

        Raises:
            CheckpointError: it is missing without a default, or no such integer.
            UnsupportedModelError: it differs from layer to layer.
        """
        value = self._uniform(key, self.get(key))
        value = default if value is None else value
        if type(value) is not int or value < 0:
            self._refuse(key, "an integer >= 0", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number.

        Numbers of 32 bits become those with the fewest digits that round to them, which is what
        configurations say: 1e-05 is stored as 9.99999974e-06.

        Raises:
            CheckpointError: it is missing without a default, or no finite number.
        """
        value = self.get(key)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            self._refuse(key, "a finite number", value)
        with np.errstate(over="ignore"):
            narrow = np.float32(value)
        return shortest(narrow) if float(narrow) == value else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is neither.
        """
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def text(self, key: str) -> str | None:
        """A text; None if there is none.

        Raises:
            CheckpointError: it is something else.
        """
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, "a text", value)
        return value

    def window_layers(self, key: str, num_layers: int, default_period: int) -> list[bool]:
        """Which layers have a sliding window, by a flag for each, or by their period.

        Of a period the last layer has full attention.

        Raises:
            CheckpointError: it is neither an integer >= 1 nor a list of at least `num_layers` flags.
        """
        value = self.get(key)
        if isinstance(value, np.ndarray):
            if len(value) < num_layers:
                self._refuse(key, f"{num_layers} flags", f"{len(value)}")
            return [bool(flag) for flag in value[:num_layers]]
        period = default_period if value is None else value
        if type(period) is not int or period < 1:
            self._refuse(key, "an integer >= 1, or a flag for each layer", value)
        return [(layer + 1) % period != 0 for layer in range(num_layers)]

    def check_all_read(self) -> None:
        """Refuse keys that nobody read: they may change the arithmetic.

        Raises:
            UnsupportedModelError: there is such a key, and its value is neither zero nor false.
        """
        prefix = f"{self._architecture}."
        for name, value in self.container.metadata.items():
            key = name.removeprefix(prefix)
            if key == name or key in self._read | DESCRIPTIVE or key.startswith(OTHER_PARTS):
                continue
            if isinstance(value, int | float | str) and value in (0, "none", NEUTRAL.get(key)):
                continue
            raise UnsupportedModelError(
                f"{self.container.path}: {name} is {shown(_plain(value))}, a setting that is not "
                f"supported for {self._architecture}; use the original checkpoint in safetensors"
            )

    def _uniform(self, key: str, value: Any) -> Any:
        if not isinstance(value, np.ndarray) or not len(value):
            return value
        if (value != value[0]).any():
            raise UnsupportedModelError(
                f"{self.container.path}: {self._architecture}.{key} differs from layer to layer, which "
                f"is not supported: {shown(_plain(value))}"
            )
        return value[0].item()

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        state = "nothing" if value is None else shown(_plain(value))
        raise CheckpointError(
            f"{self.container.path}: {self._architecture}.{key}: expected {expected}, found {state}; "
            "download it again"
        )


def shortest(value: np.float32) -> float:
    """The number with the fewest digits that rounds to one of 32 bits."""
    return float(str(value))


def _plain(value: Any) -> Any:
    """A value whose text is short."""
    return list(_first(value)) if isinstance(value, np.ndarray) else value


def _first(value: Iterable[Any]) -> Iterable[Any]:
    for number, item in enumerate(value):
        if number == 8:
            return
        yield item.item()
