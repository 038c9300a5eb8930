"""Precision and recall of `ramify lint` on planted logs.

`python -m tests.pure.analysis.scoring --seed 1 --format openai_chat` prints a table;
`--explain` lists what was missed and what was wrongly named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.pure.analysis.planted_formats import FORMATS, WrittenLog, planted_log, write_log
from tests.pure.analysis.planted_logs import KINDS, PlantedLog, Truth

Report = dict[str, Any]

BY_TEXT = frozenset(KINDS)  # causes that the planted logs of text have
FORGIVEN = frozenset({"new_content", "outside_prompt"})


@dataclass(slots=True)
class Counts:
    """Right, wrongly named and missed."""

    right: int = 0
    wrong: int = 0
    missed: int = 0

    @property
    def precision(self) -> float:
        """Share of what was named that is true."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else 1.0

    @property
    def recall(self) -> float:
        """Share of what is true that was named."""
        return self.right / (self.right + self.missed) if self.right + self.missed else 1.0

    def add(self, other: Counts) -> None:
        """Count these too."""
        self.right += other.right
        self.wrong += other.wrong
        self.missed += other.missed


@dataclass(slots=True)
class Score:
    """What `lint` said about a log, compared with the truth."""

    proved: dict[str, Counts] = field(default_factory=dict)
    likely: dict[str, Counts] = field(default_factory=dict)  # proved and likely
    segments: Counts = field(default_factory=Counts)  # of causes rightly named
    matches: Counts = field(default_factory=Counts)
    divergences: Counts = field(default_factory=Counts)
    num_requests: int = 0
    lost_in_decoys: int = 0  # requests without a cause that got one
    notes: list[str] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Count another log too."""
        for mine, theirs in ((self.proved, other.proved), (self.likely, other.likely)):
            for cause, counts in theirs.items():
                mine.setdefault(cause, Counts()).add(counts)
        for mine_counts, their_counts in (
            (self.segments, other.segments),
            (self.matches, other.matches),
            (self.divergences, other.divergences),
        ):
            mine_counts.add(their_counts)
        self.num_requests += other.num_requests
        self.lost_in_decoys += other.lost_in_decoys
        self.notes += other.notes


def total(counts: Collection[Counts]) -> Counts:
    """Counts over all causes."""
    out = Counts()
    for item in counts:
        out.add(item)
    return out


def run_lint(path: Path, *arguments: str) -> Report:
    """What `ramify lint --json` writes about a file."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "lint.json"
        command = [
            sys.executable,
            "-m",
            "ramify",
            "lint",
            str(path),
            "--json",
            str(target),
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        report: Report = json.loads(target.read_text())
    return report


def score_report(log: PlantedLog, written: WrittenLog, report: Report) -> Score:
    """Compare a report with the truth of a log."""
    score = Score(num_requests=len(log.requests))
    number_of = {line: number for number, line in enumerate(written.lines)}
    verdicts = {verdict["line"]: verdict for verdict in report["verdicts"]}
    assert len(report["verdicts"]) == report["num_requests"]
    assert sorted(verdicts) == sorted(number_of), "not the requests of the log"
    for line, number in number_of.items():
        _score_verdict(score, log, number_of, number, verdicts[line])
    return score


def _score_verdict(
    score: Score, log: PlantedLog, number_of: dict[int, int], number: int, verdict: Report
) -> None:
    allowed, strict = log.candidates(number)
    reported = number_of.get(verdict["best_match_line"])
    truth = log.truth(number, strict)
    where = f"line {verdict['line']} (request {number}, cell {log.requests[number].cell})"
    if reported in allowed:
        truth = log.truth(number, reported)
    if not truth.is_unrelated:
        is_right = reported in allowed
        score.matches.add(Counts(int(is_right), int(not is_right), int(not is_right)))
        if not is_right:
            score.notes.append(f"{where}: best match {reported}, not one of {allowed[-4:]}")
        _score_divergence(score, truth, verdict, where)
    named = {item["cause"]: item for item in verdict["causes"] if item["certainty"] != "suspected"}
    _score_causes(score, truth, named, where)


def _score_divergence(score: Score, truth: Truth, verdict: Report, where: str) -> None:
    said = verdict["divergence"]
    place = None if said is None else (said["segment"], said["char"])
    true = truth.divergence
    if true is None:
        is_right = place is None
    else:
        is_right = place in true.places or (place is None and true.may_be_none)
    score.divergences.add(Counts(int(is_right), int(not is_right), int(not is_right)))
    if not is_right:
        places = None if true is None else sorted(true.places)
        score.notes.append(f"{where}: divergence {place}, not {places}")


def _score_causes(score: Score, truth: Truth, named: dict[str, Any], where: str) -> None:
    true = truth.causes
    for cause in (true.keys() | named.keys()) - FORGIVEN:
        if truth.is_unrelated and cause == "model_changed":
            continue
        is_true, is_named = cause in true, cause in named
        counts = Counts(
            int(is_true and is_named), int(is_named and not is_true), int(is_true and not is_named)
        )
        score.likely.setdefault(cause, Counts()).add(counts)
        is_proved = is_named and named[cause]["certainty"] == "proved"
        if is_proved or (is_true and cause not in truth.likely):
            counts = Counts(
                int(is_true and is_proved),
                int(is_proved and not is_true),
                int(is_true and not is_proved),
            )
            score.proved.setdefault(cause, Counts()).add(counts)
        if is_true and is_named:
            is_there = named[cause]["segment"] in true[cause] or not true[cause]
            score.segments.add(Counts(int(is_there), int(not is_there), int(not is_there)))
            if not is_there:
                score.notes.append(
                    f"{where}: {cause} at {named[cause]['segment']}, not {sorted(true[cause])}"
                )
        if is_true != is_named:
            verb = "missed" if is_true else "wrongly named"
            item = named.get(cause)
            quoted = (
                f" {item['segment']} {item['had']!r:.60} → {item['got']!r:.60}"
                if item
                else f" at {sorted(true[cause])}"
            )
            score.notes.append(
                f"{where}: {verb} {cause}{quoted}; true {sorted(true)}, named {sorted(named)}"
            )
            if not true:
                score.lost_in_decoys += 1


def table_of(score: Score) -> str:
    """The score as text."""
    lines = [
        f"{score.num_requests} requests",
        f"{'cause':22}{'proved P':>9}{'R':>7}{'likely P':>10}{'R':>7}{'true':>7}",
    ]
    for cause in sorted(score.likely):
        strong, both = score.proved.get(cause, Counts()), score.likely[cause]
        lines.append(
            f"{cause:22}{strong.precision:9.3f}{strong.recall:7.3f}{both.precision:10.3f}{both.recall:7.3f}"
            f"{both.right + both.missed:7d}"
        )
    strong, both = total(score.proved.values()), total(score.likely.values())
    scores = (strong.precision, strong.recall, both.precision, both.recall)
    lines.append(
        "{:22}{:9.3f}{:7.3f}{:10.3f}{:7.3f}{:7d}".format("all", *scores, both.right + both.missed)
    )
    lines.append(
        f"best match {score.matches.precision:.4f}, divergence {score.divergences.precision:.4f}"
    )
    lines.append(
        f"segment of a cause {score.segments.precision:.4f}, named without a cause {score.lost_in_decoys}"
    )
    return "\n".join(lines)


def score_format(seed: int, format_name: str, folder: Path, num_requests: int = 300) -> Score:
    """Write a log, lint it, compare."""
    log = planted_log(seed, format_name, num_requests=num_requests)
    suffix = "har" if format_name.startswith("har") else "jsonl"
    written = write_log(log, format_name, folder / f"{format_name}_{seed}.{suffix}")
    report = run_lint(written.path)
    if "bad_lines" in report["quality"]:
        bad = [line for _, line in report["quality"]["bad_lines"]]
        assert bad == list(written.bad_lines), "bad lines"
    return score_report(log, written, report)


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--num-requests", type=int, default=300)
    parser.add_argument("--explain", type=int, default=0, help="notes to print")
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    options = parser.parse_args()
    whole = Score()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for format_name in options.format:
            for seed in options.seed:
                score = score_format(seed, format_name, folder, options.num_requests)
                whole.add(score)
                print(f"\n{format_name} seed {seed}: {table_of(score)}")  # noqa: T201
                for note in score.notes[: options.explain]:
                    print(note)  # noqa: T201
    print(f"\nall: {table_of(whole)}")  # noqa: T201


if __name__ == "__main__":
    main()
