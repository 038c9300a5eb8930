"""When figures of a log are still those that were recorded: rows, verdicts, tokens, savings.

Rows read and predicted tokens are equal, causes have a precision and a recall of 0.99 of the recorded
ones, savings and lost tokens are within 2 %. What else differs only `differences` lists.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.pure.analysis.golden_cases import GoldenCase, Json
from tests.pure.analysis.scoring import Counts

# Names that may stand for a recorded cause; a cause that is not in the table keeps its name.
CAUSE_NAMES: dict[str, frozenset[str]] = {}

GOAL = 0.99  # precision and recall of causes
TOLERANCE = 0.02  # of savings and lost tokens
ROUNDING = 1e-9  # of sums of floats in another order
ROWS = ("num_rows", "num_requests", "formats", "bad_lines")
# Keys of `analyze`, and of a node of its tree, that show what requests share.
SHARING = ("num_input", "num_counted", "duration_s", "curves")
NODE = (
    "parent",
    "depth",
    "first",
    "num_requests",
    "num_tokens",
    "prefix_tokens",
    "total",
    "num_read",
)
PLACE = ("file", "line", "index")


def names_of(cause: str) -> frozenset[str]:
    """The names that a recorded cause may have."""
    return CAUSE_NAMES.get(cause, frozenset({cause}))


@dataclass(slots=True)
class Comparison:
    """What has become of the figures of some logs."""

    recall: defaultdict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    precision: defaultdict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    places: defaultdict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))
    savings: defaultdict[str, list[float]] = field(
        default_factory=lambda: defaultdict(lambda: [0.0, 0.0])
    )
    faults: list[str] = field(default_factory=list)  # that no tolerance allows
    notes: list[str] = field(default_factory=list)  # where causes and places differ

    def add(self, case: GoldenCase, current: Json) -> None:
        """Compare a log."""
        recorded = case.figures
        if case.is_well_formed:
            self._add_rows(case.name, recorded["lint"], current["lint"])
            self._add_equal(case.name, recorded, current)
            self._add_savings(case.name, recorded, current)
        else:
            self._note_rows(case.name, recorded["lint"], current["lint"])
        self._add_verdicts(case.name, recorded["lint"], current["lint"])
        for before, now in zip(recorded["explain"], current["explain"], strict=True):
            where = f"{case.name} explain {before['pair']}"
            self._add_causes(where, before.get("differences", []), now.get("differences", []))

    @property
    def fallen(self) -> list[str]:
        """The goals that are missed, with their figures."""
        lines = list(self.faults)
        for kind, table in (
            ("recall", self.recall),
            ("precision", self.precision),
            ("equal", self.places),
        ):
            for name, counts in sorted(table.items()):
                share = counts.precision if kind == "precision" else counts.recall
                if share < GOAL:
                    total = counts.right + counts.wrong + counts.missed
                    lines.append(f"{name}: {kind} {share:.4f} < {GOAL} ({counts.right} of {total})")
        for name, (before, now) in sorted(self.savings.items()):
            if not is_close(before, now, TOLERANCE):
                lines.append(f"{name}: {before:,.6g} -> {now:,.6g}, more than {TOLERANCE:.0%}")
        return lines

    def table(self) -> str:
        """Precision and recall by cause, then what else is counted."""
        lines = [f"{'':28}{'precision':>10}{'recall':>10}{'recorded':>10}"]
        for name in sorted(self.recall.keys() | self.precision.keys()):
            recall = self.recall.get(name, Counts())
            share = self.precision.get(name, Counts()).precision
            lines.append(
                f"{name:28}{share:10.4f}{recall.recall:10.4f}{recall.right + recall.missed:10d}"
            )
        for name, counts in sorted(self.places.items()):
            lines.append(f"{name:28}{'':10}{counts.recall:10.4f}{counts.right + counts.missed:10d}")
        for name, (before, now) in sorted(self.savings.items()):
            change = (now - before) / before if before else 0.0
            lines.append(f"{name:40}{before:18,.6g} -> {now:18,.6g} {change:+8.3%}")
        return "\n".join(lines)

    def _add_rows(self, name: str, recorded: Json, current: Json) -> None:
        before, now = recorded.get("quality", {}), current.get("quality", {})
        for key in ROWS:
            if before.get(key) != now.get(key):
                self.faults.append(f"{name}: {key} {before.get(key)} -> {now.get(key)}")

    def _note_rows(self, name: str, recorded: Json, current: Json) -> None:
        before, now = recorded.get("quality", {}), current.get("quality", {})
        for key in ROWS:
            if before.get(key) != now.get(key):
                self.notes.append(f"{name}: {key} {before.get(key)} -> {now.get(key)}")

    def _add_equal(self, name: str, recorded: Json, current: Json) -> None:
        """What has no tolerance: predictions, sharing, simulations, whether a command refuses."""
        pairs = [
            ("predicted", *(_predicted(item["lint"]) for item in (recorded, current))),
            ("analyze", *(_sharing(item["analyze"]) for item in (recorded, current))),
            ("lint", *(_outcome(item["lint"]) for item in (recorded, current))),
            ("simulate", *(_simulated(item["simulate"]) for item in (recorded, current))),
        ]
        for provider, before in recorded["providers"].items():
            now = current["providers"].get(provider, {})
            pairs.append((f"predicted by {provider}", _predicted(before), _predicted(now)))
        pairs += [
            (f"explain {before['pair']}", _shared(before), _shared(now))
            for before, now in zip(recorded["explain"], current["explain"], strict=True)
        ]
        for what, before, now in pairs:
            first = next(differences(before, now, what), None)
            if first is not None:
                self.faults.append(f"{name}: {first}")

    def _add_savings(self, name: str, recorded: Json, current: Json) -> None:
        for run in ("lint", *(f"by {provider}" for provider in recorded["providers"])):
            before, now = (
                item["lint"] if run == "lint" else item["providers"].get(run[3:], {})
                for item in (recorded, current)
            )
            for kind in ("tokens", "money"):
                was, is_now = (item.get("saving_all", {}).get(kind) for item in (before, now))
                if not is_close(was, is_now, TOLERANCE):
                    self.faults.append(f"{name}: {run}: saving of all {kind} {was} -> {is_now}")
            for at, report in enumerate((before, now)):
                for finding in report.get("findings", ()):
                    cause = finding["cause"]
                    # One finding may stand for several recorded ones: only `saving_all` compares.
                    if any(cause in names_of(old) | {old} for old in CAUSE_NAMES):
                        continue
                    self.savings[f"saving, {cause}"][at] += finding["saving"]["tokens"]
                    self.savings[f"dollars, {cause}"][at] += finding["saving"]["money"] or 0.0
        for at, item in enumerate((recorded, current)):
            self.savings["tokens lost"][at] += item["analyze"].get("tokens_lost", 0)

    def _add_verdicts(self, name: str, recorded: Json, current: Json) -> None:
        now_by_place = {_place(verdict): verdict for verdict in current.get("verdicts", ())}
        for before in recorded.get("verdicts", ()):
            now = now_by_place.get(_place(before))
            where = f"{name} line {before['line']}"
            self._add_causes(where, before["causes"], [] if now is None else now["causes"])
            if now is None:
                self.notes.append(f"{where}: no verdict")
                continue
            self._add_place(where, "best match", _match(before), _match(now))
            self._add_place(where, "divergence", _divergence(before), _divergence(now))
            for key in ("total", "reusable"):
                if before["tokens"][key] != now["tokens"][key]:
                    self.faults.append(
                        f"{where}: tokens {key} {before['tokens'][key]} -> {now['tokens'][key]}"
                    )

    def _add_causes(self, where: str, before: Sequence[Json], now: Sequence[Json]) -> None:
        recorded = {item["cause"]: item for item in before}
        current = {item["cause"]: item for item in now}
        for cause, item in recorded.items():
            stands = sorted(names_of(cause) & current.keys())
            self.recall[cause].add(Counts(right=int(bool(stands)), missed=int(not stands)))
            if not stands:
                self.notes.append(f"{where}: missed {cause} at {item['segment']}")
                continue
            other = current[stands[0]]
            self._add_place(where, "segment of a cause", item["segment"], other["segment"])
            self._add_place(where, "certainty of a cause", item["certainty"], other["certainty"])
        for cause, item in current.items():
            is_right = any(cause in names_of(old) for old in recorded)
            self.precision[cause].add(Counts(right=int(is_right), wrong=int(not is_right)))
            if not is_right:
                self.notes.append(f"{where}: wrongly named {cause} at {item['segment']}")

    def _add_place(self, where: str, what: str, before: Any, now: Any) -> None:
        is_right = before == now
        self.places[what].add(Counts(right=int(is_right), missed=int(not is_right)))
        if not is_right:
            self.notes.append(f"{where}: {what} {before} -> {now}")


def is_close(before: float | None, now: float | None, tolerance: float) -> bool:
    """Whether two figures, or the lack of both, are equal within a share of the greater."""
    if before is None or now is None:
        return before is now
    return math.isclose(before, now, rel_tol=tolerance, abs_tol=1e-9)


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """Every place at which two JSON values differ, as text."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if key not in before or key not in now:
                side = (
                    f"absent -> {_short(now[key])}"
                    if key in now
                    else f"{_short(before[key])} -> absent"
                )
                yield f"{where}.{key}: {side}"
            else:
                yield from differences(before[key], now[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            yield f"{where}: {len(before)} items -> {len(now)}"
        for at, (old, new) in enumerate(zip(before, now, strict=False)):
            yield from differences(old, new, f"{where}[{at}]")
    elif isinstance(before, float) and isinstance(now, int | float):
        if not is_close(before, now, ROUNDING):
            yield f"{where}: {before} -> {now}"
    elif before != now:
        yield f"{where}: {_short(before)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _place(verdict: Json) -> tuple[Any, ...]:
    return tuple(verdict.get(key) for key in PLACE)


def _match(verdict: Json) -> tuple[Any, ...]:
    return tuple(verdict.get(f"best_match_{key}") for key in PLACE)


def _divergence(verdict: Json) -> tuple[Any, ...] | None:
    place = verdict["divergence"]
    return None if place is None else (place["segment"], place["char"], place["token"])


def _predicted(report: Json) -> Any:
    table = report.get("predicted") or report.get("tables", {}).get("predicted")
    return {"provider": report.get("provider"), "predicted": _without_money(table)}


def _without_money(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_money(item) for key, item in value.items() if key != "money"}
    return value


def _outcome(report: Json) -> Json:
    return {key: report.get(key) for key in ("error", "num_requests", "provider", "capacity")}


def _sharing(analysis: Json) -> Json:
    tree = [{key: node[key] for key in NODE} for node in analysis.get("tree", ())]
    rates = {name: rate for name, rate in analysis.get("rates", {}).items() if name != "possible"}
    shared = {key: analysis.get(key) for key in SHARING}
    parts = {"tree": tree, "rates": rates, "is refused": "error" in analysis}
    return {name: _without_nulls(value) for name, value in shared.items()} | parts


def _without_nulls(value: Any) -> Any:
    """What a null says, its absence says too."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _simulated(runs: Json) -> Json:
    """Simulations without what they tell of the file; of a refusal only that it is one."""
    return {
        name: "refused" if "error" in run else {key: run[key] for key in run if key != "quality"}
        for name, run in runs.items()
    }


def _shared(explanation: Json) -> Json:
    keys = ("num_tokens_a", "num_tokens_b", "shared_as_sent", "is_exact", "error")
    return {key: explanation.get(key) for key in keys}
