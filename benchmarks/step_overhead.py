"""What a decode step costs in Python, without any model: schedule, plan, step plan, commit, update.

    python benchmarks/step_overhead.py                        running {1, 64, 256} x waiting {0, 1k, 10k}
    python benchmarks/step_overhead.py --running 256 --waiting 0 --steps 500 --json out.json
    python benchmarks/step_overhead.py --overlap              each step begun before the one in front has ended

Every running request decodes with about 1,000 tokens of context in pages of 16; the waiting ones
find no free row. The executor answers at once. All cells take turns, a few steps each, so that a
slow phase of the machine meets all of them; printed are the least and the median time per step in
ms, and the least time inside each part. Parts are timed by wrapping them, which costs about 0.2 us per
call; `step` is taken from steps without that.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from ramify.attention.batch import AttentionBatch
from ramify.config import EngineConfig, resolve
from ramify.engine import step_pipeline
from ramify.engine.core import EngineCore
from ramify.engine.step import SampledTokens, StepPlan, StepResult
from ramify.params import SamplingParams

PARTS = ("schedule", "plan", "build", "step plan", "commit", "update")
NEW_TOKENS = 900
LONE = SampledTokens((7,))


class InstantExecutor:
    """An executor that answers token 7 to everything."""

    def __init__(self) -> None:
        self.spent = 0.0
        self._results = deque[StepResult]()

    def begin(self, plan: StepPlan) -> None:
        self._results.clear()
        self._answer(plan)

    def finish(self) -> StepResult:
        return self._results.popleft()

    def _answer(self, plan: StepPlan) -> None:
        start = time.thread_time()
        self._results.append(StepResult({draw.request_id: LONE for draw in plan.samples}, {}))
        self.spent += time.thread_time() - start

    def zero_pages(self, pages: Sequence[int]) -> None:
        raise AssertionError("no step fails")

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        pass  # prompts that leave the common head inside a page


class OverlappingInstant(InstantExecutor):
    """The same, for an engine that begins steps ahead."""

    def begin_ahead(self, plan: StepPlan) -> None:
        self._answer(plan)


class Cell:
    """An engine with a number of decoding requests and a number of waiting requests."""

    def __init__(
        self, num_running: int, num_waiting: int, shared: int, context: int, *, overlap: bool
    ) -> None:
        self.name = f"{num_running} x {num_waiting:,}"
        tokens = num_running * (context + NEW_TOKENS)
        engine_config = EngineConfig.of(
            kv_cache_tokens=2 * tokens, max_num_seqs=num_running, max_batch_tokens=8192
        )
        config = resolve(engine_config, model_max_len=32_768, token_bytes=1, free_memory=0)
        self.device = OverlappingInstant() if overlap else InstantExecutor()
        self.core: EngineCore = EngineCore(config, self.device, vocab_size=32_000)
        rng = random.Random(1)
        head = [rng.randrange(32_000) for _ in range(shared)]
        for at in range(num_running + num_waiting):
            length = context - shared if at < num_running else 100
            prompt = head + [rng.randrange(32_000) for _ in range(length + at % 16)]
            self.core.add_request(prompt, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True))
            if at == num_running - 1:
                running = self.core.scheduler.running
                while len(running) < num_running or any(
                    request.sequence.num_uncomputed > 1 for request in running
                ):
                    self.core.step()
        self.totals: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)

    def steps(self, count: int) -> None:
        """Time whole steps, without the executor's share."""
        for _ in range(count):
            before, start = self.device.spent, time.thread_time()
            self.core.step()
            self.totals.append(time.thread_time() - start - (self.device.spent - before))

    def step_by_part(self) -> None:
        """Time the parts of one step."""
        spent: dict[str, float] = defaultdict(float)
        core, planner = self.core, self.core.planner
        undo = [
            timed(core.scheduler, "schedule", spent, "schedule"),
            timed(core.scheduler, "schedule_ahead", spent, "schedule"),
            timed(planner, "plan", spent, "plan"),
            timed(planner.ahead, "plan", spent, "plan"),
            timed(AttentionBatch, "next_decode", spent, "build"),
            timed(AttentionBatch, "from_rows", spent, "build"),
            timed(AttentionBatch, "from_decodes", spent, "build"),
            timed(step_pipeline, "build_step_plan", spent, "step plan"),
            timed(step_pipeline, "build_ahead_plan", spent, "step plan"),
            timed(core.results, "process", spent, "update"),
            timed(planner, "commit", spent, "commit"),
        ]
        core.step()
        for restore in undo:
            restore()
        spent["schedule"] -= spent["plan"]
        spent["plan"] -= spent["build"]
        spent["update"] -= spent["commit"]
        for part in PARTS:
            self.parts[part].append(spent[part])


def timed(owner: Any, name: str, spent: dict[str, float], part: str) -> Callable[[], None]:
    """Add the time inside a method to `spent[part]` until the returned function is called."""
    inner = getattr(owner, name)

    @wraps(inner)
    def outer(*args: Any, **named: Any) -> Any:
        start = time.thread_time()
        try:
            return inner(*args, **named)
        finally:
            spent[part] += time.thread_time() - start

    kept = vars(owner).get(name)
    setattr(owner, name, outer)
    if kept is None:
        return lambda: delattr(owner, name)
    return lambda: setattr(owner, name, kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--waiting", type=int, nargs="*", default=[0, 1_000, 10_000])
    parser.add_argument("--shared", type=int, default=500, help="tokens that all prompts share")
    parser.add_argument("--context", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=300, help="per cell; at most 800")
    parser.add_argument("--overlap", action="store_true", help="begin each decode step ahead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [
        Cell(running, waiting, args.shared, args.context, overlap=args.overlap)
        for running in args.running
        for waiting in args.waiting
    ]
    gc.collect()
    gc.freeze()  # what was built is not passed over again and again
    for _ in range(max(1, min(args.steps, NEW_TOKENS - 100) // 10)):
        for cell in cells:
            cell.steps(9)
            cell.step_by_part()
    print(
        f"{'running x waiting':>18} {'least':>8} {'median':>8}   of it (least): {', '.join(PARTS)}"
    )
    for cell in cells:
        parts = " ".join(f"{min(cell.parts[part]) * 1e3:8.3f}" for part in PARTS)
        least, median = min(cell.totals), statistics.median(cell.totals)
        print(f"{cell.name:>18} {least * 1e3:8.3f} {median * 1e3:8.3f}   {parts}")
    if args.json is not None:
        results = {
            cell.name: {
                "steps_s": cell.totals,
                "parts_s": cell.parts,
            }
            for cell in cells
        }
        args.json.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
