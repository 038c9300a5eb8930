"""What a step of the engine takes: three constants, as `ramify calibrate` measures them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ramify.errors import ConfigError

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
                f"the cost file {path} cannot be read: {error}; it needs the numbers "
                f"{', '.join(CONSTANTS)}, in seconds and not negative, as `ramify calibrate MODEL "
                "--json FILE` writes them"
            ) from error


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step."""

    num_tokens: int
    num_reads: int
    seconds: float


def fit_cost(samples: list[StepSample], *, model: str = "") -> CostModel:
    """The constants that fit measured steps best by relative error; none is negative.

    Raises:
        ConfigError: fewer samples than constants.
    """
    if len(samples) < len(CONSTANTS):
        raise ConfigError(f"{len(samples)} steps were measured but 3 constants need 3 or more")
    seconds = np.array([sample.seconds for sample in samples])
    columns = np.array([[1.0, sample.num_tokens, sample.num_reads] for sample in samples])
    scaled = columns / seconds[:, None]  # so that short steps count as much as long ones
    constants = _non_negative(scaled, np.ones(len(samples)))
    errors = np.abs(columns @ constants - seconds) / seconds
    facts = {
        "num_steps": len(samples),
        "median_error": float(np.median(errors)),
        "p90_error": float(np.quantile(errors, 0.9)),
    }
    step_s, token_s, read_s = constants.tolist()
    return CostModel(step_s, token_s, read_s, model, facts)


def _non_negative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares over the columns whose factors are not negative: drop the most negative."""
    used = list(range(columns.shape[1]))
    factors = np.zeros(columns.shape[1])
    while used:
        solution = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if solution.min() >= 0:
            factors[used] = solution
            break
        used.pop(int(solution.argmin()))
    return factors
