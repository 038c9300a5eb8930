"""Request log: a log line per request, log records as JSON, and a trace file for the analyser."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ramify.errors import ConfigError
from ramify.reasons import reason_of
from ramify.server.errors import ApiError
from ramify.server.generation import Generation
from ramify.server.http.wire import log_safe

logger = logging.getLogger("ramify.requests")

MAX_SEGMENTS = 1024  # of a line of the record


class JsonFormatter(logging.Formatter):
    """Formats a log record as a line of JSON; `extra={"fields": …}` become keys of the object.

    Args:
        fields: keys of every object.
    """

    def __init__(self, fields: Mapping[str, object] | None = None) -> None:
        super().__init__()
        self._fields = fields or {}

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=True)


def log_request(generation: Generation) -> None:
    """Log `id=… tenant=… prompt=… hit=… miss=… …` for an ended request: counts and times, no text."""
    output = generation.output
    fields: dict[str, object] = {
        "id": generation.id,
        "tenant": log_safe(generation.caller.tenant) or "-",
        "prompt": len(generation.request.prompt.ids),
        "hit": generation.num_cached,
        "miss": "-" if generation.miss is None else generation.miss.reason,
    }
    if generation.miss is not None and generation.miss.segment is not None:
        fields["at"] = f"{generation.miss.at_token}:{log_safe(generation.miss.segment)}"
    if generation.placement is not None:
        fields["replica"] = generation.placement.replica
    if output is not None and output.resumed:
        fields["resumed"] = True
    if output is None:
        fields |= {"end": generation.end_reason, "status": 499}
    else:
        fields |= {"output": output.usage.completion_tokens, "end": generation.end_reason}
        if output.metrics.ttft_s is not None:
            fields["ttft_ms"] = round(1000 * output.metrics.ttft_s)
        fields["total_ms"] = round(1000 * output.metrics.total_s)
    logger.info("%s", _key_values(fields), extra={"fields": fields})


def log_rejected(error: ApiError, route: str, request_id: str) -> None:
    """Log a request that ended with an error response: status, code and field, no text."""
    fields: dict[str, object] = {"id": log_safe(request_id), "route": route, "status": error.status}
    if error.code is not None:
        fields["code"] = error.code
    if error.param is not None:
        fields["param"] = log_safe(error.param)
    level = logging.WARNING if error.status >= 500 else logging.INFO
    logger.log(level, "refused %s", _key_values(fields), extra={"fields": fields})


def _key_values(fields: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


class LineFile:
    """An append-only file of lines; each is written whole, so that others can read along.

    A file that was renamed or removed is made anew with the next line; one that was emptied goes on
    from its beginning. A pipe that nobody reads loses lines, and blocks nothing.

    Args:
        report: called with the first of several failures in a row.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = logger.error) -> None:
        self._path, self._report, self._has_failed = path, report, False
        try:
            self._handle = self._open()
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason_of(error, path)}") from error

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
        return os.open(self._path, flags, 0o600)

    def _follow_path(self) -> None:
        """Open the path again if it names another file by now, or none.

        Raises:
            OSError: the file was removed, and no other can be made.

        Until that succeeds, lines go to the file that it named: a program that rotates logs may make
        the new one itself, with the rights of this process.
        """
        current = os.fstat(self._handle)
        try:
            named = self._path.stat()
            if (named.st_dev, named.st_ino) == (current.st_dev, current.st_ino):
                return
        except FileNotFoundError:
            pass
        except OSError:
            return
        try:
            handle = self._open()
        except OSError:
            # What is written to a file without a name is lost.
            if not current.st_nlink:
                raise
            return
        os.close(self._handle)
        self._handle = handle

    def write(self, line: str) -> None:
        """Append a line. On failure the file keeps no part of it, and the first failure is logged."""
        data = line.encode(errors="backslashreplace")
        try:
            self._follow_path()
            written = os.write(self._handle, data)
            if written < len(data):
                os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
                raise OSError(f"only {written} of {len(data)} bytes were written")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True  # first: a report may come back as a line
                self._report(f"{self._path}: lines are lost: {reason_of(error, self._path)}")


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


class LogFileHandler(logging.Handler):
    """Appends log records to a `LineFile`. When lines are lost, stderr says so."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = LineFile(path, report=_to_stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        try:
            self._file.write(self.format(record) + "\n")
        except Exception:  # noqa: BLE001 - a record that cannot be formatted, as every handler treats it
            self.handleError(record)


def trace_line(generation: Generation, *, with_tokens: bool = False) -> str:
    """A JSON line about an ended request, for the analyser: counts, times and page hashes, no text.

    Times are milliseconds, `timestamp` since the epoch at the end of the request. `segments` are the
    first tokens and the paths of the request's fields, in the order of the prompt. `hit` is
    `read + shared`; `miss` says why the cache lookup ended where it did.

    Args:
        with_tokens: with token ids as well, from which the text can be restored.
    """
    output, prompt, cache = generation.output, generation.request.prompt, generation.cache
    entry: dict[str, object] = {
        "timestamp": round(1000 * time.time()),
        "id": generation.id,
        "tenant": generation.caller.tenant,
        "input_length": len(prompt.ids),
        "output_length": 0 if output is None else output.usage.completion_tokens,
        "page_size": generation.page_size,
        "hash_ids": generation.page_hashes(),
        "segments": [
            (segment.start, log_safe(segment.path)) for segment in prompt.segments[:MAX_SEGMENTS]
        ],
        "hit": generation.num_cached,
        "end": generation.end_reason,
    }
    if output is not None:
        entry["total_ms"] = round(1000 * output.metrics.total_s, 1)
        if output.metrics.ttft_s is not None:
            entry["ttft_ms"] = round(1000 * output.metrics.ttft_s, 1)
    if cache is not None:
        entry |= {"read": cache.read, "shared": cache.shared, "written": cache.written}
    if generation.miss is not None:
        miss: dict[str, object] = {
            "reason": generation.miss.reason,
            "at_token": generation.miss.at_token,
        }
        if generation.miss.segment is not None:
            miss["segment"] = log_safe(generation.miss.segment)
        entry["miss"] = miss
    if with_tokens:
        entry["token_ids"] = prompt.ids.tolist()
    return json.dumps(entry) + "\n"
