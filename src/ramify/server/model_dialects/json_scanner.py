"""Finds the end of a JSON object while it arrives, and decodes JSON strings piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NEXT_BRACKET = re.compile(r'["{}\[\]]')
PYTHON_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
NO_CONSTANTS: Mapping[str, str] = {}
_WORD = re.compile(r"[A-Za-z]++")
_LAST_WORD = re.compile(r"[A-Za-z]{1,5}\Z")
PLAIN = re.compile(r'[^"\\]*+')
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|[^u])", re.DOTALL)
PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
SHORT_ESCAPES = dict(zip('"\\/bfnrt', '"\\/\b\f\n\r\t', strict=True))
REPLACEMENT = "\\ufffd"


def json_text(value: Any) -> str:
    """A value as JSON, whose strings have all characters as they are."""
    return json.dumps(value, ensure_ascii=False)


class StringScanner:
    """Reads the inside of a JSON string; escapes of half a surrogate pair become U+FFFD.

    `is_done` once the closing quote has been consumed.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._high = ""  # an escape that is the first half of a pair

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The string's text from `start`, escapes as they are, and where it stops.

        It stops after the closing quote, which is not part of the string's text, at an escape that is
        not complete, or at the end.
        """
        parts: list[str] = []
        position = start
        while position < len(text):
            plain = PLAIN.match(text, position)
            assert plain is not None, "an empty text matches"
            if plain.end() > position:
                parts += (self._unpaired(), plain.group())
                position = plain.end()
            elif text[position] == '"':
                parts.append(self._unpaired())
                self.is_done = True
                return "".join(parts), position + 1
            elif (escape := ESCAPE.match(text, position)) is not None:
                parts += self._paired(escape)
                position = escape.end()
            elif PARTIAL_ESCAPE.fullmatch(text, position):
                break
            else:  # "\u" without four digits, which no JSON reader accepts
                parts += (self._unpaired(), "\\\\")
                position += 1
        return "".join(parts), position

    def finish(self) -> str:
        """The text that was held back, when the answer ends inside the string."""
        return self._unpaired()

    def _unpaired(self) -> str:
        high, self._high = self._high, ""
        return REPLACEMENT if high else ""

    def _paired(self, match: re.Match[str]) -> tuple[str, str]:
        escape, code = match.group(), int(match.group(1) or "0", 16)
        if 0xD800 <= code < 0xDC00:
            unpaired, self._high = self._unpaired(), escape
            return unpaired, ""
        if 0xDC00 <= code < 0xE000:
            high, self._high = self._high, ""
            return (high, escape) if high else ("", REPLACEMENT)
        return self._unpaired(), escape


def unescape(text: str) -> str:
    """Decode whole escapes of a JSON string's text; those that JSON does not know stay as they are."""
    if "\\" not in text:
        return text
    parts, position = list[str](), 0
    while (start := text.find("\\", position)) >= 0:
        parts.append(text[position:start])
        if text.startswith("\\u", start):
            end = start + 6
            if text.startswith("\\u", end) and 0xD800 <= int(text[start + 2 : end], 16) < 0xDC00:
                end += 6
            parts.append(json.loads(f'"{text[start:end]}"'))
        else:
            end = start + 2
            parts.append(SHORT_ESCAPES.get(text[start + 1], text[start:end]))
        position = end
    return "".join((*parts, text[position:]))


class ObjectScanner:
    """Reads a JSON object, by its brackets and strings, up to the bracket that closes it.

    Counts brackets of both kinds together, so that depth costs nothing.

    Args:
        constants: words outside of strings → what replaces them; `PYTHON_CONSTANTS`, or none.
    """

    def __init__(self, constants: Mapping[str, str] = NO_CONSTANTS) -> None:
        self.is_done = False
        self._constants = constants
        self._depth = 0
        self._string: StringScanner | None = None  # while inside one

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The object's text from `start`, and where it stops: after the object, or for more text."""
        parts: list[str] = []
        position = start
        while position < len(text) and not self.is_done:
            if self._string is not None:
                part, end = self._string.scan(text, position)
                parts.append(part)
                if self._string.is_done:
                    parts.append('"')
                    self._string = None
                elif end == position:
                    break
                position = end
                continue
            bracket = NEXT_BRACKET.search(text, position)
            end = len(text) if bracket is None else bracket.end()
            if self._constants:
                # A word at the end of the text may go on.
                word = _LAST_WORD.search(text, position) if bracket is None else None
                end = end if word is None else word.start()
                parts.append(_WORD.sub(self._replaced, text[position:end]))
            else:
                parts.append(text[position:end])
            position = end
            if bracket is None:
                break
            if bracket.group() == '"':
                self._string = StringScanner()
            else:
                self._depth += 1 if bracket.group() in "{[" else -1
                self.is_done = self._depth <= 0
        return "".join(parts), position

    def finish(self) -> str:
        """The text that was held back, when the answer ends inside the object."""
        return "" if self._string is None else self._string.finish()

    def _replaced(self, word: re.Match[str]) -> str:
        return self._constants.get(word[0], word[0])


class EncodedObjectScanner:
    """Reads a JSON object that stands in a JSON string, from after the opening quote; writes the object.

    Text after the object in the string is written too.
    """

    def __init__(self) -> None:
        self._string, self._object = StringScanner(), ObjectScanner()
        self._held = ""  # decoded, the beginning of an escape

    @property
    def is_done(self) -> bool:
        """Whether the closing quote has been consumed."""
        return self._string.is_done

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The object's text from `start`, and where it stops: after the string, or for more text."""
        part, end = self._string.scan(text, start)
        decoded = self._held + unescape(part)
        written, position = self._object.scan(decoded)
        self._held = decoded[position:]
        if self.is_done or self._object.is_done:
            written += self.finish()
        return written, end

    def finish(self) -> str:
        """The text that was held back, when the answer or the string ends inside the object."""
        held, self._held = self._held, ""
        return self._object.finish() + held
