"""Measure what the engine's steps take on this machine, for `simulate --cost`. Runs a model."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ramify.analysis.progress import Progress, ignore_progress
from ramify.analysis.simulation.replays.cost_model import StepSample, fit_cost
from ramify.engine.step import Executor, StepPlan, StepResult
from ramify.errors import ConfigError
from ramify.params import SamplingParams
from ramify.step_cost import CostModel

if TYPE_CHECKING:
    from ramify.engine.core import EngineCore

PREFILL_LENGTHS = (64, 256, 1024, 4096)
BATCHES = (1, 4, 16)
NUM_DECODES = 12  # steps of each batch


@dataclass
class Stopwatch:
    """An executor that notes the size of each step of another executor."""

    inner: Executor
    num_tokens: int = 0
    num_reads: int = 0

    def begin(self, plan: StepPlan) -> None:
        """See `Executor.begin`."""
        self.num_tokens = plan.batch.num_tokens
        self.num_reads = int(plan.batch.positions.sum()) + self.num_tokens
        self.inner.begin(plan)

    def finish(self) -> StepResult:
        """See `Executor.finish`."""
        return self.inner.finish()

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `Executor.zero_pages`."""
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Executor.copy_pages`."""
        self.inner.copy_pages(pairs)


def calibrate(
    model: str = "ramify-tiny",
    *,
    max_seconds: float = 60.0,
    progress: Progress | None = None,
    **engine: Any,
) -> CostModel:
    """Run prompts of several lengths and batches of several sizes; fit the cost model.

    Args:
        model: as `LLM` takes it.
        max_seconds: no further length or batch is begun after this time.
        engine: options of `ramify.config`.

    Raises:
        ConfigError, ModelError: see `LLM`.
    """
    from ramify.engine.llm import LLM

    if not max_seconds > 0:
        raise ConfigError(f"max_seconds={max_seconds} but it must be more than 0")
    llm = LLM(model, **({"max_num_seqs": max(BATCHES), "prefix_cache": False} | engine))
    samples, rates = _measure(llm.core, max_seconds=max_seconds, progress=progress)
    cost = fit_cost(samples, model=str(model))
    config = llm.config
    facts = {
        **rates,
        "max_batch_tokens": config.max_batch_tokens,
        "page_size": config.page_size,
        "kv_token_bytes": config.token_bytes,
    }
    return replace(cost, facts=cost.facts | facts)


def _measure(
    core: EngineCore, *, max_seconds: float, progress: Progress | None
) -> tuple[list[StepSample], dict[str, dict[str, float]]]:
    """Time the steps of prefills alone, then of batches that decode. The engine is idle before.

    Returns the steps, and the rates by length of the prefill and size of the batch.
    """
    watch = Stopwatch(core.executor)
    core.executor = watch
    rng = random.Random(0)  # noqa: S311 - tokens to compute, no secrets
    samples: list[StepSample] = []
    prefill_tokens_per_s: dict[str, float] = {}
    decode_step_s: dict[str, float] = {}
    longest = min(core.config.max_model_len - NUM_DECODES, core.config.kv_cache_tokens // 2)
    lengths = sorted({min(length, longest) for length in PREFILL_LENGTHS})
    batches = [size for size in BATCHES if size <= core.config.max_num_seqs]
    jobs = [(1, length) for length in lengths] + [(size, lengths[0]) for size in batches]
    report = progress or ignore_progress
    try:
        _serve(core, watch, rng, 1, lengths[0])  # compiles kernels
        deadline = time.perf_counter() + max_seconds
        for done, (size, length) in enumerate(jobs):
            report("calibrate", done, len(jobs))
            if time.perf_counter() > deadline:
                break
            steps = _serve(core, watch, rng, size, length)
            samples += steps
            prefill_s = sum(step.seconds for step in steps if step.num_tokens > size)
            decodes = [step.seconds for step in steps if step.num_tokens == size]
            if size == 1 and prefill_s:
                prefill_tokens_per_s[str(length)] = length / prefill_s
            if length == lengths[0] and decodes:
                decode_step_s[str(size)] = statistics.median(decodes)
        report("calibrate", len(jobs), len(jobs))
    finally:
        core.executor = watch.inner
    return samples, {"prefill_tokens_per_s": prefill_tokens_per_s, "decode_step_s": decode_step_s}


def _serve(
    core: EngineCore, watch: Stopwatch, rng: random.Random, size: int, length: int
) -> list[StepSample]:
    """Run a batch of random prompts to its end; returns its steps."""
    params = SamplingParams(max_tokens=NUM_DECODES, ignore_eos=True)
    for _ in range(size):
        core.add_request([rng.randrange(core.vocab_size) for _ in range(length)], params)
    steps = []
    while core.has_unfinished:
        start = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - start
        steps.append(StepSample(watch.num_tokens, watch.num_reads, seconds))
    return steps
