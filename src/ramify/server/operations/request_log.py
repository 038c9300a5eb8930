"""One line per request, and one every ten seconds while there is something to tell."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from ramify.errors import ConfigError
from ramify.server.errors import ApiError
from ramify.server.generation import Generation
from ramify.server.http.wire import log_safe

logger = logging.getLogger("ramify.requests")


class JsonFormatter(logging.Formatter):
    """Log records as JSON, one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        told = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        told |= getattr(record, "fields", {})
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, ensure_ascii=True)


def log_request(generation: Generation) -> None:
    """`id=… prompt=… hit=… miss=…`: what a request took, never what it said."""
    output, use = generation.output, generation.cache
    fields: dict[str, object] = {
        "id": generation.id,
        "tenant": log_safe(generation.caller.tenant) or "-",
        "prompt": len(generation.request.prompt.ids),
        "hit": 0 if use is None else use.cached,
        "miss": "-" if generation.miss is None else generation.miss.reason,
    }
    if generation.miss is not None and generation.miss.segment is not None:
        fields["at"] = f"{generation.miss.at_token}:{log_safe(generation.miss.segment)}"
    if output is None:
        fields["end"] = "disconnected"
    else:
        fields["output"] = output.usage.completion_tokens
        fields["end"] = str(output.finish_reason)
        if output.metrics.ttft_s is not None:
            fields["ttft_ms"] = round(1000 * output.metrics.ttft_s)
        fields["total_ms"] = round(1000 * output.metrics.total_s)
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    logger.info("%s", told, extra={"fields": fields})


def log_rejected(error: ApiError, route: str, name: str) -> None:
    """One line for a request that was not carried out: what was wrong, not what it said."""
    fields: dict[str, object] = {"id": log_safe(name), "route": route, "status": error.status}
    if error.code is not None:
        fields["code"] = error.code
    if error.param is not None:
        fields["param"] = log_safe(error.param)
    told = " ".join(f"{name}={value}" for name, value in fields.items())
    level = logging.WARNING if error.status >= 500 else logging.INFO
    logger.log(level, "refused %s", told, extra={"fields": fields})


class LineFile:
    """A file that others may read while it grows: whole lines, each of them in the file at once.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._has_failed = path, False
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error}") from error

    def write(self, line: str) -> None:
        """Append a line; when the disk is full, what fits of it is taken back and that is logged."""
        data = line.encode()
        try:
            written = os.write(self._handle, data)
            if written < len(data):
                os.ftruncate(self._handle, os.fstat(self._handle).st_size - written)
                raise OSError(f"{written} of {len(data)} bytes were taken")
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.error("%s: lines are lost: %s", self._path, error)
            self._has_failed = True

    def close(self) -> None:
        """End."""
        os.close(self._handle)


class TraceWriter:
    """Writes one JSON line per request for the analyser: lengths and hashes, no text.

    Args:
        write: takes a line.
        page_size: prompts are hashed page by page, each with all that is before it.
        with_tokens: token ids too. They are as good as the text.
    """

    def __init__(
        self, write: Callable[[str], object], *, page_size: int, with_tokens: bool = False
    ) -> None:
        self._write, self._page_size, self._with_tokens = write, page_size, with_tokens

    def __call__(self, generation: Generation) -> None:
        """A request has ended."""
        output, prompt = generation.output, generation.request.prompt
        told: dict[str, object] = {
            "timestamp": round(1000 * time.time()),
            "tenant": generation.caller.tenant,
            "input_length": len(prompt.ids),
            "output_length": 0 if output is None else output.usage.completion_tokens,
            "page_size": self._page_size,
            "hash_ids": generation.page_hashes(),
            "hit": 0 if generation.cache is None else generation.cache.cached,
        }
        if self._with_tokens:
            told["token_ids"] = prompt.ids.tolist()
        self._write(json.dumps(told) + "\n")
