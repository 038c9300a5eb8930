"""Rows of tables with a header: comma, semicolon or tab between the cells."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from typing import Any

from ramify.analysis.inputs.byte_source import ByteSource, ValueTooLongError
from ramify.analysis.inputs.json_values import RawValue

_NAME = re.compile(r'\s*"?[A-Za-z_@$][\w .:@/()\-\[\]]{0,80}"?\s*')
MAX_CELL_CHARS = min(sys.maxsize, 1 << 30)


def delimiter_of(header: str) -> str | None:
    """What stands between the names of a header; None if the line is no header."""
    for delimiter in ",\t;":
        names = header.split(delimiter)
        if len(names) > 1 and all(_NAME.fullmatch(name) for name in names):
            return delimiter
    return None


def csv_values(source: ByteSource, delimiter: str) -> Iterator[RawValue]:
    """An object for each row after the header, its cells by the names of the header.

    A row's line is the one on which it begins: cells may hold line ends.
    """
    csv.field_size_limit(MAX_CELL_CHARS)
    lines = _Lines(source)
    reader = csv.reader(lines, delimiter=delimiter, strict=False)
    names: list[str] | None = None
    while True:
        first = lines.number + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield RawValue(first, error=f"no row of a table: {error}")
            continue
        if lines.error is not None:
            yield RawValue(first, error=lines.error)
            lines.error = None
        elif names is None:
            names = [name.strip() for name in cells]
        elif cells:
            yield _row(names, cells, first)


def _row(names: list[str], cells: list[str], line: int) -> RawValue:
    if len(cells) != len(names):
        return RawValue(line, error="number of cells differs from the header's")
    value: dict[str, Any] = dict(zip(names, cells, strict=True))
    return RawValue(line, value)


class _Lines:
    """Lines of a source for the parser, and the number of the last that it took."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.number = source.line - 1
        self.error: str | None = None  # of a line since it was last cleared

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        while True:
            try:
                line = self._source.take_line()
            except ValueTooLongError:
                self.error = "longer than 1 GiB"
                continue
            finally:
                self.number = self._source.line - 1
            if line is None:
                raise StopIteration
            try:
                return line.decode("utf-8") + "\n"
            except UnicodeDecodeError:
                self.error = "no UTF-8"
                return line.decode("utf-8", "replace") + "\n"
