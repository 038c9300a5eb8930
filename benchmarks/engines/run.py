"""Start worker processes, send them commands and collect their samples."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from engines.contract import Entry, Setup
from engines.json_process import JsonProcess, ProcessGoneError, TooSlowError
from engines.stats import Spread, paired_ratios
from engines.workloads import Task, Workload, task_of

BENCHMARKS = Path(__file__).parents[1]
LOAD_LIMIT_S = 600.0  # vLLM compiles its graph


class Worker:
    """A process that holds one engine."""

    def __init__(self, entry: Entry, peers: Path, threads: int, source: Path | None = None) -> None:
        """`source` is the folder that `ramify` is imported from; by default this checkout's."""
        self.entry = entry
        python = sys.executable
        if entry.environment:
            python = str(peers / entry.environment / "bin" / "python")
        path = [str(BENCHMARKS)]
        if not entry.environment:
            path.append(str(source or BENCHMARKS.parent / "src"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": str(threads),
            "PATH": os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")]),
        }
        command = [python, "-m", "engines.worker", entry.name]
        self._process = JsonProcess(command, environment, BENCHMARKS)

    def ask(self, limit_s: float, **command: Any) -> dict[str, Any]:
        """`JsonProcess.ask`, with the command's fields as arguments."""
        return self._process.ask(limit_s, command)

    def end(self) -> None:
        """Close the worker's input, wait up to 20 s for its exit, then kill it."""
        self._process.end()

    def kill(self) -> None:
        """Kill the process and its children."""
        self._process.kill()


@dataclass(slots=True)
class Cell:
    """One engine on one workload: a sample per repetition, or the reason for having none."""

    entry: Entry
    workload: Workload
    note: str = ""
    failed: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    spent_s: float = 0.0

    @property
    def totals(self) -> list[float]:
        """Seconds, by repetition."""
        return [sample["total_s"] for sample in self.samples]

    @property
    def measured(self) -> bool:
        """True if at least one repetition was measured."""
        return bool(self.samples)

    def total(self) -> Spread:
        """Seconds over the repetitions."""
        return Spread.of(self.totals)

    def mid(self, name: str) -> float | None:
        """Median of a figure over the samples that report it; None if none does."""
        values = [sample[name] for sample in self.samples if sample[name] is not None]
        return float(median(values)) if values else None

    def tokens_per_s(self) -> float:
        """Output tokens over the median time."""
        return sum(map(len, self.samples[0]["tokens"])) / self.total().mid

    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were not computed; None if no sample reports it."""
        facts = [sample["facts"] for sample in self.samples if "prompt_tokens" in sample["facts"]]
        if not facts:
            return None
        computed, prompt = (
            float(sum(fact[name] for fact in facts))
            for name in ("computed_tokens", "prompt_tokens")
        )
        return 1 - computed / prompt

    def equal_answers(self, other: Cell) -> tuple[int, int] | None:
        """Number of answers equal to another engine's, and number compared; None without any."""
        pairs = [
            (mine, theirs)
            for sample, other_sample in zip(self.samples, other.samples, strict=False)
            for mine, theirs in zip(sample["tokens"], other_sample["tokens"], strict=True)
        ]
        return (sum(mine == theirs for mine, theirs in pairs), len(pairs)) if pairs else None


def ratios(slow: Cell, base: Cell) -> list[float]:
    """Times of one engine over those of another, repetition by repetition."""
    return paired_ratios(slow.totals, base.totals)


class Group:
    """All engines on one model and dtype, loaded side by side and taking turns."""

    def __init__(
        self,
        entries: Sequence[Entry],
        setup: Setup,
        peers: Path,
        *,
        limit_s: float,
        long_s: float,
        vocab: int,
    ) -> None:
        self._setup, self._peers, self._vocab = setup, peers, vocab
        self._limit_s, self._long_s = limit_s, long_s
        self._workers: dict[str, Worker] = {}
        self.entries = list(entries)
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        for entry in entries:
            self._start(entry)

    def _start(self, entry: Entry) -> bool:
        python = self._peers / entry.environment / "bin" / "python"
        reason = self._peers / entry.environment / "absent"
        if entry.environment and reason.is_file():
            self.absent[entry.name] = reason.read_text("utf-8").strip()
            return False
        if entry.environment and not python.exists():
            self.absent[entry.name] = f"{entry.environment} is not installed: make bench-engine"
            return False
        worker = Worker(entry, self._peers, self._setup.threads)
        given = asdict(replace(self._setup, options={})) | {"folder": str(self._setup.folder)}
        try:
            answer = worker.ask(LOAD_LIMIT_S, setup=given)
        except (ProcessGoneError, TooSlowError) as gone:
            self.absent[entry.name] = f"did not start: {gone}"
            return False
        if "absent" in answer:
            self.absent[entry.name] = answer["absent"]
            worker.end()
            return False
        self.versions[entry.name], self.notes[entry.name] = answer["version"], answer["note"]
        self._workers[entry.name] = worker
        return True

    def measure(
        self, workloads: Sequence[Workload], repetitions: int, between: Callable[[], object]
    ) -> dict[str, list[Cell]]:
        """Measure every workload on every engine; returns the cells by workload name.

        Calls `between` before each round of all engines. A cell is not repeated after it exceeded
        the time limit, or once its samples took more than 3 * `long_s` in total.
        """
        cells = {
            workload.name: {
                entry.name: Cell(entry, workload, note=self.notes.get(entry.name, ""))
                for entry in self.entries
                if entry.name not in self.absent
            }
            for workload in workloads
        }
        for chain in _chains(workloads):
            self._warm_up(chain[0], cells)
            for repetition in range(repetitions):
                between()
                order = [entry for entry in self.entries if entry.name not in self.absent]
                for entry in order if repetition % 2 == 0 else order[::-1]:
                    self._sample_chain(
                        [cells[workload.name][entry.name] for workload in chain], repetition
                    )
        return {name: list(row.values()) for name, row in cells.items()}

    def resources(self, entry: Entry) -> dict[str, Any] | None:
        """What loading an engine took, by the names of `Resources`; None if the engine is gone."""
        worker = self._workers.get(entry.name)
        if worker is None:
            return None
        try:
            return worker.ask(LOAD_LIMIT_S, resources=True)
        except (ProcessGoneError, TooSlowError) as gone:
            self.absent[entry.name] = f"did not start: {gone}"
            del self._workers[entry.name]
            return None

    def _sample_chain(self, chain: Sequence[Cell], repetition: int) -> None:
        """Sample dependent workloads on an engine, in order; a failure fails the later workloads."""
        for position, cell in enumerate(chain):
            task = task_of(cell.workload.name, repetition, self._vocab)
            if not self._sample(cell, task):
                for later in chain[position + 1 :]:
                    if cell.failed:
                        later.failed = later.failed or f"{cell.workload.name}: {cell.failed}"
                return

    def _warm_up(self, workload: Workload, cells: dict[str, dict[str, Cell]]) -> None:
        """Run a small batch off the clock, to create buffers, threads and kernels."""
        rng = random.Random("warm up")
        ids = [[rng.randrange(3, self._vocab) for _ in range(96)] for _ in range(4)]
        for name, cell in cells[workload.name].items():
            if name in self._workers and not cell.failed:
                shape = [workload.num_requests, workload.request_tokens]
                self._attempt(cell, prepare=shape)
                self._attempt(cell, task=asdict(Task([], [ids], 4)))

    def _sample(self, cell: Cell, task: Task) -> bool:
        if cell.failed or cell.spent_s > 3 * self._long_s:
            return False
        name = cell.entry.name
        if name not in self._workers:
            if name in self.absent or not self._start(cell.entry):
                cell.failed = self.absent[name]
                return False
            self._attempt(cell, prepare=[cell.workload.num_requests, cell.workload.request_tokens])
        start = time.monotonic()
        sample = self._attempt(cell, task=asdict(task))
        cell.spent_s += time.monotonic() - start
        if sample is None:
            return False
        cell.samples.append(sample)
        print(f"  {cell.workload.name} {name}: {sample['total_s']:.2f} s", file=sys.stderr)
        return True

    def _attempt(self, cell: Cell, **command: Any) -> dict[str, Any] | None:
        worker = self._workers.get(cell.entry.name)
        if worker is None:
            return None
        try:
            return worker.ask(self._limit_s, **command)
        except TooSlowError as slow:
            cell.failed = str(slow)
        except ProcessGoneError as gone:
            cell.failed = f"failed: {gone}"
        del self._workers[cell.entry.name]
        print(f"  {cell.workload.name} {cell.entry.name}: {cell.failed}", file=sys.stderr)
        return None

    def end(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.end()
        self._workers.clear()


def _chains(workloads: Sequence[Workload]) -> list[list[Workload]]:
    """Group each workload with the workloads that must run right after it."""
    names = {workload.name for workload in workloads}
    chains: list[list[Workload]] = []
    for workload in workloads:
        if workload.after and workload.after in names:
            next(chain for chain in chains if chain[0].name == workload.after).append(workload)
        else:
            chains.append([workload])
    return chains
