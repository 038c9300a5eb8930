"""Strings, lists and dicts as Python's `repr` writes them.

Python's parser is given single strings only. What is around them is rewritten as JSON, so that neither
nesting nor calls nor size reach it.
"""

from __future__ import annotations

import ast
import json
import re

import msgspec

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.row_values import quoted

MAX_STRING_CHARS = 1 << 26
# The escapes that `repr` writes; what is between them. Possessive: a string without its end is rejected
# in one pass.
_ESCAPE = r"\\(?:[nrt\\'\"]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})"
STRING = rf"'[^'\\]*+(?:{_ESCAPE}[^'\\]*+)*+'|\"[^\"\\]*+(?:{_ESCAPE}[^\"\\]*+)*+\""
_STRING = re.compile(STRING)
_INTEGERS = re.compile(r"\[[\d,\s-]*+\]")
_WORDS = {"None": "null", "True": "true", "False": "false", "(": "[", ")": "]", "nan": "null"}
# A quote by which no string begins ends the search: the text behind it is not scanned for each quote.
_LITERAL = re.compile(STRING + r"|\b(?:None|True|False|nan)\b|[()'\"]")


def string_at(text: str, position: int) -> tuple[str, int]:
    """The string that begins at a position, and the position behind it.

    Raises:
        BadRowError: no string begins there, or it does not end.
    """
    match = _STRING.match(text, position)
    if match is None:
        raise BadRowError(f"no complete string in {quoted(text[position : position + 64])}")
    literal = match[0]
    if "\\" not in literal:
        return literal[1:-1], match.end()
    if len(literal) > MAX_STRING_CHARS:
        raise BadRowError(f"string of {len(literal):,} characters, more than {MAX_STRING_CHARS:,}")
    try:
        return str(ast.literal_eval(literal)), match.end()
    except (SyntaxError, ValueError) as error:
        raise BadRowError(f"{quoted(literal)} is no string of Python: {error}") from None


def integers_at(text: str, position: int) -> tuple[list[int], int]:
    """The list of integers that begins at a position, and the position behind it.

    Raises:
        BadRowError: no such list begins there, or it does not end.
    """
    match = _INTEGERS.match(text, position)
    try:
        if match is not None:
            return msgspec.json.decode(match[0], type=list[int]), match.end()
    except msgspec.DecodeError:
        pass
    raise BadRowError(f"no list of integers in {quoted(text[position : position + 64])}")


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
