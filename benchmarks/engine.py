"""Ramify's engine beside other engines: same checkpoint, same prompts, same dtype, in one run.

    make bench-engine                                             everything, hours
    make bench-engine ARGS="--models S --dtypes float32 --workloads W1,W2warm --repetitions 3"
    make bench-engine ARGS="--engines ramify,openvino --json out.json"
    make bench-engine ARGS="--overhead"       what the cache costs when nothing is shared
    make bench-engine ARGS="--speculation"    speculative decoding on and off

Every engine has one process per model and dtype, reads the same random checkpoint, takes and gives
token ids, and decodes greedily past any end of sequence. The engines take turns within each
repetition, so that a slow phase of the machine meets all of them; ratios are those of one
repetition. The roofline is the larger of arithmetic over the matmul peak and bytes over the read
bandwidth, both measured between the repetitions. An engine that is not there is reported with the
reason; one that takes longer than --limit is ended and reported as over it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arguments import count, names
from engines.contract import Entry, Setup
from engines.models import DTYPES, MODELS, TITLES, VALUE_BYTES, shape_of, write_model
from engines.overhead import overhead
from engines.peaks import Peaks
from engines.registry import ENTRIES
from engines.report import best_peer, notes, setting, table
from engines.roofline import Machine, seconds
from engines.run import Cell, Group, ratios
from engines.speculation import speculation
from engines.workloads import WORKLOADS, Workload

ROOT = Path(__file__).parents[1]
CHOSEN = tuple(name for name in ENTRIES if name != "ramify-off")


def make_setup(folder: Path, model: str, dtype: str, threads: int, work: list[Workload]) -> Setup:
    """The setup that every engine loads: pools as large as the largest workload needs."""
    return Setup(
        folder=folder,
        dtype=dtype,
        threads=threads,
        max_len=max(workload.request_tokens for workload in work) + 64,
        kv_tokens=max(workload.kv_tokens for workload in work) + 2048,
        token_bytes=shape_of(model).kv_values * VALUE_BYTES[dtype],
    )


def compare(
    args: argparse.Namespace, entries: Sequence[Entry], model: str, dtype: str, peaks: Peaks
) -> dict[str, Any]:
    """Measure all engines on one model in one dtype; prints the tables, returns the results."""
    work = [WORKLOADS[name] for name in args.workloads]
    folder = write_model(args.scratch, model, dtype)
    setup = make_setup(folder, model, dtype, args.threads, work)
    vocab = MODELS[model]["vocab_size"]
    group = Group(entries, setup, args.peers, limit_s=args.limit, long_s=args.long, vocab=vocab)
    try:
        rows = group.measure(work, args.repetitions, lambda: peaks.sample(dtype))
    finally:
        group.end()
    machine = Machine(peaks.flops[dtype], peaks.bandwidth, VALUE_BYTES[dtype])
    print(
        f"\n### {TITLES[model]}, {dtype}\n\nMeasured peak {machine.peak / 1e9:,.0f} GFLOP/s, "
        f"read bandwidth {machine.bandwidth / 1e9:.1f} GB/s.\n"
    )
    print(notes(group.versions, group.notes))
    for name, reason in group.absent.items():
        print(f"- {ENTRIES[name].title}: absent: {reason}")
    results: dict[str, Any] = {"model": model, "dtype": dtype, "machine": asdict(machine)}
    results |= {"versions": group.versions, "absent": group.absent, "rows": {}}
    for name, cells in rows.items():
        if not cells:
            continue
        roofline = seconds(WORKLOADS[name].roofline, shape_of(model), machine)
        print("\n" + table(cells, roofline), flush=True)
        best = best_peer(cells)
        results["rows"][name] = {
            "roofline_s": roofline,
            "best_peer": best.entry.name if best else None,
            "cells": {cell.entry.name: _cell(cell, best) for cell in cells},
        }
    return results


def _cell(cell: Cell, best: Cell | None) -> dict[str, Any]:
    return {
        "failed": cell.failed,
        "total_s": cell.totals,
        "ttft_s": [sample["ttft_s"] for sample in cell.samples],
        "between_s": [sample["between_s"] for sample in cell.samples],
        "hit_rate": cell.hit_rate(),
        "best_peer_over_this": ratios(best, cell) if best else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=names(MODELS), default=["S", "M"], help="sizes, comma-separated"
    )
    parser.add_argument("--dtypes", type=names(DTYPES), default=list(DTYPES))
    parser.add_argument("--workloads", type=names(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--engines", type=names(ENTRIES), default=list(CHOSEN))
    parser.add_argument("--repetitions", type=count, default=3, help="of each cell")
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=100.0, help="seconds for one repetition")
    parser.add_argument(
        "--long", type=float, default=25.0, help="a cell that took 3 times these seconds ends early"
    )
    parser.add_argument("--overhead", action="store_true", help="cache on and off on W4")
    parser.add_argument(
        "--speculation", action="store_true", help="speculative decoding on and off"
    )
    parser.add_argument("--pairs", type=count, default=10, help="of --overhead, --speculation")
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers-engine")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench-models")
    parser.add_argument("--json", type=Path, help="also write every sample here")
    args = parser.parse_args()
    if "W2warm" in args.workloads and "W2cold" not in args.workloads:
        args.workloads.insert(args.workloads.index("W2warm"), "W2cold")
    settings = setting("bench-engine", args.threads)
    for name, value in settings.items():
        print(f"{name}: {value}")
    results: dict[str, Any] = {"setting": settings, "tables": []}
    peaks = Peaks(args.threads)
    for model in args.models:
        for dtype in args.dtypes:
            if args.overhead:
                setup = make_setup(
                    write_model(args.scratch, model, dtype), model, dtype, args.threads,
                    [WORKLOADS["W4"]],
                )  # fmt: skip
                results["tables"].append(overhead(args, setup, model))
            elif args.speculation:
                results["tables"].append(speculation(args, model, dtype))
            else:
                entries = [ENTRIES[name] for name in args.engines]
                results["tables"].append(compare(args, entries, model, dtype, peaks))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2), "utf-8")


if __name__ == "__main__":
    main()
