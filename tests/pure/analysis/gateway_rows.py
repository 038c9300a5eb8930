"""Rows of gateways and tracers around a body, as those write them, and random bodies."""

from __future__ import annotations

import base64
import datetime as dt
import json
from typing import Any

from hypothesis import strategies as st

START_S, FIRST_S, END_S = 1764000000.25, 1764000001.0, 1764000002.5
SECRET = "sk-live-7f1b8d1c9e0a4b5c"

TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda text: text.strip()[:1] not in ("{", "[", '"') and text != "[REDACTED]")
NAMES = st.from_regex(r"[a-z][a-z_]{0,7}", fullmatch=True)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=3)
DATA = st.binary(min_size=1, max_size=9).map(lambda data: base64.b64encode(data).decode())


def iso(at: float) -> str:
    return dt.datetime.fromtimestamp(at, dt.UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(at: float) -> str:
    return f"{round(at * 1000)}000000"


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@st.composite
def chat_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A chat body with tools, images, tool calls and settings, in the shapes that SDKs send."""
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(st.one_of(TEXT, chat_blocks()))})
        if draw(st.booleans()):
            call = {
                "id": "call_" + draw(NAMES),
                "type": "function",
                "function": {
                    "name": draw(NAMES),
                    "arguments": json.dumps(
                        draw(OBJECTS), separators=(",", ":"), ensure_ascii=False
                    ),
                },
            }
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(TEXT), "tool_call_id": call["id"]})
        messages.append({"role": "assistant", "content": draw(TEXT)})
    body: dict[str, Any] = {
        "model": draw(st.sampled_from(["gpt-5.1", "gpt-4.1"])),
        "messages": messages,
    }
    if draw(st.booleans()):
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": draw(NAMES),
                    "description": draw(TEXT),
                    "parameters": draw(OBJECTS),
                },
            }
            for _ in range(draw(st.integers(1, 3)))
        ]
    if draw(st.booleans()):
        body["reasoning_effort"] = draw(st.sampled_from(["low", "high"]))
    return body


def chat_blocks() -> st.SearchStrategy[list[dict[str, Any]]]:
    text = TEXT.map(lambda text: {"type": "text", "text": text})
    image = DATA.map(
        lambda data: {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
    )
    return st.lists(text | image, min_size=1, max_size=3)


@st.composite
def anthropic_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """A Messages body whose contents are all lists of blocks, with thinking, tools and images."""
    text = TEXT.map(lambda text: {"type": "text", "text": text})
    image = DATA.map(
        lambda data: {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": data},
        }
    )
    messages: list[dict[str, Any]] = []
    for turn in range(draw(st.integers(1, 3))):
        messages.append(
            {"role": "user", "content": draw(st.lists(text | image, min_size=1, max_size=3))}
        )
        answer: list[dict[str, Any]] = []
        if draw(st.booleans()):
            answer.append({"type": "thinking", "thinking": draw(TEXT)})
        answer.append(draw(text))
        messages.append({"role": "assistant", "content": answer})
        if draw(st.booleans()):
            name, given, result = draw(NAMES), draw(OBJECTS), draw(TEXT)
            use = {"type": "tool_use", "id": f"toolu_{turn}", "name": name, "input": given}
            messages[-1]["content"].append(use)
            messages.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": use["id"], "content": result}
                    ],
                }
            )
    body: dict[str, Any] = {"model": "claude-sonnet-4-5", "max_tokens": 9, "messages": messages}
    if draw(st.booleans()):
        body["system"] = draw(st.lists(text, min_size=1, max_size=2))
    if draw(st.booleans()):
        body["tools"] = [
            {"name": draw(NAMES), "description": draw(TEXT), "input_schema": draw(OBJECTS)}
            for _ in range(draw(st.integers(1, 2)))
        ]
    return body


def chat_response(**usage: Any) -> dict[str, Any]:
    """A chat completion with usage."""
    counts = {
        "prompt_tokens": 2000,
        "completion_tokens": 5,
        "total_tokens": 2005,
        "prompt_tokens_details": {"cached_tokens": 1500},
    }
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1764000000,
        "model": "gpt-5.1-2025-11-13",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Rain."}}],
        "usage": {**counts, **usage},
    }


def anthropic_response() -> dict[str, Any]:
    """A message with usage and a verdict of the vendor."""
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5-20250929",
        "content": [{"type": "text", "text": "Rain."}],
        "usage": {
            "input_tokens": 200,
            "cache_read_input_tokens": 1500,
            "cache_creation_input_tokens": 300,
            "output_tokens": 5,
        },
        "diagnostics": {
            "cache_miss_reason": {"type": "messages_changed", "cache_missed_input_tokens": 64}
        },
    }


def langfuse_row(body: dict[str, Any], response: Any = None, **changes: Any) -> dict[str, Any]:
    """A row of observations_v2, for a chat body."""
    stamp = "%Y-%m-%d %H:%M:%S.%f"
    sent = {key: value for key, value in body.items() if key in {"messages", "tools"}}
    others = {k: v for k, v in body.items() if k not in {"messages", "tools", "model"}}
    fields = {
        "id": "obs-1",
        "trace_id": "trace-1",
        "project_id": "p",
        "environment": "default",
        "type": "GENERATION",
        "parent_observation_id": "",
        "start_time": dt.datetime.fromtimestamp(START_S, dt.UTC).strftime(stamp),
        "end_time": dt.datetime.fromtimestamp(END_S, dt.UTC).strftime(stamp),
        "completion_start_time": dt.datetime.fromtimestamp(FIRST_S, dt.UTC).strftime(stamp),
        "level": "DEFAULT",
        "input": dumps(sent),
        "output": dumps({"role": "assistant", "content": "Rain."}),
        "provided_model_name": body["model"],
        "model_parameters": json.dumps(others),
        "usage_details": {"input": 500, "input_cached_tokens": 1500, "output": 5, "total": 2005},
        "prompt_name": "support",
        "prompt_version": 7,
        "session_id": "session-1",
    }
    return fields | changes


def helicone_row(body: dict[str, Any], response: Any, **changes: Any) -> dict[str, Any]:
    """A row of the export with bodies."""
    fields = {
        "response_id": "r",
        "response_created_at": iso(END_S),
        "response_body": response,
        "response_status": 200,
        "request_id": "req-1",
        "request_model": body["model"],
        "request_created_at": iso(START_S),
        "request_body": body,
        "request_path": "https://api.openai.com/v1/chat/completions",
        "request_properties": {"Helicone-Session-Id": "session-1"},
        "delay_ms": 2250,
        "time_to_first_token": 750,
        "provider": "OPENAI",
        "cache_enabled": True,
        "cache_reference_id": "00000000-0000-0000-0000-000000000000",
    }
    return fields | changes


def har_entry(body: dict[str, Any], answer: Any, url: str, **changes: Any) -> dict[str, Any]:
    """An entry of an archive, with the headers that clients send."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    fields = {
        "startedDateTime": iso(START_S),
        "time": 2250.0,
        "timings": {"send": 0, "wait": 750, "receive": 1500.0},
        "request": {
            "method": "POST",
            "url": url,
            "headers": [
                {"name": "Authorization", "value": f"Bearer {SECRET}"},
                {"name": "X-Api-Key", "value": SECRET},
                {"name": "Cookie", "value": f"session={SECRET}"},
                {"name": "anthropic-beta", "value": "context-1m-2025-08-07"},
                {"name": "X-Claude-Code-Session-Id", "value": "session-1"},
            ],
            "cookies": [{"name": "session", "value": SECRET}],
            "postData": {"mimeType": "application/json", "text": json.dumps(body)},
        },
        "response": {"status": 200, "headers": [], "content": {"text": text}},
    }
    return fields | changes


def attribute(key: str, value: Any) -> dict[str, Any]:
    """A pair of OTLP; objects and lists as AnyValues."""
    return {"key": key, "value": any_value(value)}


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": [attribute(key, item) for key, item in value.items()]}}
    return {}


def otlp_span(attributes: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A span of OTLP JSON."""
    fields = {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": "eee19b7ec3c1b174",
        "name": "chat",
        "kind": 3,
        "startTimeUnixNano": nanoseconds(START_S),
        "endTimeUnixNano": nanoseconds(END_S),
        "attributes": [attribute(key, value) for key, value in attributes.items()],
    }
    return fields | changes


def otlp_export(*spans: dict[str, Any]) -> dict[str, Any]:
    """An export request with spans."""
    resource = {"attributes": [attribute("service.name", "shop")]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": list(spans)}]}]}


def otlp_logs(*records: dict[str, Any]) -> dict[str, Any]:
    """An export request with log records."""
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": list(records)}]}]}


def otlp_part(block: dict[str, Any]) -> dict[str, Any]:
    """A part of the conventions for a block of Anthropic's."""
    kind = block["type"]
    if kind == "text":
        return {"type": "text", "content": block["text"]}
    if kind == "thinking":
        return {"type": "reasoning", "content": block["thinking"]}
    if kind == "image":
        source = block["source"]
        return {
            "type": "blob",
            "modality": "image",
            "mime_type": source["media_type"],
            "content": source["data"],
        }
    if kind == "tool_use":
        return {
            "type": "tool_call",
            "id": block["id"],
            "name": block["name"],
            "arguments": block["input"],
        }
    return {"type": "tool_call_response", "id": block["tool_use_id"], "response": block["content"]}


def otlp_prompt(body: dict[str, Any]) -> dict[str, Any]:
    """Attributes of the conventions for a Messages body."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "anthropic",
        "gen_ai.request.model": body["model"],
        "gen_ai.input.messages": [
            {"role": message["role"], "parts": [otlp_part(block) for block in message["content"]]}
            for message in body["messages"]
        ],
    }
    if "system" in body:
        attributes["gen_ai.system_instructions"] = [otlp_part(block) for block in body["system"]]
    if "tools" in body:
        attributes["gen_ai.tool.definitions"] = body["tools"]
    return attributes
