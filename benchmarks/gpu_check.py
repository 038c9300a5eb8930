"""The figures of `make gpu-check`, beside their goals: one JSON file and a table.

    python benchmarks/gpu_check.py [--json FILE] [--only NAME] [--checkpoint DIR] [--strict]

Each figure is measured in a process of its own, because a fault of a kernel ends the CUDA context of
its process, and has a time limit; the file is written again after each, so that nothing measured is
lost. Exit status: 0 if all were measured, 1 if one could not be, or a test of the GPU had failed before,
or, with `--strict`, a goal is missed; 2 without a CUDA device. The file has the same in its `summary`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 240.0  # of a figure, in which a model of 8B weights is loaded


@dataclass(frozen=True)
class Goal:
    """What a figure should reach on an H200."""

    name: str
    title: str
    limit: float
    unit: str
    is_least: bool = True  # the limit is the least that is good; False: the most

    def is_met(self, value: float) -> bool:
        """Whether a value reaches it."""
        return value >= self.limit if self.is_least else value <= self.limit

    @property
    def text(self) -> str:
        """The limit with its side and unit."""
        return f"{'≥' if self.is_least else '≤'} {self.limit:g} {self.unit}"


# In the order of the table; `gpu_figures.FIGURES` measures each.
GOALS = (
    Goal("paged-decode", "paged decode, 64 × 4k, GQA 8", 0.85, "of copy bandwidth"),
    Goal("grouped-decode", "tree-grouped decode, 64 × 16k shared", 10.0, "× ungrouped"),
    Goal("extend", "extend, 8 × 512 over 4k", 0.9, "× the best library kernel"),
    Goal("single-stream", "8B bfloat16, one stream, decode", 0.8, "of the bandwidth bound"),
    Goal("64-streams", "8B bfloat16, 64 streams, decode step", 1.2, "× its roofline", False),
    Goal("warm-ttft", "warm TTFT on a prefix of 16k", 1.5, "× its tail alone", False),
    Goal("exact", "exact=True, prefill and decode of 8B", 1.35, "× the fast mode", False),
    Goal("latent-decode", "DeepSeek-V3, absorbed decode, 64 × 4k", 0.5, "of its roofline"),
    Goal("sparse-index", "DeepSeek-V3.2, index of 64 × 32k", 0.5, "of its roofline"),
    Goal("moe-step", "DeepSeek-V3, experts of 64 rows", 1.5, "× its roofline", False),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A figure, or why there is none."""

    name: str
    value: float | None
    is_met: bool | None
    failure: str | None
    seconds: float  # that it took to measure
    details: Mapping[str, Any]


# Measures the figure of that name: its value, and details for the JSON file.
Measure = Callable[[str], tuple[float, Mapping[str, Any]]]


def run_all(
    goals: Iterable[Goal],
    measure: Measure,
    *,
    save: Callable[[list[Outcome]], object],
    now: Callable[[], float] = time.perf_counter,
) -> list[Outcome]:
    """Measure each figure; one that fails says why, and the others go on.

    Args:
        save: called with all outcomes so far after each.
    """
    outcomes: list[Outcome] = []
    for goal in goals:
        start = now()
        try:
            value, details = measure(goal.name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other figures are measured
            reason = f"{type(error).__name__}: {error}"
            outcome = Outcome(goal.name, None, None, reason, now() - start, {})
        else:
            outcome = Outcome(goal.name, value, goal.is_met(value), None, now() - start, details)
        outcomes.append(outcome)
        save(outcomes)
    return outcomes


def summary(
    goals: Iterable[Goal], outcomes: Sequence[Outcome], tests_status: int | None
) -> dict[str, Any]:
    """What came of each goal, by name; `tests` is `passed`, `failed` or None, which is not run.

    Args:
        tests_status: exit status of the tests that ran before.
    """
    measured = {outcome.name for outcome in outcomes}
    return {
        "tests": None if tests_status is None else "failed" if tests_status else "passed",
        "reached": [outcome.name for outcome in outcomes if outcome.is_met],
        "missed": [outcome.name for outcome in outcomes if outcome.is_met is False],
        "failed": [outcome.name for outcome in outcomes if outcome.is_met is None],
        "not_run": [goal.name for goal in goals if goal.name not in measured],
    }


def exit_status(verdict: Mapping[str, Any], *, is_strict: bool) -> int:
    """1 if a test or a figure failed, or, if strict, a goal is missed; else 0."""
    is_bad = verdict["tests"] == "failed" or verdict["failed"] or verdict["not_run"]
    return int(bool(is_bad or (is_strict and verdict["missed"])))


def table(goals: Iterable[Goal], outcomes: Iterable[Outcome]) -> str:
    """The outcomes in Markdown, as `docs/performance.md` has them."""
    titles = {goal.name: goal for goal in goals}
    lines = ["| figure | measured | goal | reached |", "|---|---|---|---|"]
    for outcome in outcomes:
        goal = titles[outcome.name]
        measured = "not measured" if outcome.value is None else f"{outcome.value:.2f} {goal.unit}"
        reached = outcome.failure or ("yes" if outcome.is_met else "no")
        lines.append(f"| {goal.title} | {measured} | {goal.text} | {_one_line(reached)} |")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    """The first line of a text, short enough for a table."""
    first = text.strip().splitlines()[0].replace("|", "\\|") if text.strip() else ""
    return first if len(first) <= 120 else first[:117] + "..."


def measure_in_process(
    name: str, checkpoint: Path, limit_s: float = LIMIT_S
) -> tuple[float, Mapping[str, Any]]:
    """Measure a figure in another process.

    Raises:
        RuntimeError: it failed; the message is the last line that it wrote.
        TimeoutExpired: it took longer than the limit.
    """
    command = [sys.executable, __file__, "--figure", name, "--checkpoint", str(checkpoint)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, check=False
    )  # fmt: skip
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RuntimeError(lines[-1])
    answer = json.loads(process.stdout.strip().splitlines()[-1])
    return float(answer["value"]), answer["details"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="file to write")
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument("--checkpoint", type=Path, help="the random 8B model; written if missing")
    parser.add_argument("--strict", action="store_true", help="a missed goal is a failure")
    parser.add_argument("--tests-status", type=int, help="exit status of the tests that ran before")
    parser.add_argument("--figure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure here")
        return 2
    import gpu_figures

    if args.figure is not None:
        value, details = gpu_figures.FIGURES[args.figure](args.checkpoint)
        print(json.dumps({"value": value, "details": details}))
        return 0
    goals = [goal for goal in GOALS if args.only in goal.name]
    setting = gpu_figures.setting()

    def save(outcomes: list[Outcome]) -> None:
        document = {
            "setting": setting,
            "summary": summary(goals, outcomes, args.tests_status),
            "figures": [asdict(outcome) for outcome in outcomes],
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or Path(folder) / "llama-8b"

        def measure(name: str) -> tuple[float, Mapping[str, Any]]:
            if name in gpu_figures.NEED_CHECKPOINT:
                gpu_figures.write_checkpoint(checkpoint)
            return measure_in_process(name, checkpoint)

        outcomes = run_all(goals, measure, save=save)
    print("\n".join(f"- {name}: {value}" for name, value in setting.items()))
    print("\n" + table(goals, outcomes))
    verdict = summary(goals, outcomes, args.tests_status)
    print("\n" + ", ".join(f"{len(verdict[key])} {key}" for key in ("reached", "missed", "failed")))
    return exit_status(verdict, is_strict=args.strict)


if __name__ == "__main__":
    sys.exit(main())
