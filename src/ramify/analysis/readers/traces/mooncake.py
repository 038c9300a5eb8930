"""Mooncake traces and variants: times in ms, ids of blocks that are valid in the whole file.

Variants add sessions with delays (AIPerf), prompts as text or messages, a block size, and dependencies between
requests with a header row (Dynamo's agentic Mooncake).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row, RowReader
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.row_values import (
    get_first_count,
    get_milliseconds,
    get_name,
    get_text,
    mapping_of,
)
from ramify.analysis.readers.times import later
from ramify.analysis.readers.traces.hashed_prompts import (
    BlockSizes,
    FileScopes,
    block_ids_of,
    check_block_size,
    namespaced,
)
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind, Usage

BLOCK_SIZE = 512  # of the published traces
AGENTIC_SCHEMA = "dynamo.agentic_mooncake"
OTHER_FORMATS = ("chat_id", "page_size", "requests")
_START_NAMES = ("timestamp", "created_time", "not_before_ms")
ESTIMATED_START = "start estimated as that of the previous turn + delay"


def is_mooncake(value: Any) -> bool:
    """Whether a row has `hash_ids` or `text_input` and nothing that marks another trace."""
    if not isinstance(value, Mapping):
        return False
    if value.get("schema") == AGENTIC_SCHEMA:
        return True
    has_prompt = (
        isinstance(value.get("hash_ids"), list)
        or isinstance(value.get("text_input"), str)
        or (isinstance(value.get("messages"), list) and "output_length" in value)
    )
    return has_prompt and not any(name in value for name in OTHER_FORMATS)


class MooncakeReader(RowReader):
    """Reads rows; a row without a time starts `delay` ms after the previous row of its session."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._sizes = BlockSizes(BLOCK_SIZE, quality)
        self._scopes = FileScopes(quality)
        self._starts: dict[tuple[str, str], float] = {}  # of the last row, by file and session
        self._header_sizes: dict[str, int] = {}

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        if value.get("schema") == AGENTIC_SCHEMA:
            self._header_sizes[row.file] = check_block_size(value.get("block_size"))
            self._quality.skipped["header"] += 1
            return
        session = get_name(value, "session_id")
        text = get_text(value, "text_input")
        num_tokens = get_first_count(value, "input_length", "input_tokens")
        segments: tuple[Segment, ...] = ()
        hashed: HashedPrompt | None = None
        if text is not None:
            segments = (Segment("prompt", SegmentKind.MESSAGE, text),)
        elif value.get("hash_ids") is not None:
            hashed = self._hashed(row.file, value, num_tokens)
        elif value.get("messages") is not None:
            segments = parse_bodies(value)[0].segments
        else:
            raise BadRowError("row has no hash_ids, text_input or messages")
        start = self._start_s(row.file, session, value)
        yield LoggedRequest(
            *row.place,
            segments=segments,
            hashed=hashed,
            request_id=get_name(value, "request_id"),
            conversation=session,
            start_s=start,
            end_s=later(start, get_milliseconds(value, "recorded_api_time_ms")),
            model=get_text(value, "model"),
            cache_scope="" if hashed is None else self._scopes.scope(row.file),
            usage=Usage(
                num_input=num_tokens,
                num_output=get_first_count(value, "output_length", "output_tokens"),
            ),
        )

    def _hashed(self, file: str, value: Mapping[str, Any], num_tokens: int | None) -> HashedPrompt:
        ids = block_ids_of(value["hash_ids"])
        size = value.get("block_size", self._header_sizes.get(file))
        if file in self._header_sizes:  # the schema says that ids are valid in a play
            ids = namespaced(ids, get_name(value, "play_id") or "")
        return self._sizes.prompt(file, ids, num_tokens, size)

    def _start_s(self, file: str, session: str | None, value: Mapping[str, Any]) -> float | None:
        times = (get_milliseconds(value, name) for name in _START_NAMES)
        start = next((time for time in times if time is not None), None)
        if session is None:
            return start
        if start is None and (file, session) in self._starts:
            delay = get_milliseconds(value, "delay" if "delay" in value else "delay_ms")
            if delay is not None:
                start = self._starts[file, session] + delay
                self._quality.notes[ESTIMATED_START] += 1
        if start is not None:
            self._starts[file, session] = start
        return start


MOONCAKE = LogFormat("mooncake", is_mooncake, MooncakeReader)
