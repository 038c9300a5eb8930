"""ShareGPT conversations: each turn of the human becomes the request that its history was sent with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ramify.analysis.reader import BadRowError, LogFormat, ReadQuality, Row
from ramify.analysis.readers.row_values import (
    RowByRow,
    get_name,
    get_text,
    list_of,
    mapping_of,
    quoted,
)
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
    "function_response": "tool",
}
ASKING = frozenset({"user", "tool"})  # roles after which an answer is asked for


def is_sharegpt(value: Any) -> bool:
    """Whether a row is a conversation of turns with `from` and `value`."""
    if not isinstance(value, Mapping):
        return False
    turns = value.get("conversations", value.get("conversation"))
    return (
        isinstance(turns, list)
        and bool(turns)
        and isinstance(turns[0], Mapping)
        and ("from" in turns[0] or "role" in turns[0])
    )


def read_sharegpt(row: Row, quality: ReadQuality) -> Iterator[LoggedRequest]:
    """A request for each turn before an answer, with all turns before it."""
    value = mapping_of(row.value, "row")
    turns = list_of(value.get("conversations", value.get("conversation")), "conversations")
    system = get_text(value, "system")
    lead = (Segment("system", SegmentKind.SYSTEM, system),) if system else ()
    history: list[Segment] = []
    for number, item in enumerate(turns):
        turn = mapping_of(item, "turn")
        name = get_text(turn, "from" if "from" in turn else "role")
        role = ROLES.get((name or "").lower())
        if role is None:
            raise BadRowError(f"turn {number} is from {quoted(name)}")
        text = get_text(turn, "value" if "value" in turn else "content")
        if text is None:
            raise BadRowError(f"turn {number} has no value")
        history.append(Segment(f"messages[{number}]", SegmentKind.MESSAGE, text, label=role))
    asking = [
        number
        for number in range(len(history))
        if history[number].label in ASKING
        and (number + 1 == len(history) or history[number + 1].label == "assistant")
    ]
    if not asking:
        quality.skipped["conversation without a human's turn"] += 1
    conversation = get_name(value, "id") or f"{row.file}:{row.line}:{row.index or 0}"
    for index, number in enumerate(asking):
        yield LoggedRequest(
            file=row.file,
            line=row.line,
            index=index,
            segments=(*lead, *history[: number + 1]),
            output=tuple(history[number + 1 : number + 2]),
            request_id=f"{conversation}#{index}",
            conversation=conversation,
            parent_id=f"{conversation}#{index - 1}" if index else None,
            model=get_text(value, "model"),
        )


SHAREGPT = LogFormat("sharegpt", is_sharegpt, partial(RowByRow, read_sharegpt))
