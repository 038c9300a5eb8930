"""Rows of tables with a header: comma, semicolon or tab between the cells."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator

from ramify.analysis.files.json_documents import RawValue
from ramify.analysis.files.log_stream import TOO_LONG, numbered_lines

_NAME = re.compile(r'\s*"?[A-Za-z_@$][\w .:@/()\-\[\]]{0,80}"?\s*')
MAX_ROW_BYTES = 1 << 26  # a row that is longer lacks a quote
_OPEN_QUOTE = "a cell does not end: a quote is missing"


def delimiter_of(header: str) -> str | None:
    """What stands between the names of a header; None if the line is no header."""
    for delimiter in ",\t;":
        names = header.split(delimiter)
        if len(names) > 1 and all(_NAME.fullmatch(name) for name in names):
            return delimiter
    return None


def csv_values(
    source: io.BufferedReader, delimiter: str, *, max_row_bytes: int = MAX_ROW_BYTES
) -> Iterator[RawValue]:
    """An object for each row after the header, its cells by the names of the header.

    A row's line is the one on which it begins: cells may hold line ends. If such a row is bad, a
    quote may be missing, and the lines after its first are read again as rows.
    """
    csv.field_size_limit(min(sys.maxsize, 1 << 30))
    lines = _Lines(source, max_row_bytes)
    names: list[str] | None = None
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.begin_row()
        error: str | None = None
        cells: list[str] = []
        try:
            cells = next(reader)
        except StopIteration:
            if not lines.taken:
                return
            error = _OPEN_QUOTE
        except csv.Error as parse_error:
            error = f"no row of a table: {parse_error}"
        error = error or lines.error or (_OPEN_QUOTE if lines.is_cut else None)
        if error is None and names is None:
            names = [name.strip() for name in cells]
            continue
        if error is None and names is not None and cells and len(cells) != len(names):
            error = "number of cells differs from the header's"
        if error is not None:
            yield RawValue(lines.first, error=error)
            lines.give_back()
            reader = csv.reader(lines, delimiter=delimiter, strict=True)
        elif cells and names is not None:
            yield RawValue(lines.first, dict(zip(names, cells, strict=True)))


class _Lines:
    """Lines of a source for the parser; those of the current row can be given back."""

    def __init__(self, source: io.BufferedReader, max_row_bytes: int) -> None:
        self._source, self._max_row_bytes = numbered_lines(source), max_row_bytes
        self._waiting: list[tuple[int, str, str | None]] = []  # given back, the next one last
        self.taken: list[tuple[int, str, str | None]] = []  # by the current row
        self._num_bytes = 0

    def begin_row(self) -> None:
        """Forget the lines of the row before."""
        self.taken, self._num_bytes, self.is_cut = [], 0, False

    @property
    def first(self) -> int:
        """Number of the line on which the current row begins."""
        return self.taken[0][0]

    @property
    def error(self) -> str | None:
        """Why a line of the current row cannot be decoded."""
        return next((error for _, _, error in self.taken if error is not None), None)

    def give_back(self) -> None:
        """Let the lines of the current row after its first be read again."""
        self._waiting += reversed(self.taken[1:])

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        is_over = self._num_bytes > self._max_row_bytes
        line = None if is_over else self._waiting.pop() if self._waiting else self._read()
        if line is None:
            self.is_cut = bool(self.taken)
            raise StopIteration
        self.taken.append(line)
        self._num_bytes += len(line[1])
        return line[1]

    def _read(self) -> tuple[int, str, str | None] | None:
        number, line = next(self._source, (0, b""))
        if not number:
            return None
        if line is None:
            return number, "\n", TOO_LONG
        try:
            return number, line.decode("utf-8") + "\n", None
        except UnicodeDecodeError:
            return number, line.decode("utf-8", "replace") + "\n", "no UTF-8"
