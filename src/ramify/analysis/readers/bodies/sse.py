"""Responses that were streamed: events joined to the response that a client would have built."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.row_fields import mapping_or_empty

_DONE = "[DONE]"


def looks_like_sse(text: str) -> bool:
    """Whether a text is a stream of server-sent events."""
    head = text[:2048].lstrip("\ufeff \r\n")
    return head.startswith(("data:", "event:", "id:", "retry:", ": ", ":\n"))


def events_of(text: str) -> list[Any]:
    """Decoded `data` of each event; data that is no JSON, as of a cut stream, is left out."""
    events: list[Any] = []
    data: list[str] = []
    for line in (*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""):
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            payload = "\n".join(data)
            data = []
            if payload.strip() == _DONE:
                continue
            try:
                events.append(json.loads(payload))
            except (ValueError, RecursionError):
                continue
    return events


def join_events(events: Iterable[Any]) -> dict[str, Any]:
    """The response that the events of a stream of any API build.

    Raises:
        BadRowError: no event is of a known API.
    """
    known = [event for event in events if isinstance(event, Mapping)]
    kinds = {event.get("type") for event in known if isinstance(event.get("type"), str)}
    if "message_start" in kinds:
        return _join_anthropic(known)
    if any(kind.startswith("response.") for kind in kinds if kind is not None):
        return _join_responses(known)
    if any(isinstance(event.get("choices"), list) or "usage" in event for event in known):
        return _join_chat(known)
    if any("candidates" in event or "usageMetadata" in event for event in known):
        return _join_gemini(known)
    for event in known:
        if event.get("error") is not None:
            return {"error": event["error"]}
    raise BadRowError("stream has no event of a known API")


def _append(fields: dict[str, Any], delta: Mapping[str, Any], names: Iterable[str]) -> None:
    """Append the texts of a delta to the fields of the same names."""
    for name in names:
        if isinstance(delta.get(name), str):
            text = fields.get(name)
            text = text if isinstance(text, str) else ""
            # A text with one owner grows in place; with two, every delta would copy it.
            fields[name] = None
            text += delta[name]
            fields[name] = text


def _join_anthropic(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        kind, index = event.get("type"), event.get("index")
        delta = mapping_or_empty(event.get("delta"))
        if kind == "message_start" and isinstance(event.get("message"), Mapping):
            message = dict(event["message"])
            message["usage"] = dict(mapping_or_empty(message.get("usage")))
        elif kind == "message_delta":
            message.update(delta)
            counted = mapping_or_empty(event.get("usage"))
            usage = message.setdefault("usage", {})
            usage.update({key: item for key, item in counted.items() if item is not None})
            if event.get("diagnostics") is not None:
                message["diagnostics"] = event["diagnostics"]
        elif kind == "content_block_start" and isinstance(index, int):
            blocks[index] = dict(mapping_or_empty(event.get("content_block")))
        elif kind == "content_block_delta" and isinstance(index, int) and index in blocks:
            _append(blocks[index], delta, ("text", "thinking", "signature", "partial_json"))
        elif kind == "error" and not blocks:
            message.setdefault("error", event.get("error"))
    for block in blocks.values():
        if "partial_json" in block:
            block["input"] = _decoded(block.pop("partial_json"))
    message["content"] = [blocks[index] for index in sorted(blocks)]
    return message


def _join_responses(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    response: dict[str, Any] = {}
    items: dict[int, Any] = {}
    for event in events:
        if isinstance(event.get("response"), Mapping):
            response.update(event["response"])
        index = event.get("output_index")
        if event.get("type") == "response.output_item.done" and isinstance(index, int):
            items[index] = event.get("item")
    if not response.get("output") and items:
        response["output"] = [items[index] for index in sorted(items)]
    return response


def _join_gemini(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Parts of the first candidate; texts that follow one another are one part."""
    response: dict[str, Any] = {}
    parts: list[dict[str, Any]] = []
    for event in events:
        response.update({key: item for key, item in event.items() if item is not None})
        candidates = event.get("candidates")
        first = candidates[0] if isinstance(candidates, list) and candidates else None
        content = mapping_or_empty(mapping_or_empty(first).get("content"))
        content_parts = content.get("parts")
        for part in content_parts if isinstance(content_parts, list) else ():
            last = parts[-1] if parts else {}
            if not isinstance(part, dict):
                continue
            is_text = isinstance(part.get("text"), str) and isinstance(last.get("text"), str)
            if is_text and last.get("thought") == part.get("thought"):
                last["text"] += part["text"]
            else:
                parts.append(dict(part))
    response["candidates"] = [{"content": {"role": "model", "parts": parts}}]
    return response


def _join_chat(events: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Chat and completions: parts of the first choice."""
    response: dict[str, Any] = {}
    for event in events:
        for key, item in event.items():
            if key != "choices" and (item is not None or key not in response):
                response[key] = item
    choice = _first_choice(events)
    if choice is not None:
        response["choices"] = [choice]
    if isinstance(response.get("object"), str):
        response["object"] = response["object"].removesuffix(".chunk")
    return response


def _first_choice(events: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    completion: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping) or choice.get("index", 0) != 0:
                continue
            delta = mapping_or_empty(choice.get("delta"))
            message["role"] = delta.get("role") or message["role"]
            _append(completion, choice, ("text",))
            _append(message, delta, ("content", "reasoning_content", "reasoning", "refusal"))
            _add_tool_calls(calls, delta.get("tool_calls"))
    if completion:
        return {"index": 0, **completion}
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    has_answer = any(item is not None for key, item in message.items() if key != "role")
    return {"index": 0, "message": message} if has_answer else None


def _add_tool_calls(calls: dict[int, dict[str, Any]], deltas: object) -> None:
    for position, delta in enumerate(deltas if isinstance(deltas, list) else ()):
        index = delta.get("index", position) if isinstance(delta, Mapping) else None
        if not isinstance(index, int):
            continue
        call = calls.setdefault(index, {"id": None, "type": "function", "function": {}})
        for key in ("id", "type"):
            call[key] = delta.get(key) or call[key]
        function = mapping_or_empty(delta.get("function"))
        if isinstance(function.get("name"), str):
            call["function"].setdefault("name", function["name"])
        _append(call["function"], function, ("arguments",))


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
