"""Who carries out a step: here, in this process, on one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ramify.engine.runner import ModelRunner
from ramify.engine.sampler import draw_token, token_logprob
from ramify.engine.step import Drawn, StepPlan, StepResult
from ramify.params import TokenLogprob

SCORED_ROWS = 64  # logits of so many prompt rows at a time: [64, 152k] float32 is 39 MB


class LocalExecutor:
    """Forward pass and sampling in the caller's thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def execute(self, plan: StepPlan) -> StepResult:
        """See `Executor.execute`.

        Raises:
            FloatingPointError: the logits of a request are not numbers.
        """
        hidden = self.runner.forward(plan)
        drawn: dict[int, Drawn] = {}
        if plan.draws:
            logits = self.runner.logits(hidden, [draw.row for draw in plan.draws]).numpy()
            for draw, row in zip(plan.draws, logits, strict=True):
                if not np.isfinite(row.max()):
                    raise FloatingPointError(
                        f"the logits of request {draw.request_id} at position {draw.position} "
                        "are not finite; the weights or the K/V are damaged"
                    )
                token = draw_token(row, draw)
                known = None
                if draw.num_logprobs is not None:
                    known = token_logprob(row, token, draw.num_logprobs)
                drawn[draw.request_id] = Drawn(token, known)
        scored: dict[int, tuple[TokenLogprob, ...]] = {}
        for score in plan.scores:
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
        return StepResult(drawn, scored)

    def erase_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.erase_pages`."""
        self.runner.pool.zero_pages(pages)
