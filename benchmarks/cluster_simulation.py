"""Routing rules in virtual time: hit rate, time to first token and imbalance of simulated fleets.

    make bench-routing                                      generated traffic, 4 and 16 replicas
    make bench-routing ARGS="--replicas 4,16,100 --trace conversation_trace.jsonl --json out.json"

Every rule serves the same requests with the same caches and costs; the router of this package gets
the caches' events 20 ms late. "one cache" is one engine with the memory, the speed and the rows of
all replicas together: the bound of every hit rate. A trace is sped up in proportion to the replicas.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from machine import commit, cpu_model

from ramify.analysis.log_files import read_log
from ramify.analysis.simulation.page_trace import PageTrace
from ramify.analysis.simulation.replays.cost_model import CostModel
from ramify.analysis.simulation.sources import page_trace
from ramify.cluster.simulation import traffic
from ramify.cluster.simulation.fleet import FleetRun, serve_trace
from ramify.cluster.simulation.rules import RULES

COST = CostModel(step_s=0.02, token_s=1e-4, read_s=0.0)
MAX_ROWS = 64


def workloads(
    num_replicas: int, trace: PageTrace | None, scale: float, trace_rate: float
) -> Iterator[tuple[str, PageTrace, int, float]]:
    """Names, traces, tokens of a replica's cache, and how much faster than logged."""
    size = num_replicas * scale
    yield (
        "conversations",
        traffic.conversations(round(100 * size), 0.35 * num_replicas),
        60_000,
        1.0,
    )
    yield "agents", traffic.agents(round(15 * size), 0.06 * num_replicas), 150_000, 1.0
    if trace is not None:
        yield "trace", trace, 400_000, trace_rate * num_replicas


def row(run: FleetRun) -> dict[str, Any]:
    """A line of the table."""
    imbalance = float(np.percentile(run.imbalance, 99)) if len(run.imbalance) else 0.0
    return {
        "hit_rate": round(run.hit_rate, 4),
        "ttft_p50_s": round(run.percentile_s(50), 3),
        "ttft_p99_s": round(run.percentile_s(99), 3),
        "imbalance_p99": round(imbalance, 2),
        "work_imbalance": round(run.work_imbalance, 2),
        "event_kb_per_s": round(run.event_bytes_per_s / 1e3, 1),
        "index_entries": run.num_index_entries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", default="4,16", help="fleet sizes, with commas")
    parser.add_argument("--trace", type=Path, help="a log with arrival times, such as Mooncake's")
    parser.add_argument(
        "--trace-rate",
        type=float,
        default=0.2,
        help="factor of the trace's arrival rate, for each replica",
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the generated traffic's length"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = None if args.trace is None else page_trace(read_log([args.trace])).trace
    results: dict[str, Any] = {"commit": commit(), "cpu": cpu_model(), "rows": []}
    for num_replicas in map(int, args.replicas.split(",")):
        for name, load, tokens, speed_up in workloads(
            num_replicas, trace, args.scale, args.trace_rate
        ):
            print(f"\n{name}, {num_replicas} replicas x {tokens:,} tokens, {len(load):,} requests")
            for rule in (*RULES, "one cache"):
                begin = time.perf_counter()
                if rule == "one cache":
                    cost = CostModel(COST.step_s, COST.token_s / num_replicas, 0.0)
                    run = serve_trace(
                        load,
                        RULES["round robin"],
                        num_replicas=1,
                        replica_tokens=tokens * num_replicas,
                        cost=cost,
                        max_rows=MAX_ROWS * num_replicas,
                        speed_up=speed_up,
                    )
                else:
                    run = serve_trace(
                        load,
                        RULES[rule],
                        num_replicas=num_replicas,
                        replica_tokens=tokens,
                        cost=COST,
                        max_rows=MAX_ROWS,
                        speed_up=speed_up,
                    )
                line = row(run)
                seconds = time.perf_counter() - begin
                results["rows"].append(
                    {"workload": name, "replicas": num_replicas, "rule": rule} | line
                )
                text = "  ".join(f"{key} {value:g}" for key, value in line.items())
                print(f"  {rule:18} {text}  [{seconds:.0f} s]")
                sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
