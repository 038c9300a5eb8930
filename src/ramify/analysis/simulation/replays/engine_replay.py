"""Replay of a log in the real engine, its scheduler and its cache, with a clock that steps advance.

Nothing is computed: a step takes what the cost model says, and a request's next token is the one that
the log goes on with. Requests arrive at their logged times, wait, run together, share pages that are
still being computed, preempt each other, and publish their answers, as in production.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.simulation.page_trace import PageTrace
from ramify.config import EngineConfig, resolve
from ramify.engine.core import EngineCore
from ramify.engine.step import SampledTokens, StepPlan, StepResult
from ramify.errors import RequestError
from ramify.params import SamplingParams
from ramify.step_cost import CostModel

VOCAB_SIZE = 2**31 - 1  # tokens are page ids
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class EngineRun:
    """What an engine did with a log."""

    num_requests: int  # finished
    num_refused: int  # longer than the whole cache
    num_tokens: int  # of the prompts of all requests
    num_hit: int  # read from the cache, or shared with a request in flight
    num_computed: int  # query rows, those of answers and recomputed ones included
    num_preemptions: int
    num_steps: int
    makespan_s: float  # from the first arrival to the last end
    ttft_s: NDArray[np.float64]  # [finished] from arrival to the first token

    @property
    def hit_rate(self) -> float:
        """Share of all input tokens that were not computed."""
        return self.num_hit / self.num_tokens if self.num_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        """The run as JSON; times in seconds."""
        ttft = self.ttft_s if len(self.ttft_s) else np.zeros(1)
        return {
            "hit_rate": self.hit_rate,
            "num_requests": self.num_requests,
            "num_refused": self.num_refused,
            "computed_tokens": self.num_computed,
            "preemptions": self.num_preemptions,
            "steps": self.num_steps,
            "makespan_s": self.makespan_s,
            "ttft_mean_s": float(ttft.mean()),
            **{f"ttft_p{share}_s": float(np.percentile(ttft, share)) for share in PERCENTILES},
        }


def replay_engine(
    trace: PageTrace,
    capacity_tokens: int,
    policy: str,
    cost: CostModel,
    *,
    max_num_seqs: int = 64,
    max_batch_tokens: int = 512,
    progress: Callable[[int], None] | None = None,
) -> EngineRun:
    """Serve a trace; its answers are shared only if the trace was read with `insert_outputs`.

    Args:
        trace: requests without a time arrive at once; answers without a length have one token.
    """
    config = resolve(
        EngineConfig.of(
            kv_cache_tokens=capacity_tokens,
            page_size=trace.page_size,
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            # A log of page hashes does not say what prompts share inside a page.
            partial_pages=False,
            check_sample=0.0,
        ),
        model_max_len=2**31 - 1,
        token_bytes=1,
        free_memory=0,
    )
    device = _CostedDevice(cost)
    core = EngineCore(config, device, vocab_size=VOCAB_SIZE, clock=lambda: device.now_s)
    return _Replay(trace, core, device).run(progress)


class _CostedDevice:
    """An executor that takes time and answers with the log's own tokens."""

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.now_s = cost, 0.0
        self.tokens: dict[int, NDArray[np.int32]] = {}  # of live requests, answers included
        self._result = StepResult({}, {})  # of the step that was begun last

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`; moves the clock on by the time of the step."""
        batch = plan.batch
        self.now_s += self.cost.step(
            batch.num_tokens, float(batch.positions.sum()) + batch.num_tokens
        )
        sampled = {
            spec.request_id: SampledTokens((int(self.tokens[spec.request_id][spec.position]),))
            for spec in plan.samples
        }
        self._result = StepResult(sampled, {})

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        return self._result

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`; there is nothing to zero."""

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`; there is nothing to copy."""


class _Replay:
    """Feeds a trace to an engine and notes when first tokens come."""

    def __init__(self, trace: PageTrace, core: EngineCore, device: _CostedDevice) -> None:
        self.trace, self.core, self.device = trace, core, device
        times = trace.start_s - np.nanmin(trace.start_s) if trace.has_times else None
        self.starts = [0.0] * len(trace) if times is None else times.tolist()
        self.waiting_first: dict[int, int] = {}  # engine's id → request
        self.ttft_s: list[float] = []
        self.num_hit = self.num_finished = self.num_refused = self.num_preemptions = 0

    def run(self, progress: Callable[[int], None] | None) -> EngineRun:
        """Serve all requests."""
        trace, core, device = self.trace, self.core, self.device
        arriving = 0
        while arriving < len(trace) or core.has_unfinished:
            if not core.has_unfinished:
                device.now_s = max(device.now_s, self.starts[arriving])
            while arriving < len(trace) and self.starts[arriving] <= device.now_s:
                self._add(arriving)
                arriving += 1
                if progress is not None and not arriving % 64:
                    progress(self.num_finished)
            if core.has_unfinished:
                self._step()
        return EngineRun(
            num_requests=self.num_finished,
            num_refused=self.num_refused,
            num_tokens=trace.total_tokens,
            num_hit=self.num_hit,
            num_computed=core.num_computed_tokens,
            num_preemptions=self.num_preemptions,
            num_steps=core.num_steps,
            makespan_s=device.now_s,
            ttft_s=np.array(self.ttft_s),
        )

    def _add(self, request: int) -> None:
        num_tokens = max(1, int(self.trace.num_tokens[request]))
        num_output = max(1, int(self.trace.num_output[request]))
        tokens = request_tokens(self.trace, request, num_tokens + num_output)
        try:
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            number = self.core.add_request(tokens[:num_tokens].tolist(), params)
        except RequestError:
            self.num_refused += 1
            return
        self.device.tokens[number] = tokens
        self.waiting_first[number] = request

    def _step(self) -> None:
        for event in self.core.step():
            if event.new_token_ids and event.request_id in self.waiting_first:
                request = self.waiting_first.pop(event.request_id)
                self.ttft_s.append(self.device.now_s - self.starts[request])
            if event.output is not None:
                self.num_finished += 1
                self.num_hit += event.output.usage.cached_tokens
                self.num_preemptions += event.output.metrics.preemptions
                del self.device.tokens[event.request_id]


def request_tokens(trace: PageTrace, request: int, num_tokens: int) -> NDArray[np.int32]:
    """Tokens that are equal where pages are: a page's id, as often as the page has tokens.

    After the last page known come tokens that no other request has.
    """
    tokens = trace.pages(request).repeat(trace.page_size)[:num_tokens]
    own = np.full(num_tokens - len(tokens), VOCAB_SIZE - 1 - request, np.int32)
    return np.concatenate([tokens, own])
