"""Ramify's cache core beside those of other engines: same requests, same pages, in one run.

    make bench-core                                     everything, about fifteen minutes
    make bench-core ARGS="--quick"                      a first look, one or two minutes
    make bench-core ARGS="--peers ramify,phyai --workloads chat --no-scaling --json out.json"
    make bench-core ARGS="--policies --trace A.jsonl --trace B.jsonl"    hit rates, no clock

A request is `match` (look up, pin, obtain the page ids of the hit), `alloc` (evict if short, hand
out pages for the rest) and `insert` (publish prompt and output, give back duplicates and the tail,
unpin). Token containers are each peer's own and are made off the clock. Every core has one process
per workload and a new cache per run; the cores take turns within each round, so that a slow phase
of the machine meets all of them. Before any clock runs, every core is audited (each page of each
hit must hold the right tokens), and where nothing is evicted all cores must hit the same tokens.

A peer that is not there is reported with the reason and what would change it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from arguments import names
from core.contract import AbsentError, Entry
from core.policies import default_policies, hit_rates
from core.registry import ENTRIES, NATIVE, OURS
from core.report import (
    COLUMNS,
    absences,
    policy_table,
    scaling_table,
    setting,
    speed_table,
)
from core.run import Cell, Worker, WorkerGoneError, disagreement, run_workload
from core.workloads import WORKLOADS, find_trace

import ramify

PEERS_VARIABLE = "RAMIFY_PEERS"
DEFAULT_PEERS = Path(__file__).parents[1] / ".venv-peers" / "peers"
QUICK_REQUESTS = {"trace": 300, "few-shot": 768, "chat": 512, "unshared": 1_024}
CHEAP_PEERS = ("phyai", "sglang-rust", "sglang-radix")  # in the scaling rows


class Benchmark:
    """Owns the workers and collects all measurements for the tables and for --json."""

    def __init__(self, args: argparse.Namespace, trace: Path | None) -> None:
        self._args, self._trace = args, trace
        self.workers: list[Worker] = []
        self.absent: dict[str, tuple[Entry, str]] = {}
        self.wrong: list[str] = []  # what makes the figures worthless
        self.results: dict[str, Any] = {"workloads": {}, "scaling": {}}

    def start(self) -> None:
        """Start all cores in parallel; print which are absent and why."""
        started = [Worker(ENTRIES[name], self._args.peers_dir) for name in self._args.peers]
        versions: dict[str, str] = {}
        audited: dict[str, int] = {}
        for worker in started:
            name = worker.entry.name
            try:
                answer = worker.answer()
            except WorkerGoneError as gone:
                answer = {"absent": f"failed before any clock ran: {gone}"}
                if name.startswith(OURS):
                    self.wrong.append(f"{name}: {gone}")
            if "absent" in answer:
                self.absent[name] = (worker.entry, answer["absent"])
                worker.end()
            else:
                versions[name] = answer["version"]
                audited[name] = answer["audited_pages"]
                self.workers.append(worker)
        self.results["setting"] = setting(versions)
        self.results["audited_pages"] = audited
        self.results["absent"] = {name: reason for name, (_, reason) in self.absent.items()}
        for name, value in self.results["setting"].items():
            print(f"{name}: {value}")
        print(
            f"audited: {min(filter(None, audited.values()), default=0)} or more hit pages of every core"
        )
        if self.absent:
            print(f"\nNot measured:\n{absences(self.absent)}")

    def speed(self, name: str) -> None:
        """Measure all cores on a workload and check that their hits agree."""
        args, workload = self._args, WORKLOADS[name]
        if name == "trace":
            try:
                find_trace(self._trace)
            except AbsentError as reason:
                print(f"\n### {workload.title}\n\nabsent: {reason}")
                self.results["workloads"][name] = {"absent": str(reason)}
                return
        cells = run_workload(
            self.workers,
            workload,
            rounds=args.runs,
            limit=QUICK_REQUESTS[name] if args.quick else None,
            trace=self._trace if name == "trace" else None,
        )
        base = next(
            (timing for timing in cells if timing.entry.name == OURS and timing.samples), None
        )
        for cell in cells:
            if cell.failed and cell.entry.name.startswith(OURS):
                self.wrong.append(f"{cell.entry.name} on {name}: {cell.failed}")
            if base is None or workload.evicts or cell.failed or cell.entry.name == "one-pass":
                continue
            if differs := disagreement(cell, base):
                self.wrong.append(f"{cell.entry.name} on {name}: {differs}")
        gone = {cell.entry.name for cell in cells if cell.failed}
        self.workers = [worker for worker in self.workers if worker.entry.name not in gone]
        rows = cells + [Cell(entry, f"absent: {why}") for entry, why in self.absent.values()]
        order = list(ENTRIES)
        rows.sort(key=lambda cell: order.index(cell.entry.name))
        print(f"\n{speed_table(workload, rows, base)}", flush=True)
        self.results["workloads"][name] = {cell.entry.name: _saved(cell) for cell in cells}

    def scaling(self) -> None:
        """Measure single calls as the tree grows: our core at every size, peers at cheap ones."""
        largest = 100_000 if self._args.quick else 1_000_000
        shown: dict[str, list[tuple[Entry, dict[str, Any]]]] = {name: [] for name in COLUMNS}
        for worker in self.workers:
            name = worker.entry.name
            if name not in (OURS, NATIVE, "ramify-hash", *self._args.scaling_peers):
                continue
            limit = largest if name in (OURS, NATIVE) else min(largest, 100_000)
            sizes = [10**power for power in range(3, len(str(limit)))]
            jobs: list[dict[str, Any]] = [
                {"scale": "grow", "shape": "flat", "sizes": sizes},
                {"scale": "grow", "shape": "branchy", "sizes": sizes},
                {"scale": "long_prompt", "repeats": 10 if self._args.quick else 50},
                {"scale": "stalls", "size": limit, "steady": limit // 20},
                {"scale": "memory", "limit": 512 if self._args.quick else None},
            ]
            if name.startswith(OURS):
                jobs.append({"scale": "explanations"})
            for job in jobs:
                try:
                    rows = worker.ask(**job)["rows"]
                except WorkerGoneError as gone:
                    print(f"\n{name}: {job['scale']} failed: {gone}")
                    if name.startswith(OURS):
                        self.wrong.append(f"{name}: {job['scale']}: {gone}")
                    break
                shown[job["scale"]] += [(worker.entry, row) for row in rows]
        for name, rows in shown.items():
            if rows:
                print(f"\n{scaling_table(name, rows)}", flush=True)
            self.results["scaling"][name] = [{"core": entry.name, **row} for entry, row in rows]

    def end(self) -> None:
        """Stop all worker processes."""
        for worker in self.workers:
            worker.end()


def _saved(cell: Cell) -> dict[str, Any]:
    if cell.failed:
        return {"failed": cell.failed}
    return {
        **cell.shape,
        "hit_rate": cell.hit_rate,
        "peak_mb": cell.peak_mb,
        "total_us": cell.mid("total_us"),
        "samples": cell.samples,
    }


def report_policies(args: argparse.Namespace) -> dict[str, Any]:
    """Print and return the hit rates of every eviction policy on every named trace."""
    report: dict[str, Any] = {"setting": setting({"ramify": ramify.__version__})}
    for name, value in report["setting"].items():
        print(f"{name}: {value}")
    print("pages of 512 tokens, whole pages only, order of arrival, outputs not published")
    for given in args.trace or [None]:
        path = find_trace(given)
        rates, infinite = hit_rates(path, default_policies(), 1_000 if args.quick else None)
        print(f"\n{policy_table(path.stem, rates, infinite)}", flush=True)
        report[path.stem] = {row.policy: row.rates for row in rates} | {"infinite": infinite}
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="cache_core.py", description=str(__doc__).splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="fewer requests, two runs")
    parser.add_argument("--runs", type=int, help="runs on the clock (default 5, or 2 with --quick)")
    parser.add_argument("--peers", type=names(ENTRIES), default=list(ENTRIES), metavar="A,B")
    parser.add_argument(
        "--workloads", type=names(WORKLOADS), default=list(WORKLOADS), metavar="A,B"
    )
    parser.add_argument(
        "--trace", type=Path, action="append", help="Mooncake trace; several with --policies"
    )
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=Path(os.environ.get(PEERS_VARIABLE) or DEFAULT_PEERS),
        help=f"where the peers are unpacked (also {PEERS_VARIABLE})",
    )
    parser.add_argument("--no-scaling", action="store_true")
    parser.add_argument("--no-speed", action="store_true", help="scaling rows only")
    parser.add_argument(
        "--scaling-peers",
        type=names(ENTRIES),
        nargs="?",
        const=list(CHEAP_PEERS),
        default=[],
        metavar="A,B",
        help=f"peers in the scaling rows; without names {', '.join(CHEAP_PEERS)}",
    )
    parser.add_argument("--policies", action="store_true", help="hit rates of eviction policies")
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--list", action="store_true", help="cores and workloads, then stop")
    args = parser.parse_args()
    args.runs = args.runs or (2 if args.quick else 5)
    args.peers_dir = args.peers_dir.resolve()
    if args.trace and len(args.trace) > 1 and not args.policies:
        parser.error("several traces make sense with --policies only")
    return args


def main() -> None:
    args = parse()
    if args.list:
        for name, entry in ENTRIES.items():
            print(f"core      {name:18} {entry.title}")
        for name, workload in WORKLOADS.items():
            print(f"workload  {name:18} {workload.title}")
        return
    if args.policies:
        results = report_policies(args)
        wrong = []
    else:
        benchmark = Benchmark(args, args.trace[0] if args.trace else None)
        benchmark.start()
        if not args.no_speed:
            for name in args.workloads:
                benchmark.speed(name)
        if not args.no_scaling:
            benchmark.scaling()
        benchmark.end()
        results, wrong = benchmark.results, benchmark.wrong
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if wrong:
        sys.exit("\nWRONG:\n" + "\n".join(f"- {line}" for line in wrong))


if __name__ == "__main__":
    main()
