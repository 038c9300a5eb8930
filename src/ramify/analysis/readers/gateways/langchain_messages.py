"""Messages of LangChain as messages of a chat body.

A message is a constructor (`{"lc": 1, "id": […, "HumanMessage"], "kwargs": {…}}`), `{"type": "human",
"data": {…}}`, `{"type": "human", "content": …}`, a pair of role and text, or already of the wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.readers.bodies.openai_bodies import tool_call
from ramify.analysis.readers.bodies.segments import compact_json
from ramify.analysis.readers.row_fields import mapping_or_empty

# Roles by type of message: `human` or `HumanMessage` in lower case.
_ROLES = {"human": "user", "ai": "assistant"} | {
    kind: kind for kind in ("system", "tool", "function", "developer", "chat")
}
_ROLES |= {f"{kind}message": role for kind, role in _ROLES.items()}
_ITEM_TYPES = (
    "function_call", "function_call_output", "reasoning", "custom_tool_call", "item_reference",
    "custom_tool_call_output", "web_search_call", "file_search_call", "computer_call",
)  # fmt: skip
_REASONING_KEYS = ("reasoning_content", "reasoning", "refusal", "function_call")


def chat_messages(messages: Any) -> Any:
    """A list of messages of the wire from a list, or a list of one list, of LangChain's."""
    if isinstance(messages, list) and len(messages) >= 1 and isinstance(messages[0], list):
        is_pair = len(messages[0]) == 2 and isinstance(messages[0][0], str)
        if not is_pair:
            messages = messages[0]  # a batch: each of its prompts has a run of its own
    if not isinstance(messages, list):
        return messages
    return [chat_message_of(message) for message in messages]


def chat_message_of(message: Any) -> Any:
    """A message of the wire; one that is not LangChain's comes back as it is."""
    if isinstance(message, list) and len(message) == 2 and isinstance(message[0], str):
        return {"role": _role(message[0]), "content": message[1]}
    if not isinstance(message, dict):
        return message
    fields, kind = _fields_of(message)
    if fields is None:
        return message
    extra = mapping_or_empty(fields.get("additional_kwargs"))
    role = fields.get("role") if _role(kind) == "chat" else _role(kind)
    if extra.get("__openai_role__") == "developer":
        role = "developer"
    wire: dict[str, Any] = {"role": role, "content": fields.get("content")}
    for key in ("name", "tool_call_id"):
        if fields.get(key):
            wire[key] = fields[key]
    for key in _REASONING_KEYS:
        if extra.get(key):
            wire[key] = extra[key]
    calls = extra.get("tool_calls") or _calls_of(fields)
    if calls:
        wire["tool_calls"] = calls
        if wire["content"] == "":
            wire["content"] = None  # LangChain has no null
    if "cache_control" in extra:
        wire["cache_control"] = extra["cache_control"]
    return wire


def _fields_of(message: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The fields of a message of LangChain's and its type; None if it is not of LangChain."""
    identity, kwargs = message.get("id"), message.get("kwargs")
    if isinstance(identity, list) and isinstance(kwargs, dict):
        name = identity[-1] if identity and isinstance(identity[-1], str) else ""
        name = name.removesuffix("Chunk")
        return kwargs, name.lower() or str(kwargs.get("type", "")).lower()
    kind, data = message.get("type"), message.get("data")
    if isinstance(kind, str) and isinstance(data, dict):
        return data, kind.lower().removesuffix("chunk")
    if isinstance(kind, str) and "content" in message and message.get("role") is None:
        kind = kind.lower().removesuffix("chunk")
        return (message, kind) if kind in _ROLES else (None, "")
    return None, ""


def _role(kind: str) -> str:
    return _ROLES.get(kind.lower(), kind)


def _calls_of(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tool calls of the wire, unless the content has them as blocks."""
    calls, content = fields.get("tool_calls"), fields.get("content")
    if not isinstance(calls, list):
        return []
    if isinstance(content, list) and any(
        isinstance(block, dict) and block.get("type") == "tool_use" for block in content
    ):
        return []
    return [
        tool_call(call.get("id"), call.get("name"), _arguments(call.get("args")))
        for call in calls
        if isinstance(call, dict)
    ]


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else compact_json({} if value is None else value)


def is_items(values: Any) -> bool:
    """Whether a list holds items of the Responses API, not messages alone."""
    return isinstance(values, list) and any(
        isinstance(value, dict) and value.get("type") in _ITEM_TYPES and "role" not in value
        for value in values
    )
