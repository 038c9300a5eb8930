"""The page about logs names every format."""

from __future__ import annotations

import re
from pathlib import Path

from ramify.analysis.formats import FORMATS

PAGE = Path(__file__).parents[3] / "docs" / "logs.md"


def test_the_page_has_a_row_for_each_format() -> None:
    """In its table; no name of a format that is gone."""
    names = re.findall(r"^\| `([a-z][a-z-]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)

    assert sorted(names) == sorted(known.name for known in FORMATS)
