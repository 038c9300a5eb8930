"""Logs as requests: every file, every row, in the format that the row has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from ramify.analysis.files.json_documents import CONTAINERS, RawValue
from ramify.analysis.files.log_paths import Progress, find_files, total_bytes
from ramify.analysis.files.response_history import ResponseHistory
from ramify.analysis.files.rows import values_of
from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers import FORMATS
from ramify.analysis.records import LoggedRequest
from ramify.errors import LogError

UNKNOWN_ROW = "row of no known format"
OTHER_LINE = "line that is no request"


def read_log(
    paths: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    format: str | None = None,  # noqa: A002 - the word of the command line
    quality: ReadQuality | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Iterator[LoggedRequest]:
    """The requests of logs, in the order in which their rows are complete.

    Reads plain, gzip, zstd, bzip2 and xz files: JSON Lines, JSON arrays and documents, tables with a
    header, lines of text, Parquet. Rows are read one by one; memory holds a row, not a file.

    Args:
        paths: files, directories (searched for the suffixes of logs), or "-" for standard input.
        format: name of a format, if rows shall not be recognised by their keys.
        quality: counts what was read and what was not.
        strict: a bad line is an error.
        progress: called with the bytes read so far of all files and their sum (None: unknown).

    Raises:
        LogError: no such file or format, a file of a kind that is refused, or a bad line if strict.
    """
    if isinstance(paths, str | PathLike):
        paths = [paths]
    chosen = None if format is None else format_named(format)
    files = list(find_files(paths))
    quality = ReadQuality() if quality is None else quality
    return _Reading(files, chosen, quality, strict, progress).requests()


def format_named(name: str) -> LogFormat:
    """The format of the table with a name.

    Raises:
        LogError: there is none.
    """
    for known in FORMATS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in FORMATS)
    raise LogError(f"there is no log format {name!r}; choose one of {names}")


class _Reading:
    """One pass over files; holds a reader for each format that occurs."""

    def __init__(
        self,
        files: list[Path | str],
        chosen: LogFormat | None,
        quality: ReadQuality,
        strict: bool,
        progress: Progress | None,
    ) -> None:
        self._files, self._chosen = files, chosen
        self._quality, self._strict, self._progress = quality, strict, progress
        self._readers: dict[str, RowReader] = {}
        self._history = ResponseHistory(quality)
        self._line = ("", 0)
        self._indices: set[int] = set()  # of the requests of that line
        self._num_bytes, self._total_bytes = 0, total_bytes(files)

    def requests(self) -> Iterator[LoggedRequest]:
        for file in self._files:
            yield from self._requests_of(file)
        for reader in self._readers.values():
            for request in reader.close():
                yield self._finished(request)

    def _requests_of(self, file: Path | str) -> Iterator[LoggedRequest]:
        name = str(file)
        as_text = self._chosen is not None and self._chosen.is_text
        values = values_of(file, advance=self._advance, is_row=_is_row, as_text=as_text)
        is_empty = True
        for value in values:
            is_empty = False
            if value.error is not None:
                self._add_bad_line(name, value.line, value.error)
                continue
            for row in self._rows(name, value):
                yield from self._requests_of_row(row)
        if is_empty:
            self._quality.notes["empty file"] += 1

    def _rows(self, name: str, value: RawValue) -> Iterator[Row]:
        """The rows of a value: itself, or the list of rows that a document on one line holds."""
        if value.value is None:
            self._quality.skipped[OTHER_LINE] += 1
            return
        if isinstance(value.value, str) and not value.is_text and self._chosen is None:
            # A text among JSON values is a piece of a broken value, not a prompt.
            self._quality.skipped[UNKNOWN_ROW] += 1
            return
        items = None if self._chosen is not None else _rows_inside(value.value)
        if items is None:
            yield Row(name, value.line, value.value, value.index)
            return
        for number, item in enumerate(items):
            yield Row(name, value.line, item, number if len(items) > 1 else None)

    def _requests_of_row(self, row: Row) -> Iterator[LoggedRequest]:
        self._quality.num_rows += 1
        log_format = _format_of(row.value) if self._chosen is None else self._chosen
        if log_format is None:
            self._quality.skipped[UNKNOWN_ROW] += 1
            return
        if self._chosen is not None and not log_format.is_row(row.value):
            self._add_bad_line(row.file, row.line, f"no row of the format {log_format.name}")
            return
        self._quality.formats[log_format.name] += 1
        reader = self._readers.get(log_format.name)
        if reader is None:
            reader = self._readers[log_format.name] = log_format.reader(self._quality)
        try:
            for request in reader.feed(row):
                yield self._finished(self._indexed(request, row))
        except BadRowError as error:
            self._add_bad_line(row.file, row.line, str(error))
        except RecursionError:
            self._add_bad_line(row.file, row.line, "nested too deeply")

    def _indexed(self, request: LoggedRequest, row: Row) -> LoggedRequest:
        """The request with an index that no other request of its line has."""
        if row.index is None or (request.file, request.line) != (row.file, row.line):
            return request
        if self._line != (row.file, row.line):
            self._line, self._indices = (row.file, row.line), set()
        index = row.index if request.index is None else request.index
        if index in self._indices:
            index = max(self._indices) + 1
        self._indices.add(index)
        return request if index == request.index else replace(request, index=index)

    def _finished(self, request: LoggedRequest) -> LoggedRequest:
        self._quality.num_requests += 1
        return self._history.completed(request)

    def _add_bad_line(self, name: str, line: int, reason: str) -> None:
        if self._strict:
            raise LogError(
                f"{name}, line {line}: {reason}; repair the line, or read without strict"
            )
        self._quality.add_bad_line(name, line, reason)

    def _advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._num_bytes, self._total_bytes)


def _format_of(value: Any) -> LogFormat | None:
    return next((known for known in FORMATS if known.is_row(value)), None)


def _is_row(value: Any) -> bool:
    """Whether a format takes a value; of a text, one of server logs."""
    is_text = isinstance(value, str)
    return any(
        known.is_row(value)
        for known in FORMATS
        if known.is_text >= is_text and known.name != "plain"
    )


def _rows_inside(value: Any) -> list[Any] | None:
    """Rows of a document with a list of them; None for whatever is a row itself."""
    if isinstance(value, list):
        is_rows = len(value) > 0 and all(
            isinstance(item, dict) and "role" not in item and "from" not in item for item in value
        )
        return value if is_rows else None
    if not isinstance(value, dict):
        return None
    log = value.get("log")
    if isinstance(log, dict) and isinstance(log.get("entries"), list):
        return list(log["entries"])
    names = CONTAINERS.intersection(value)
    if not names or _format_of(value) is not None:
        return None
    for name, items in value.items():
        if (
            name in names
            and isinstance(items, list)
            and items
            and all(isinstance(item, dict) for item in items)
        ):
            return list(items)
    return None
