"""The analyser at two sizes: time and peak memory of lint, simulate and the tree of requests.

    python benchmarks/analysis_scale.py                     10^5 requests of 10^3 tokens, 10^6 hashed
    python benchmarks/analysis_scale.py --scale 0.1         a tenth of each
    python benchmarks/analysis_scale.py --only simulate tree --json out.json

Each case runs in a process of its own, at half the size and at the whole size: time and memory that
grow linearly double. Logs are generated into a temporary directory, conversations with shared heads;
writing them is not timed. `mooncake` is the published trace from file to report, if it is there.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

TRACE = Path("shared", "data", "mooncake", "conversation_trace.jsonl")
FOLDERS = Path(__file__).resolve().parents[2:4]  # beside the checkout, or above its neighbours
MOONCAKE = next((at / TRACE for at in FOLDERS if (at / TRACE).exists()), FOLDERS[0] / TRACE)
NUM_WORDS = 5000
BLOCK = 512
NUM_HEADS = 1000
SIZES = {"lint": 100_000, "simulate": 1_000_000, "tree": 1_000_000, "mooncake": 12_031}


def conversations(num_requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Chat bodies of about 1,000 tokens: a head of 700, turns of 60 to 300, times."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randrange(2, 9))) for _ in range(NUM_WORDS)]
    often = [1 / rank for rank in range(3, NUM_WORDS + 3)]  # as in prose
    heads = [" ".join(rng.choices(words, often, k=700)) for _ in range(20)]
    number = 0
    while number < num_requests:
        messages = [{"role": "system", "content": rng.choice(heads)}]
        for _ in range(min(rng.randrange(1, 6), num_requests - number)):
            text = " ".join(rng.choices(words, often, k=rng.randrange(60, 300)))
            messages.append({"role": "user", "content": f"{number} {text}"})
            yield {"model": "m", "messages": messages}
            messages = [*messages, {"role": "assistant", "content": text[:200]}]
            number += 1


def hashed(num_requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Mooncake rows of about 20 blocks: conversations that grow, under popular heads."""
    rng = random.Random(seed)
    fresh = NUM_HEADS * 8
    live: list[list[int]] = []
    for number in range(num_requests):
        if live and rng.random() < 0.5:
            ids = live.pop(rng.randrange(len(live)))
        else:
            head = min(int(rng.paretovariate(0.8)) - 1, NUM_HEADS - 1)
            ids = list(range(head * 8, head * 8 + rng.randrange(1, 9)))
        count = rng.randrange(2, 24)
        ids = [*ids, *range(fresh, fresh + count)]
        fresh += count
        if len(ids) < 100:
            live.append(ids)
            del live[:-5000]
        yield {
            "timestamp": number * 10,
            "input_length": len(ids) * BLOCK - rng.randrange(BLOCK),
            "output_length": 100,
            "hash_ids": ids,
        }


def run_lint(log: Path, _num_requests: int) -> str:
    from ramify.analysis import lint

    report = lint(log)
    return f"{report.num_requests:,} requests, {len(report.findings)} findings"


def run_simulate(log: Path, _num_requests: int) -> str:
    from ramify.analysis import simulate

    result = simulate(log, capacity="10M", policy="lru")
    rate = result.one_pass_lru[10_000_000]
    assert abs(rate - result.curve["lru"][10_000_000]) < 0.003
    return f"{result.facts.page_references:,} pages, LRU {rate:.2%}, infinite {result.infinite:.2%}"


def run_tree(_log: Path, num_requests: int) -> str:
    """10^3 tokens a request, as 62 hashed blocks of 16, and 8 tokens more."""
    from ramify.analysis import RequestPrefixMatcher

    rng = np.random.default_rng(0)
    matcher = RequestPrefixMatcher(block_size=16, capacity_tokens=10_000_000)
    fresh = NUM_HEADS * 100
    for request in range(num_requests):
        head = min(int(rng.zipf(1.3)), NUM_HEADS) - 1
        num_shared = int(rng.integers(1, 31))
        own = np.arange(fresh, fresh + 62 - num_shared)
        tokens = np.concatenate([head * 100 + np.arange(num_shared), own])
        fresh += len(own)
        matcher.add_request_prefix(request, tokens, num_tokens=1000)
    saving = matcher.estimate_saving(matcher.capacity_tokens)
    groups = matcher.get_prefix_groups()
    return (
        f"{matcher.tree.total_tokens:,} tokens, {matcher.tree.num_nodes:,} nodes, "
        f"{len(groups):,} groups, speed-up {saving.speedup:.3f}"
    )


def run_mooncake(log: Path, _num_requests: int) -> str:
    """`ramify analyze` as a user runs it, in this process."""
    from typer.testing import CliRunner

    from ramify.cli import app

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        arguments = ["analyze", str(log), "--json", str(out / "a.json"), "--html"]
        done = CliRunner().invoke(app, [*arguments, str(out / "a.html")])
        assert done.exit_code == 0, done.output
        return f"{(out / 'a.html').stat().st_size:,} bytes of HTML"


CASES: dict[str, Callable[[Path, int], str]] = {
    "lint": run_lint,
    "simulate": run_simulate,
    "tree": run_tree,
    "mooncake": run_mooncake,
}


def write_log(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def run_case(name: str, log: Path, num_requests: int) -> None:
    """In a process of its own: print time, memory and what was computed, as JSON."""
    start = time.perf_counter()
    outcome = CASES[name](log, num_requests)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if platform.system() == "Darwin" else 1024
    )
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "outcome": outcome}))


def measure(name: str, log: Path, num_requests: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, str(log), str(num_requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        run_case(args.case[0], Path(args.case[1]), int(args.case[2]))
        return
    results: dict[str, dict[int, Any]] = {}
    print(f"{'case':>10}{'requests':>12}{'s':>9}{'us/request':>12}{'peak MB':>9}")
    for name in args.only:
        whole = max(2, int(SIZES[name] * args.scale))
        sizes = [SIZES[name]] if name == "mooncake" else [whole // 2, whole]
        for num_requests in sizes:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log.jsonl")
                if name == "mooncake":
                    log = MOONCAKE
                elif name != "tree":
                    rows = conversations if name == "lint" else hashed
                    write_log(log, rows(num_requests))
                if name == "mooncake" and not log.exists():
                    print(f"{name:>10}  the trace is not at {log}")
                    continue
                figures = measure(name, log, num_requests)
            results.setdefault(name, {})[num_requests] = figures
            if "failed" in figures:
                print(f"{name:>10}{num_requests:>12,}  failed: {figures['failed']}")
                continue
            print(
                f"{name:>10}{num_requests:>12,}{figures['seconds']:>9.1f}"
                f"{figures['seconds'] / num_requests * 1e6:>12.1f}"
                f"{figures['peak_bytes'] / 1e6:>9,.0f}  {figures['outcome']}",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
