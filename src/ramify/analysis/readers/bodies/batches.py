"""Batches of OpenAI and Anthropic: requests in one file, results in another, joined by `custom_id`."""

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import msgspec

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.exchanges import NO_REQUEST, is_other_call
from ramify.analysis.readers.bodies.request_bodies import parse_bodies, requests_of
from ramify.analysis.readers.bodies.responses import ResponseFields, parse_response
from ramify.analysis.readers.nested_json import decode_json
from ramify.analysis.records import LoggedRequest

MEMORY_BYTES = 64 << 20  # of requests and results that wait in memory; more of them wait on disk


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row in the spool."""

    custom_id: str
    file: str
    line: int
    index: int | None
    offset: int
    num_bytes: int


def is_batch(value: Any) -> bool:
    """Whether a row is an entry of a batch or its result."""
    if not isinstance(value, Mapping) or "custom_id" not in value:
        return False
    return not value.keys().isdisjoint(("body", "params", "response", "result", "error"))


class BatchReader:
    """Keeps all rows until the last, then gives the requests in the order of the input files.

    An id that several batches use is joined in order: its first request with its first result.
    Times are unknown: a batch runs in any order.
    """

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._spool: IO[bytes] = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._spool.close)
        self._num_bytes = 0
        self._requests: list[_Waiting] = []
        self._results: dict[str, list[_Waiting]] = {}

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = row.value
        if not isinstance(value, Mapping) or not isinstance(value.get("custom_id"), str):
            raise BadRowError("custom_id is no text")
        if isinstance(value.get("body"), Mapping) or isinstance(value.get("params"), Mapping):
            if is_other_call(_url(value), None, _body(value)):
                self._quality.skipped[NO_REQUEST] += 1
                return iter(())
            # A body that cannot be read is reported here, while its line is known.
            parse_bodies(_body(value), url_path=_url(value))
            self._requests.append(self._store(row))
        elif "response" in value or "result" in value or "error" in value:
            self._results.setdefault(value["custom_id"], []).append(self._store(row))
        else:
            raise BadRowError("entry of a batch has neither body, params, response nor result")
        return iter(())

    def _store(self, row: Row) -> _Waiting:
        data = _encode(row.value)
        self._spool.seek(self._num_bytes)
        self._spool.write(data)
        waiting = _Waiting(
            row.value["custom_id"], row.file, row.line, row.index, self._num_bytes, len(data)
        )
        self._num_bytes += len(data)
        return waiting

    def _load(self, waiting: _Waiting) -> Mapping[str, Any]:
        self._spool.seek(waiting.offset)
        value: Mapping[str, Any] = decode_json(self._spool.read(waiting.num_bytes))
        return value

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for results in self._results.values():
            results.reverse()
        for waiting in self._requests:
            results = self._results.get(waiting.custom_id, [])
            result = self._load(results.pop()) if results else None
            yield from self._requests_of(waiting, result)
        left = sum(len(results) for results in self._results.values())
        if left:
            self._quality.skipped["batch result without its request"] += left

    def _requests_of(
        self, waiting: _Waiting, result: Mapping[str, Any] | None
    ) -> Iterator[LoggedRequest]:
        value = self._load(waiting)
        row = Row(waiting.file, waiting.line, value, waiting.index)
        if result is None:
            self._quality.notes["batch request without its result"] += 1
            answer, status = None, None
        else:
            answer, status = self._answer(result)
        bodies = parse_bodies(_body(value), url_path=_url(value))
        for request in requests_of(
            row, self._quality, bodies, answer, status=status, is_batch=True
        ):
            yield replace(request, start_s=None)

    def _answer(self, result: Mapping[str, Any]) -> tuple[ResponseFields | None, object]:
        """Response and status of a result."""
        anthropic = result.get("result")
        if isinstance(anthropic, Mapping):
            if anthropic.get("type") != "succeeded":
                return None, "failed"
            return self._parsed(anthropic.get("message")), None
        response = result.get("response")
        if isinstance(response, Mapping):
            status = response.get("status_code")
            return self._parsed(response.get("body")), status
        return None, "failed"

    def _parsed(self, value: object) -> ResponseFields:
        try:
            return parse_response(value)
        except BadRowError:
            self._quality.notes["response not readable"] += 1
            return ResponseFields()


def _body(value: Mapping[str, Any]) -> Mapping[str, Any]:
    body = value.get("params", value.get("body"))
    if not isinstance(body, Mapping):
        body = value.get("body")
    assert isinstance(body, Mapping)
    return body


def _url(value: Mapping[str, Any]) -> str:
    url = value.get("url")
    if isinstance(value.get("params"), Mapping):
        return "/v1/messages"
    return url if isinstance(url, str) else ""


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (ValueError, TypeError, RecursionError):  # lone surrogates, long integers
        return json.dumps(value).encode("ascii")


BATCHES = LogFormat("batches", is_batch, BatchReader)
