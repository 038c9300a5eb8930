"""Attention kernels on a CUDA device, beside what its memory and its matmuls can do.

    python benchmarks/gpu_attention.py [--json FILE] [--only decode]

Per case and backend: median and spread of the time of one layer, the share of the measured copy
bandwidth (bytes of K/V that a step must read once, queries and outputs) and of the measured matmul
rate (multiplications and additions of visible pairs). The plan is made before the clock starts; its
time is a column of its own. Without a CUDA device it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from machine import commit
from torch import Tensor

import ramify
from ramify.attention.backend import backend_class
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable

BACKENDS = ("triton", "flashinfer", "varlen", "flex")
DTYPE = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
REPEATS, WARMUP = 30, 5
GOALS = """Goals, on an H200: paged decode at 85 % of copy bandwidth; grouped decode 10 times as fast
as ungrouped; extend at 0.9 of the best library kernel."""


@dataclass(frozen=True)
class Case:
    """Requests of (cached, new) tokens that share their first `shared` tokens."""

    name: str
    shares: tuple[tuple[int, int], ...]
    shared: int = 0

    @property
    def flops(self) -> float:
        """FLOPs of the two matmuls, over the keys that each query sees."""
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in self.shares)
        return 4.0 * pairs * NUM_HEADS * HEAD_DIM

    @property
    def num_bytes(self) -> int:
        """Bytes to move: K/V of every token (shared tokens once), queries and outputs."""
        tokens = self.shared + sum(cached + new - self.shared for cached, new in self.shares)
        rows = sum(new for _, new in self.shares)
        return (2 * tokens * NUM_KV_HEADS + 2 * rows * NUM_HEADS) * HEAD_DIM * DTYPE.itemsize


CASES = (
    Case("decode, 64 × 4k", ((4095, 1),) * 64),
    Case("decode, 1 × 16k", ((16383, 1),)),
    Case("decode, 64 sharing 16k", ((16384 + 63, 1),) * 64, shared=16384),
    Case("extend, 512 over 4k", ((4096, 512),)),
    Case("extend, 8 × 512 over 4k", ((4096, 512),) * 8),
    Case("prefill, 4k", ((0, 4096),)),
    Case("prefill, 4 × 4k", ((0, 4096),) * 4),
)


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: str
    backend: str
    exact: bool
    ms: float  # median
    low_ms: float  # of the middle half of the runs
    high_ms: float
    plan_ms: float  # host time of planning, nothing on the device awaited
    copy_share: float
    matmul_share: float


@dataclass(frozen=True)
class Limits:
    """Copy bandwidth and matmul rate of the device, as measured."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    @classmethod
    def measured(cls, device: torch.device) -> Limits:
        """A copy of 1 GiB, read and written; a product of two 8192 × 8192 matrices."""
        source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy_ms = median(timed(lambda: target.copy_(source)))
        side = 8192
        a, b = (torch.randn(side, side, dtype=DTYPE, device=device) for _ in "ab")
        product_ms = median(timed(lambda: torch.mm(a, b)))
        return cls(2 * source.numel() / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)


def timed(call: Callable[[], object]) -> list[float]:
    """Milliseconds of `REPEATS` calls on the device, after a warm-up."""
    for _ in range(WARMUP):
        call()
    begin, end = ([torch.cuda.Event(enable_timing=True) for _ in range(REPEATS)] for _ in range(2))
    for index in range(REPEATS):
        begin[index].record()
        call()
        end[index].record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in zip(begin, end, strict=True)]


def batch_of(case: Case, *, is_shared: bool) -> AttentionBatch:
    """A batch over scattered pages; `is_shared` adds the shared prefix to it."""
    common = case.shared // PAGE_SIZE
    counts = [-(-(cached + new) // PAGE_SIZE) - common for cached, new in case.shares]
    pages = torch.randperm(
        common + sum(counts), generator=torch.Generator().manual_seed(0)
    ).tolist()
    first, at = pages[:common], common
    rows = []
    for count in counts:
        rows.append([*first, *pages[at : at + count]])
        at += count
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(case.shares)]
    sharing = [(-1, 0), *[(0, case.shared)] * (len(rows) - 1)] if is_shared and common else ()
    return AttentionBatch.build(extends, PagedBlockTable.of(rows, PAGE_SIZE), sharing)


def measure(
    case: Case, name: str, exact: bool, limits: Limits, device: torch.device, *, is_shared: bool
) -> Row | str:
    """A row, or the reason why there is none."""
    spec = AttentionSpec(
        num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE,
        dtype=DTYPE, windows=(None,), scale=HEAD_DIM**-0.5, exact=exact,
    )  # fmt: skip
    reason = backend_class(name).supports(spec, device)
    if reason is not None:
        return reason
    backend, batch = backend_class(name)(spec, device), batch_of(case, is_shared=is_shared)
    num_pages = int(batch.block_table.max()) + 1
    planes, q = inputs(num_pages, batch.num_tokens, device)
    plan = backend.plan(batch)
    times = sorted(timed(lambda: backend.run(plan, 0, q, planes)))
    start = time.perf_counter()
    for _ in range(5):
        backend.plan(batch)
    plan_ms = (time.perf_counter() - start) / 5 * 1e3
    label = f"{name}, prefixes shared" if is_shared else name
    ms = median(times)
    return Row(
        case.name, label, exact, ms, times[REPEATS // 4], times[3 * REPEATS // 4], plan_ms,
        case.num_bytes / ms * 1e3 / limits.copy_bytes_per_s,
        case.flops / ms * 1e3 / limits.matmul_flops_per_s,
    )  # fmt: skip


def inputs(
    num_pages: int, num_tokens: int, device: torch.device
) -> tuple[dict[str, Tensor], Tensor]:
    """Random planes and queries."""
    shape = (num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    planes = {name: torch.randn(shape, dtype=DTYPE, device=device) for name in ("k", "v")}
    return planes, torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, dtype=DTYPE, device=device)


def table(rows: list[Row]) -> str:
    """Markdown: absolute times, shares of the limits, and times relative to the fastest."""
    lines = [
        "| case | backend | exact | ms: median (middle half) | plan, ms | of copy | of matmul | × best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = min(other.ms for other in rows if other.case == row.case)
        lines.append(
            f"| {row.case} | {row.backend} | {'yes' if row.exact else 'no'} "
            f"| {row.ms:.3f} ({row.low_ms:.3f}–{row.high_ms:.3f}) | {row.plan_ms:.2f} "
            f"| {row.copy_share:.0%} | {row.matmul_share:.0%} | {row.ms / best:.2f} |"
        )
    return "\n".join(lines)


def setting(device: torch.device, limits: Limits) -> dict[str, str]:
    """What is needed to read a figure."""
    return {
        "command": f"python benchmarks/gpu_attention.py {' '.join(sys.argv[1:])}".strip(),
        "commit": f"ramify {ramify.__version__} ({commit()})",
        "hardware": f"{torch.cuda.get_device_name(device)}, {platform.machine()}",
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}",
        "model": f"{NUM_HEADS} heads, {NUM_KV_HEADS} K/V heads, head_dim {HEAD_DIM}, "
        f"page_size {PAGE_SIZE}, {str(DTYPE).removeprefix('torch.')}",
        "copy": f"{limits.copy_bytes_per_s / 1e9:,.0f} GB/s read and written",
        "matmul": f"{limits.matmul_flops_per_s / 1e12:,.0f} TFLOP/s",
        "repeats": f"{REPEATS} after {WARMUP}; K/V of the grouped case may stay in the L2 cache",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write settings and rows to this file")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    limits = Limits.measured(device)
    rows: list[Row] = []
    absent: list[str] = []
    for case in CASES:
        if args.only not in case.name:
            continue
        for name in BACKENDS:
            for exact in (True, False) if name == "triton" else (False,):
                for is_shared in (True, False) if case.shared and name == "triton" else (False,):
                    outcome = measure(case, name, exact, limits, device, is_shared=is_shared)
                    if isinstance(outcome, Row):
                        rows.append(outcome)
                    elif (line := f"{name}: {outcome}") not in absent:
                        absent.append(line)
    known = setting(device, limits)
    print("\n".join(f"- {name}: {value}" for name, value in known.items()))
    print("\n" + table(rows) + "\n")
    print("\n".join(f"- absent: {line}" for line in absent))
    print("\n" + GOALS)
    if args.json is not None:
        document = {"setting": known, "rows": [asdict(row) for row in rows], "absent": absent}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
