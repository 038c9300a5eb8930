"""Values of JSON Lines and of JSON documents in the order of the file, with their lines."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from ramify.analysis.files.json_documents import RawValue, breaks_at_once, document_values
from ramify.analysis.files.log_stream import CHUNK_BYTES, TOO_LONG, numbered_lines
from ramify.analysis.readers.nested_json import decode_json

_OBJECTS = re.compile(rb"\s*(?:\[\s*)?\{")
_LONG_LINE_BYTES = 1 << 24  # a first line that is longer is read as a document, in chunks


def json_values(
    source: io.BufferedReader, is_text_row: Callable[[str], bool]
) -> Iterator[RawValue]:
    """Every value of JSON Lines, or of documents; values that begin on the same line are numbered.

    Args:
        source: of UTF-8.
        is_text_row: whether a line that is no JSON is a row of a format of text.
    """
    previous: RawValue | None = None
    for value in _values(source, is_text_row):
        if previous is not None:
            if value.line == previous.line:
                previous = replace(previous, index=previous.index or 0)
                value = replace(value, index=(previous.index or 0) + 1)  # noqa: PLW2901
            yield previous
        previous = value
    if previous is not None:
        yield previous


def _values(source: io.BufferedReader, is_text_row: Callable[[str], bool]) -> Iterator[RawValue]:
    head = source.peek()
    if head.lstrip()[:1] not in {b"{", b"["}:
        yield from _line_values(numbered_lines(source), is_text_row)
        return
    number, first = 1, source.readline(_LONG_LINE_BYTES)
    while first.isspace():
        number, first = number + 1, source.readline(_LONG_LINE_BYTES)
    if _is_document(first, source.peek(), is_text_row, is_whole=len(head) < CHUNK_BYTES):
        yield from document_values(source, first, line=number)
    else:
        line = first.removesuffix(b"\n").removesuffix(b"\r")
        lines = chain([(number, line)], numbered_lines(source, start=number + 1))
        yield from _line_values(lines, is_text_row)


def _is_document(
    first: bytes, following: bytes, is_text_row: Callable[[str], bool], *, is_whole: bool
) -> bool:
    """Whether a file is a document, not lines: its first line is no value, and the next ones go on with it.

    The first of several lines may be broken. It is no beginning of a document then, and of the
    lines that follow some are rows, or all begin with the same bracket.
    """
    if len(first) >= _LONG_LINE_BYTES:
        return True
    try:
        decode_json(first.decode("utf-8", "replace"))
    except ValueError:
        if _OBJECTS.match(first + following) is None:
            return False
        if not breaks_at_once(first + following, is_whole=is_whole):
            return True
        lines = [line for line in following.split(b"\n") if line and not line.isspace()]
        return not (
            all(line[:1] == first[:1] for line in lines)
            or any(map(is_json_object, lines))
            or any(is_text_row(line.decode("utf-8", "replace")) for line in lines)
        )
    return False


def _line_values(
    lines: Iterable[tuple[int, bytes | None]], is_text_row: Callable[[str], bool]
) -> Iterator[RawValue]:
    for number, line in lines:
        if line is None:
            yield RawValue(number, error=TOO_LONG)
            continue
        if not line or line.isspace():
            continue
        try:
            value = decode_json(line)
        except ValueError as error:
            text = line.decode("utf-8", "replace")
            if is_text_row(text):
                yield RawValue(number, text, is_text=True)
            else:
                yield RawValue(number, error=_reason_of(error))
            continue
        if isinstance(value, list) and _is_list_of_rows(value):
            yield from (RawValue(number, item) for item in value)
        else:
            yield RawValue(number, value)


def _is_list_of_rows(items: list[Any]) -> bool:
    """Whether a list begins with an object that is no message."""
    return (
        bool(items)
        and isinstance(items[0], dict)
        and next(iter(items[0]), "") not in {"role", "from"}
    )


def is_json_object(line: bytes) -> bool:
    """Whether a line is an object."""
    if line.lstrip()[:1] != b"{":
        return False
    try:
        return isinstance(decode_json(line), dict)
    except ValueError:
        return False


def _reason_of(error: ValueError) -> str:
    """Why a line cannot be decoded."""
    if isinstance(error, UnicodeError):
        return "no UTF-8"
    text = str(error)
    return text if text.startswith("nested") else "no JSON"
