"""Request logs of SGLang (`--log-requests`), as JSON or as lines of text.

Levels 0 and 1 have neither text nor token ids; level 2 has both halves of a text of 2,048 characters
with `...` between; level 3 has all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.body_fields import scope_of
from ramify.analysis.readers.bodies.segments import token_segment
from ramify.analysis.readers.bodies.usage import count
from ramify.analysis.readers.engines.sglang_lines import event_of_line, is_sglang_line
from ramify.analysis.readers.pending_rows import PendingRows
from ramify.analysis.readers.row_fields import mapping_or_empty
from ramify.analysis.readers.row_values import (
    LineIndices,
    get_name,
    get_number,
    get_text,
    get_time,
    ids_of,
    quoted,
)
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, Usage

RECEIVED, FINISHED = "request.received", "request.finished"
NO_PROMPTS = "requests without text and token ids: log with --log-requests-level 3"
CUT = "prompt cut by --log-requests-level 2; level 3 logs all of it"
SPLICE = "..."
MIN_CUT_LEN = 64  # shorter limits are not sensible, and ordinary texts have dots


def is_sglang(value: Any) -> bool:
    """Whether a row is an event of the request log."""
    if isinstance(value, str):
        return is_sglang_line(value)
    return (
        isinstance(value, Mapping) and value.get("event") in (RECEIVED, FINISHED) and "rid" in value
    )


class SglangReader:
    """Joins what was received with what finished, by request id; a batch becomes several requests."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._pending: PendingRows[list[LoggedRequest]] = PendingRows()
        self._indices = LineIndices()

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = row.value
        if not is_sglang(value):
            raise BadRowError(f"row is {quoted(value)}, not an event of a request")
        if isinstance(value, str):
            value = event_of_line(value)
        key = str(value["rid"])[:4096]
        requests = self._requests(row, value)
        if value["rid"] is None:
            # Without an id only the end is sure to be one request.
            if value["event"] == FINISHED:
                yield from requests
            return
        if value["event"] == RECEIVED:
            for given_up in self._pending.add(key, requests):
                yield from given_up
            return
        waiting = self._pending.take(key)
        if waiting is not None and len(waiting) == len(requests):
            requests = list(map(_joined, waiting, requests))
        yield from requests

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        for requests in self._pending.take_all():
            yield from requests

    def _requests(self, row: Row, value: Mapping[str, Any]) -> list[LoggedRequest]:
        obj = value.get("obj")
        if not isinstance(obj, Mapping):
            raise BadRowError(f"obj is {quoted(obj)}, not an object")
        prompts, is_batch = _prompts_of(obj)
        outs = value.get("out")
        outs = outs if isinstance(outs, list) else [outs]
        time = get_time(value, "timestamp")
        is_finished = value["event"] == FINISHED
        requests: list[LoggedRequest] = []
        for number, (segment, is_cut) in enumerate(prompts):
            out = outs[number] if number < len(outs) else None
            meta = mapping_or_empty(mapping_or_empty(out).get("meta_info"))
            latency = get_number(meta, "e2e_latency")
            start = time
            if is_finished:
                start = None if time is None or latency is None else time - latency
                if segment is None:
                    self._quality.notes[NO_PROMPTS] += 1
                elif is_cut:
                    self._quality.notes[CUT] += 1
            requests.append(
                LoggedRequest(
                    file=row.file,
                    line=row.line,
                    index=self._indices.take(row) if is_batch or row.index is not None else None,
                    segments=() if segment is None else (segment,),
                    request_id=_id_of(value["rid"], number),
                    conversation=_session_of(obj),
                    start_s=start,
                    end_s=time if is_finished else None,
                    provider="sglang",
                    model=get_text(obj, "model"),
                    cache_scope=scope_of(obj),
                    has_full_text=segment is not None and not is_cut,
                    usage=Usage(
                        num_input=count(meta.get("prompt_tokens")),
                        num_read=count(meta.get("cached_tokens")),
                        num_output=count(meta.get("completion_tokens")),
                    ),
                )
            )
        return requests


def _prompts_of(obj: Mapping[str, Any]) -> tuple[list[tuple[Segment | None, bool]], bool]:
    """Prompts and whether each is cut; whether they are a batch."""
    text, ids = obj.get("text"), obj.get("input_ids")
    if isinstance(text, list) and all(isinstance(item, str) for item in text):
        return [_text_prompt(item) for item in text if item != SPLICE], True
    if isinstance(text, str):
        return [_text_prompt(text)], False
    if text is not None:
        raise BadRowError(f"text is {quoted(text)}, neither a string nor strings")
    if ids is None:
        return [(None, False)], False
    if (
        isinstance(ids, list)
        and ids
        and all(isinstance(item, list) or item == SPLICE for item in ids)
    ):
        return [_id_prompt(item) for item in ids if item != SPLICE], True
    return [_id_prompt(ids)], False


def _text_prompt(text: str) -> tuple[Segment, bool]:
    kept = len(text) - len(SPLICE)
    is_cut = kept >= MIN_CUT_LEN and not kept & (kept - 1) and text.startswith(SPLICE, kept // 2)
    return Segment("prompt", SegmentKind.MESSAGE, text), is_cut


def _id_prompt(value: Any) -> tuple[Segment | None, bool]:
    ids = [item for item in value if item != SPLICE] if isinstance(value, list) else value
    token_ids = ids_of(ids, "input_ids")
    return (token_segment(token_ids) if token_ids else None), len(token_ids) != len(value)


def _id_of(rid: Any, number: int) -> str | None:
    if isinstance(rid, list):
        rid = rid[number] if number < len(rid) else None
    return rid if isinstance(rid, str) else None


def _session_of(obj: Mapping[str, Any]) -> str | None:
    session = obj.get("session_params")
    return get_name(session, "id") if isinstance(session, Mapping) else None


def _joined(received: LoggedRequest, finished: LoggedRequest) -> LoggedRequest:
    """The times and counts of the end at the place of the beginning."""
    has_text = bool(received.segments)
    return replace(
        finished,
        file=received.file,
        line=received.line,
        index=received.index,
        start_s=finished.start_s if received.start_s is None else received.start_s,
        segments=received.segments if has_text else finished.segments,
        has_full_text=received.has_full_text if has_text else finished.has_full_text,
    )


SGLANG = LogFormat("sglang", is_sglang, SglangReader, is_text=True)
