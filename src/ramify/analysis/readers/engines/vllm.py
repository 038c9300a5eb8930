"""Request logs of vLLM, lines of text.

Older versions log prompts at INFO (`Received request ID: prompt: '…', params: …`), newer ones at
DEBUG (`Request ID details: prompt: '…', prompt_token_ids: […]`, followed by `Received request ID:
params: …` at INFO). At INFO alone newer logs have no prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.segments import token_segment
from ramify.analysis.readers.engines.python_literals import integers_at, string_at
from ramify.analysis.readers.pending_rows import PendingRows
from ramify.analysis.readers.row_values import quoted
from ramify.analysis.readers.times import parse_time
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, Usage

NO_PROMPTS = (
    "requests without a prompt: set VLLM_LOGGING_LEVEL=DEBUG beside --enable-log-requests, without "
    "--max-log-len"
)
CUT = "prompt cut by --max-log-len"

_RECEIVED = re.compile(r"Received request (\S+?): ")
_DETAILS = re.compile(r"Request (\S+?) details: (?=prompt: )")
_PREFIX = re.compile(
    r"\b(?:INFO|DEBUG|WARNING|ERROR) (?:(\d{4})-)?(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:[.,](\d+))?"
)
_MAX_LOG_LEN = re.compile(r"max_log_len['\"]?\s*[=:]\s*(\d{1,9})\b")
_TOKEN_IDS = re.compile(r", prompt_token_ids: (?=\[)")
_LORA = re.compile(r"lora_request: LoRARequest\(lora_name='([^']*)'")
_NO_PROMPT = "None"
_YEAR = 2000  # of lines without a year: a leap year


def is_vllm(value: Any) -> bool:
    """Whether a line is of a log of vLLM: a request, or its prefix of level and time."""
    text = _text_of(value)
    return text is not None and (
        _RECEIVED.search(text, 0, 4096) is not None
        or _DETAILS.search(text, 0, 4096) is not None
        or (isinstance(value, str) and _PREFIX.search(text, 0, 128) is not None)
    )


def _text_of(value: Any) -> str | None:
    """The message of a line, which may be JSON of a custom logging configuration."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        for name in ("message", "msg"):
            if isinstance(value.get(name), str) and "equest" in value[name]:
                return str(value[name])
    return None


class VllmReader:
    """Reads lines; the adapter of a request with details is on the line that says it was received."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._pending: PendingRows[LoggedRequest] = PendingRows()
        self._origin_s: dict[str, float] = {}  # of files whose times have no year
        self._max_log_len: int | None = None

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        text = _text_of(row.value)
        if text is None:
            raise BadRowError(f"row is {quoted(row.value)}, not a line of text")
        details = _DETAILS.search(text)
        received = _RECEIVED.search(text)
        if details is not None and (received is None or details.start() < received.start()):
            request = self._request(row, text, details[1], details.end())
            yield from self._pending.add(details[1], request)
        elif received is not None:
            yield from self._received(row, text, received)
        else:
            limit = _MAX_LOG_LEN.search(text)
            if limit is not None:
                self._max_log_len = int(limit[1])
            self._quality.skipped["line without a request"] += 1

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        return self._pending.take_all()

    def _received(self, row: Row, text: str, received: re.Match[str]) -> Iterator[LoggedRequest]:
        lora = _LORA.search(text, received.end())
        scope = "" if lora is None else f"lora_name={lora[1]}"
        waiting = self._pending.take(received[1])
        if waiting is not None:
            yield replace(waiting, cache_scope=scope)
        elif text.startswith("prompt: ", received.end()):
            request = self._request(row, text, received[1], received.end())
            if request.segments:
                yield replace(request, cache_scope=scope)
        else:
            self._quality.skipped["request without a prompt"] += 1
            self._quality.notes[NO_PROMPTS] += 1

    def _request(self, row: Row, text: str, request_id: str, position: int) -> LoggedRequest:
        position += len("prompt: ")
        prompt: str | None = None
        if not text.startswith(_NO_PROMPT, position):
            prompt, position = string_at(text, position)
        ids: list[int] | None = None
        match = _TOKEN_IDS.search(text, position)
        if match is not None:
            ids, _ = integers_at(text, match.end())
        is_cut = self._is_cut(prompt, ids)
        segments: tuple[Segment, ...] = ()
        if prompt:
            segments = (Segment("prompt", SegmentKind.MESSAGE, prompt),)
        elif ids:
            segments = (token_segment(tuple(ids)),)
        else:
            self._quality.skipped["request without a prompt"] += 1
            self._quality.notes[NO_PROMPTS] += 1
        if is_cut:
            self._quality.notes[CUT] += 1
        return LoggedRequest(
            *row.place,
            segments=segments,
            request_id=request_id,
            start_s=self._time_s(row, text),
            provider="vllm",
            has_full_text=bool(segments) and not is_cut,
            usage=Usage(num_input=len(ids) if ids and not is_cut else None),
        )

    def _is_cut(self, prompt: str | None, ids: list[int] | None) -> bool:
        longest = max(len(prompt or ""), len(ids or []))
        if self._max_log_len is not None and longest >= self._max_log_len:
            return True
        # The same limit cuts characters and ids; a text of as many tokens as characters is rare.
        return prompt is not None and ids is not None and len(ids) == len(prompt) >= 8

    def _time_s(self, row: Row, text: str) -> float | None:
        if isinstance(row.value, dict):
            names = ("timestamp", "time", "asctime", "ts")
            times = (parse_time(row.value.get(name)) for name in names)
            return next((time for time in times if time is not None), None)
        match = _PREFIX.search(text, 0, 256)
        if match is None:
            return None
        year, month, day, hour, minute, second = (
            _YEAR if part is None else int(part) for part in match.groups()[:6]
        )
        fraction = float(f"0.{match[7]}") if match[7] else 0.0
        try:
            time = datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
        except ValueError:
            return None
        time += fraction
        if match[1] is not None:
            return time
        return time - self._origin_s.setdefault(row.file, time)


VLLM = LogFormat("vllm", is_vllm, VllmReader, is_text=True)
