"""The two values that cross the line: a complete plan goes down, a result comes up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.params import TokenLogprob


@dataclass(frozen=True, slots=True)
class Draw:
    """Choose the next token of one request from the logits of one query row."""

    request_id: int
    row: int  # of the step's query rows
    position: int  # of the token that is drawn; with the seed it keys the generator
    seed: int
    temperature: float
    top_k: int | None
    top_p: float
    num_logprobs: int | None


@dataclass(frozen=True, slots=True)
class Score:
    """Log probabilities of known prompt tokens: row `first_row + i` predicts `targets[i]`."""

    request_id: int
    first_row: int
    targets: tuple[int, ...]
    num_logprobs: int


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """All that a forward pass and its sampling need."""

    batch: AttentionBatch
    token_ids: NDArray[np.int64]  # [T]
    draws: tuple[Draw, ...]
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The token chosen for one request."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answers to a plan's draws and scores, by request id."""

    drawn: dict[int, Drawn]
    scored: dict[int, tuple[TokenLogprob, ...]]


class Executor(Protocol):
    """Carries out plans. `ramify.testing.FakeExecutor` is one without a model."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the forward pass and sample; afterwards the K/V of the step is in its pages."""
        ...

    def erase_pages(self, pages: Sequence[int]) -> None:
        """Make the content of pages unreadable after a failed step."""
        ...
