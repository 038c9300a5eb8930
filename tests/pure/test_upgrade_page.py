"""docs/upgrade.md: the versions that it names are those of the code."""

import re
from pathlib import Path

import pytest

from ramify.cluster.wire import PROTOCOL_VERSION
from ramify.engine.identity import ARITHMETIC_VERSION
from ramify.kv.stores.segment_format import FORMAT_VERSION

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "upgrade.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("file_format", FORMAT_VERSION),
        ("arithmetic_version", ARITHMETIC_VERSION),
        ("protocol_version", PROTOCOL_VERSION),
    ],
)
def test_formats_have_their_versions(name: str, version: int) -> None:
    """A reader compares the numbers with those that the log of an old server names."""
    [row] = re.findall(rf"^\| `{name}`[^|]*\| (\d+) \|", PAGE, re.MULTILINE)

    assert int(row) == version
