"""`LocalExecutor`: runs a `StepPlan` in this process, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.sampler import SampleFn, sample_batch, sample_from_cdf, token_logprob
from ramify.engine.step import EmbeddingSpec, PromptLogprobSpec, SampledTokens, StepPlan, StepResult
from ramify.errors import StepMemoryError
from ramify.outputs import TokenLogprob

SCORED_ROWS = 64  # prompt rows per logits product: [64, 152k] float32 is 39 MB
# Parts of torch's messages when an allocation fails.
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that an allocation failed, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in message for words in NO_MEMORY)


def nonfinite_problem(plan: StepPlan, row: int) -> tuple[int, str]:
    """The request of a hidden row that is not finite, and what to tell it."""
    seq = int(np.searchsorted(plan.batch.cu_seqlens_q, row, side="right")) - 1
    request_id = plan.request_ids[seq]
    return request_id, (
        f"the hidden state of request {request_id} at position {plan.batch.positions[row]} is not "
        "finite; the weights or the K/V are damaged"
    )


class LocalExecutor:
    """Forward pass and sampling in the caller's thread.

    Args:
        sample_fn: draws a token, and so decides whether a draft token is accepted.
    """

    def __init__(self, runner: ModelRunner, sample_fn: SampleFn = sample_from_cdf) -> None:
        self.runner, self._sample_fn = runner, sample_fn
        self._result: StepResult | None = None  # of a step that was begun and is not finished

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`; computes the whole step.

        Requests whose hidden rows or logits are not finite are in `StepResult.failed`.
        """
        self._result = None
        try:
            self._result = self._compute(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise StepMemoryError(plan.batch.num_tokens, lines[0]) from error

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        result, self._result = self._result, None
        assert result is not None, "finish without begin"
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        hidden = self.runner.forward(plan)
        specs, failed = plan.samples, dict[int, str]()
        samples_every_row = [spec.row for spec in specs] == [*range(plan.batch.num_tokens)]
        # If every row is sampled, `sample_batch` finds a row that is not finite by its logits.
        if not samples_every_row:
            failed = self._nonfinite_requests(plan, hidden)
            specs = tuple(spec for spec in specs if spec.request_id not in failed)
        sampled: dict[int, SampledTokens] = {}
        if specs:
            rows = [spec.row + offset for spec in specs for offset in range(len(spec.draft) + 1)]
            logits = self.runner.logits(hidden, rows).cpu().numpy()
            sampled, unsampled = sample_batch(logits, specs, self._sample_fn)
            if unsampled:  # a hidden row that is not finite is the better reason
                failed |= unsampled | self._nonfinite_requests(plan, hidden)
        prompt_logprobs = {
            spec.request_id: self._prompt_logprobs(hidden, spec)
            for spec in plan.prompt_logprobs
            if spec.request_id not in failed
        }
        pooled = [spec for spec in plan.embeddings if spec.request_id not in failed]
        embeddings = self._embeddings(hidden, pooled) if pooled else {}
        return StepResult(sampled, prompt_logprobs, failed, embeddings)

    def _prompt_logprobs(self, hidden: Tensor, spec: PromptLogprobSpec) -> tuple[TokenLogprob, ...]:
        logprobs: list[TokenLogprob] = []
        for begin in range(0, len(spec.targets), SCORED_ROWS):
            targets, first = spec.targets[begin : begin + SCORED_ROWS], spec.first_row + begin
            logits = self.runner.logits(hidden, range(first, first + len(targets))).cpu().numpy()
            logprobs += [
                token_logprob(row, target, spec.num_logprobs)
                for row, target in zip(logits, targets, strict=True)
            ]
        return tuple(logprobs)

    def _embeddings(
        self, hidden: Tensor, specs: Sequence[EmbeddingSpec]
    ) -> dict[int, NDArray[np.float32]]:
        """Rows [num_rows, hidden_size] of each spec behind the final norm, by request id."""
        rows = [
            row for spec in specs for row in range(spec.first_row, spec.first_row + spec.num_rows)
        ]
        ends = np.cumsum([spec.num_rows for spec in specs])
        parts = np.split(self.runner.embeddings(hidden, rows).cpu().numpy(), ends[:-1])
        return {spec.request_id: part for spec, part in zip(specs, parts, strict=True)}

    def _nonfinite_requests(self, plan: StepPlan, hidden: Tensor) -> dict[int, str]:
        """What is wrong with the requests that have a hidden row which is not finite, by request id."""
        failed: dict[int, str] = {}
        for index in self.runner.nonfinite_rows(hidden):
            request_id, reason = nonfinite_problem(plan, index)
            failed.setdefault(request_id, reason)
        return failed

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.runner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self.runner.copy_pages(pairs)
