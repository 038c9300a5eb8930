"""Compare the engine's speed with the stored baseline; fail if it became slower.

    make perf                          against benchmarks/perf_baseline.json
    make perf ARGS="--against HEAD~5"  against another commit, on any machine
    make perf ARGS="--save"            measure this commit and store it as the baseline
    make perf ARGS="--plant 1.10"      slow every step down by 10 %: must fail
    make perf ARGS="--cells 1x128x32,8x512x128 --pairs 20"

Batch {1, 8} × prompt {128, 512} × decode {32, 128} on a random model; time to first token, time
between tokens, throughput and end to end. Nothing is shared and every prompt is new.

A machine with neighbours has phases in which everything takes twice as long, so that seconds of
today say little about seconds of last month. What is compared is therefore the baseline's *commit*:
its sources are checked out beside these and run in a process of their own, taking turns with this
tree on the same prompts. A cell with a figure whose median ratio is above 1.05 is measured on, until
it has three times as many pairs; the figure fails when the median of all of them is above 1.05 and
the 95 % interval of that median lies above 1. The stored seconds are shown beside today's and judge
nothing; `--against` does without them. A gain hides the slowdowns that follow it: where this tree is
as clearly faster, it says so, and a new baseline should be stored.

Beside the times on the wall, the processor time of the whole request is judged: neighbours who take
the processor away lengthen the former and hardly the latter. By default one thread computes, since
two that wait for each other on a busy machine measure the neighbours.

What it cannot tell: a slowdown below 5 %; with neighbours on every core, one that costs no processor
time (waiting, worse use of several threads: --threads on a quiet machine); one that came with
another torch, numba or Python, since both sides run on what is installed (then the metadata differs,
and it stops); one of the first call after loading.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

from engines.contract import Setup
from engines.judge import Verdict, hidden, judge, mismatches
from engines.models import DTYPES, MODELS, TITLES, VALUE_BYTES, shape_of, write_model
from engines.registry import OURS, planted
from engines.run import LOAD_LIMIT_S, Worker
from engines.stats import Spread
from engines.workloads import Task
from machine import commit, cpu_model

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
HEAD = (
    "| cell | ms: end to end (min–max) | tokens/s | × baseline (interval) | processor ms | × | TTFT ms | × "
    "| between tokens ms | × | stored end to end ms |"
)
FIGURES = {  # as judged: as a worker names it
    "end_to_end_s": "total_s",
    "processor_s": "cpu_s",
    "ttft_s": "ttft_s",
    "between_tokens_s": "between_s",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A benchmark cell: batch size, prompt length and decode length."""

    batch: int
    prompt: int
    decode: int

    @property
    def name(self) -> str:
        """The cell's name in the table."""
        return f"batch {self.batch}, prompt {self.prompt}, decode {self.decode}"

    @property
    def short(self) -> str:
        """The cell's name in --cells."""
        return f"{self.batch}x{self.prompt}x{self.decode}"

    def task(self, pair: int, vocab: int) -> Task:
        """Return random prompts that are new in each pair and equal for both sides of a pair."""
        rng = random.Random(f"{self.name} {pair}")
        prompts = [[rng.randrange(3, vocab) for _ in range(self.prompt)] for _ in range(self.batch)]
        return Task([], [prompts], self.decode)


SHAPES = tuple(Shape(*sizes) for sizes in product((1, 8), (128, 512), (32, 128)))


def shapes(text: str) -> list[Shape]:
    """Parse --cells into the shapes that it names."""
    known = {shape.short: shape for shape in SHAPES}
    for name in text.split(","):
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return [known[name] for name in text.split(",")]


Timings = dict[str, dict[str, list[float]]]  # cell → figure → values by pair


class Sides:
    """The benchmarked worker processes: this tree, and the baseline's commit unless saving one."""

    def __init__(self, args: argparse.Namespace, base: Path | None) -> None:
        folder = write_model(args.scratch, args.model, args.dtype)
        longest = max(shape.prompt + shape.decode for shape in SHAPES)
        setup = Setup(
            folder, args.dtype, args.threads, longest + 64, 16 * longest,
            shape_of(args.model).kv_values * VALUE_BYTES[args.dtype],
        )  # fmt: skip
        self._vocab = MODELS[args.model]["vocab_size"]
        self._pair = 0
        given = asdict(setup) | {"folder": str(folder)}
        self._workers = [Worker(planted(args.plant), args.scratch, args.threads)]
        if base is not None:
            self._workers.append(Worker(planted(1.0), args.scratch, args.threads, source=base))
        for worker in self._workers:
            reply = worker.ask(LOAD_LIMIT_S, setup=given)
            if "absent" in reply:
                raise SystemExit(f"{OURS} cannot be loaded: {reply['absent']}")

    def measure(self, shapes: Sequence[Shape], pairs: int) -> list[Timings]:
        """Run `pairs` pairs of each shape in alternating order; returns the timings of each side."""
        timings: list[Timings] = [{} for _ in self._workers]
        for shape in shapes:
            for pair in range(pairs + 1):  # the first one warms up
                self._pair += 1
                task = asdict(shape.task(self._pair, self._vocab))
                sides = list(zip(self._workers, timings, strict=True))
                for worker, cells in sides if pair % 2 == 0 else sides[::-1]:
                    answer = worker.ask(LIMIT_S, task=task)
                    if pair:
                        figures = cells.setdefault(shape.name, {name: [] for name in FIGURES})
                        for name, source in FIGURES.items():
                            figures[name].append(answer[source])
            print(f"  {shape.name}: {pairs} pairs", file=sys.stderr)
        return timings

    def end(self) -> None:
        """End the worker processes."""
        for worker in self._workers:
            worker.end()


def metadata(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings and versions that must agree for a baseline to be comparable."""
    return {
        "model": TITLES[args.model],
        "dtype": args.dtype,
        "threads": args.threads,
        "machine": f"{cpu_model()}, {os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "numpy", "numba")},
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def sources_of(revision: str, scratch: Path) -> Path:
    """Extract `src` of a commit next to the models, replacing an earlier copy; returns its path."""
    tree = scratch / "perf-baseline"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, "src"],
        cwd=ROOT, capture_output=True, check=False,
    )  # fmt: skip
    if archive.returncode:
        raise SystemExit(
            f"the baseline's commit {revision} is not in this repository: "
            f"{archive.stderr.decode().strip()}; fetch it, or store another one with --save"
        )
    subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
    return tree / "src"


def save(args: argparse.Namespace) -> None:
    """Measure this tree and store the result as the baseline."""
    revision = commit()
    if revision == "no git" or revision.endswith("-dirty"):
        raise SystemExit(f"--save needs a clean commit to return to, and this is {revision}")
    sides = Sides(args, None)
    try:
        (cells,) = sides.measure(args.cells, args.pairs)
    finally:
        sides.end()
    stored = {
        "commit": revision,
        "date": datetime.now(UTC).date().isoformat(),
        "metadata": metadata(args),
        "pairs": args.pairs,
        "cells": {
            cell: {name: asdict(Spread.of(values)) for name, values in figures.items()}
            for cell, figures in cells.items()
        },
    }
    args.baseline.write_text(json.dumps(stored, indent=2) + "\n", "utf-8")
    print(f"stored {len(cells)} cells of {revision} in {args.baseline}")


def stored_baseline(args: argparse.Namespace) -> dict[str, Any]:
    """Return the stored baseline, checked against this machine and --cells."""
    if not args.baseline.is_file():
        raise SystemExit(f"{args.baseline} is missing; write it on a clean commit with --save")
    stored: dict[str, Any] = json.loads(args.baseline.read_text("utf-8"))
    differs = mismatches(stored["metadata"], metadata(args))
    if differs:
        raise SystemExit(
            "the baseline cannot be compared with:\n  "
            + "\n  ".join(differs)
            + f"\nmake both alike, name the commit with --against {stored['commit']}, "
            "or store a baseline of here with --save"
        )
    absent = [shape.short for shape in args.cells if shape.name not in stored["cells"]]
    if absent:
        raise SystemExit(
            f"the baseline has no {', '.join(absent)}; store one with all --cells with --save"
        )
    return stored


def compare(args: argparse.Namespace) -> int:
    """Measure this tree against the baseline's commit; returns the exit status."""
    stored = (
        {"commit": args.against, "cells": {}} if args.against is not None else stored_baseline(args)
    )
    sides = Sides(args, sources_of(stored["commit"], args.scratch))
    try:
        now, base = sides.measure(args.cells, args.pairs)
        verdicts = [verdict for cell in now for verdict in judge(cell, now[cell], base[cell])]
        print(_table(now, base, stored, verdicts))
        unseen = hidden(verdicts)
        suspects = {verdict.cell for verdict in verdicts if verdict.suspect}
        if suspects:
            print(f"\nmeasured on, {2 * args.pairs} more pairs: {', '.join(sorted(suspects))}")
            again = [shape for shape in args.cells if shape.name in suspects]
            for all_pairs, more in zip(
                (now, base), sides.measure(again, 2 * args.pairs), strict=True
            ):
                for cell, figures in more.items():
                    for name, values in figures.items():
                        all_pairs[cell][name] += values
            verdicts = [
                verdict
                for cell in sorted(suspects)
                for verdict in judge(cell, now[cell], base[cell])
            ]
        slower = [verdict for verdict in verdicts if verdict.slower]
        for verdict in verdicts:
            if verdict.suspect and not verdict.slower:
                print(
                    f"undecided, too much noise: {verdict.cell}: {verdict.figure} {_interval(verdict)}"
                )
    finally:
        sides.end()
    for verdict in slower:
        print(
            f"SLOWER: {verdict.cell}: {verdict.figure} {_interval(verdict)} of {stored['commit']}"
        )
    if unseen > 1.0:
        print(
            f"\nthe baseline is old: a figure that became up to {unseen:.2f} times as slow as in "
            f"this table would still pass; store this commit with --save"
        )
    if not slower:
        print(f"\nno figure is slower than at {stored['commit']}")
    return 1 if slower else 0


def _table(now: Timings, base: Timings, stored: dict[str, Any], verdicts: list[Verdict]) -> str:
    by_figure = {(verdict.cell, verdict.figure): verdict for verdict in verdicts}
    lines = [
        HEAD,
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for shape in SHAPES:
        if shape.name not in now:
            continue
        cell, mine = shape.name, now[shape.name]
        total = Spread.of(mine["end_to_end_s"])
        before = "–"
        if cell in stored["cells"]:
            spread = stored["cells"][cell]["end_to_end_s"]
            before = (
                f"{spread['mid'] * 1e3:.0f} ({spread['low'] * 1e3:.0f}–{spread['high'] * 1e3:.0f})"
            )
        lines.append(
            f"| {cell} | {total.mid * 1e3:.0f} ({total.low * 1e3:.0f}–{total.high * 1e3:.0f}) "
            f"| {shape.batch * shape.decode / total.mid:,.0f} "
            f"| {_interval(by_figure[cell, 'end_to_end_s'])} "
            f"| {Spread.of(mine['processor_s']).mid * 1e3:.0f} | {_interval(by_figure[cell, 'processor_s'])} "
            f"| {Spread.of(mine['ttft_s']).mid * 1e3:.1f} | {_interval(by_figure[cell, 'ttft_s'])} "
            f"| {Spread.of(mine['between_tokens_s']).mid * 1e3:.2f} "
            f"| {_interval(by_figure[cell, 'between_tokens_s'])} "
            f"| {before} |"
        )
    return "\n".join(lines)


def _interval(verdict: Verdict) -> str:
    return f"{verdict.ratio.mid:.3f} ({verdict.ratio.low:.3f}–{verdict.ratio.high:.3f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="S")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--plant", type=float, default=1.0, help="factor to slow each step down by")
    parser.add_argument("--cells", type=shapes, default=list(SHAPES), help="such as 1x128x32,...")
    parser.add_argument("--against", metavar="COMMIT", help="instead of the stored baseline's")
    parser.add_argument("--save", action="store_true", help="store a baseline instead")
    parser.add_argument("--baseline", type=Path, default=ROOT / "benchmarks" / "perf_baseline.json")
    parser.add_argument("--scratch", type=Path, default=ROOT / "build" / "bench-models")
    args = parser.parse_args()
    if args.save:
        save(args)
        return 0
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
