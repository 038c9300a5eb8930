"""A scheduled step as the complete plan that goes down to the executor."""

from __future__ import annotations

from array import array

import numpy as np

from ramify.engine.request import Request
from ramify.engine.scheduler import Scheduled
from ramify.engine.step import Draw, Score, StepPlan


def step_plan(scheduled: Scheduled) -> StepPlan:
    """The plan of a step: token ids, what is drawn after them, and which of them are scored."""
    batch = scheduled.batch
    ids = array("i")
    draws: list[Draw] = []
    scores: list[Score] = []
    names: list[int] = []
    for request in scheduled.requests:
        sequence, params, start = request.sequence, request.params, len(ids)
        tokens, begin = sequence.tokens, sequence.num_computed
        end = begin + sequence.num_planned
        names.append(request.id)
        if end == begin + 1:
            ids.append(tokens[begin])
        else:
            ids.extend(tokens[begin:end])
        if end == len(tokens):
            if request.branches or request.draft or request.recheck or request.shaper is not None:
                draws += _draws(request, len(ids), end)
            else:
                row, wanted = len(ids) - 1, params.logprobs
                draws.append(Draw(request.id, row, end, params, request.seed, wanted))
        if params.prompt_logprobs is not None:
            first = max(begin, len(request.prompt_logprobs))
            targets = request.prompt_ids[first + 1 : end + 1]
            if targets:
                row = start + first - begin
                scores.append(Score(request.id, row, tuple(targets), params.prompt_logprobs))
    token_ids = np.frombuffer(ids, np.int32).astype(np.int64) if ids else np.empty(0, np.int64)
    return StepPlan(batch, token_ids, tuple(draws), tuple(scores), tuple(names), bool(scores))


def _draws(request: Request, stop: int, end: int) -> list[Draw]:
    """What is drawn for a request and its branches; its rows end at `stop`, its tokens at `end`."""
    draft, draws = request.draft, []
    for one in (request, *request.waiting_branches):
        wanted = one.params.logprobs
        if wanted is None and one.recheck:
            wanted = 0
        shaping = None if one.shaper is None else one.shaper.shaping(one.output_ids, draft)
        row, position = stop - 1 - len(draft), end - len(draft)
        draws.append(Draw(one.id, row, position, one.params, one.seed, wanted, draft, shaping))
    return draws
