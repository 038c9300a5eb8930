"""A scheduled step as the complete plan that goes down to the executor."""

from __future__ import annotations

import numpy as np

from ramify.engine.request import Request
from ramify.engine.scheduler import Scheduled
from ramify.engine.step import Draw, Score, StepPlan


def step_plan(scheduled: Scheduled) -> StepPlan:
    """The plan of a step: token ids, what is drawn after them, and which of them are scored."""
    batch = scheduled.batch
    ids = np.empty(batch.num_tokens, np.int64)
    draws, scores = [], []
    bounds = batch.cu_seqlens_q.tolist()
    for index, request in enumerate(scheduled.requests):
        sequence, params = request.sequence, request.params
        start, stop = bounds[index], bounds[index + 1]
        begin, end = sequence.num_computed, sequence.num_computed + stop - start
        ids[start:stop] = np.frombuffer(sequence.tokens[begin:end], np.int32)
        if end == len(sequence.tokens):
            row, position = stop - 1 - len(request.draft), end - len(request.draft)
            for one in (request, *request.waiting_branches):
                draws.append(_draw(one, request.draft, row, position))
        if params.prompt_logprobs is not None:
            first = max(begin, len(request.prompt_logprobs))
            targets = request.prompt_ids[first + 1 : end + 1]
            if targets:
                score = Score(
                    request.id, start + first - begin, tuple(targets), params.prompt_logprobs
                )
                scores.append(score)
    names = tuple(request.id for request in scheduled.requests)
    return StepPlan(batch, ids, tuple(draws), tuple(scores), names)


def _draw(request: Request, draft: tuple[int, ...], row: int, position: int) -> Draw:
    wanted = request.params.logprobs
    if wanted is None and request.recheck:
        wanted = 0
    return Draw(
        request_id=request.id,
        row=row,
        position=position,
        params=request.params,
        seed=request.seed,
        num_logprobs=wanted,
        draft=draft,
        shaping=None
        if request.shaper is None
        else request.shaper.shaping(request.output_ids, draft),
    )
