"""Values of JSON Lines, JSON arrays and documents in the order of the file, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ramify.analysis.files.byte_source import (
    STRING,
    TOKEN,
    TOO_LONG,
    ByteSource,
    ValueTooLongError,
    balance,
)
from ramify.analysis.readers.nested_json import decode_json

# Lists of rows in the documents of exports: HAR, LangSmith, Langfuse and most other APIs.
CONTAINERS = frozenset(
    "runs data observations items rows results records logs entries generations".split()
)
_MESSAGES = re.compile(rb'\[\s*\{\s*"(?:role|from)"\s*:')
_OPEN_ENDS = (b"{", b"[", b",", b":")
_LOOK_AHEAD_BYTES = 1 << 16
_LONG_LINE_BYTES = 1 << 24  # an object on a longer line is looked into before it is read whole


@dataclass(frozen=True, slots=True)
class RawValue:
    """A decoded value, or the reason why there is none."""

    line: int
    value: Any = None
    index: int | None = None  # among several values that begin on the line
    error: str | None = None
    text: bytes | None = None  # the line, if it is no JSON
    is_text: bool = False  # the value is a line of text


def json_values(source: ByteSource) -> Iterator[RawValue]:
    """Every value: a line each, or an element of an array or of a document's list of rows.

    A line that is no JSON has its text and the error. Values that begin on the same line are
    numbered.
    """
    previous: RawValue | None = None
    for value in _values(source):
        if previous is not None:
            if value.line == previous.line:
                previous = replace(previous, index=previous.index or 0)
                value = replace(value, index=(previous.index or 0) + 1)  # noqa: PLW2901
            yield previous
        previous = value
    if previous is not None:
        yield previous


def _values(source: ByteSource) -> Iterator[RawValue]:
    while True:
        first = source.skip_blank()
        if not first:
            return
        if first == b"[" and _is_list_of_objects(source):
            source.advance(source.position + 1)
            yield from _elements(source)
        elif first == b"{" and _starts_document(source):
            if source.enter_list(CONTAINERS):
                yield from _elements(source)
                _leave_document(source)
            else:
                yield _document(source, is_pretty=_is_bare_brace(source))
        else:
            yield _line(source)


def _is_list_of_objects(source: ByteSource) -> bool:
    head = source.head(4096)
    return head[1:].lstrip()[:1] == b"{" and _MESSAGES.match(head) is None


def _starts_document(source: ByteSource) -> bool:
    """Whether the object at the position goes on in the next lines, or is very long."""
    searched = 0
    while True:
        end = source.buffer.find(b"\n", source.position + searched)
        if end >= 0:
            break
        searched = len(source.buffer) - source.position
        if searched > _LONG_LINE_BYTES:
            return True
        if not source.fill():
            return False
    if end - source.position > 4096:
        # The first line of a document is short; a long line that does not end is cut.
        return False
    line = source.buffer[source.position : end].rstrip()
    depth = balance(line)
    if depth is None or depth <= 0 or not line.endswith(_OPEN_ENDS):
        return False
    return _goes_on(line, source.head(end + 1 - source.position + _LOOK_AHEAD_BYTES)[len(line) :])


def _goes_on(line: bytes, rest: bytes) -> bool:
    """Whether the lines after an open one continue it, and are no values of their own."""
    following = [item.strip() for item in rest.split(b"\n") if item.strip()]
    if not following:
        return False
    if following[0][:1] != b"{":
        return True
    is_name_due = line.endswith((b"{", b",")) and _innermost(line) == b"{"
    if is_name_due or len(following) < 2:
        return False
    # An element ends with a comma, or the list ends on the next line.
    return not _is_whole(following[0]) or following[1][:1] in {b"]", b"}", b","}


def _innermost(line: bytes) -> bytes:
    """The last bracket that is still open."""
    depth = 0
    for match in reversed(list(TOKEN.finditer(line))):
        if match[0] in {b"]", b"}"}:
            depth += 1
        elif match[0] in {b"[", b"{"}:
            if not depth:
                return match[0]
            depth -= 1
    return b""


def _is_whole(line: bytes) -> bool:
    try:
        decode_json(line)
    except ValueError:
        return False
    return True


def _is_bare_brace(source: ByteSource) -> bool:
    return source.head(64)[1:].lstrip(b" \t\r")[:1] == b"\n"


def _line(source: ByteSource) -> RawValue:
    number = source.line
    try:
        line = source.take_line() or b""
    except ValueTooLongError:
        return RawValue(number, error=TOO_LONG)
    try:
        return RawValue(number, decode_json(line))
    except ValueError as error:
        return RawValue(number, error=_reason(error), text=line)


def _document(source: ByteSource, *, is_pretty: bool) -> RawValue:
    """The object or list at the position, which may span lines.

    After a malformed value, goes to the next line that begins as the value did if documents are
    pretty-printed, else to the next line.
    """
    number = source.line
    indent = source.indent
    error = "value does not end"
    try:
        end = source.value_end()
    except ValueTooLongError:
        end, error = None, TOO_LONG
    if end is not None:
        try:
            value = decode_json(source.buffer[source.position : end])
        except ValueError as parse_error:
            error = _reason(parse_error)
        else:
            source.advance(end)
            return RawValue(number, value)
    if is_pretty:
        source.resync(indent, end)
    else:
        source.skip_line()
    return RawValue(number, error=error)


def _elements(source: ByteSource) -> Iterator[RawValue]:
    """Elements of the array whose bracket is behind the position; goes behind its end."""
    while True:
        byte = source.skip_blank()
        if byte == b",":
            source.advance(source.position + 1)
        elif not byte or byte == b"]":
            source.advance(source.position + len(byte))
            return
        else:
            yield _document(source, is_pretty=True) if byte in b"{[" else _scalar(source)


_SCALAR = re.compile(STRING + rb'"|[^\s,\]\[{}"]+|.', re.DOTALL)


def _scalar(source: ByteSource) -> RawValue:
    number = source.line
    source.head(1 << 16)
    match = _SCALAR.match(source.buffer, source.position)
    data = b"" if match is None else match[0]
    source.advance(source.position + len(data))
    try:
        return RawValue(number, decode_json(data))
    except ValueError as error:
        return RawValue(number, error=_reason(error))


def _leave_document(source: ByteSource) -> None:
    """Skip the rest of an object in which a list was entered: everything up to the line's end.

    What follows the list is metadata of the export. The closing brackets of a pretty document are
    skipped as well.
    """
    while True:
        byte = source.skip_blank()
        if not byte:
            return
        if byte in b"}],":
            source.advance(source.position + 1)
        elif byte == b'"':
            _scalar(source)
        elif byte == b":":
            source.advance(source.position + 1)
            if source.skip_blank() in {b"{", b"["}:
                try:
                    end = source.value_end()
                except ValueTooLongError:
                    end = None
                source.advance(len(source.buffer) if end is None else end)
            else:
                _scalar(source)
        else:
            return


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeError):
        return "no UTF-8"
    text = str(error)
    return text if text.startswith("nested") else "no JSON"
