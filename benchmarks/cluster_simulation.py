"""Routing rules in virtual time: hit rate, time to first token and imbalance of simulated fleets.

    make bench-routing                                      generated traffic, 4 and 16 replicas
    make bench-routing ARGS="--replicas 4,16,100 --trace conversation_trace.jsonl --json out.json"
    make bench-routing ARGS="--replicas 100 --seeds 10 --workloads agents"

Every rule serves the same requests with the same caches and costs; the router of this package gets
the caches' events 20 ms late. "one cache" is one engine with the memory, the speed and the rows of
all replicas together: the bound of every hit rate. Generated traffic is drawn with each of the seeds:
the table has the means, and behind ± half the range. A trace is sped up in proportion to the replicas;
of a trace, the first half is for choosing constants and the second for reporting.

Imbalance, the 99th percentile of three:

    requests    at arrivals: the most live requests of a replica, but one / the mean (at least 2)
    minute      of each minute: the most seconds that a replica computes / the mean
    whole run   likewise (no percentile)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, cpu_model

from ramify.analysis.log_files import read_log
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.sources import page_trace
from ramify.cluster.simulation import traffic
from ramify.cluster.simulation.fleet import FleetRun, serve_trace
from ramify.cluster.simulation.rules import RULES
from ramify.step_cost import CostModel

COST = CostModel(step_s=0.02, token_s=1e-4, read_s=0.0)
MAX_ROWS = 64
ONE_CACHE = "one cache"
HELD_OUT_SEEDS = "10,11,12"  # constants of the router were chosen with others
WORKLOADS = ("conversations", "agents", "trace")


@dataclass(frozen=True, slots=True)
class Workload:
    """The same traffic for every rule."""

    name: str
    traces: list[PageTrace]  # by seed
    replica_tokens: int
    speed_up: float = 1.0

    @property
    def num_requests(self) -> int:
        """Of one of the traces, on average."""
        return sum(map(len, self.traces)) // len(self.traces)


def workloads(
    num_replicas: int,
    names: Sequence[str],
    seeds: Sequence[int],
    trace: PageTrace | None,
    rate: float,
) -> Iterator[Workload]:
    """Traffic in proportion to the replicas.

    Args:
        rate: of the trace, for each replica.
    """
    size = num_replicas
    if "conversations" in names:
        traces = [traffic.conversations(100 * size, 0.35 * size, seed) for seed in seeds]
        yield Workload("conversations", traces, 60_000)
    if "agents" in names:
        traces = [traffic.agents(15 * size, 0.06 * size, seed) for seed in seeds]
        yield Workload("agents", traces, 150_000)
    if "trace" in names and trace is not None:
        yield Workload("trace", [trace], 400_000, rate * num_replicas)


def half_of(trace: PageTrace, half: str) -> PageTrace:
    """The first or second half of the requests, or all of them."""
    middle = len(trace) // 2
    begin, end = {"first": (0, middle), "second": (middle, len(trace))}.get(half, (0, len(trace)))
    return trace.select(np.arange(begin, end))


def serve(load: Workload, rule: str, num_replicas: int) -> list[FleetRun]:
    """A run for each seed."""
    options: dict[str, Any] = {
        "num_replicas": num_replicas,
        "replica_tokens": load.replica_tokens,
        "cost": COST,
        "max_rows": MAX_ROWS,
    }
    if rule == ONE_CACHE:
        options = {
            "num_replicas": 1,
            "replica_tokens": load.replica_tokens * num_replicas,
            "cost": CostModel(COST.step_s, COST.token_s / num_replicas, 0.0),
            "max_rows": MAX_ROWS * num_replicas,
        }
    made = RULES["round robin" if rule == ONE_CACHE else rule]
    return [serve_trace(trace, made, speed_up=load.speed_up, **options) for trace in load.traces]


def row(runs: Sequence[FleetRun], num_replicas: int) -> dict[str, float]:
    """A line of the table; `*_spread` is half the range over the seeds."""

    def mean(value: Callable[[FleetRun], float]) -> float:
        return float(np.mean([value(run) for run in runs]))

    def spread(value: Callable[[FleetRun], float]) -> float:
        return float(np.ptp([value(run) for run in runs])) / 2

    def p99(parts: Sequence[Any]) -> float:
        values = np.concatenate(parts)
        return float(np.percentile(values, 99)) if len(values) else 0.0

    return {
        "hit_rate": mean(lambda run: run.hit_rate),
        "hit_rate_spread": spread(lambda run: run.hit_rate),
        "ttft_p50_s": mean(lambda run: run.percentile_s(50)),
        "ttft_p99_s": mean(lambda run: run.percentile_s(99)),
        "ttft_p99_spread_s": spread(lambda run: run.percentile_s(99)),
        "requests_imbalance_p99": p99([run.imbalance for run in runs]),
        "minute_imbalance_p99": p99([run.minutes for run in runs]),
        "run_imbalance": mean(lambda run: run.work_imbalance),
        "event_kb_per_s": mean(lambda run: run.event_bytes_per_s) / 1e3 / num_replicas,
        "index_mb": mean(lambda run: run.index_bytes) / 1e6,
    }


HEAD = """
| rule | hit rate % | to one cache | TTFT p50 s | TTFT p99 s | requests | minute | run | events kB/s | index MB | took |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""


def line(rule: str, values: dict[str, float], best: float, seconds: float) -> str:
    """A row of `HEAD`; events are those of a replica."""
    cells = (
        rule,
        f"{values['hit_rate'] * 100:.1f} ± {values['hit_rate_spread'] * 100:.1f}",
        f"{(values['hit_rate'] - best) * 100:+.1f}",
        f"{values['ttft_p50_s']:.2f}",
        f"{values['ttft_p99_s']:.2f} ± {values['ttft_p99_spread_s']:.2f}",
        f"{values['requests_imbalance_p99']:.2f}",
        f"{values['minute_imbalance_p99']:.2f}",
        f"{values['run_imbalance']:.2f}",
        f"{values['event_kb_per_s']:.1f}",
        f"{values['index_mb']:.1f}",
        f"{seconds:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="4,16", help="fleet sizes, with commas")
    parser.add_argument("--seeds", default=HELD_OUT_SEEDS, help="of generated traffic, with commas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="with commas")
    parser.add_argument("--rules", default=",".join(RULES), help="with commas")
    parser.add_argument("--trace", type=Path, help="a log with arrival times, such as Mooncake's")
    parser.add_argument("--trace-half", choices=("first", "second", "both"), default="second")
    parser.add_argument(
        "--trace-rate",
        type=float,
        default=0.2,
        help="factor of the trace's arrival rate, for each replica",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = None
    if args.trace is not None:
        trace = half_of(page_trace(read_log([args.trace])).trace, args.trace_half)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    results: dict[str, Any] = {"commit": commit(), "cpu": cpu_model(), "rows": []}
    for num_replicas in map(int, args.replicas.split(",")):
        names = args.workloads.split(",")
        for load in workloads(num_replicas, names, seeds, trace, args.trace_rate):
            print(
                f"\n{load.name}, {num_replicas} replicas x {load.replica_tokens:,} tokens, "
                f"{len(load.traces)} x {load.num_requests:,} requests\n{HEAD}"
            )
            best = 0.0
            for rule in (ONE_CACHE, *args.rules.split(",")):
                begin = time.perf_counter()
                values = row(serve(load, rule, num_replicas), num_replicas)
                best = best or values["hit_rate"]
                results["rows"].append(
                    {"workload": load.name, "replicas": num_replicas, "rule": rule} | values
                )
                print(line(rule, values, best, time.perf_counter() - begin))
                sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
