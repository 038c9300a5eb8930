"""Records of our own server (`--record`): page hashes, counts, times and the reason of the miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from operator import itemgetter
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.segments import token_segment
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_count,
    get_milliseconds,
    get_name,
    get_text,
    ids_of,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces.hashed_prompts import block_ids_of, check_block_size, num_blocks
from ramify.analysis.records import HashedPrompt, LoggedRequest, Usage, VendorVerdict

NO_DURATION = "records of an older server: a request's start is taken to be its end"


def is_ramify_record(value: Any) -> bool:
    """Whether a row has page hashes and the number of cached tokens."""
    return (
        isinstance(value, Mapping)
        and "page_size" in value
        and "hit" in value
        and isinstance(value.get("hash_ids"), list)
    )


def read_record(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """The request of a record; token ids are segments beside the hashes."""
    value = mapping_of(row.value, "row")
    num_tokens = get_count(value, "input_length")
    if num_tokens is None:
        raise BadRowError("record has no input_length")
    page_size = check_block_size(value.get("page_size"), "page_size")
    ids = block_ids_of(value.get("hash_ids"))
    end = get_milliseconds(value, "timestamp")
    duration = get_milliseconds(value, "total_ms")
    start = None if end is None or duration is None else end - duration
    if duration is None and end is not None and value.get("end") != "disconnected":
        quality.notes[NO_DURATION] += 1
    first = later(start, get_milliseconds(value, "ttft_ms"))
    token_ids = value.get("token_ids")
    yield LoggedRequest(
        *row.place,
        segments=() if not token_ids else (token_segment(ids_of(token_ids, "token_ids")),),
        hashed=HashedPrompt(
            page_size, ids[: num_blocks(num_tokens, page_size)], num_tokens, _segments(value)
        ),
        request_id=get_name(value, "id"),
        conversation=get_name(value, "conversation"),
        start_s=end if start is None else start,
        first_output_s=first,
        end_s=end,
        provider="ramify",
        model=get_text(value, "model"),
        cache_scope=get_text(value, "tenant") or "",
        verdict=_verdict(value),
        usage=Usage(
            num_input=num_tokens,
            num_read=get_count(value, "hit"),
            num_output=get_count(value, "output_length"),
        ),
    )


def _verdict(value: Mapping[str, Any]) -> VendorVerdict | None:
    """The server's own reason; the tokens from the end of the hit on were missed."""
    if value.get("miss") is None:
        return None
    miss = mapping_of(value["miss"], "miss")
    reason = get_text(miss, "reason")
    total, hit = get_count(value, "input_length"), get_count(value, "hit")
    if reason is None or total is None:
        return None
    missed = None if hit is None else max(0, total - hit)
    return VendorVerdict(reason, missed, get_text(miss, "segment") or "")


def _segments(value: Mapping[str, Any]) -> tuple[tuple[int, str], ...]:
    """First token and path of the request's fields; () in records that do not have them."""
    segments = []
    for item in list_of(value.get("segments") or [], "segments"):
        if not isinstance(item, list) or list(map(type, item)) != [int, str]:
            raise BadRowError(f"segments has {quoted(item)}, not a token and a path")
        segments.append((item[0], item[1]))
    return tuple(sorted(segments, key=itemgetter(0)))


RAMIFY_RECORD = LogFormat("ramify-record", is_ramify_record, partial(RowByRow, read_record))
