"""The interface of core and executor: `StepPlan` down, `StepResult` up; the `Executor` protocol.

Both are values that can be pickled, so that the executor may be in other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ramify.attention.batch import AttentionBatch
from ramify.engine.logits.logits_processors import LogitsTransform
from ramify.outputs import TokenLogprob
from ramify.params import SamplingParams


class SampleSpec(NamedTuple):
    """Sample the next tokens of one request: one, and one more for each accepted draft token.

    A tuple, as `SampledTokens`: each step creates one per request, and creating a frozen dataclass
    takes five times as long.
    """

    request_id: int
    row: int  # query row whose logits give the first token; those of the drafts follow
    position: int  # of the first sampled token; keys the random generator, with the seed
    params: SamplingParams
    seed: int
    num_logprobs: int | None
    draft: tuple[int, ...] = ()  # draft tokens for `position` and the positions after it
    logits: LogitsTransform | None = None  # None leaves the logits as they are


@dataclass(frozen=True, slots=True)
class PromptLogprobSpec:
    """Score prompt tokens: the logits of row `first_row + i` predict `targets[i]`."""

    request_id: int
    first_row: int
    targets: tuple[int, ...]
    num_logprobs: int


class EmbeddingSpec(NamedTuple):
    """Return hidden states of consecutive rows, behind the model's final norm."""

    request_id: int
    first_row: int
    num_rows: int


class LateToken(NamedTuple):
    """An input token that the step before samples: the plan is made before it is known."""

    row: int  # of the plan's `token_ids`, which has a 0 there
    request_id: int  # of the sample in the step before; any token id if that sample failed


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Inputs of a forward pass over T query rows and of its sampling."""

    batch: AttentionBatch
    token_ids: NDArray[np.int64]  # [T]
    samples: tuple[SampleSpec, ...]
    prompt_logprobs: tuple[PromptLogprobSpec, ...]
    request_ids: tuple[int, ...]  # in batch order
    embeddings: tuple[EmbeddingSpec, ...] = ()
    all_rows: bool = True  # whether rows that nothing is sampled from need hidden states
    late_tokens: tuple[LateToken, ...] = ()  # only of a step that is begun ahead


class SampledTokens(NamedTuple):
    """The tokens sampled for one request: the accepted drafts, and one token after them."""

    token_ids: tuple[int, ...]  # 1 to num_drafts + 1
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token, if requested


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens and prompt logprobs by request id; a failed request has neither."""

    sampled: dict[int, SampledTokens]
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...]]
    # Why the hidden states or logits of a request are not finite; its K/V must not be used.
    failed: dict[int, str] = field(default_factory=dict)
    # [rows, hidden_size] each
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)


class Executor(Protocol):
    """Runs step plans. `ramify.testing.FakeExecutor` does so without a model.

    A step is begun, then finished; one is in flight at a time. Calls take effect in the order in
    which they are made, so that pages zeroed or copied after `begin` are those of the step or of
    what follows it. After `begin` or `finish` has raised, no step is in flight.
    """

    def begin(self, plan: StepPlan) -> None:
        """Start to write the step's K/V to its pages, to attend, and to sample.

        Returns before that is done, if the device works by itself; on a CPU it is done then. A step
        that was begun and never finished is dropped.

        Raises:
            StepMemoryError: out of memory; a step of fewer tokens may fit.
        """

    def finish(self) -> StepResult:
        """Wait for the step that was begun; returns its result.

        Raises:
            StepMemoryError: see `begin`.
        """

    def zero_pages(self, pages: Sequence[int]) -> None:
        """Zero all K/V of these pages, after a failed step."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all K/V of the first page of each pair to the second."""


@runtime_checkable
class OverlappingExecutor(Executor, Protocol):
    """An executor that takes a second step while the first one runs.

    It computes both in order, and what else it is called for too: a page that the host gives back
    and zeroes, copies or plans anew is one that the steps begun before have read and written.
    """

    def begin_ahead(self, plan: StepPlan) -> None:
        """Begin a step behind the one in flight, which samples `plan.late_tokens`.

        `finish` returns the older step. If it raises, the newer one is dropped too. `begin` drops both.

        Raises:
            Exception: the step was not begun; the one in flight is as it was.
        """
