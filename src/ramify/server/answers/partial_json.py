"""`partial_object`: the members of a truncated JSON object that are complete."""

from __future__ import annotations

import json
import re
from typing import Any

# A string, which the end of the text may cut off, or a mark between values.
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)|[{}\[\]:,]', re.DOTALL)
CLOSERS = {"{": "}", "[": "]"}


def partial_object(text: str) -> dict[str, Any]:
    """The members that are complete in the beginning of a JSON object; {} if it is none.

    A string, number or word at the end of a cut text is left out, since it may go on:
    `{"a": 1, "b": [2, 3` gives `{"a": 1, "b": [2]}`. One pass over the text.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = json.loads(_closed(text))
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}


def _closed(text: str) -> str:
    """The text up to its last complete value, with everything open closed."""
    open_brackets: list[str] = []
    end = depth = 0  # of the last complete value: its end, and the brackets open after it
    awaits_value = False  # a colon is the last mark
    for match in TOKEN.finditer(text):
        mark = match[0]
        place = match.end()
        if mark in CLOSERS:
            open_brackets.append(mark)
        elif mark in "}]" and open_brackets:
            open_brackets.pop()
        elif mark == ",":
            place = match.start()  # a number or a word before the comma is complete
        elif mark[0] == '"':
            is_value = awaits_value or open_brackets[-1:] == ["["]
            if not (is_value and match["end"]):
                continue
        elif mark == ":":
            awaits_value = True
            continue
        end, depth, awaits_value = place, len(open_brackets), False
    return text[:end] + "".join(CLOSERS[bracket] for bracket in reversed(open_brackets[:depth]))
