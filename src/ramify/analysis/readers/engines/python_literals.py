"""Strings, lists and dicts as Python's `repr` writes them, without evaluating anything."""

from __future__ import annotations

import json
import re

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.row_values import quoted

# Possessive: a string without its end is rejected in one pass.
STRING = r"'[^'\\]*+(?:\\.[^'\\]*+)*+'|\"[^\"\\]*+(?:\\.[^\"\\]*+)*+\""
_STRING = re.compile(STRING, re.DOTALL)
_INTEGERS = re.compile(r"\[[\d,\s-]*+\]")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]", "nan": "null"}
# A quote by which no string begins ends the search: the text behind it is not scanned for each quote.
_LITERAL = re.compile(STRING + r"|\b(?:None|True|False|nan)\b|[()'\"]", re.DOTALL)
MAX_DIGITS = 20


def string_at(text: str, position: int) -> tuple[str, int]:
    """The string that begins at a position, and the position behind it.

    Raises:
        BadRowError: no string begins there, or it does not end.
    """
    match = _STRING.match(text, position)
    if match is None:
        raise BadRowError(f"no complete string in {quoted(text[position : position + 64])}")
    inner = match[0][1:-1]
    return (_ESCAPE.sub(_unescape, inner) if "\\" in inner else inner), match.end()


def integers_at(text: str, position: int) -> tuple[tuple[int, ...], int]:
    """The list of integers that begins at a position, and the position behind it.

    Raises:
        BadRowError: no such list begins there, or it does not end.
    """
    match = _INTEGERS.match(text, position)
    if match is None:
        raise BadRowError(f"no list of integers in {quoted(text[position : position + 64])}")
    items = [item.strip() for item in match[0][1:-1].split(",")]
    if items == [""]:
        return (), match.end()
    for item in items:
        if not item.lstrip("-").isdecimal() or len(item) > MAX_DIGITS or "-" in item[1:]:
            raise BadRowError(f"{quoted(item)} in a list of integers")
    return tuple(map(int, items)), match.end()


def json_of_literal(text: str) -> str | None:
    """Dicts, lists and tuples of plain values as JSON; None where a string has no end or an unknown escape.

    What is no literal, as a call, stays and is no JSON.
    """
    try:
        return _LITERAL.sub(lambda match: _WORDS.get(match[0]) or _json_string(match[0]), text)
    except BadRowError:
        return None


def _json_string(literal: str) -> str:
    return json.dumps(string_at(literal, 0)[0])


def _unescape(match: re.Match[str]) -> str:
    digits = match[1] or match[2] or match[3]
    if digits is not None:
        code = int(digits, 16)
        if code > 0x10FFFF:
            raise BadRowError(f"escape {match[0]} is no character")
        return chr(code)
    character = _PLAIN.get(match[4])
    if character is None:
        raise BadRowError(f"unknown escape {quoted(match[0])} in a string")
    return character
