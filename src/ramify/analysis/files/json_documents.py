"""Values of JSON documents, which span lines or are too long to be read whole, with their lines.

A document is a value of any layout; several may follow one another. Of an array of objects, and of an
object that holds a list of them under one of `CONTAINERS`, the values are the elements. The text is read
in chunks: memory holds an element, not the document. A document that is broken ends the values.
"""

from __future__ import annotations

import io
import json
import re
from codecs import getincrementaldecoder
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from ramify.analysis.files.log_stream import CHUNK_BYTES, MAX_VALUE_BYTES, TOO_LONG

# Lists of rows in the documents of exports: HAR, LangSmith, Langfuse and most other APIs.
CONTAINERS = frozenset(
    "runs data observations items rows results records logs entries generations".split()
)
_NOT_READ = "; the rest of the document is not read"
_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
_ARRAY_OF_ROWS = re.compile(r'\[\s*\{(?!\s*"(?:role|from)"\s*:)')
_LIST_OF_ROWS = re.compile(r"\[\s*[{\]]")
_LOOK_AHEAD_CHARS = 4096
_TOKEN_CHARS = 16  # of a word, a number's tail or an escape that the end of a chunk may cut


@dataclass(frozen=True, slots=True)
class RawValue:
    """A decoded value, or the reason why there is none."""

    line: int
    value: Any = None
    index: int | None = None  # among several values that begin on the line
    error: str | None = None
    is_text: bool = False  # the value is a line of text


class _BrokenDocumentError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def document_values(
    source: io.BufferedReader,
    first: bytes = b"",
    *,
    line: int = 1,
    max_chars: int = MAX_VALUE_BYTES,
) -> Iterator[RawValue]:
    """The values of all documents of a source; the last has an error if its document is broken.

    Args:
        source: of UTF-8.
        first: bytes that were taken from the source before.
        line: number of the line on which they begin.
        max_chars: of a value.
    """
    try:
        text = _DocumentText(source, first, line, max_chars)
        while bracket := text.next_char():
            if bracket == "[" and text.looks_at(_ARRAY_OF_ROWS):
                yield from _elements(text)
            elif bracket == "{":
                number = text.line
                value = yield from _rows_of_object(text)
                if value is not None:
                    yield RawValue(number, value)
            else:
                yield RawValue(text.line, text.take_value())
    except _BrokenDocumentError as error:
        yield RawValue(error.line, error=f"{error}{_NOT_READ}")


def breaks_at_once(data: bytes, *, is_whole: bool) -> bool:
    """Whether data that begins with an object, or a list of them, is no beginning of a document.

    Args:
        data: of a document up to its first element, or more.
        is_whole: nothing follows the data.
    """
    text = data.decode("utf-8", "replace").strip().removeprefix("[").lstrip()
    try:
        _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        return is_whole or not _may_be_cut(error)
    except RecursionError:
        return True
    return False


def _elements(text: _DocumentText) -> Iterator[RawValue]:
    """The elements of the list at the position."""
    text.skip()
    if text.next_char() == "]":
        text.skip()
        return
    while True:
        text.next_char()
        number = text.line
        yield RawValue(number, text.take_value())
        if not text.goes_on("]"):
            return


def _rows_of_object(
    text: _DocumentText, *, is_log: bool = False
) -> Generator[RawValue, None, dict[str, Any] | None]:
    """The elements of the first list of rows in the object at the position; returns an object without such a list.

    What stands beside the list is metadata of the export. HAR has its list in the object `log`.
    """
    fields: dict[str, Any] = {}
    has_rows = False
    text.skip()
    if text.next_char() == "}":
        text.skip()
        return fields
    while True:
        key = text.take_key()
        if not has_rows and key in CONTAINERS and text.looks_at(_LIST_OF_ROWS):
            yield from _elements(text)
            has_rows = True
        elif not has_rows and not is_log and key == "log" and text.next_char() == "{":
            fields[key] = yield from _rows_of_object(text, is_log=True)
            has_rows = fields[key] is None
        else:
            fields[key] = text.take_value()
        if not text.goes_on("}"):
            return None if has_rows else fields


class _DocumentText:
    """Text of documents, a position in it, and the line of the position."""

    def __init__(self, source: io.BufferedReader, first: bytes, line: int, max_chars: int) -> None:
        self._source, self._max_chars = source, max_chars
        self._decoder = getincrementaldecoder("utf-8")()
        self.line = line
        self._position = 0
        self._is_at_end = False
        self._has_bad_bytes = False  # behind the text
        self._text = self._decoded(first)

    def next_char(self) -> str:
        """Go to the next character that is no blank; returns it, "" at the end."""
        line = self.line
        while True:
            match = _BLANK.match(self._text, self._position)
            self._advance(self._position if match is None else match.end())
            if self._position < len(self._text):
                return self._text[self._position]
            if not self._fill():
                self.line = line  # that of the last character, for errors
                return ""

    def skip(self) -> None:
        """Go over a character."""
        self._position += 1

    def looks_at(self, pattern: re.Pattern[str]) -> bool:
        """Whether the text at the next character begins with a pattern."""
        self.next_char()
        while len(self._text) - self._position < _LOOK_AHEAD_CHARS and self._fill(is_needed=False):
            pass
        return pattern.match(self._text, self._position) is not None

    def goes_on(self, end: str) -> bool:
        """Go over a comma, or over the end of a list or object; whether it was a comma."""
        mark = self.next_char()
        if mark not in {",", end}:
            raise self._broken(self._position, "no JSON")
        self.skip()
        return mark == ","

    def take_key(self) -> str:
        """The name of a field, and go over its colon."""
        key = self.take_value() if self.next_char() == '"' else None
        if key is None or self.next_char() != ":":
            raise self._broken(self._position, "no JSON")
        self.skip()
        return str(key)

    def take_value(self) -> Any:
        """The value at the next character."""
        self.next_char()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                if not _may_be_cut(error) or not self._fill():
                    raise self._broken(error.pos, "no JSON") from None
            except RecursionError:
                raise self._broken(self._position, "nested too deeply") from None
            else:
                # A number at the end of the text may go on.
                if end < len(self._text) or not self._fill(is_needed=False):
                    self._advance(end)
                    return value

    def _fill(self, *, is_needed: bool = True) -> bool:
        """Append a chunk, as long as what is left, so that a long value is read in linear time.

        Args:
            is_needed: bytes that are no UTF-8 are an error; else the text ends before them.
        """
        rest = self._text[self._position :]
        if not (self._is_at_end or self._has_bad_bytes):
            if len(rest) > self._max_chars:
                raise self._broken(self._position, TOO_LONG)
            chunk = self._source.read1(max(CHUNK_BYTES, len(rest)))
            self._is_at_end = not chunk
            decoded = self._decoded(chunk)
            if decoded:
                self._text, self._position = rest + decoded, 0
            if decoded or not (self._is_at_end or self._has_bad_bytes):
                return True
        if self._has_bad_bytes and is_needed:
            num_between = self._text.count("\n", self._position)
            raise _BrokenDocumentError(self.line + num_between, "no UTF-8")
        return False

    def _decoded(self, data: bytes) -> str:
        """The text of bytes; of those with some that are no UTF-8 what is before these."""
        try:
            return self._decoder.decode(data, final=not data and self._is_at_end)
        except UnicodeDecodeError as error:
            self._has_bad_bytes = True
            return error.object[: error.start].decode("utf-8")

    def _advance(self, end: int) -> None:
        self.line += self._text.count("\n", self._position, end)
        self._position = end

    def _broken(self, position: int, reason: str) -> _BrokenDocumentError:
        """An error at a position of the text, or at its last character that is no blank."""
        end = min(position, len(self._text.rstrip()))
        num_between = self._text.count("\n", self._position, end)
        return _BrokenDocumentError(self.line + num_between, reason)


def _may_be_cut(error: json.JSONDecodeError) -> bool:
    """Whether more text may mend an error: it is at the end, or a string does not end."""
    return error.msg.startswith("Unterminated") or error.pos > len(error.doc) - _TOKEN_CHARS
