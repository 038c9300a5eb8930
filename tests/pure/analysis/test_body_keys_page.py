"""The page about logs lists the keys that are read beside a body."""

import re
from pathlib import Path

from ramify.analysis.readers.bodies import wrapped_bodies

PAGE = Path(__file__).parents[3] / "docs" / "logs.md"


def test_the_page_lists_the_keys_of_rows() -> None:
    """Each tuple of keys is a row of the table, in order."""
    section = PAGE.read_text("utf-8").partition("## What stands beside a body")[2]
    rows = [
        tuple(re.findall(r"`([^`]+)`", line.split("|")[2]))
        for line in section.splitlines()
        if line.startswith("| ") and "`" in line
    ]

    assert rows == [
        wrapped_bodies.REQUEST_KEYS,
        wrapped_bodies.RESPONSE_KEYS,
        wrapped_bodies.START_KEYS,
        wrapped_bodies.END_KEYS,
        wrapped_bodies.DURATION_KEYS,
        wrapped_bodies.FIRST_OUTPUT_KEYS,
        wrapped_bodies.CONVERSATION_KEYS,
        wrapped_bodies.ID_KEYS,
        wrapped_bodies.PARENT_KEYS,
        wrapped_bodies.TENANT_KEYS,
        wrapped_bodies.REPLICA_KEYS,
    ]
