"""Fits the constants of a step to measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.errors import ConfigError
from ramify.step_cost import CONSTANTS, CostModel


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
