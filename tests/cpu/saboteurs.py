"""Executors that inject random faults into the steps of another one, for the soak test of the engine."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import OverlappingExecutor, StepPlan, StepResult
from ramify.errors import StepMemoryError
from tests.device_runner import step_executor
from tests.pure.whole_steps import WholeSteps, run_step

STEP_FAULTS = ("raise", "raise late", "memory", "interrupt", "interrupt late", "taint", "page")


@dataclass
class Saboteur(WholeSteps):
    """An executor that injects faults into steps, copies, decoders and eviction observers."""

    runner: ModelRunner
    rng: random.Random
    rate: float
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.inner = step_executor(self.runner)

    def happens(self, rate: float, *kinds: str) -> str:
        """Return a random fault of `kinds`, counted, with probability `rate`; else ""."""
        if self.rng.random() >= rate:
            return ""
        kind = self.rng.choice(kinds)
        self.done[kind] += 1
        return kind

    def execute(self, plan: StepPlan) -> StepResult:
        kind = self.happens(self.rate, *STEP_FAULTS)
        if kind in ("raise", "interrupt", "memory"):
            self._raise(kind, plan)
        if kind == "page":
            self._spoil_page()
        result = run_step(self.inner, plan)
        if kind.endswith("late"):
            self._spoil(plan.batch.slot_mapping.tolist())
            self._raise(kind.removesuffix(" late"), plan)
        if kind == "taint":
            index = self.rng.randrange(plan.batch.num_seqs)
            bounds = plan.batch.cu_seqlens_q
            self._spoil(plan.batch.slot_mapping[bounds[index] : bounds[index + 1]].tolist())
            return self._tainted(plan, result, index)
        return result

    def _tainted(self, plan: StepPlan, result: StepResult, index: int) -> StepResult:
        name = plan.request_ids[index]
        result.sampled.pop(name, None)
        return replace(result, failed={**result.failed, name: "tainted"})

    def _raise(self, kind: str, plan: StepPlan) -> None:
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "memory":
            raise StepMemoryError(plan.batch.num_tokens, "sabotage")
        raise RuntimeError("sabotage")

    def _spoil_page(self) -> None:
        """Write NaN into a random page, cached, in use or free."""
        page = self.rng.randrange(self.runner.pool.num_pages)
        size = self.runner.pool.page_size
        self._spoil(range(page * size, (page + 1) * size))

    def _spoil(self, slots: Sequence[int]) -> None:
        pool, index = self.runner.pool, torch.tensor(list(slots))
        for name, plane in pool.planes(self.rng.randrange(pool.layout.num_layers)).items():
            if plane.dtype.is_floating_point and name != "v":
                plane.flatten(0, 1)[index] = float("nan")

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        kind = self.happens(3 * self.rate, "raise in copy", "interrupt in copy")
        if kind:
            raise (RuntimeError("sabotage") if kind.startswith("raise") else KeyboardInterrupt)
        self.inner.copy_pages(pairs)

    def evicted(self, eviction: object) -> None:
        """Raise inside `plan` at random, as an observer of evictions."""
        kind = self.happens(self.rate / 4, "raise in plan", "interrupt in plan")
        if kind:
            raise (RuntimeError("sabotage") if kind.startswith("raise") else KeyboardInterrupt)


@dataclass
class OverlappingSaboteur(Saboteur):
    """The same around an executor that takes a second step: faults where a step begins, and where it ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begun = deque[tuple[StepPlan, str, int]]()  # plan, fault, request that it taints

    def begin(self, plan: StepPlan) -> None:
        self._begun.clear()
        self._launch(plan, self.inner.begin)

    def begin_ahead(self, plan: StepPlan) -> None:
        assert isinstance(self.inner, OverlappingExecutor)
        self._launch(plan, self.inner.begin_ahead)

    def _launch(self, plan: StepPlan, begin: Callable[[StepPlan], None]) -> None:
        kind = self.happens(self.rate, *STEP_FAULTS)
        if kind in ("raise", "interrupt", "memory"):
            self._raise(kind, plan)
        if kind == "page":
            self._spoil_page()
        begin(plan)
        index, slots = self.rng.randrange(plan.batch.num_seqs), plan.batch.slot_mapping.tolist()
        if kind == "taint":
            slots = slots[plan.batch.cu_seqlens_q[index] : plan.batch.cu_seqlens_q[index + 1]]
        if kind == "taint" or kind.endswith("late"):
            self._spoil(slots)
        self._begun.append((plan, kind, index))

    def finish(self) -> StepResult:
        plan, kind, index = self._begun.popleft()
        result = self.inner.finish()
        if kind.endswith("late"):
            self._begun.clear()
            self._raise(kind.removesuffix(" late"), plan)
        return self._tainted(plan, result, index) if kind == "taint" else result
