"""Converts Python-like literals to JSON while they arrive: `{'a': None, 'b': (1, 2)}`, `{a:<q>x<q>}`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from contextlib import suppress

from ramify.server.model_dialects.json_scanner import PYTHON_CONSTANTS, ObjectScanner, json_text
from ramify.server.model_dialects.reader import Marks

WORD = re.compile(r"""[^\s\[\](){},:='"<]+|<""")
BLANK = re.compile(r"\s+")
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[^xuU])", re.DOTALL)
PARTIAL_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
SHORT_ESCAPES = dict(zip("ntrbf0av\\'\"", "\n\t\r\b\f\0\a\v\\'\"", strict=True)) | {"\n": ""}
CONSTANTS = PYTHON_CONSTANTS | {name: name for name in PYTHON_CONSTANTS.values()}
JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][-+]?[0-9]++)?")
MAX_NUMBER_CHARS = 64
CLOSERS = {"{": "}", "[": "]", "(": "]"}
PYTHON_QUOTES = ('"""', "'''", '"', "'")


class LiteralScanner:
    """Reads one bracketed literal and writes it as JSON; the outermost bracket becomes an object.

    `f(a=1, b='x')` from its bracket on is `{"a": 1, "b": "x"}`. A bare word is a constant, a number or,
    as any key is, a string.

    Args:
        quotes: that begin and end strings, each before those that are prefixes of it.
        has_escapes: a backslash in a string begins an escape.
    """

    def __init__(self, quotes: Sequence[str] = PYTHON_QUOTES, *, has_escapes: bool = True) -> None:
        self.is_done = False
        self._quotes = quotes
        self._max_quote = max(map(len, quotes))
        extra = {"\\"} if has_escapes else set[str]()
        self._string_marks = {quote: Marks({quote, *extra}) for quote in quotes}
        self._string: Marks | None = None  # while inside one
        self._word: list[str] = []
        self._closers: list[str] = []
        self._comma = ""  # written before the next value, so that none stands before a bracket
        # Pairs of surrogates in escapes, and halves of them.
        self._pairing = ObjectScanner()

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The literal's JSON from `start`, and where it stops: after the literal, or for more text."""
        parts: list[str] = []
        position = start
        while position < len(text) and not self.is_done:
            if self._string is not None:
                end = self._scan_string(self._string, text, position, parts)
            else:
                end = self._scan_token(text, position, parts)
            if end == position:
                break
            position = end
        return self._pairing.scan("".join(parts))[0], position

    def finish(self) -> str:
        """The text that was held back, when the answer ends inside the literal."""
        parts: list[str] = []
        self._end_word(parts)
        return self._pairing.scan("".join(parts))[0] + self._pairing.finish()

    def _scan_string(self, marks: Marks, text: str, position: int, parts: list[str]) -> int:
        end, mark = marks.find(text, position)
        if end > position:
            parts.append(json_text(text[position:end])[1:-1])
            return end
        if mark == "\\":
            escape = ESCAPE.match(text, position)
            if escape is not None:
                parts.append(_json_escape(escape.group()))
                return escape.end()
            if PARTIAL_ESCAPE.fullmatch(text, position):
                return position
            parts.append("\\\\")
            return position + 1
        if mark:
            parts.append('"')
            self._string = None
        return position + len(mark)

    def _scan_token(self, text: str, position: int, parts: list[str]) -> int:
        beginning = text[position : position + self._max_quote]
        if any(
            len(beginning) < len(quote) and quote.startswith(beginning) for quote in self._quotes
        ):
            return position
        quote = next((quote for quote in self._quotes if beginning.startswith(quote)), "")
        if quote:
            self._end_word(parts)
            parts += (self._take_comma(), '"')
            self._string = self._string_marks[quote]
            return position + len(quote)
        word = WORD.match(text, position)
        if word is not None:
            self._word.append(word.group())
            return word.end()
        blank = BLANK.match(text, position)
        if blank is not None:
            self._end_word(parts)
            return blank.end()
        self._structure(text[position], parts)
        return position + 1

    def _structure(self, char: str, parts: list[str]) -> None:
        if char in ":=":
            self._end_word(parts, is_key=True)
            parts.append(": ")
        elif char in CLOSERS:
            self._end_word(parts)
            closer = CLOSERS[char] if self._closers else "}"
            parts += (self._take_comma(), "{" if closer == "}" else "[")
            self._closers.append(closer)
        elif char == ",":
            self._end_word(parts)
            self._comma = ", "
        elif char in "])}":
            self._end_word(parts)
            self._comma = ""
            if self._closers:
                parts.append(self._closers.pop())
            self.is_done = not self._closers
        else:
            self._word.append(char)

    def _take_comma(self) -> str:
        comma, self._comma = self._comma, ""
        return comma

    def _end_word(self, parts: list[str], *, is_key: bool = False) -> None:
        if self._word:
            word, self._word = "".join(self._word), []
            parts += (self._take_comma(), json_text(word) if is_key else _constant(word))


def _constant(word: str) -> str:
    """A bare word as JSON."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if JSON_NUMBER.fullmatch(word):
        return word
    if len(word) <= MAX_NUMBER_CHARS and (word[0].isdigit() or word[-1].isdigit()):
        with suppress(ValueError, SyntaxError):
            value = ast.literal_eval(word)
            if isinstance(value, int | float):
                return json.dumps(value, allow_nan=False)
    return json_text(word)


def _json_escape(escape: str) -> str:
    """An escape of a Python string as the inside of a JSON string."""
    digits = escape[2:]
    if digits:
        code = int(digits, 16)
        # Halves of surrogate pairs stay escapes until both have been seen.
        if 0xD800 <= code < 0xE000:
            return f"\\u{code:04x}"
        return json_text(chr(code))[1:-1] if code < 0x110000 else "\\ufffd"
    return json_text(SHORT_ESCAPES.get(escape[1], escape))[1:-1]
