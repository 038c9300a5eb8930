"""Messages, system instructions and tools of OpenTelemetry GenAI as segments.

`parts[j]` of a message is `messages[i].content[j]`. A part with text, reasoning, media or a tool's
result becomes the block that Anthropic's API has for it, so that its text is read in the same way;
every other part is compact JSON as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.openai_bodies import chat_message
from ramify.analysis.readers.bodies.segments import (
    block_of,
    content_of,
    json_segment,
    label_of,
    tools_of,
)
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.records import Segment, SegmentKind

_MEDIA_SOURCES = ("content", "data", "uri", "url", "file_id")


def messages_of(value: Any) -> list[Segment]:
    """Segments of `gen_ai.input.messages`, a list or the JSON text of a list.

    Raises:
        BadRowError: the value is neither, or a message is no object.
    """
    messages = decode_nested(value)
    if is_cut_json(messages):
        return []
    if isinstance(messages, dict):
        messages = messages.get("messages", [messages])
    if isinstance(messages, str):
        return [Segment("messages[0]", SegmentKind.MESSAGE, messages, label="user")]
    if not isinstance(messages, list):
        raise BadRowError("input messages are no list")
    segments: list[Segment] = []
    for number, message in enumerate(messages):
        segments += _message(decode_nested(message), number)
    return segments


def system_of(value: Any) -> list[Segment]:
    """Segments of `gen_ai.system_instructions`: parts, or one text."""
    value = decode_nested(value)
    if is_cut_json(value):
        return []
    if isinstance(value, dict):
        value = value.get("parts", [value])
    if isinstance(value, list):
        value = [block_of_part(part) for part in value]
    return content_of(value, "system", "system", SegmentKind.SYSTEM)


def tools_of_definitions(value: Any) -> list[Segment]:
    """Segments of `gen_ai.tool.definitions`: a list, its JSON text, or a list of JSON texts."""
    value = decode_nested(value)
    if isinstance(value, dict):
        value = value.get("tools", [value])
    if not isinstance(value, list):
        return []
    return tools_of([decode_nested(tool) for tool in value])


def block_of_part(part: Any) -> Any:
    """The content block that says what a part says."""
    if not isinstance(part, dict):
        return part
    kind, content = part.get("type"), part.get("content")
    if kind == "text" and isinstance(content, str):
        return _with_marker(part, {"type": "text", "text": content})
    if kind in ("reasoning", "thinking") and isinstance(content, str):
        return _with_marker(part, {"type": "thinking", "thinking": content})
    if kind in ("tool_call_response", "tool_response"):
        result = part.get("response", part.get("result", content))
        if isinstance(result, str):
            block = {"type": "tool_result", "tool_use_id": part.get("id"), "content": result}
            return _with_marker(part, block)
    if kind in ("blob", "uri", "file", "file_data", "media"):
        source = next((part[key] for key in _MEDIA_SOURCES if part.get(key) is not None), None)
        if source is not None:
            return {"type": _media_kind(part), "source": {"data": source}}
    return part


def _with_marker(part: Mapping[str, Any], block: dict[str, Any]) -> dict[str, Any]:
    if "cache_control" in part:
        block["cache_control"] = part["cache_control"]
    return block


def _media_kind(part: Mapping[str, Any]) -> str:
    modality, mime = part.get("modality"), part.get("mime_type")
    if not isinstance(modality, str) and isinstance(mime, str):
        modality = mime.partition("/")[0]
    if modality in ("image", "audio", "video"):
        return str(modality)
    return "file"


def _message(message: Any, number: int) -> list[Segment]:
    if not isinstance(message, dict) or "parts" not in message:
        return chat_message(message, number)  # exporters that pass on the body's own messages
    path = f"messages[{number}]"
    label = label_of(message.get("role"), message.get("name"))
    parts = decode_nested(message["parts"])
    if isinstance(parts, list):
        return [
            block_of(block_of_part(part), f"{path}.content[{index}]", label)
            for index, part in enumerate(parts)
        ] or [Segment(path, SegmentKind.MESSAGE, "", label=label)]
    if isinstance(parts, str):
        return [Segment(path, SegmentKind.MESSAGE, parts, label=label)]
    return [json_segment(parts, path, label)]
