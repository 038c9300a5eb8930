"""A scheduled step as the complete plan that goes down to the executor."""

from __future__ import annotations

from array import array

import numpy as np

from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.engine.step import PromptLogprobSpec, SampleSpec, StepPlan


def build_step_plan(scheduled: ScheduledStep) -> StepPlan:
    """The plan of a step: token ids, what is drawn after them, and which of them are scored."""
    batch = scheduled.batch
    ids = array("i")
    draws: list[SampleSpec] = []
    scores: list[PromptLogprobSpec] = []
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
            if (
                request.children
                or request.draft
                or request.verify_cold
                or request.logits_processor is not None
            ):
                draws += _sample_specs(request, len(ids), end)
            else:
                row, wanted = len(ids) - 1, params.logprobs
                draws.append(SampleSpec(request.id, row, end, params, request.seed, wanted))
        if params.prompt_logprobs is not None:
            first = max(begin, len(request.prompt_logprobs))
            targets = request.prompt_ids[first + 1 : end + 1]
            if targets:
                row = start + first - begin
                scores.append(
                    PromptLogprobSpec(request.id, row, tuple(targets), params.prompt_logprobs)
                )
    token_ids = np.frombuffer(ids, np.int32).astype(np.int64) if ids else np.empty(0, np.int64)
    return StepPlan(batch, token_ids, tuple(draws), tuple(scores), tuple(names), bool(scores))


def _sample_specs(request: Request, stop: int, end: int) -> list[SampleSpec]:
    """What is drawn for a request and its branches; its rows end at `stop`, its tokens at `end`."""
    draft, draws = request.draft, []
    for one in (request, *request.pending_children):
        wanted = one.params.logprobs
        if wanted is None and one.verify_cold:
            wanted = 0
        shaping = (
            None
            if one.logits_processor is None
            else one.logits_processor.for_step(one.output_ids, draft)
        )
        row, position = stop - 1 - len(draft), end - len(draft)
        draws.append(
            SampleSpec(one.id, row, position, one.params, one.seed, wanted, draft, shaping)
        )
    return draws
