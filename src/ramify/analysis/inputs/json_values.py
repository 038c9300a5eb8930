"""Values of JSON Lines, JSON arrays and documents in the order of the file, with their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ramify.analysis.formats.nested_json import decode_json
from ramify.analysis.inputs.byte_source import ByteSource, ValueTooLongError, balance

# Lists of rows in the documents of exports: HAR, LangSmith, Langfuse and most other APIs.
CONTAINERS = frozenset(
    "runs data observations items rows results records logs entries generations".split()
)
_MESSAGES = re.compile(rb'\[\s*\{\s*"(?:role|from)"\s*:')
_OPEN_ENDS = (b"{", b"[", b",", b":")
_LONG_LINE_BYTES = 1 << 24  # an object on a longer line is looked into before it is read whole


@dataclass(frozen=True, slots=True)
class RawValue:
    """A decoded value, or the reason why there is none."""

    line: int
    value: Any = None
    index: int | None = None  # among several values that begin on the line
    error: str | None = None
    text: bytes | None = None  # the line, if it is no JSON


def json_values(source: ByteSource) -> Iterator[RawValue]:
    """Every value: a line each, or an element of an array or of a document's list of rows.

    A line that is no JSON has its text and the error.
    """
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
                yield _document(source)
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
    if not line.endswith(_OPEN_ENDS):
        return False
    depth = balance(line)
    return depth is not None and depth > 0


def _line(source: ByteSource) -> RawValue:
    number = source.line
    try:
        line = source.take_line() or b""
    except ValueTooLongError:
        return RawValue(number, error="longer than 1 GiB")
    try:
        return RawValue(number, decode_json(line))
    except ValueError as error:
        return RawValue(number, error=_reason(error), text=line)


def _document(source: ByteSource) -> RawValue:
    """The object at the position, which spans lines."""
    number = source.line
    indent = source.indent
    try:
        end = source.value_end()
    except ValueTooLongError:
        end = None
    if end is None:
        source.resync(indent, None)
        return RawValue(number, error="value does not end")
    data = source.buffer[source.position : end]
    try:
        value = decode_json(data)
    except ValueError as error:
        source.resync(indent, end)
        return RawValue(number, error=_reason(error))
    source.advance(end)
    return RawValue(number, value)


def _elements(source: ByteSource) -> Iterator[RawValue]:
    """Elements of the array whose bracket is behind the position; goes behind its end."""
    previous: RawValue | None = None
    while True:
        byte = source.skip_blank()
        if byte == b",":
            source.advance(source.position + 1)
            continue
        if not byte or byte == b"]":
            if byte:
                source.advance(source.position + 1)
            break
        element = _document(source) if byte in b"{[" else _scalar(source)
        shares_line = previous is not None and previous.line == element.line
        if previous is not None:
            yield _numbered(previous, shares_line)
        if previous is not None and shares_line:
            element = RawValue(
                element.line, element.value, (previous.index or 0) + 1, element.error
            )
        previous = element
    if previous is not None:
        yield previous


def _numbered(value: RawValue, shares_line: bool) -> RawValue:
    if shares_line and value.index is None:
        return RawValue(value.line, value.value, 0, value.error)
    return value


_SCALAR = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"|[^\s,\]\[{}"]+|.', re.DOTALL)


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
