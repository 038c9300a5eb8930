"""The two values that cross the line: a complete plan goes down, a result comes up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.engine.logits.logits_processors import LogitsTransform
from ramify.outputs import TokenLogprob
from ramify.params import SamplingParams


class SampleSpec(NamedTuple):
    """Choose the next tokens of one request: one, and one more for each draft that is right.

    A tuple, as `SampledTokens`: each step makes one per request, and a frozen dataclass takes
    five times as long to make.
    """

    request_id: int
    row: int  # of the step's query rows, whose logits give the first token; drafts are in the next
    position: int  # of the first token that is drawn; with the seed it keys the generator
    params: SamplingParams
    seed: int
    num_logprobs: int | None
    draft: tuple[int, ...] = ()  # guesses for that token and those after it
    logits: LogitsTransform | None = None  # None leaves the scores as they are


@dataclass(frozen=True, slots=True)
class PromptLogprobSpec:
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
    samples: tuple[SampleSpec, ...]
    prompt_logprobs: tuple[PromptLogprobSpec, ...]
    request_ids: tuple[int, ...]  # in batch order
    all_rows: bool = True  # hidden rows are wanted that nothing is drawn from


class SampledTokens(NamedTuple):
    """The tokens chosen for one request: the drafts that were right, and the one after them."""

    token_ids: tuple[int, ...]  # at least 1, at most 1 more than there were drafts
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if they were asked for


@dataclass(frozen=True, slots=True)
class StepResult:
    """Answers to a plan's draws and scores, by request id; whoever failed has neither."""

    sampled: dict[int, SampledTokens]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    failed: dict[int, Exception] = field(default_factory=dict)  # their K/V must not be used


class Executor(Protocol):
    """Carries out plans. `ramify.testing.FakeExecutor` is one without a model."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the forward pass and sample; afterwards the K/V of the step is in its pages.

        Raises:
            StepMemoryError: memory did not suffice; fewer tokens may fit.
        """
        ...

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Make the content of pages unreadable after a failed step."""
        ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all K/V of the first page of each pair to the second."""
        ...
