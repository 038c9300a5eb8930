"""Bodies of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.body_fields import (
    RESPONSES,
    BodyFields,
    openai_fields,
    text_or_none,
)
from ramify.analysis.readers.bodies.segments import (
    block_of,
    content_of,
    json_segment,
    label_of,
    settings_of,
    tools_of,
)
from ramify.analysis.records import Segment, SegmentKind


def parse_responses(body: Mapping[str, Any]) -> BodyFields:
    """Fields of a body with `input`, `instructions` or a stored prompt.

    With `previous_response_id` or `conversation` the body holds the new items only: the text is not
    full until the history is joined. A stored template (`prompt.id`) is kept as its reference.
    """
    segments = settings_of(body)
    segments += tools_of(body.get("tools"))
    history = text_or_none(body.get("previous_response_id"))
    conversation = body.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    conversation = text_or_none(conversation)
    note = None
    template = body.get("prompt")
    if isinstance(template, dict):
        segments.append(json_segment(template, "prompt", "", SegmentKind.SYSTEM))
        note = "prompt template is stored at the vendor"
    segments += content_of(body.get("instructions"), "system", "system", SegmentKind.SYSTEM)
    segments += input_items(body.get("input"))
    fields = openai_fields(RESPONSES, body, segments)
    return replace(
        fields,
        provider="openai",
        conversation=conversation or fields.conversation,
        history_id=history or conversation,
        has_full_text=note is None and history is None and conversation is None,
        note=note,
    )


def input_items(items: object) -> list[Segment]:
    """Segments of `input`: a string is `messages[0]`, item *i* is `messages[i]`."""
    if isinstance(items, str):
        return [Segment("messages[0]", SegmentKind.MESSAGE, items, label="user")]
    if items is None:
        return []
    if not isinstance(items, list):
        raise BadRowError("input is no text and no list")
    segments: list[Segment] = []
    for number, item in enumerate(items):
        segments += input_item(item, number)
    return segments


def input_item(item: object, number: int) -> list[Segment]:
    """Segments of an item: a message's content, else the item as a whole."""
    path = f"messages[{number}]"
    if isinstance(item, dict) and "role" in item and item.get("type") in (None, "message"):
        label = label_of(item.get("role"), item.get("name"))
        segments = content_of(item.get("content"), path, label)
        return segments or [Segment(path, SegmentKind.MESSAGE, "", label=label)]
    if not isinstance(item, dict | str):
        raise BadRowError(f"input[{number}] is no object")
    return [block_of(item, path, "user" if isinstance(item, str) else "")]
