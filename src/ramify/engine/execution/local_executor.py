"""Who carries out a step: here, in this process, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.sampler import SampleFn, sample_batch, sample_from_cdf, token_logprob
from ramify.engine.step import SampledTokens, StepPlan, StepResult
from ramify.errors import StepMemoryError
from ramify.outputs import TokenLogprob

SCORED_ROWS = 64  # logits of so many prompt rows at a time: [64, 152k] float32 is 39 MB

NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")  # in torch's words


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be had, of whichever device and library."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    told = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in told for words in NO_MEMORY)


class LocalExecutor:
    """Forward pass and sampling in the caller's thread.

    Args:
        sample_fn: how tokens are drawn, and guesses accepted.
    """

    def __init__(self, runner: ModelRunner, sample_fn: SampleFn = sample_from_cdf) -> None:
        self.runner, self._sample_fn = runner, sample_fn

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`.

        Requests with a hidden row that is not finite fail, and those whose logits are not.
        """
        try:
            return self._execute(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            told = str(error).strip().splitlines() or [type(error).__name__]
            raise StepMemoryError(plan.batch.num_tokens, told[0]) from error

    def _execute(self, plan: StepPlan) -> StepResult:
        hidden = self.runner.forward(plan)
        draws, failed = plan.samples, dict[int, Exception]()
        is_every_row_drawn_from = [one.row for one in draws] == [*range(plan.batch.num_tokens)]
        if not is_every_row_drawn_from:  # else their logits tell: of no broken row are they finite
            failed = self._nonfinite_requests(plan, hidden)
            draws = tuple(draw for draw in draws if draw.request_id not in failed)
        drawn: dict[int, SampledTokens] = {}
        if draws:
            rows = [draw.row + place for draw in draws for place in range(len(draw.draft) + 1)]
            logits = self.runner.logits(hidden, rows).numpy()
            drawn, without = sample_batch(logits, draws, self._sample_fn)
            if without:  # a broken row is the better reason
                failed |= without | self._nonfinite_requests(plan, hidden)
        scored: dict[int, tuple[TokenLogprob, ...]] = {}
        for score in plan.prompt_logprobs:
            if score.request_id in failed:
                continue
            found: list[TokenLogprob] = []
            for begin in range(0, len(score.targets), SCORED_ROWS):
                targets = score.targets[begin : begin + SCORED_ROWS]
                first = score.first_row + begin
                logits = self.runner.logits(hidden, range(first, first + len(targets))).numpy()
                found += [
                    token_logprob(row, target, score.num_logprobs)
                    for row, target in zip(logits, targets, strict=True)
                ]
            scored[score.request_id] = tuple(found)
        return StepResult(drawn, scored, failed)

    def _nonfinite_requests(self, plan: StepPlan, hidden: Tensor) -> dict[int, Exception]:
        """Requests with a hidden row that is not finite, and what they are told."""
        failed: dict[int, Exception] = {}
        for index in self.runner.nonfinite_rows(hidden):
            seq = int(np.searchsorted(plan.batch.cu_seqlens_q, index, side="right")) - 1
            failed.setdefault(
                plan.request_ids[seq],
                FloatingPointError(
                    f"the hidden state of request {plan.request_ids[seq]} at position "
                    f"{plan.batch.positions[index]} is not finite; the weights or the K/V are "
                    "damaged"
                ),
            )
        return failed

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.runner.pool.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self.runner.pool.copy_pages([page for page, _ in pairs], [page for _, page in pairs])
