"""Small requests on idle cores and beside a busy loop, by how idle threads wait.

    make bench-busy-cores                        needs cores that nothing else uses
    make bench-busy-cores ARGS="--rounds 5 --model DIR"

Time one call of `generate` with 12 requests of 16 new tokens, in a process for each wait policy. The
policies take turns within each round. "before" is libgomp's own spin count, "passive" sleeps at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from ramify import LLM, OMP_SPIN_COUNT, SamplingParams

WAYS = {
    "before": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    f"default ({OMP_SPIN_COUNT})": {},
}
CALLS, WARM_UP = 20, 3
QUESTIONS = [f"Mara has {n} lamps. Who has lamps?" for n in range(12)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="ramify-tiny")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(median_call_s(args.model))
        return
    seconds: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for is_busy in (False, True):
            for way, variables in WAYS.items():
                with busy_loop(is_busy):
                    seconds[way, is_busy].append(measure(args.model, variables))
    print(f"{len(QUESTIONS)} requests, ms: median of {args.rounds} rounds (least–most)\n")
    print("| threads wait | idle cores | beside a busy loop |\n|---|---:|---:|")
    for way in WAYS:
        cells = [
            f"{statistics.median(values) * 1e3:.1f} ({min(values) * 1e3:.1f}–{max(values) * 1e3:.1f})"
            for values in (seconds[way, False], seconds[way, True])
        ]
        print(f"| {way} | {cells[0]} | {cells[1]} |")


def measure(model: str, variables: dict[str, str]) -> float:
    """Median seconds of a call in a process of its own."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    output = subprocess.run(
        [sys.executable, __file__, "--worker", "--model", model],
        env=environment | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(output.stdout.split()[-1])


def median_call_s(model: str) -> float:
    """Median seconds of one call of `generate`, after a warm-up."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    llm, seconds = LLM(model, kv_cache_tokens=16_384), []
    for _ in range(WARM_UP + CALLS):
        begin = time.perf_counter()
        llm.generate(QUESTIONS, params)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[WARM_UP:])


@contextmanager
def busy_loop(is_busy: bool) -> Iterator[None]:
    """Another process that computes for ever, if `is_busy`."""
    if not is_busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
