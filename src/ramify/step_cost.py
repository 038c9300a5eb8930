"""`CostModel`: what a step of the engine takes, by three constants that `ramify calibrate` measures."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ramify.errors import ConfigError
from ramify.reasons import reason_of

SCHEMA = 1
CONSTANTS = ("step_s", "token_s", "read_s")
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


@dataclass(frozen=True, slots=True)
class CostModel:
    """`seconds = step_s + token_s * tokens + read_s * reads`.

    `tokens` are query rows of a step; `reads` are, summed over them, the tokens that each attends to.
    A decode step is almost `step_s` (all weights are read once) and the reads of its contexts.
    """

    step_s: Seconds
    token_s: Seconds
    read_s: Seconds
    model: str = ""
    facts: dict[str, Any] = field(default_factory=dict)  # how it was measured

    def step(self, num_tokens: int, num_reads: float) -> float:
        """Seconds of a step."""
        return self.step_s + self.token_s * num_tokens + self.read_s * num_reads

    def to_json(self) -> dict[str, Any]:
        """The document of `ramify calibrate`."""
        constants = {name: getattr(self, name) for name in CONSTANTS}
        return {"schema": SCHEMA, "model": self.model, **constants, "facts": self.facts}

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read a file that `ramify calibrate` wrote.

        Raises:
            ConfigError: it cannot be read, or has no constants.
        """
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the cost file {path} cannot be read: {reason_of(error, path)}; it needs the numbers "
                f"{', '.join(CONSTANTS)}, in seconds and not negative, as `ramify calibrate MODEL "
                "--json FILE` writes them"
            ) from error
