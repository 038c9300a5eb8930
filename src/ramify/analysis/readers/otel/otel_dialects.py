"""Older and other spellings of a span's prompt, as a request body.

`gen_ai.prompt.0.content` (OpenLLMetry), `llm.input_messages.0.message.content` (OpenInference),
`ai.prompt.messages` (Vercel's SDK), and a log record or span event for each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ramify.analysis.readers.bodies.openai_bodies import tool_call
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.otel.otlp_values import OtlpItem
from ramify.analysis.readers.row_fields import mapping_in

_EVENT_ROLES = {
    "gen_ai.system.message": "system",
    "gen_ai.developer.message": "developer",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_MAX_INDEX = 100_000  # of a flattened list; more is no list but an attack


def is_message_event(name: str) -> bool:
    """Whether an event holds one message of the prompt."""
    return name in _EVENT_ROLES


def flat_tree(attributes: Mapping[str, Any], prefix: str) -> Any:
    """Nested objects and lists from keys such as `PREFIX0.message.role`; None without such keys."""
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix):
            continue
        node = tree
        *parents, leaf = key[len(prefix) :].split(".")
        for name in parents:
            inner = node.get(name)
            if not isinstance(inner, dict):
                inner = node[name] = {}
            node = inner
        node[leaf] = value
    return _lists(tree) if tree else None


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    values = {key: _lists(value) for key, value in node.items()}
    if values and all(key.isascii() and key.isdecimal() and len(key) < 7 for key in values):
        numbers = sorted(values, key=int)
        if int(numbers[-1]) < _MAX_INDEX:
            return [values[number] for number in numbers]
    return values


def openllmetry_body(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Chat body of `gen_ai.prompt.N.*` and `llm.request.functions.N.*`."""
    prompts = flat_tree(attributes, "gen_ai.prompt.")
    if prompts is None:
        text = decode_nested(attributes.get("gen_ai.prompt"))
        if isinstance(text, str) and text:
            return {"prompt": text}
        return {"messages": text} if isinstance(text, list) else None
    if not isinstance(prompts, list):
        return None
    body: dict[str, Any] = {"messages": [_openllmetry_message(item) for item in prompts]}
    functions = flat_tree(attributes, "llm.request.functions.")
    if isinstance(functions, list):
        body["tools"] = [_openllmetry_tool(item) for item in functions]
    return body


def _openllmetry_message(item: Any) -> Any:
    if not isinstance(item, dict):
        return {"role": "user", "content": item if isinstance(item, str) else None}
    content = item.get("content")
    message: dict[str, Any] = {"role": item.get("role")}
    inner = decode_nested(content)
    is_blocks = isinstance(inner, list) and all(isinstance(block, dict) for block in inner)
    message["content"] = inner if inner and is_blocks else content
    if item.get("tool_call_id"):
        message["tool_call_id"] = item["tool_call_id"]
    calls = item.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [
            tool_call(call.get("id"), call.get("name"), call.get("arguments"))
            for call in calls
            if isinstance(call, dict)
        ]
    return message


def _openllmetry_tool(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    function = {
        key: decode_nested(item[key]) if key == "parameters" else item[key]
        for key in ("name", "description", "parameters")
        if key in item
    }
    return {"type": "function", "function": function}


def vercel_body(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Body of `ai.prompt.messages` and `ai.prompt.tools`."""
    messages = decode_nested(attributes.get("ai.prompt.messages"))
    if not isinstance(messages, list):
        return None
    body: dict[str, Any] = {"messages": messages}
    tools = attributes.get("ai.prompt.tools")
    if isinstance(tools, list):
        body["tools"] = [decode_nested(tool) for tool in tools]
    choice = attributes.get("ai.prompt.toolChoice")
    if choice is not None:
        body["tool_choice"] = decode_nested(choice)
    return body


def event_body(events: Iterable[OtlpItem], listed: Any = None) -> dict[str, Any] | None:
    """Chat body of one event for each message, in order.

    Args:
        listed: the events as a list in an attribute, as pydantic-ai writes them.
    """
    messages = [message for event in events if (message := _event_message(event)) is not None]
    items = decode_nested(listed) if not messages else None
    for event in items if isinstance(items, list) else ():
        role = _EVENT_ROLES.get(str(mapping_in(event).get("event.name")))
        if role is not None:
            messages.append(_message(role, mapping_in(event)))
    return {"messages": messages} if messages else None


def _event_message(event: OtlpItem) -> dict[str, Any] | None:
    role = _EVENT_ROLES.get(event.name)
    if role is None:
        return None
    body = mapping_in(event.body)
    if not body:
        body = mapping_in(event.attributes.get("gen_ai.event.content"))
    if not body:
        body = {key: event.attributes[key] for key in ("content", "role", "id", "tool_calls")
                if key in event.attributes}  # fmt: skip
    return _message(role, body)


def _message(role: str, body: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": body.get("role") or role, "content": body.get("content")}
    if role == "tool" and body.get("id"):
        message["tool_call_id"] = body["id"]
    calls = decode_nested(body.get("tool_calls"))
    if isinstance(calls, list):
        message["tool_calls"] = calls
    return message
