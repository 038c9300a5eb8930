"""Records of our own server (`--record`): page hashes, counts, times and the reason of the miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.bodies.segments import token_segment
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_text,
    ids_of,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces.hashed_prompts import (
    block_ids_of,
    check_block_size,
    hashed_prompt,
)
from ramify.analysis.readers.traces.trace_columns import RAMIFY
from ramify.analysis.records import LoggedRequest, Usage, VendorVerdict

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
    usage = RAMIFY.usage(value)
    if usage.num_input is None:
        raise BadRowError("record has no input_length")
    page_size = check_block_size(value.get("page_size"), "page_size")
    hashed = hashed_prompt(page_size, block_ids_of(value.get("hash_ids")), usage.num_input)
    end_s = RAMIFY.seconds(value, "timestamp")
    duration_s = RAMIFY.seconds(value, "total_ms")
    start_s = end_s
    first_output_s = None
    if end_s is not None and duration_s is not None:
        start_s = end_s - duration_s
        first_output_s = later(start_s, RAMIFY.seconds(value, "ttft_ms"))
    elif end_s is not None and value.get("end") != "disconnected":
        quality.notes[NO_DURATION] += 1
    token_ids = value.get("token_ids")
    yield RAMIFY.request(
        row,
        value,
        segments=(token_segment(ids_of(token_ids, "token_ids")),) if token_ids else (),
        hashed=replace(hashed, segments=_segments(value)),
        start_s=start_s,
        first_output_s=first_output_s,
        end_s=end_s,
        provider="ramify",
        cache_scope=get_text(value, "tenant") or "",
        verdict=_verdict(value, usage),
    )


def _verdict(value: Mapping[str, Any], usage: Usage) -> VendorVerdict | None:
    """The server's own reason; the tokens from the end of the hit on were missed."""
    if value.get("miss") is None:
        return None
    miss = mapping_of(value["miss"], "miss")
    reason = get_text(miss, "reason")
    if reason is None or usage.num_input is None:
        return None
    missed = None if usage.num_read is None else max(0, usage.num_input - usage.num_read)
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
