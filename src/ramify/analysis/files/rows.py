"""Rows of a file: JSON Lines, JSON documents, tables, lines of text; each with its line."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ramify.analysis.files.containers import is_cri, unwrapped
from ramify.analysis.files.csv_rows import csv_values, delimiter_of
from ramify.analysis.files.json_documents import RawValue
from ramify.analysis.files.json_values import is_json_object, json_values
from ramify.analysis.files.log_stream import (
    CHUNK_BYTES,
    TOO_LONG,
    LogStream,
    numbered_lines,
    open_file,
)
from ramify.analysis.readers.nested_json import decode_json
from ramify.errors import LogError

HEAD_BYTES = 1 << 16
TRUNCATED = "file ends too early"
_BOM = b"\xef\xbb\xbf"
_JSON_SUFFIXES = (".json", ".jsonl", ".ndjson", ".har")
_CSV_SUFFIXES = (".csv", ".tsv")


def values_of(
    file: Path | str,
    *,
    advance: Callable[[int], None],
    is_row: Callable[[Any], bool],
    as_text: bool = False,
) -> Iterator[RawValue]:
    """The values of a file in order; what cannot be decoded has an error.

    A line of text in a log that is no JSON has its text as `value` if it is a row of a format of
    text, and an `error` otherwise.

    Args:
        file: "-" is standard input.
        advance: called with the number of bytes read from disk.
        is_row: whether a format takes a value, or a format of text a line.
        as_text: every line is a row of text.

    Raises:
        LogError: the file is of a kind that is refused.
    """
    with open_file(file) as disk:
        stream = LogStream(disk, str(file), advance)
        if stream.is_parquet:
            yield from _parquet_values(file)
            return
        source: io.BufferedReader[Any] = io.BufferedReader(stream, CHUNK_BYTES)
        previous: RawValue | None = None
        for value in unwrapped(_values(source, str(file), is_row, as_text), is_row):
            if previous is not None:
                yield previous
            previous = value
        if previous is not None and not (stream.is_truncated and previous.error):
            yield previous
        if stream.is_truncated:
            yield RawValue(stream.num_line_ends + 1, error=TRUNCATED)


def _values(
    source: io.BufferedReader, name: str, is_text_row: Callable[[str], bool], as_text: bool
) -> Iterator[RawValue]:
    if source.peek().startswith(_BOM):
        source.read(len(_BOM))
    head = source.peek()[:HEAD_BYTES]
    if head[257:262] == b"ustar":
        raise LogError(f"{name} is a tar archive; unpack it first")
    if as_text:
        return _text_values(source)
    suffix = _suffix(name)
    lines = head.split(b"\n")
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()
    first = next((line.strip() for line in lines if line.strip()), b"")
    is_json = suffix in _JSON_SUFFIXES or first[:1] in {b"{", b"["}
    if is_json or any(map(is_json_object, lines[:100])):
        return json_values(source, is_text_row)
    delimiter = delimiter_of(first.decode("utf-8", "replace"))
    if delimiter is not None and (
        suffix in _CSV_SUFFIXES or _is_table([line for line in lines if line.strip()], delimiter)
    ):
        return csv_values(source, delimiter)
    if is_cri(first.decode("utf-8", "replace")):
        return _text_values(source)
    if any(is_text_row(line.decode("utf-8", "replace")) for line in lines):
        return _text_log(source, is_text_row)
    if b"\x00" in head:
        return json_values(source, is_text_row)
    return _text_values(source)


def _suffix(name: str) -> str:
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    while suffixes and suffixes[-1] in {".gz", ".zst", ".bz2", ".xz"}:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _is_table(lines: list[bytes], delimiter: str) -> bool:
    """Whether the second line has at least the cells of the header, or a cell with a line end."""
    if len(lines) < 2:
        return False
    cells = lines[1].count(delimiter.encode())
    return cells >= lines[0].count(delimiter.encode()) or b'"' in lines[1]


def _text_values(source: io.BufferedReader) -> Iterator[RawValue]:
    """Each line that is not blank."""
    for number, line in numbered_lines(source):
        if line is None:
            yield RawValue(number, error=TOO_LONG)
        elif line.strip():
            try:
                yield RawValue(number, line.decode("utf-8"), is_text=True)
            except UnicodeDecodeError:
                yield RawValue(number, error="no UTF-8")


def _text_log(source: io.BufferedReader, is_text_row: Callable[[str], bool]) -> Iterator[RawValue]:
    """Lines of a server's log: rows of text, JSON, and other lines, which have the value None."""
    for value in _text_values(source):
        if value.error is not None or is_text_row(value.value):
            yield value
        elif value.value.lstrip()[:1] in {"{", "["}:
            try:
                yield RawValue(value.line, decode_json(value.value.encode("utf-8")))
            except ValueError:
                yield RawValue(value.line, error="no JSON")
        else:
            yield RawValue(value.line)


def _parquet_values(file: Path | str) -> Iterator[RawValue]:
    if isinstance(file, str):
        raise LogError("standard input is a Parquet file, which needs random access; name the file")
    try:
        parquet: Any = import_module("pyarrow.parquet")
        errors: Any = import_module("pyarrow").ArrowException
    except ImportError:
        raise LogError(
            f"{file} is a Parquet file; pip install pyarrow to read it, or export JSON Lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield RawValue(number, value)
    except errors:
        yield RawValue(number + 1, error=TRUNCATED)
