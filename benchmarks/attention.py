"""One layer of attention on CPU: what sharing a read gains, beside torch's own kernels.

    make bench-attention                                 the table, about six minutes
    make bench-attention ARGS="--quick"                  one run each
    make bench-attention ARGS="--json out.json --dtypes bfloat16"

The layer is that of a 0.35 B Llama: 16 heads, 8 K/V heads, 64 elements, pages of 16 tokens in random
order. Ramify's backends attend over the pages; the peers gather them into kept buffers first:
`folded sdpa` is scaled_dot_product_attention with the heads of a group as rows, `folded matmul` two
batched products and a softmax, `causal sdpa` a whole prompt without a cache. All take turns within
each round. `exact` says whether a row's bits are the same however it is batched.

The limit is the larger of bytes read once over the bandwidth of a sum, and multiplications over the
speed of a large product, both measured here in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from machine import commit, cpu_model
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ramify.attention.backend import backend_class
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.spec import AttentionSpec
from ramify.kv.block_table import PagedBlockTable

HEADS, KV_HEADS, DIM, PAGE_SIZE = 16, 8, 64, 16
GROUP = HEADS // KV_HEADS
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Work:
    """A batch of equally long requests that share the pages of their first `shared` tokens."""

    name: str
    num_seqs: int
    kv_len: int
    q_len: int
    shared: int
    goal: float  # times as fast as the fastest of torch's, gathering included

    @property
    def multiply_adds(self) -> float:
        seen = self.kv_len - (self.q_len - 1) / 2  # keys that a row sees, on average
        return 2.0 * self.num_seqs * self.q_len * HEADS * DIM * seen

    def num_bytes(self, dtype: torch.dtype) -> float:
        tokens = self.shared + self.num_seqs * (self.kv_len - self.shared)
        return 2.0 * tokens * KV_HEADS * DIM * dtype.itemsize


WORKS = (
    Work("decode, 32 requests share 4,096 tokens", 32, 4096 + 32, 1, 4096, 3.0),
    Work("decode, 1 request of 1,056 tokens", 1, 1056, 1, 0, 1.0),
    Work("decode, 32 requests of 1,056 tokens", 32, 1056, 1, 0, 2.0),
    Work("prefill, 2,048 tokens", 1, 2048, 2048, 0, 0.9),
    Work("prefill, 8,192 tokens", 1, 8192, 8192, 0, 0.9),
)


class Case:
    """K/V pages, block tables and queries of one `Work`, and the implementations to time on it."""

    def __init__(self, work: Work, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)
        self.work, self.dtype = work, dtype
        common, per_seq = work.shared // PAGE_SIZE, -(-work.kv_len // PAGE_SIZE)
        num_pages = common + work.num_seqs * (per_seq - common)
        pages = torch.randperm(num_pages, generator=draw).tolist()
        shared = pages[:common]
        rows = []
        for i in range(work.num_seqs):
            first = common + i * (per_seq - common)
            rows.append(shared + pages[first : first + per_seq - common])
        shape = (num_pages, PAGE_SIZE, KV_HEADS, DIM)
        self.planes = {name: torch.randn(shape, generator=draw).to(dtype) for name in ("k", "v")}
        num_tokens = work.num_seqs * work.q_len
        self.q = torch.randn(num_tokens, HEADS, DIM, generator=draw).to(dtype)
        table = PagedBlockTable.of(rows, PAGE_SIZE)
        extends = [Extend(i, i, work.kv_len - work.q_len, work.q_len) for i in range(work.num_seqs)]
        alone = [(-1, 0)] * work.num_seqs
        sharing = [(-1, 0), *[(0, work.shared)] * (work.num_seqs - 1)] if common else alone
        self.batch = AttentionBatch.build(extends, table, sharing)
        slots = np.concatenate([self.batch.kv_slots(i) for i in range(work.num_seqs)])
        self._slots = torch.from_numpy(slots)
        self._kept = [torch.empty(len(slots), KV_HEADS, DIM, dtype=dtype) for _ in "kv"]

    def ramify(self, name: str, exact: bool) -> Run:
        spec = AttentionSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            page_size=PAGE_SIZE,
            dtype=self.dtype,
            windows=(None,),
            scale=DIM**-0.5,
            exact=exact,
        )
        backend = backend_class(name)(spec, CPU)
        plan = backend.plan(self.batch)  # once per step, not per layer
        return lambda: backend.run(plan, 0, self.q, self.planes)

    def _gathered(self) -> list[Tensor]:
        shape = (self.work.num_seqs, self.work.kv_len, KV_HEADS, DIM)
        return [
            torch.index_select(self.planes[name].flatten(0, 1), 0, self._slots, out=buffer)
            .view(shape)
            .transpose(1, 2)
            for name, buffer in zip("kv", self._kept, strict=True)
        ]

    def _folded(self) -> Tensor:
        shape = (self.work.num_seqs, KV_HEADS, GROUP, DIM)
        return self.q.view(shape)

    def folded_sdpa(self) -> Tensor:
        keys, values = self._gathered()
        return scaled_dot_product_attention(self._folded(), keys, values)

    def folded_matmul(self) -> Tensor:
        keys, values = self._gathered()
        scores = torch.matmul(self._folded() * DIM**-0.5, keys.transpose(2, 3))
        return torch.matmul(scores.softmax(-1), values)

    def causal_sdpa(self) -> Tensor:
        keys, values = self._gathered()
        q = self.q.view(self.work.num_seqs, self.work.q_len, HEADS, DIM).transpose(1, 2)
        output = scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2)

    def implementations(self) -> dict[str, tuple[Run, bool]]:
        """Name → (what to run, exact)."""
        runs = {
            "Ramify cpu": (self.ramify("cpu", True), True),
            "Ramify blocked (torch alone)": (self.ramify("blocked", True), True),
        }
        if self.work.q_len == 1:
            runs["folded sdpa"] = (self.folded_sdpa, False)
            runs["folded matmul"] = (self.folded_matmul, False)
        else:
            runs["causal sdpa"] = (self.causal_sdpa, False)
        return runs


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def machine_limits(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second of a sum over 256 MB; multiply-adds a second of a large product.

    The product is float32, or in `dtype` where that is faster: without instructions for bfloat16 it
    is a hundred times slower, so it is tried on a small one first.
    """
    big = torch.ones(1 << 26)
    square = torch.randn(2048, 2048)
    read = min(seconds(big.sum) for _ in range(5))
    product = min(seconds(lambda: square @ square) for _ in range(3)) / 2048.0**3
    small = square[:256, :256].to(dtype)
    if min(seconds(lambda: small @ small) for _ in range(3)) / 256.0**3 < product:
        narrow = square.to(dtype)
        product = min(seconds(lambda: narrow @ narrow) for _ in range(3)) / 2048.0**3
    return big.numel() * 4 / read, 1 / product


def measure(work: Work, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Time every implementation in turns; measures the machine's limits before and after."""
    case = Case(work, dtype)
    implementations = case.implementations()
    limits = [machine_limits(dtype)]
    expected = None
    for run, _ in implementations.values():  # also warms up
        output = run().float().reshape(-1, DIM)
        assert expected is None or torch.allclose(output, expected, atol=3e-2)
        expected = output
    times: dict[str, list[float]] = {name: [] for name in implementations}
    for _ in range(rounds):
        for name, (run, _) in implementations.items():
            times[name].append(seconds(run))
    limits.append(machine_limits(dtype))
    bandwidth, peak = (max(rates) for rates in zip(*limits, strict=True))
    return {
        "work": work.name,
        "dtype": str(dtype).removeprefix("torch."),
        "times": times,
        "exact": {name: exact for name, (_, exact) in implementations.items()},
        "goal": work.goal,
        "limit_s": max(work.num_bytes(dtype) / bandwidth, work.multiply_adds / peak),
        "bandwidth_gb_s": bandwidth / 1e9,
        "peak_gflop_s": 2 * peak / 1e9,
    }


def table(results: list[dict[str, object]]) -> str:
    """Markdown: medians, ratios per round with their spread, share of the limit."""
    lines = [
        "| work | dtype | implementation | exact | ms, median (min–max) | × Ramify cpu | goal | limit / time |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for result in results:
        times: dict[str, list[float]] = result["times"]  # type: ignore[assignment]
        ours = times["Ramify cpu"]
        peers = {
            name: statistics.median(own) for name, own in times.items() if "Ramify" not in name
        }
        best = min(peers, key=lambda name: peers[name])
        for name, own in times.items():
            ratios = [a / b for a, b in zip(own, ours, strict=True)]
            goal = f"≥ {result['goal']}" if name == best else ""
            exact = "yes" if result["exact"][name] else "no"  # type: ignore[index]
            share = float(result["limit_s"]) / statistics.median(own)  # type: ignore[arg-type]
            lines.append(
                f"| {result['work']} | {result['dtype']} | {name} | {exact} | "
                f"{_spread([1e3 * t for t in own])} | {_spread(ratios)} | {goal} | {share:.2f} |"
            )
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, no prefill of 8,192")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    setting = (
        f"commit {commit()}, {cpu_model()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    print(setting + "\n", flush=True)
    results = []
    for work in WORKS[:-1] if args.quick else WORKS:
        for dtype in args.dtypes.split(","):
            results.append(measure(work, DTYPES[dtype], 1 if args.quick else args.rounds))
            print(f"  {work.name}, {dtype}: done", flush=True)
    print("\n" + table(results))
    if args.json:
        args.json.write_text(json.dumps({"setting": setting, "found": results}, indent=1))


if __name__ == "__main__":
    main()
