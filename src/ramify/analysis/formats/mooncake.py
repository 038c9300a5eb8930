"""Mooncake traces and variants: times in ms, ids of blocks that are valid in the whole file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ramify.analysis.formats.hashed_prompts import BlockSizes, block_ids_of
from ramify.analysis.formats.row_values import (
    get_count,
    get_name,
    get_number,
    get_text,
    mapping_of,
)
from ramify.analysis.reading import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.records import HashedPrompt, LoggedRequest, Segment, SegmentKind, Usage

BLOCK_SIZE = 512  # of the published traces
OTHER_FORMATS = ("chat_id", "page_size", "requests")


def is_mooncake(value: Any) -> bool:
    """Whether a row has `hash_ids` or `text_input`, and nothing that marks another trace."""
    return (
        isinstance(value, Mapping)
        and (isinstance(value.get("hash_ids"), list) or isinstance(value.get("text_input"), str))
        and not any(name in value for name in OTHER_FORMATS)
    )


class MooncakeReader:
    """Reads rows; a row without a time starts `delay` ms after the previous row of its session."""

    def __init__(self, quality: ReadQuality) -> None:
        self._quality = quality
        self._sizes = BlockSizes(BLOCK_SIZE, quality)
        self._starts: dict[tuple[str, str], float] = {}  # of the last row, by file and session

    def feed(self, row: Row) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        value = mapping_of(row.value, "row")
        session = get_name(value, "session_id")
        text = get_text(value, "text_input")
        segments: tuple[Segment, ...] = ()
        hashed: HashedPrompt | None = None
        num_tokens = get_count(value, "input_length")
        if text is not None:
            segments = (Segment("prompt", SegmentKind.MESSAGE, text),)
        elif value.get("hash_ids") is not None:
            hashed = self._sizes.prompt(
                row.file, block_ids_of(value["hash_ids"]), num_tokens, value.get("block_size")
            )
        else:
            raise BadRowError("row has neither hash_ids nor text_input")
        yield LoggedRequest(
            file=row.file,
            line=row.line,
            segments=segments,
            hashed=hashed,
            request_id=get_name(value, "request_id"),
            conversation=session,
            start_s=self._start_s(row.file, session, value),
            model=get_text(value, "model"),
            usage=Usage(num_input=num_tokens, num_output=get_count(value, "output_length")),
        )

    def _start_s(self, file: str, session: str | None, value: Mapping[str, Any]) -> float | None:
        milliseconds = get_number(value, "timestamp")
        start = None if milliseconds is None else milliseconds / 1000
        if session is None:
            return start
        if start is None and (file, session) in self._starts:
            delay = get_number(value, "delay")
            if delay is not None:
                start = self._starts[file, session] + delay / 1000
                self._quality.notes["start estimated as that of the previous turn + delay"] += 1
        if start is not None:
            self._starts[file, session] = start
        return start

    def close(self) -> Iterator[LoggedRequest]:
        """See `RowReader`."""
        return iter(())


MOONCAKE = LogFormat("mooncake", is_mooncake, MooncakeReader)
