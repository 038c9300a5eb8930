"""What a log format implements: rows in, requests out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ramify.analysis.records import LoggedRequest

Place = tuple[str, int, int | None]  # file, line, index of a request, as `LoggedRequest` begins


@dataclass(frozen=True, slots=True)
class Row:
    """A value of a log: a line of JSONL, an item of an array, a row of a table."""

    file: str
    line: int  # on which the value begins, from 1
    value: Any
    index: int | None = None  # among several values that begin on the line

    @property
    def place(self) -> Place:
        """Where its request stands."""
        return self.file, self.line, self.index


class BadRowError(Exception):
    """A row that should be a request and is none; the message is the reason."""


class RowReader(Protocol):
    """Turns rows of one format into requests; holds what later rows are joined with."""

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """The requests that this row completes.

        Raises:
            BadRowError: the row cannot be read.
        """
        ...

    def close(self) -> Iterator[LoggedRequest]:
        """The requests that were still waiting for other rows, in order; by default none."""
        return iter(())


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A row of the table of formats."""

    name: str
    is_row: Callable[[Any], bool]  # whether a decoded row has this format
    reader: Callable[[ReadQuality], RowReader]
    is_text: bool = False  # rows are lines of text


@dataclass(slots=True)
class ReadQuality:
    """What was read and what was not; `--json` has it as `quality`."""

    num_rows: int = 0
    num_requests: int = 0
    bad_lines: list[tuple[str, int]] = field(default_factory=list)
    bad_reasons: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)  # rows that are no request, by reason
    formats: Counter[str] = field(default_factory=Counter)  # rows by name of the format
    notes: Counter[str] = field(default_factory=Counter)  # as "text cut", "grouping inferred"

    def as_json(self) -> dict[str, Any]:
        """The object `quality` of `--json`; `asdict` would count the items of the counters."""
        return {
            "num_rows": self.num_rows,
            "num_requests": self.num_requests,
            "bad_lines": [list(place) for place in self.bad_lines],
            "bad_reasons": dict(self.bad_reasons),
            "skipped": dict(self.skipped),
            "formats": dict(self.formats),
            "notes": dict(self.notes),
        }

    def why_empty(self) -> str:
        """Why there are no requests, for an error message; the way out, where a reader knows it."""
        counts = (self.skipped + self.bad_reasons).most_common(3)
        reasons = [*self.notes, *(f"{count:,} × {reason}" for reason, count in counts)]
        return "; ".join(reasons[:4]) or "it is empty"

    def add_bad_line(self, file: str, line: int, reason: str) -> None:
        """Count a line that cannot be read, once for all bad values on it."""
        if not self.bad_lines or self.bad_lines[-1] != (file, line):
            self.bad_lines.append((file, line))
        self.bad_reasons[reason] += 1
