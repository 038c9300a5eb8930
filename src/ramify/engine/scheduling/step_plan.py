"""Builds the `StepPlan` of a `ScheduledStep`, for the executor."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ramify.engine.logits.logits_processors import LogitsProcessor, LogitsTransform
from ramify.engine.request import Request
from ramify.engine.scheduling.scheduler import ScheduledStep
from ramify.engine.step import (
    EmbeddingSpec,
    LateToken,
    PromptLogprobSpec,
    SampleSpec,
    StepPlan,
)


def build_step_plan(scheduled: ScheduledStep) -> StepPlan:
    """The plan of a step: its token ids, what to sample after them, and which to score."""
    batch = scheduled.batch
    ids = array("i")
    samples: list[SampleSpec] = []
    prompt_logprobs: list[PromptLogprobSpec] = []
    embeddings: list[EmbeddingSpec] = []
    request_ids: list[int] = []
    for request in scheduled.requests:
        sequence, params, start = request.sequence, request.params, len(ids)
        tokens, begin = sequence.tokens, sequence.num_computed
        end = begin + sequence.num_planned
        request_ids.append(request.id)
        if end == begin + 1:
            ids.append(tokens[begin])
        else:
            ids.extend(tokens[begin:end])
        if end == len(tokens):
            if request.children or request.draft or request.verify_cold:
                samples += _sample_specs(request, len(ids), end)
            else:
                row, num_logprobs, logits = len(ids) - 1, params.logprobs, None
                if request.logits_processor is not None:
                    logits = _transform_of(request.logits_processor, request.output_ids)
                samples.append(
                    SampleSpec(request.id, row, end, params, request.seed, num_logprobs, (), logits)
                )
        if params.prompt_embedding:
            rows = request.pooling.wanted(begin, end)
            if rows:
                first_row = start + rows.start - begin
                embeddings.append(EmbeddingSpec(request.id, first_row, len(rows)))
        if params.prompt_logprobs is not None:
            first = max(begin, len(request.prompt_logprobs))
            targets = request.prompt_ids[first + 1 : end + 1]
            if targets:
                row = start + first - begin
                prompt_logprobs.append(
                    PromptLogprobSpec(request.id, row, tuple(targets), params.prompt_logprobs)
                )
    token_ids = np.frombuffer(ids, np.int32).astype(np.int64) if ids else np.empty(0, np.int64)
    return StepPlan(
        batch,
        token_ids,
        tuple(samples),
        tuple(prompt_logprobs),
        tuple(request_ids),
        tuple(embeddings),
        bool(prompt_logprobs) or _are_pruned(embeddings, samples),
    )


def build_ahead_plan(scheduled: ScheduledStep) -> StepPlan:
    """The plan of a step of `Scheduler.schedule_ahead`: chunks of prompts, and tokens that may be late ones."""
    ids = array("i")
    samples: list[SampleSpec] = []
    late: list[LateToken] = []
    row = 0
    for request in scheduled.requests:
        sequence, params = request.sequence, request.params
        begin = sequence.num_computed + sequence.num_planned
        end = begin + sequence.num_ahead
        if begin < len(sequence.tokens):
            ids.extend(sequence.tokens[begin:end])
            row = len(ids)
            if end == len(sequence.tokens):
                samples += _sample_specs(request, row, end)
            continue
        late.append(LateToken(row, request.id))
        ids.append(0)
        processor, logits, num_logprobs = request.logits_processor, None, params.logprobs
        if processor is not None:
            logits = _transform_of(processor, request.output_ids, num_late=1)
        if request.verify_cold:
            num_logprobs = _num_logprobs(request)
        samples.append(
            SampleSpec(request.id, row, end, params, request.seed, num_logprobs, (), logits)
        )
        row += 1
    return StepPlan(
        scheduled.batch,
        np.frombuffer(ids, np.int32).astype(np.int64),
        tuple(samples),
        (),
        tuple([request.id for request in scheduled.requests]),
        all_rows=False,
        late_tokens=tuple(late),
    )


def _transform_of(
    processor: LogitsProcessor,
    output_ids: Sequence[int],
    draft: tuple[int, ...] = (),
    *,
    num_late: int = 0,
) -> LogitsTransform | None:
    """See `LogitsProcessor.for_step`; None if it leaves the logits as they are."""
    transform = processor.for_step(output_ids, draft, num_late=num_late)
    return None if transform.is_identity else transform


def _num_logprobs(request: Request) -> int | None:
    """Most likely tokens to report with each sample; None: no log probability."""
    num_logprobs = request.params.logprobs
    return 0 if num_logprobs is None and request.verify_cold else num_logprobs


def _are_pruned(embeddings: list[EmbeddingSpec], samples: list[SampleSpec]) -> bool:
    """Whether a step for these samples alone would leave out a row of the embeddings."""
    if not embeddings:
        return False
    sampled = {spec.row for spec in samples}
    return any(spec.num_rows > 1 or spec.first_row not in sampled for spec in embeddings)


def _sample_specs(request: Request, stop: int, end: int) -> list[SampleSpec]:
    """Samples of a request and its children: its rows end at `stop`, its tokens at `end`."""
    draft, samples = request.draft, []
    row, position = stop - 1 - len(draft), end - len(draft)
    for member in (request, *request.pending_children):
        num_logprobs = _num_logprobs(member)
        processor, logits = member.logits_processor, None
        if processor is not None:
            logits = _transform_of(processor, member.output_ids, draft)
        samples.append(
            SampleSpec(
                member.id, row, position, member.params, member.seed, num_logprobs, draft, logits
            )
        )
    return samples
