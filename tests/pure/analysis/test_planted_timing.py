"""How well `lint` finds causes that only times, usage and replicas show, on planted logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pure.analysis.planted_timing import TimedRequest, timed_log
from tests.pure.analysis.scoring import Counts, Report, run_lint, total
from tests.pure.analysis.timed_rows import ROWS, write_rows

GOAL = 0.97
AT_MOST_LIKELY = frozenset(
    "ttl_expired parallel_cold breakpoint_missing lookback_exceeded below_minimum unread_write routing "
    "evicted outside_prompt".split()
)
FROM_USAGE = frozenset("routing evicted outside_prompt model_changed cache_key_scattered".split())


def score(
    requests: Sequence[TimedRequest], report: Report, *, has_usage: bool
) -> tuple[dict[str, Counts], list[str]]:
    """Counts by cause, proved and likely together, and what was missed or wrongly named."""
    counts: dict[str, Counts] = {}
    notes: list[str] = []
    assert len(report["verdicts"]) == len(requests)
    for request, verdict in zip(requests, report["verdicts"], strict=True):
        named = {
            item["cause"] for item in verdict["causes"] if item["certainty"] != "suspected"
        } - {"new_content"}
        for item in verdict["causes"]:
            assert item["cause"] not in AT_MOST_LIKELY or item["certainty"] != "proved"
        maybe, true = set(request.sent.maybe), set(request.sent.causes)
        if not has_usage:
            maybe |= FROM_USAGE
        for cause in true | named:
            is_true, is_named = cause in true, cause in named
            if cause in maybe and not (is_true and is_named):
                continue
            counts.setdefault(cause, Counts()).add(
                Counts(is_true and is_named, is_named and not is_true, is_true and not is_named)
            )
            if is_true != is_named:
                verb = "missed" if is_true else "wrongly named"
                notes.append(
                    f"line {verdict['line']} ({request.sent.story}): {verb} {cause}; {verdict}"
                )
    return counts, notes


def check(folder: Path, seeds: Sequence[int], names: Sequence[str], num_requests: int) -> None:
    """Score logs by name and seed: precision and recall of all, and no cause far below."""
    whole: dict[str, Counts] = {}
    notes: list[str] = []
    for name in names:
        vendor, row = ROWS[name]
        for seed in seeds:
            requests = timed_log(seed, vendor, num_requests=num_requests)
            path = folder / f"{name}_{seed}.jsonl"
            write_rows(requests, row, path)
            counts, more = score(requests, run_lint(path), has_usage=name != "anthropic_times")
            notes += [f"{name} {seed}: {note}" for note in more]
            for cause, item in counts.items():
                whole.setdefault(cause, Counts()).add(item)
    everything = total(list(whole.values()))
    assert everything.precision >= GOAL, notes[:20]
    assert everything.recall >= GOAL, notes[:20]
    weak = {
        cause: (item.precision, item.recall)
        for cause, item in whole.items()
        if item.right + item.missed >= 20 and min(item.precision, item.recall) < 0.8
    }
    assert not weak, notes[:20]


def test_causes_of_times_and_usage_are_found(tmp_path: Path) -> None:
    """Every story once or twice under two cache models: 0.97 of all, decoys included."""
    check(tmp_path, [31], ["anthropic", "openai_litellm"], 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_causes_of_times_and_usage_are_found_in_every_log(tmp_path: Path) -> None:
    """Nine logs and three seeds: 0.97 of all, no cause below 0.8."""
    check(tmp_path, [31, 32, 33], list(ROWS), 200)
