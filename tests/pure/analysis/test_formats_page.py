"""The page of log formats names every format, and its examples are read."""

import re
from pathlib import Path

import pytest

from ramify.analysis.log_files import read_log
from ramify.analysis.reader import ReadQuality
from ramify.analysis.readers import FORMATS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "logs.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```(jsonl|csv|text) ([\w-]+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_tables_name_every_format_once() -> None:
    """A format that is added or renamed has a row in the tables."""
    rows = re.findall(r"^\| `([\w-]+)` \|", TEXT, re.MULTILINE)

    assert sorted(rows) == sorted(form.name for form in FORMATS)
    assert {name for _, name, _ in EXAMPLES} == set(rows)


@pytest.mark.parametrize(("kind", "name", "text"), EXAMPLES, ids=[name for _, name, _ in EXAMPLES])
def test_examples_are_recognised_and_read(kind: str, name: str, text: str, tmp_path: Path) -> None:
    """Each example is recognised as its format, without a bad line, and holds a request."""
    suffix = {"jsonl": ".jsonl", "csv": ".csv", "text": ".log"}[kind]
    path = tmp_path / f"log{suffix}"
    path.write_text(text, encoding="utf-8")
    quality = ReadQuality()

    requests = list(read_log(path, quality=quality))

    assert set(quality.formats) == {name}
    assert not quality.bad_lines
    assert len(requests) == 1
