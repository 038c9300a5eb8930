"""`DeviceExecutor`: runs a `StepPlan` on a device; only sampled ids and flags come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.engine.execution.device import current
from ramify.engine.execution.device_sampler import (
    SampledRows,
    collect_samples,
    log_probabilities,
    sample_rows,
    token_logprob_of,
)
from ramify.engine.execution.host_copies import to_device, to_host
from ramify.engine.execution.kernel_sampler import has_sampling_kernels, sample_by_kernels
from ramify.engine.execution.local_executor import SCORED_ROWS, is_out_of_memory, nonfinite_problem
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.execution.step_graphs import DecodeGraphs, finite_rows
from ramify.engine.step import PromptLogprobSpec, SampleSpec, StepPlan, StepResult
from ramify.errors import StepMemoryError
from ramify.outputs import TokenLogprob

Scores = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class _LaunchedStep:
    """A step whose operations are queued; the host's tensors are complete once `done` has passed."""

    plan: StepPlan
    device_tokens: Tensor  # [R] int64, of all rows that are sampled; the next step reads them
    rows: SampledRows  # on the host
    are_finite: Tensor  # [T] bool on the host: hidden rows
    prompt_scores: tuple[list[Scores], ...]  # of each prompt spec, by chunk, on the host
    embeddings: Tensor | None  # of all specs, on the host
    done: torch.cuda.Event | None  # None on a CPU, which has computed it


class DeviceExecutor:
    """An `OverlappingExecutor` for one device of this process; takes two steps at once.

    Forward pass and sampling are queued on the current stream. On a CPU both are computed in
    `begin`, by the same operations.

    Args:
        by_rejection: draft tokens are accepted by rejection sampling, see `rejection_sample`.
        decode: runs decode steps; None: the runner runs them as all others.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        by_rejection: bool = False,
        decode: DecodeGraphs | None = None,
    ) -> None:
        self.runner, self._by_rejection, self._decode = runner, by_rejection, decode
        self._has_kernels = has_sampling_kernels(runner.pool.device)
        self._launched: deque[_LaunchedStep] = deque()  # oldest first

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`."""
        self._launched.clear()
        self._launched.append(self._launch(plan, None))

    def begin_ahead(self, plan: StepPlan) -> None:
        """See `OverlappingExecutor.begin_ahead`."""
        assert len(self._launched) == 1, "one step is in flight"
        self._launched.append(self._launch(plan, self._launched[0]))

    def finish(self) -> StepResult:
        """See `Executor.finish`; waits for the sampled ids."""
        assert self._launched, "finish without begin"
        step = self._launched.popleft()
        try:
            if step.done is not None:
                step.done.synchronize()
            return self._result(step)
        except BaseException as error:
            self._launched.clear()
            raise _as_step_error(error, step.plan) from error

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.runner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self.runner.copy_pages(pairs)

    # -- on the device -----------------------------------------------------------------------

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, before: _LaunchedStep | None) -> _LaunchedStep:
        try:
            with current(self.runner.pool.device):
                return self._queue(plan, before)
        except Exception as error:
            raise _as_step_error(error, plan) from error

    def _queue(self, plan: StepPlan, before: _LaunchedStep | None) -> _LaunchedStep:
        runner, device = self.runner, self.runner.pool.device
        late_ids = None if before is None else _late_ids(plan, before)
        hidden, logits, are_finite = self._forward(plan, late_ids)
        if logits is not None:
            sampled = self._sample(logits, plan.samples)
        else:
            none = are_finite.new_empty(0)
            sampled = SampledRows(none.long(), none, none)
        prompt_scores = tuple([self._score_prompt(hidden, spec) for spec in plan.prompt_logprobs])
        embeddings = None
        if plan.embeddings:
            pooled = [
                row
                for spec in plan.embeddings
                for row in range(spec.first_row, spec.first_row + spec.num_rows)
            ]
            embeddings = to_host(runner.embeddings(hidden, pooled))
        flags = to_host(sampled.are_finite)
        is_greedy = sampled.are_allowed is sampled.are_finite
        on_host = SampledRows(
            to_host(sampled.tokens),
            flags,
            flags if is_greedy else to_host(sampled.are_allowed),
            None if sampled.scores is None else _scores_to_host(sampled.scores),
        )
        hidden_flags, done = to_host(are_finite), None
        if device.type == "cuda":
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(device))
        return _LaunchedStep(
            plan, sampled.tokens, on_host, hidden_flags, prompt_scores, embeddings, done
        )

    def _sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> SampledRows:
        if self._has_kernels and not (self._by_rejection and any(spec.draft for spec in specs)):
            return sample_by_kernels(logits, specs)
        return sample_rows(logits, specs, by_rejection=self._by_rejection)

    def _forward(
        self, plan: StepPlan, late_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Hidden rows [T, hidden_size], logits to sample from or None, whether hidden rows are finite."""
        if self._decode is not None and self._decode.can_run(plan):
            return self._decode.run(plan, late_ids)
        hidden = self.runner.forward(plan, late_ids)
        rows = [spec.row + at for spec in plan.samples for at in range(len(spec.draft) + 1)]
        return hidden, self.runner.logits(hidden, rows) if rows else None, finite_rows(hidden)

    def _score_prompt(self, hidden: Tensor, spec: PromptLogprobSpec) -> list[Scores]:
        chunks: list[Scores] = []
        for begin in range(0, len(spec.targets), SCORED_ROWS):
            targets, first = spec.targets[begin : begin + SCORED_ROWS], spec.first_row + begin
            logits = self.runner.logits(hidden, range(first, first + len(targets)))
            tokens = to_device(np.array(targets, np.int64), logits.device)
            chunks.append(_scores_to_host(log_probabilities(logits, tokens, spec.num_logprobs)))
        return chunks

    # -- on the host -------------------------------------------------------------------------

    def _result(self, step: _LaunchedStep) -> StepResult:
        plan, failed = step.plan, dict[int, str]()
        for row in np.flatnonzero(~step.are_finite.numpy()).tolist():
            request_id, reason = nonfinite_problem(plan, row)
            failed.setdefault(request_id, reason)
        sampled, unsampled = collect_samples(step.rows, plan.samples)
        failed = unsampled | failed  # a hidden row that is not finite is the better reason
        prompt_logprobs = {
            spec.request_id: _prompt_logprobs(spec, chunks)
            for spec, chunks in zip(plan.prompt_logprobs, step.prompt_scores, strict=True)
            if spec.request_id not in failed
        }
        embeddings: dict[int, NDArray[np.float32]] = {}
        if step.embeddings is not None:
            ends = np.cumsum([spec.num_rows for spec in plan.embeddings])
            parts = np.split(step.embeddings.numpy(), ends[:-1])
            embeddings = {
                spec.request_id: part
                for spec, part in zip(plan.embeddings, parts, strict=True)
                if spec.request_id not in failed
            }
        for request_id in failed:
            sampled.pop(request_id, None)
        return StepResult(sampled, prompt_logprobs, failed, embeddings)


def _late_ids(plan: StepPlan, before: _LaunchedStep) -> Tensor | None:
    """The tokens that the step before samples for `plan.late_tokens`, on the device."""
    if not plan.late_tokens:
        return None
    tokens, samples = before.device_tokens, before.plan.samples
    wanted = [late.request_id for late in plan.late_tokens]
    if len(tokens) == len(samples) and wanted == [spec.request_id for spec in samples]:
        return tokens
    ends = accumulate(len(spec.draft) + 1 for spec in samples)
    last_rows = {spec.request_id: end - 1 for spec, end in zip(samples, ends, strict=True)}
    rows = np.array([last_rows[request_id] for request_id in wanted], np.int64)
    return tokens[to_device(rows, tokens.device)]


def _prompt_logprobs(spec: PromptLogprobSpec, chunks: list[Scores]) -> tuple[TokenLogprob, ...]:
    return tuple(
        [
            token_logprob_of(chunks[at // SCORED_ROWS], at % SCORED_ROWS, target, spec.num_logprobs)
            for at, target in enumerate(spec.targets)
        ]
    )


def _scores_to_host(scores: Scores) -> Scores:
    logprobs, top_ids, top_logprobs = scores
    return to_host(logprobs), to_host(top_ids), to_host(top_logprobs)


def _as_step_error(error: BaseException, plan: StepPlan) -> BaseException:
    """The error of a step: StepMemoryError if the device is out of memory."""
    if not is_out_of_memory(error):
        return error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return StepMemoryError(plan.batch.num_tokens, lines[0])
