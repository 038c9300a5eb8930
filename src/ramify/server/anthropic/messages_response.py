"""Answers in Anthropic's words: whole, and as events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from ramify.outputs import FinishReason
from ramify.server.anthropic.messages_request import TTL_S
from ramify.server.anthropic.protocol import MessageRequest
from ramify.server.request_history import HistoryEntry, first_difference, is_fully_reused
from ramify.server.service import Generation, Service
from ramify.server.tool_calls import (
    ParsedToolCall,
    TextOrCall,
    ToolCallParser,
    detect_format,
    split,
)

TRUNCATED = (FinishReason.LENGTH, FinishReason.ABORT)  # not at its end
DIFFERENCE_REASONS = {
    "model": "model_changed",
    "system": "system_changed",
    "tools": "tools_changed",
    "messages": "messages_changed",
}


def diagnostics(
    service: Service, tenant: str, request: MessageRequest, entry: HistoryEntry, num_cached: int
) -> dict[str, Any] | None:
    """`diagnostics` of a message; None if nobody asked, or nothing changed."""
    asked = request.diagnostics
    if asked is None or asked.previous_message_id is None:
        return None
    old = service.history.get(tenant, asked.previous_message_id)
    if old is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    change = first_difference(old, entry)
    other_model = change is not None and change.kind == "model"
    if not other_model and is_fully_reused(old, entry, num_cached, service.page_size):
        return None
    if change is None and old.num_reusable_tokens < service.page_size:
        return None  # there was nothing to find
    kind = None if change is None else DIFFERENCE_REASONS.get(change.kind)
    if change is None or kind is None:  # it was evicted, or another parameter changed
        return {"cache_miss_reason": {"type": "unavailable"}}
    reason = {
        "type": kind,
        "cache_missed_input_tokens": change.missed_tokens,
        "segment": change.path,  # beyond Anthropic's fields
    }
    return {"cache_miss_reason": reason}


class MessageResponseBuilder:
    """The answer to a request for a message."""

    def __init__(self, service: Service, request: MessageRequest, generation: Generation) -> None:
        self.service, self.request, self.generation = service, request, generation
        self.num_tokens = 0
        self.calls: list[ParsedToolCall] = []
        choice = request.tool_choice
        self._parser = None
        if request.tools and (choice is None or choice.type != "none"):
            names = [tool.name for tool in request.tools]
            forced = choice is not None and choice.type in ("any", "tool")
            single = choice is not None and bool(choice.disable_parallel_tool_use)
            form = detect_format(service.chat_template)
            self._parser = ToolCallParser(form, names, forced=forced, single=single)

    def usage(self) -> dict[str, Any]:
        """Token counts: the prompt is input + read + written."""
        generation, use = self.generation, self.generation.cache
        prompt = generation.request.prompt
        read = 0 if use is None else use.cached
        marks = [one for one in prompt.breakpoints if one.num_tokens > read]
        size = self.service.page_size
        written = {"5m": 0, "1h": 0}
        done = read
        for mark in marks if use is not None and self.service.prefix_cache else ():
            name = "1h" if mark.ttl_s == TTL_S["1h"] else "5m"
            end = mark.num_tokens // size * size
            written[name] += max(0, end - done)
            done = max(done, end)
        total = sum(written.values())
        told: dict[str, Any] = {
            "input_tokens": len(prompt.ids) - read - total,
            "cache_read_input_tokens": read,
            "cache_creation_input_tokens": total,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written["5m"],
                "ephemeral_1h_input_tokens": written["1h"],
            },
            "output_tokens": self.num_tokens,
            "service_tier": "standard",
        }
        return told | ({} if use is None else {"ramify_cache": use.as_json()})

    def _message(self, content: list[dict[str, Any]], **ends: Any) -> dict[str, Any]:
        generation = self.generation
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.request.history_entry.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": diagnostics(
                self.service,
                generation.caller.tenant,
                self.request,
                generation.request.history_entry,
                0 if generation.cache is None else generation.cache.cached,
            ),
            "usage": self.usage(),
        } | ends

    def _ends(self) -> dict[str, Any]:
        output = self.generation.output
        assert output is not None
        answer = output.completions[0]
        asked_for = self.request.stop_sequences or ()
        stop = answer.stop_reason if answer.stop_reason in asked_for else None
        if self.generation.request.is_prewarm:
            reason, stop = "max_tokens", None
        elif self.calls and answer.finish_reason not in TRUNCATED:
            reason, stop = "tool_use", None
        elif stop is not None:
            reason = "stop_sequence"
        elif answer.finish_reason in TRUNCATED:
            full = len(answer.token_ids) < self.request.max_tokens and (
                answer.finish_reason is FinishReason.LENGTH
            )
            reason = "model_context_window_exceeded" if full else "max_tokens"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    async def _pieces(self) -> AsyncIterator[list[TextOrCall]]:
        async for event in self.generation:
            pieces: list[TextOrCall] = []
            if not self.generation.request.is_prewarm:
                self.num_tokens += len(event.new_token_ids)
                if self._parser is None:
                    pieces = [event.text] if event.text else []
                else:
                    pieces = self._parser.feed(event.text)
                    if event.finish_reason is not None:
                        pieces += self._parser.finish()
                self.calls += split(pieces)[1]
            yield pieces
        self.generation.raise_error()

    async def body(self) -> dict[str, Any]:
        """`message`."""
        content: list[dict[str, Any]] = []
        async for pieces in self._pieces():
            for piece in pieces:
                if isinstance(piece, ParsedToolCall):
                    content.append(_tool_use(piece, json.loads(piece.arguments or "{}")))
                elif content and content[-1]["type"] == "text":
                    content[-1]["text"] += piece
                else:
                    content.append(_text(piece))
        if not self.generation.request.is_prewarm and not content:
            content.append(_text(""))
        return self._message(content, **self._ends())

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Names and data of server-sent events."""
        begun, index, is_open = False, 0, False
        async for pieces in self._pieces():
            if not begun:
                begun = True
                yield "message_start", {"type": "message_start", "message": self._message([])}
                yield "ping", {"type": "ping"}
            for piece in pieces:
                if isinstance(piece, str):
                    if not is_open:
                        is_open = True
                        yield _event("content_block_start", index=index, content_block=_text(""))
                    delta = {"type": "text_delta", "text": piece}
                    yield _event("content_block_delta", index=index, delta=delta)
                    continue
                if is_open:
                    yield _event("content_block_stop", index=index)
                    index, is_open = index + 1, False
                block = _tool_use(piece, {})
                yield _event("content_block_start", index=index, content_block=block)
                delta = {"type": "input_json_delta", "partial_json": piece.arguments}
                yield _event("content_block_delta", index=index, delta=delta)
                yield _event("content_block_stop", index=index)
                index += 1
        if is_open:
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=self._ends(), usage=self.usage())
        yield _event("message_stop")


def _event(name: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return name, {"type": name} | fields


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(call: ParsedToolCall, arguments: object) -> dict[str, Any]:
    name = call.id.replace("call_", "toolu_", 1)
    return {"type": "tool_use", "id": name, "name": call.name, "input": arguments}
