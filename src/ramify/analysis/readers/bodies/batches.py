"""Batches of OpenAI and Anthropic: requests in one file, results in another, joined by `custom_id`."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import IO, Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.exchanges import NO_REQUEST, is_other_call
from ramify.analysis.readers.bodies.request_bodies import parse_bodies, requests_of
from ramify.analysis.readers.bodies.responses import ResponseFields, parse_response
from ramify.analysis.records import LoggedRequest

MEMORY_BYTES = 64 << 20  # of requests and results that wait in memory; more of them wait on disk


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
        # Offsets in the spool.
        self._requests: list[tuple[str, int]] = []  # with their ids
        self._results: dict[str, list[int]] = {}

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
            self._requests.append((value["custom_id"], self._store(row)))
        elif "response" in value or "result" in value or "error" in value:
            self._results.setdefault(value["custom_id"], []).append(self._store(row))
        else:
            raise BadRowError("entry of a batch has neither body, params, response nor result")
        return iter(())

    def _store(self, row: Row) -> int:
        offset = self._spool.seek(0, os.SEEK_END)
        pickle.dump(row, self._spool)
        return offset

    def _load(self, offset: int) -> Row:
        self._spool.seek(offset)
        row: Row = pickle.load(self._spool)  # noqa: S301 - this reader has written it
        return row

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for results in self._results.values():
            results.reverse()
        for custom_id, offset in self._requests:
            results = self._results.get(custom_id, [])
            result = self._load(results.pop()).value if results else None
            yield from self._requests_of(self._load(offset), result)
        left = sum(len(results) for results in self._results.values())
        if left:
            self._quality.skipped["batch result without its request"] += left

    def _requests_of(self, row: Row, result: Mapping[str, Any] | None) -> Iterator[LoggedRequest]:
        answer, status = None, None
        if result is None:
            self._quality.notes["batch request without its result"] += 1
        else:
            answer, status = self._answer(result)
        bodies = parse_bodies(_body(row.value), url_path=_url(row.value))
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


BATCHES = LogFormat("batches", is_batch, BatchReader)
