"""The parts of the full run: which tests `make test` leaves to it, and which files they cover."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that only a full run has, and the files that they cover."""

    tests: tuple[str, ...]  # patterns of test ids
    quick: tuple[str, ...]  # of these, what every run has
    covers: tuple[str, ...]  # patterns of paths relative to the repository

    def has(self, test_id: str) -> bool:
        """Whether only a full run has the test."""
        return matches(test_id, self.tests) and not matches(test_id, self.quick)

    def num_covered(self, paths: list[str]) -> int:
        """How many of the files it covers."""
        return sum(matches(path, self.covers) for path in paths)


def matches(text: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern describes the whole text; * stands for anything, all else for itself."""
    return any(
        re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text, re.DOTALL)
        for pattern in patterns
    )


def read_parts(text: str) -> tuple[str, dict[str, Part]]:
    """The commit at which the full run last passed, "" before the first, and the parts by name."""
    table = tomllib.loads(text)
    parts = {
        name: Part(**{key: tuple(values) for key, values in part.items()})
        for name, part in table["parts"].items()
    }
    return table["commit"], parts
