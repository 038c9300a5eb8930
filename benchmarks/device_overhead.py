"""What a decode step costs the host with the executor of a device, its forward pass left out.

    python benchmarks/device_overhead.py                         64 running requests, each kind of sampling
    python benchmarks/device_overhead.py --running 8 64 --steps 500 --kinds greedy
    python benchmarks/device_overhead.py --aligned               all requests enter a page in the same step

A whole step of the engine: schedule, plan, upload, replay, sample, commit, update, the text of each
token. In each step one request of 16 enters a new page and publishes the one before. The graph of
the forward pass is captured once and then answers with the same logits, and the sampling kernel,
which a device runs, is left out, too: what is left is Python and the launches of a step. `--sample`
samples by torch's operations instead, whose arithmetic is then in the figures.

Times are those of the engine's thread: waiting for a device is not in them. Printed are the least,
the median and the 90th percentile of a step in ms; the medians of its parts, from steps of their own
in which the parts are wrapped; of these, the time inside torch's operations and their number; and
how many Python functions a step calls for each request, which depends on no machine.

| part | what |
|---|---|
| plan | choose the requests, plan their pages, build metadata and `StepPlan` |
| launch | `Executor.begin` or `begin_ahead`: block table, upload, replay, sampling |
| collect | `Executor.finish`: ids and flags to `StepResult` |
| update | commit and publish pages, append tokens, text, ends, `StepOutput` |

Goal: 1 ms at 64 requests.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from python_calls import count_calls
from step_overhead import timed
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ramify import LLM, SamplingParams
from ramify.engine import step_pipeline
from ramify.engine.execution import device_executor
from ramify.engine.execution.decode_sources import TorchSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.staged_upload import HostStream
from ramify.engine.execution.step_graphs import DecodeGraphs, Outputs
from ramify.testing import write_tiny_checkpoint

CONTEXT, WARM_STEPS, PROFILED_STEPS = 500, 20, 32
LETTER_A = 38  # a token of the tiny tokenizer; the other capital letters follow
PARTS = ("plan", "launch", "collect", "update")
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1, "seed": 1},
}  # fmt: skip


class FrozenStep:
    """A captured function that is never run again; the likeliest token of each row is a letter.

    As most of a text, and unlike what a random model answers: bytes that are no characters, which a
    detokenizer decodes again with each token until they are 64.
    """

    def __init__(self, outputs: Outputs) -> None:
        hidden, logits, are_finite = outputs
        logits = logits.clamp(max=0.0)
        logits[torch.arange(len(logits)), LETTER_A + torch.arange(len(logits)) % 26] = 1.0
        self._outputs = hidden, logits, are_finite

    def replay(self) -> Outputs:
        """See `CapturedStep`; a copy of the logits, which sampling may overwrite."""
        hidden, logits, are_finite = self._outputs
        return hidden, logits.clone(), are_finite


class FrozenGraphs:
    """A `GraphDevice` that runs a function once."""

    def capture(self, run: Callable[[], Outputs]) -> FrozenStep:
        """See `GraphDevice`."""
        return FrozenStep(run())

    def drop(self) -> None:
        """See `GraphDevice`."""


class TorchCalls(TorchFunctionMode):
    """Counts torch's operations and the time inside them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.spent = 0, 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch in place of `func`."""
        start = time.thread_time()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.spent += time.thread_time() - start
            self.num_calls += 1


@dataclass(frozen=True, slots=True)
class Figures:
    """Of decode steps, in seconds of the engine's thread."""

    steps: list[float]
    parts: dict[str, float]  # medians
    torch_s: float  # median; a share of the parts
    num_torch_calls: float  # of a step
    num_python_calls: float  # of a step, for each request


def leave_out_sampling() -> None:
    """Sample as on a CUDA device, but for the kernel: the letter A and status `OK` in its place."""
    from ramify.kernels.triton import sample_batch

    def sample(self: sample_batch.SampleBatch, logits: Tensor) -> sample_batch.SampledRows:
        zeros = torch.zeros(self.num_rows, dtype=torch.int32)
        return sample_batch.SampledRows(zeros + LETTER_A, zeros, logits[:, 0], logits[:, 0])

    setattr(device_executor, "has_sampling_kernels", lambda _device: True)  # noqa: B010
    setattr(sample_batch.SampleBatch, "sample", sample)  # noqa: B010


def decoding_engine(
    checkpoint: Path, num_running: int, options: dict[str, float], num_new: int, *, aligned: bool
) -> LLM:
    """An engine with that many requests, all of which decode by the executor of a device."""
    max_len = CONTEXT + 16 + num_new
    llm = LLM(
        checkpoint,
        kv_cache_tokens=num_running * (max_len + 16),
        max_num_seqs=num_running,
        max_batch_tokens=4096,
        max_model_len=max_len,
        ops="torch",
        exact=False,
    )
    engine = llm.engine
    runner, max_pages = engine.runner, engine.config.max_table_pages
    source = TorchSource(
        engine.attention_spec, runner.pool, num_rows=num_running, max_pages=max_pages
    )
    decode = DecodeGraphs(runner, source, FrozenGraphs(), HostStream(), num_rows=num_running)
    engine.core.executor = DeviceExecutor(runner, decode=decode)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, **options)  # type: ignore[arg-type]
    for at in range(num_running):
        length = CONTEXT if aligned else CONTEXT + at % 16
        llm.add_request([3 + (7 * at + i) % 200 for i in range(length)], params)
    while decode.num_replayed < WARM_STEPS:
        llm.step()
    return llm


def measure(llm: LLM, num_running: int, steps: int) -> Figures:
    """Figures of `steps` decode steps, and of some more that are wrapped."""
    spent: list[float] = []
    for _ in range(steps):
        start = time.thread_time()
        llm.step()
        spent.append(time.thread_time() - start)
    parts, torch_times = defaultdict[str, list[float]](list), list[float]()
    num_torch_calls = 0
    for _ in range(PROFILED_STEPS):
        for part, seconds in step_by_part(llm).items():
            parts[part].append(seconds)
        with TorchCalls() as calls:
            llm.step()
        torch_times.append(calls.spent)
        num_torch_calls += calls.num_calls
    return Figures(
        spent,
        {part: statistics.median(parts[part]) for part in PARTS},
        statistics.median(torch_times),
        num_torch_calls / PROFILED_STEPS,
        count_calls(llm.step, PROFILED_STEPS) / PROFILED_STEPS / num_running,
    )


def step_by_part(llm: LLM) -> dict[str, float]:
    """Seconds of the parts of a step."""
    spent, core = defaultdict[str, float](float), llm.engine.core
    undo = [
        timed(core.scheduler, "schedule", spent, "plan"),
        timed(core.scheduler, "schedule_ahead", spent, "plan"),
        timed(step_pipeline, "build_step_plan", spent, "plan"),
        timed(step_pipeline, "build_ahead_plan", spent, "plan"),
        timed(core.executor, "begin", spent, "launch"),
        timed(core.executor, "begin_ahead", spent, "launch"),
        timed(core.executor, "finish", spent, "collect"),
        timed(core.results, "process", spent, "update"),
    ]
    llm.step()
    for restore in undo:
        restore()
    return spent


def main() -> None:
    """Print a line for each number of running requests and each kind of sampling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="*", default=[64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kinds", nargs="*", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--aligned", action="store_true", help="prompts of one length")
    parser.add_argument("--sample", action="store_true", help="by torch's operations")
    args = parser.parse_args()
    if not args.sample:
        leave_out_sampling()
    torch.set_num_threads(1)
    names = ("least", "median", "90 %", *PARTS, "torch")
    print(f"{'running':>8} {'kind':>10} ", *[f"{name:>8}" for name in names], "ops  calls a row")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, "llama", num_hidden_layers=1)
        for num_running in args.running:
            for kind in args.kinds:
                num_new = args.steps + WARM_STEPS + 3 * PROFILED_STEPS + 16
                llm = decoding_engine(
                    checkpoint, num_running, KINDS[kind], num_new, aligned=args.aligned
                )
                figures = measure(llm, num_running, args.steps)
                ordered = sorted(figures.steps)
                times = [
                    ordered[0],
                    statistics.median(ordered),
                    ordered[len(ordered) * 9 // 10],
                    *[figures.parts[part] for part in PARTS],
                    figures.torch_s,
                ]
                print(
                    f"{num_running:>8} {kind:>10} ",
                    *[f"{seconds * 1e3:8.3f}" for seconds in times],
                    f"{figures.num_torch_calls:4.0f} {figures.num_python_calls:6.1f}",
                )


if __name__ == "__main__":
    main()
