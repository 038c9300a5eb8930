"""Bodies of OpenAI's chat completions and completions, and of the servers that speak them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.body_fields import (
    CHAT,
    COMPLETIONS,
    BodyFields,
    openai_fields,
)
from ramify.analysis.readers.bodies.segments import (
    content_of,
    json_segment,
    label_of,
    mark_last,
    settings_of,
    token_segment,
    tools_of,
    ttl_of,
)
from ramify.analysis.records import Segment, SegmentKind

# Fields in which servers return a chat message's reasoning.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking", "reasoning_details")
_PLAIN_KEYS = frozenset({"role", "content", "name", "tool_call_id", "tool_calls"})
_OTHER_KEYS = ("refusal", "function_call", "audio")


def parse_chat(body: Mapping[str, Any]) -> BodyFields:
    """Fields of a body with `messages`."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise BadRowError("messages is no list")
    segments = settings_of(body)
    segments += tools_of(body.get("tools"))
    segments += tools_of(body.get("functions"), "functions")
    for number, message in enumerate(messages):
        segments += chat_message(message, number)
    mark_last(segments, ttl_of(body))
    return openai_fields(CHAT, body, segments)


def chat_message(message: object, number: int) -> list[Segment]:
    """Segments of a chat message: reasoning, content, then tool calls, as templates render them."""
    path = f"messages[{number}]"
    if isinstance(message, str):
        return [Segment(path, SegmentKind.MESSAGE, message)]
    if not isinstance(message, dict):
        raise BadRowError(f"{path} is no object")
    role = message.get("role")
    label = label_of(role, message.get("name"), message.get("tool_call_id"))
    segments: list[Segment] = []
    is_plain = message.keys() <= _PLAIN_KEYS
    for key in () if is_plain else REASONING_KEYS:
        segments += _field(message, key, path, label_of(label, key))
    segments += content_of(message.get("content"), path, label)
    for key in () if is_plain else _OTHER_KEYS:
        segments += _field(message, key, path, label_of(label, key))
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        at = f"{path}.tool_calls[{index}]"
        segments.append(json_segment(call, at, label_of(role)))
    if not segments:
        segments.append(Segment(path, SegmentKind.MESSAGE, "", label=label))
    if "cache_control" in message:
        mark_last(segments, ttl_of({"cache_control": message["cache_control"]}))
    return segments


def tool_call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """An item of a chat message's `tool_calls`."""
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _field(message: Mapping[str, Any], key: str, path: str, label: str) -> list[Segment]:
    value = message.get(key)
    if value is None or value in ("", [], {}):
        return []
    if isinstance(value, str):
        return [Segment(f"{path}.{key}", SegmentKind.MESSAGE, value, label=label)]
    return [json_segment(value, f"{path}.{key}", label)]


def parse_completions(body: Mapping[str, Any]) -> tuple[BodyFields, ...]:
    """Fields of a body with `prompt`, for each of its prompts."""
    settings = settings_of(body)
    prompts = prompts_of(body.get("prompt"))
    return tuple(openai_fields(COMPLETIONS, body, [*settings, prompt]) for prompt in prompts)


def prompts_of(prompt: object) -> list[Segment]:
    """A segment for each prompt: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [Segment("prompt", SegmentKind.MESSAGE, prompt)]
    if isinstance(prompt, list):
        if _are_ids(prompt):
            return [token_segment(prompt)]
        prompts = []
        for item in prompt:
            if isinstance(item, str):
                prompts.append(Segment("prompt", SegmentKind.MESSAGE, item))
            elif isinstance(item, list) and _are_ids(item):
                prompts.append(token_segment(item))
            else:
                break
        else:
            if prompts:
                return prompts
    raise BadRowError("prompt is no text, list of texts, list of token ids or list of those")


def _are_ids(values: list[Any]) -> bool:
    return bool(values) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63
        for value in values
    )
