"""Truncated JSON objects: the members that are complete, or all of the text, closed."""

from __future__ import annotations

import json
import re
from typing import Any

# A string, which the end of the text may cut off, or a mark between values.
TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?P<end>"?)|[{}\[\]:,]', re.DOTALL)
CLOSERS = {"{": "}", "[": "]"}
# A string as far as its escapes are whole; half of a surrogate pair is no character.
WHOLE_ESCAPES = re.compile(
    r'"(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
# Half of a surrogate pair whose other half cannot follow; or, as `whole`, an escape beside it.
HALF_PAIR = re.compile(
    r"(?P<whole>\\[^u]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}(?!\\?\Z|\\u[0-9a-fA-F]{0,3}\Z)"
)


def partial_object(text: str) -> dict[str, Any]:
    """The members that are complete in the beginning of a JSON object; {} if it is none.

    A string, number or word at the end of a cut text is left out, since it may go on:
    `{"a": 1, "b": [2, 3` gives `{"a": 1, "b": [2]}`. One pass over the text.
    """
    for candidate in (text, _closed(text)):
        value = _loaded(candidate)
        if value is not None:
            return value if isinstance(value, dict) else {}
    return {}


def completed_object(text: str) -> dict[str, Any] | None:
    """A JSON object whose end is cut off, closed where it ends; None if the text begins none.

    A string that is cut off keeps what it has: `{"a": [1, "b` gives `{"a": [1, "b"]}`. A number or
    word at the end is left out, since it may go on.
    """
    text = _without_halves(text)
    for candidate in (_closed(text, keeps_string=True), _closed(text)):
        value = _loaded(candidate)
        if isinstance(value, dict):
            return value
    return {} if text.strip() == "{" else None


def decoded(text: str) -> Any:
    """The value of a JSON text. Half of a surrogate pair, which no prompt can hold, is U+FFFD.

    Raises:
        ValueError, RecursionError: it is not JSON.
    """
    return json.loads(_without_halves(text))


def _without_halves(text: str) -> str:
    return HALF_PAIR.sub(lambda match: match["whole"] or r"\ufffd", text)


def _loaded(text: str) -> Any:
    """The value of a JSON text; None if it is not JSON."""
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        return None


def _closed(text: str, *, keeps_string: bool = False) -> str:
    """The text up to its last complete value, with everything open closed.

    Args:
        keeps_string: a string that the end cuts off is closed too, unless it is a key.
    """
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
            if is_value and keeps_string and not match["end"]:
                whole = WHOLE_ESCAPES.match(text, match.start())
                text = text[: whole.end() if whole else match.end()] + '"'
                place = len(text)
            elif not (is_value and match["end"]):
                continue
        elif mark == ":":
            awaits_value = True
            continue
        end, depth, awaits_value = place, len(open_brackets), False
    return text[:end] + "".join(CLOSERS[bracket] for bracket in reversed(open_brackets[:depth]))
