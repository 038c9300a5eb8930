"""Bodies of Anthropic's Messages API, and of Bedrock's Converse, which has the same blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.body_fields import (
    ANTHROPIC,
    BodyFields,
    conversation_of,
    text_or_none,
)
from ramify.analysis.readers.bodies.segments import (
    content_of,
    json_segment,
    label_of,
    mark_last,
    settings_of,
    tools_of,
    ttl_of,
)
from ramify.analysis.records import Segment, SegmentKind

_NEVER_CACHED = ("thinking", "redacted_thinking")


def parse_anthropic(body: Mapping[str, Any], *, betas: object = None) -> BodyFields:
    """Fields of a body with `messages`, and `system` beside them.

    Args:
        body: the body.
        betas: names of the `anthropic-beta` header, which are part of the vendor's key.
    """
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRowError("messages is no list")
    tools = body.get("tools")
    config = body.get("toolConfig")
    if tools is None and isinstance(config, dict):
        tools = config.get("tools")
    segments = settings_of(body, betas)
    segments += tools_of(tools)
    segments += content_of(body.get("system"), "system", "system", SegmentKind.SYSTEM)
    for number, message in enumerate(messages):
        segments += anthropic_message(message, number)
    _mark_automatically(segments, ttl_of({"cache_control": body.get("cache_control")}))
    diagnostics = body.get("diagnostics")
    compares_with = None
    if isinstance(diagnostics, dict):
        compares_with = text_or_none(diagnostics.get("previous_message_id"))
    return BodyFields(
        api=ANTHROPIC,
        segments=tuple(segments),
        model=text_or_none(body.get("model")) or text_or_none(body.get("modelId")),
        provider="anthropic",
        cache_key=text_or_none(body.get("prompt_cache_key")),
        conversation=conversation_of(body),
        compares_with=compares_with,
    )


def anthropic_message(message: object, number: int) -> list[Segment]:
    """Segments of a message: its string, or its blocks at `content[j]`."""
    path = f"messages[{number}]"
    if not isinstance(message, dict):
        raise BadRowError(f"{path} is no object")
    label = label_of(message.get("role"))
    segments = content_of(message.get("content"), path, label)
    if not segments:
        # As a change of effort in mid-conversation, which has no content.
        rest = {key: item for key, item in message.items() if key != "role"}
        segments = [json_segment(rest, path, label)]
    mark_last(segments, ttl_of({"cache_control": message.get("cache_control")}))
    return segments


def _mark_automatically(segments: list[Segment], ttl_s: float | None) -> None:
    """Put the automatic breakpoint on the last segment that can have one."""
    if ttl_s is None:
        return
    for number in range(len(segments) - 1, -1, -1):
        segment = segments[number]
        if segment.kind is SegmentKind.SETTING:
            return
        is_thinking = any(word in segment.label.split() for word in _NEVER_CACHED)
        is_redacted = '"type":"redacted_thinking"' in segment.text[:64]
        if segment.text and not is_thinking and not is_redacted:
            tail = segments[number : number + 1]
            mark_last(tail, ttl_s)
            segments[number] = tail[0]
            return
