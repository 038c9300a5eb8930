"""Worker processes of the core benchmark, and the samples that the parent collects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from core.contract import Entry
from core.workloads import Workload

BENCHMARKS = Path(__file__).parents[1]


class WorkerGoneError(Exception):
    """A worker ended instead of answering; the message is the last line it wrote."""


class Worker:
    """A process that holds one core; it loads in parallel with others and measures on command."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry = entry
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
        paths = [str(BENCHMARKS), str(BENCHMARKS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        if entry.first:
            paths.insert(0, str(folder / entry.first))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "core.worker", entry.name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=BENCHMARKS,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "OMP_NUM_THREADS": "1",
            },
        )

    def send(self, **command: Any) -> None:
        """Send a command; `answer` waits for its reply."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerGoneError(self._last_words()) from None

    def answer(self) -> dict[str, Any]:
        """Read the worker's next reply.

        Raises:
            WorkerGoneError: the worker ended without a reply.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerGoneError(self._last_words())
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its reply."""
        self.send(**command)
        return self.answer()

    def end(self) -> None:
        """Close the pipes and wait for the process to exit."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        # Below a child's own error stands its parent's message that the child ended.
        worker_lines = [line for line in said if not line.startswith("the child for ")]
        return (worker_lines or said or ["ended without a message"])[-1]


@dataclass(slots=True)
class Cell:
    """Results of one core on one workload: a sample per round, or why there is none."""

    entry: Entry
    failed: str = ""
    shape: dict[str, int] = field(default_factory=dict)  # requests, tokens
    hits: list[int] = field(default_factory=list)  # per request
    peak_mb: float | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Hit tokens over prompt tokens."""
        return sum(self.hits) / self.shape["prompt_tokens"]

    def mid(self, name: str) -> float:
        """Median of a figure over the rounds."""
        return float(median(sample[name] for sample in self.samples))

    def totals(self) -> list[float]:
        """Microseconds per request, per round."""
        return [sample["total_us"] for sample in self.samples]

    def ratio(self, base: Cell) -> float:
        """How many times slower than `base`: median over the rounds, each with its own base."""
        return median(a / b for a, b in zip(self.totals(), base.totals(), strict=True))

    def fastest_ratio(self, base: Cell) -> float:
        """Ratio of the fastest runs to `base`, which noise affects least."""
        return min(self.totals()) / min(base.totals())


def run_workload(
    workers: list[Worker], workload: Workload, *, rounds: int, limit: int | None, trace: Path | None
) -> list[Cell]:
    """Run all cores on one workload, taking turns within each round.

    An untimed first round warms up each core and supplies the hits and the peak memory.
    """
    cells = {worker: Cell(worker.entry) for worker in workers}
    command = {"open": workload.name, "limit": limit, "trace": str(trace) if trace else None}
    for worker in workers:
        _attempt(cells[worker], worker.send, command)
    for worker, cell in cells.items():
        if answer := _attempt(cell, worker.answer, {}):
            cell.shape = answer
    for number in range(rounds + 1):
        for worker in workers if number % 2 == 0 else workers[::-1]:
            cell = cells[worker]
            if cell.failed:
                continue
            sample = _attempt(cell, worker.ask, {"replay": True})
            if sample is None:
                continue
            hits = sample.pop("hits")
            if number == 0:
                cell.hits, cell.peak_mb = hits, sample["peak_mb"]
            else:
                cell.samples.append(sample)
    for worker, cell in cells.items():
        if not cell.failed:
            _attempt(cell, worker.send, {"close": True})
    return list(cells.values())


def _attempt(cell: Cell, call: Any, command: dict[str, Any]) -> dict[str, Any] | None:
    if cell.failed:
        return None
    try:
        reply: dict[str, Any] | None = call(**command)
    except WorkerGoneError as gone:
        cell.failed = f"failed: {gone}"
        return None
    return reply


def disagreement(cell: Cell, base: Cell) -> str:
    """Describe where two cores without evictions match different prefixes; empty if they agree."""
    for at, (mine, theirs) in enumerate(zip(cell.hits, base.hits, strict=True)):
        if mine != theirs:
            return f"hits differ: {mine} tokens instead of {theirs} in request {at}"
    return ""
