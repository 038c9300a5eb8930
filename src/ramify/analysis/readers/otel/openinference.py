"""Spans of OpenInference (Arize Phoenix): `llm.input_messages.0.message.content` as a chat body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.readers.bodies.openai_bodies import tool_call
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.otel.otel_dialects import flat_tree
from ramify.analysis.readers.row_fields import mapping_in, mapping_or_empty


def openinference_body(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Chat body of a span of kind LLM; None if it has no prompt."""
    parameters = mapping_in(attributes.get("llm.invocation_parameters"))
    body: dict[str, Any] = dict(parameters)
    tools = flat_tree(attributes, "llm.tools.")
    if isinstance(tools, list):
        body["tools"] = [_tool(item) for item in tools]
    messages = flat_tree(attributes, "llm.input_messages.")
    if isinstance(messages, list):
        body["messages"] = [_message(item) for item in messages]
        return body
    prompts = flat_tree(attributes, "llm.prompts.")
    if isinstance(prompts, list):
        texts = [item.get("prompt", {}).get("text") if isinstance(item, dict) else item
                 for item in prompts]  # fmt: skip
        body["prompt"] = [text for text in texts if isinstance(text, str)]
        return body if body["prompt"] else None
    whole = mapping_in(attributes.get("input.value"))
    if isinstance(whole.get("messages"), list):
        return {**body, **whole}
    return None


def _message(item: Any) -> Any:
    fields = item.get("message") if isinstance(item, dict) else None
    if not isinstance(fields, dict):
        return item if isinstance(item, dict) else {"role": None, "content": None}
    message: dict[str, Any] = {"role": fields.get("role"), "content": fields.get("content")}
    contents = fields.get("contents")
    if isinstance(contents, list):
        message["content"] = [_block(part) for part in contents]
    for key in ("name", "tool_call_id"):
        if fields.get(key):
            message[key] = fields[key]
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_call(call) for call in calls]
    elif fields.get("function_call_name"):
        message["function_call"] = {
            "name": fields["function_call_name"],
            "arguments": fields.get("function_call_arguments_json"),
        }
    return message


def _block(part: Any) -> Any:
    fields = part.get("message_content") if isinstance(part, dict) else None
    if not isinstance(fields, dict):
        return part
    if fields.get("type") == "text":
        return {"type": "text", "text": fields.get("text")}
    image = fields.get("image")
    if isinstance(image, dict) and isinstance(image.get("image"), dict):
        return {"type": "image_url", "image_url": {"url": image["image"].get("url")}}
    return fields


def _call(call: Any) -> Any:
    fields = call.get("tool_call") if isinstance(call, dict) else None
    if not isinstance(fields, dict):
        return call
    function = mapping_or_empty(fields.get("function"))
    return tool_call(fields.get("id"), function.get("name"), function.get("arguments"))


def _tool(item: Any) -> Any:
    fields = item.get("tool") if isinstance(item, dict) else None
    return decode_nested(fields.get("json_schema", fields)) if isinstance(fields, dict) else item
