"""Sampling parameters of HTTP requests that omit them, from a checkpoint's `generation_config.json`.

As in vLLM, `do_sample` is ignored: a file with `do_sample: false` and a temperature samples with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ramify.errors import CheckpointError, ConfigError, InvalidParamsError
from ramify.models.configs.fields import read_json, read_optional_json, shown
from ramify.params import SamplingParams

GENERATION_CONFIG = "generation_config.json"
AUTO, NONE = "auto", "none"
LEAST_TOP_P = 1e-9  # what `top_p=0` means: the likeliest token


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of the sampling parameters that a request omits; without a file, those of the APIs.

    Args:
        file: the generation config that the values were read from; None: there is none.
        named: the parameters that the file sets.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    file: Path | None = None
    named: tuple[str, ...] = ()

    def filled(
        self,
        *,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams` for a request; None is a parameter that it omits.

        Clients may send `top_p=0` (greedy) and `top_k<=0` (off).
        """
        return {
            "temperature": self.temperature if temperature is None else temperature,
            "top_k": self.top_k if top_k is None else _plain_top_k(top_k),
            "top_p": self.top_p if top_p is None else max(top_p, LEAST_TOP_P),
            "min_p": self.min_p if min_p is None else min_p,
            "repetition_penalty": (
                self.repetition_penalty if repetition_penalty is None else repetition_penalty
            ),
        }

    def values(self) -> dict[str, float | None]:
        """All parameters by name."""
        return {name: getattr(self, name) for name in PARAMETERS}

    def summary(self) -> str:
        """The parameters that the file sets, and the file: `temperature 0.6, top_k 20 (PATH)`."""
        if self.file is None:
            return f"temperature {self.temperature:g} (without a {GENERATION_CONFIG})"
        values = ", ".join(f"{name} {getattr(self, name)}" for name in self.named)
        return f"{values or f'temperature {self.temperature:g}'} ({self.file})"


PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_sampling_defaults(choice: str, checkpoint: Path) -> SamplingDefaults:
    """Read the defaults that `--generation-config` chooses.

    Args:
        choice: "auto" reads the checkpoint's file if it has one, "none" reads none, anything else
            is a directory that has the file.

    Raises:
        CheckpointError: the file cannot be read, or has a value that is not possible.
        ConfigError: the directory does not have the file.
    """
    if choice == NONE:
        return SamplingDefaults()
    file = (checkpoint if choice == AUTO else Path(choice)) / GENERATION_CONFIG
    if choice == AUTO:
        fields = read_optional_json(file)
        if not fields:
            return SamplingDefaults()
    elif not file.is_file():
        raise ConfigError(
            f"--generation-config {choice}: there is no {file}; name a directory that has one, "
            f"or use {AUTO} or {NONE}"
        )
    else:
        fields = read_json(file)
    return sampling_defaults(fields, file)


def sampling_defaults(fields: Mapping[str, Any], file: Path) -> SamplingDefaults:
    """The defaults among the fields of a generation config.

    Args:
        file: that they are from.

    Raises:
        CheckpointError: a value is not possible.
    """
    values = {name: fields[name] for name in PARAMETERS if fields.get(name) is not None}
    plain = dict(values)
    if _is_plain_number(values.get("top_k")):
        plain["top_k"] = _plain_top_k(values["top_k"])
    if _is_plain_number(values.get("top_p")) and values["top_p"] == 0:
        plain["top_p"] = LEAST_TOP_P
    try:
        SamplingParams(**plain)
    except InvalidParamsError as error:
        raise CheckpointError(
            f"{file}: {error.name} is {shown(values[error.name])} but it must be {error.allowed}; "
            f"correct it, or start with --generation-config {NONE}"
        ) from None
    return SamplingDefaults(**plain, file=file, named=tuple(plain))


def _plain_top_k(top_k: int) -> int | None:
    """`top_k` of `SamplingParams`: None where a client or a file turns it off."""
    return top_k if top_k > 0 else None


def _is_plain_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
