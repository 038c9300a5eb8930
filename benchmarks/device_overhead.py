"""What a decode step costs the host with the executor of a device, its forward pass left out.

    python benchmarks/device_overhead.py                         64 running requests, greedy and sampled
    python benchmarks/device_overhead.py --running 8 64 --steps 500

A whole step of the engine: schedule, plan, upload, replay, sample, commit, update, the text of each
token. The graph of the forward pass is captured once and then answers with the same logits, and the
sampling kernel, which a device runs, is left out, too: what is left is Python and the launches of a step.
`--sample` samples by torch's operations instead, whose arithmetic is then in the figures.
Goal: 1 ms at 64 requests.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.engine.execution import device_executor
from ramify.engine.execution.decode_sources import TorchSource
from ramify.engine.execution.device_executor import DeviceExecutor
from ramify.engine.execution.staged_upload import HostStream
from ramify.engine.execution.step_graphs import DecodeGraphs, Outputs
from ramify.testing import write_tiny_checkpoint

CONTEXT, WARM_STEPS = 500, 20
KINDS = {"greedy": {}, "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 1}}


class FrozenStep:
    """A captured function that is never run again."""

    def __init__(self, outputs: Outputs) -> None:
        self._outputs = outputs

    def replay(self) -> Outputs:
        """See `CapturedStep`; copies, since sampling may overwrite logits."""
        return tuple([output.clone() for output in self._outputs])


class FrozenGraphs:
    """A `GraphDevice` that runs a function once."""

    def capture(self, run: Callable[[], Outputs]) -> FrozenStep:
        """See `GraphDevice`."""
        return FrozenStep(run())

    def drop(self) -> None:
        """See `GraphDevice`."""


def leave_out_sampling() -> None:
    """Sample as on a CUDA device, but for the kernel: token 7 and status `OK` in its place."""
    from ramify.kernels.triton import sample_batch

    def sample(self: sample_batch.SampleBatch, logits: Tensor) -> sample_batch.SampledRows:
        zeros = torch.zeros(len(self.seeds), dtype=torch.int32)
        return sample_batch.SampledRows(zeros + 7, zeros, logits[:, 0], logits[:, 0])

    setattr(device_executor, "has_sampling_kernels", lambda _device: True)  # noqa: B010
    setattr(sample_batch.SampleBatch, "sample", sample)  # noqa: B010


def measure(
    checkpoint: Path, num_running: int, options: dict[str, float], steps: int
) -> list[float]:
    """Seconds of the engine's thread for each of `steps` decode steps."""
    num_new = steps + WARM_STEPS + 8
    llm = LLM(
        checkpoint,
        kv_cache_tokens=num_running * (CONTEXT + num_new + 32),
        max_num_seqs=num_running,
        max_batch_tokens=4096,
        max_model_len=CONTEXT + num_new + 32,
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
        llm.add_request([3 + (7 * at + i) % 200 for i in range(CONTEXT)], params)
    while decode.num_replayed < WARM_STEPS:
        llm.step()
    spent: list[float] = []
    for _ in range(steps):
        start = time.thread_time()
        llm.step()
        spent.append(time.thread_time() - start)
    return spent


def main() -> None:
    """Print the least and the median time of a step for each kind of sampling."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="*", default=[64])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sample", action="store_true", help="by torch's operations")
    args = parser.parse_args()
    if not args.sample:
        leave_out_sampling()
    torch.set_num_threads(1)
    print(f"{'running':>8} {'kind':>8} {'least ms':>9} {'median ms':>10}")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_tiny_checkpoint(folder, "llama", num_hidden_layers=1)
        for num_running in args.running:
            for kind, options in KINDS.items():
                spent = measure(checkpoint, num_running, options, args.steps)
                least, median = min(spent) * 1e3, statistics.median(spent) * 1e3
                print(f"{num_running:>8} {kind:>8} {least:9.3f} {median:10.3f}")


if __name__ == "__main__":
    main()
