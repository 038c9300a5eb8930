"""The server answers as recorded, byte for byte but for ids and times.

Where a difference is meant, `python -m tests.pure.golden_exchanges` records the answers anew.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable

import pytest

from tests.pure.golden_exchanges import (
    GROUPS,
    OPENAPI,
    difference,
    openapi_lines,
    path_of,
    played,
    recorded,
)

HINT = "if this is meant, record it: python -m tests.pure.golden_exchanges"


@pytest.mark.parametrize("name", GROUPS)
def test_exchanges_are_as_recorded(name: str) -> None:
    """Statuses, headers, bodies, events and prompts of every dialogue."""
    before, after = recorded(name), played(name)

    assert list(before) == list(after), HINT
    differing = difference(before, after)
    if differing:
        pytest.fail(f"{path_of(name).name}: {HINT}\n\n{differing}", pytrace=False)


def test_the_openapi_document_is_as_recorded() -> None:
    """Paths, parameters and schemas, in their order."""
    before = OPENAPI.read_text(encoding="utf-8").split("\n")[:-1]
    after = openapi_lines()

    differing = list(difflib.unified_diff(before, after, "recorded", "made", n=0, lineterm=""))
    if differing:
        pytest.fail("\n".join([HINT, *differing]), pytrace=False)


def test_about_four_hundred_exchanges_are_recorded() -> None:
    """Of all four APIs, with errors and streams among them."""
    lines = [line for name in GROUPS for talk in recorded(name).values() for line in talk]

    responses = [json.loads(line) for line in lines if line.startswith('{"status":')]
    statuses = [response["status"] for response in responses]
    assert len(responses) >= 400
    assert statuses.count(200) >= 300
    assert sum(400 <= status < 500 for status in statuses) >= 100
    assert max(statuses) < 500
    for path in (
        "v1/chat/completions",
        "v1/completions",
        "v1/responses",
        "v1/messages",
        "v1/messages/count_tokens",
        "api/chat",
        "api/generate",
    ):
        assert any(line.startswith(f'{{"POST":"/{path}"') for line in lines)


def swap_events(lines: list[str]) -> list[str]:
    """The last two events of a stream in the other order."""
    return [*lines[:-2], lines[-1], lines[-2]]


def edit(old: str, new: str) -> Callable[[list[str]], list[str]]:
    """A change of the text of the last line."""

    def change(lines: list[str]) -> list[str]:
        assert old in lines[-1]
        return [*lines[:-1], lines[-1].replace(old, new, 1)]

    return change


@pytest.mark.parametrize(
    ("dialogue", "change", "shown"),
    [
        ("chat field: plain", edit('"finish_reason":"length"', '"finish_reason":"stop"'), '"stop"'),
        ("chat field: plain", edit('"total_tokens":10,', ""), '-  "total_tokens": 10'),
        ("chat field: plain", edit('"id":', '"id": '), '"id": "chatcmpl-'),
        ("chat stream: usage", swap_events, "[DONE]"),
    ],
)
def test_a_fault_is_shown(
    dialogue: str, change: Callable[[list[str]], list[str]], shown: str
) -> None:
    """A reason, a count, the order of events, a space: the dialogue and the line are named."""
    before = recorded("chat")

    differing = difference(before, before | {dialogue: change(before[dialogue])})

    assert differing.startswith(f"dialogue {dialogue!r}:")
    assert shown in differing
