"""Messages: the whole response, and the events of a stream."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator
from typing import Any

from ramify.outputs import FinishReason
from ramify.server.answers.answer import (
    EMPTY_TEXT,
    TRUNCATED,
    AnswerPart,
    AnswerParts,
    PartBegin,
    PartDelta,
    PartEnd,
    PartEvent,
)
from ramify.server.answers.partial_json import partial_object
from ramify.server.anthropic.protocol import MessageRequest
from ramify.server.generation import Generation, answer_changes
from ramify.server.prompts.renderer import BREAKPOINT_TTL_S
from ramify.server.request_fields.opaque_text import encode_opaque
from ramify.server.service import RequestService

# Of thinking blocks: they are accepted back from anyone, with any signature.
SIGNATURE = base64.b64encode(b"ramify").decode()
# Type of a block's delta, and its field, by kind of answer part.
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Kinds of `PromptDifference` that have a type of `cache_miss_reason`: `model_changed`.
REPORTED_KINDS = ("model", "system", "tools", "messages")


def diagnostics(
    service: RequestService, request: MessageRequest, generation: Generation
) -> dict[str, Any] | None:
    """`diagnostics` of a message; None if the request names no earlier message, or after a hit."""
    options = request.diagnostics
    if options is None or options.previous_message_id is None:
        return None
    comparison = service.compare_with_earlier(generation, options.previous_message_id)
    if comparison is None:
        return {"cache_miss_reason": {"type": "previous_message_not_found"}}
    difference = comparison.difference
    had_whole_page = comparison.num_reusable_tokens >= service.page_size
    if comparison.is_fully_reused or (difference is None and not had_whole_page):
        return None
    # Evicted, or another option changed.
    if difference is None or difference.kind not in REPORTED_KINDS:
        return {"cache_miss_reason": {"type": "unavailable"}}
    reason = {
        "type": f"{difference.kind}_changed",
        "cache_missed_input_tokens": difference.missed_tokens,
        "segment": difference.path,  # not a field of Anthropic's
    }
    return {"cache_miss_reason": reason}


class MessageResponseBuilder:
    """Builds the response to a Messages request from its generation."""

    def __init__(
        self, service: RequestService, request: MessageRequest, generation: Generation
    ) -> None:
        self.service, self.request, self.generation = service, request, generation
        self.is_prewarm = generation.request.is_prewarm
        translated = generation.request
        self._answer = AnswerParts(
            translated.new_parser(), ends_after_call=translated.ends_after_call
        )
        thinking = request.thinking
        self._omits_thinking = thinking is not None and thinking.display == "omitted"

    def usage(self) -> dict[str, Any]:
        """`usage`: the prompt has `input + cache_read_input + cache_creation_input` tokens.

        Tokens up to a breakpoint count as cache creation of its lifetime, as far as they were written:
        whole pages that stay cached.
        """
        generation, prompt = self.generation, self.generation.request.prompt
        num_read, page_size = generation.num_cached, self.service.page_size
        num_written = {"5m": 0, "1h": 0}
        if generation.cache is not None:
            counted, num_cached = num_read, num_read + generation.cache.written
            for point in prompt.breakpoints:
                ttl = "1h" if point.ttl_s == BREAKPOINT_TTL_S["1h"] else "5m"
                end = min(point.num_tokens // page_size * page_size, num_cached)
                num_written[ttl] += max(0, end - counted)
                counted = max(counted, end)
        total_written = sum(num_written.values())
        payload: dict[str, Any] = {
            "input_tokens": len(prompt.ids) - num_read - total_written,
            "cache_read_input_tokens": num_read,
            "cache_creation_input_tokens": total_written,
            "cache_creation": {
                "ephemeral_5m_input_tokens": num_written["5m"],
                "ephemeral_1h_input_tokens": num_written["1h"],
            },
            "output_tokens": 0 if self.is_prewarm else self._answer.num_tokens,
            "output_tokens_details": {
                "thinking_tokens": 0 if self.is_prewarm else self._answer.num_reasoning_tokens
            },
            "service_tier": "standard",
        }
        if generation.cache is not None:
            payload["ramify_cache"] = generation.cache.as_json()
        return payload

    def _message(self, content: list[dict[str, Any]], **stop_fields: Any) -> dict[str, Any]:
        generation = self.generation
        return {
            "id": generation.id,
            "type": "message",
            "role": "assistant",
            "model": generation.request.history_entry.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "diagnostics": diagnostics(self.service, self.request, generation),
            "usage": self.usage(),
        } | stop_fields

    def _stop_fields(self) -> dict[str, Any]:
        """`stop_reason` and `stop_sequence`, after the last event."""
        output = self.generation.output
        assert output is not None
        answer, finish_reason = output.completions[0], self._answer.finish_reason
        stop_sequences = self.request.stop_sequences or ()
        stop = answer.stop_reason if answer.stop_reason in stop_sequences else None
        if self.is_prewarm:
            reason, stop = "max_tokens", None
        elif self._answer.calls and finish_reason not in TRUNCATED:
            reason, stop = "tool_use", None
        elif stop is not None:
            reason = "stop_sequence"
        elif finish_reason is FinishReason.ABORT:
            reason = "pause_turn"  # the client may send the answer back and go on
        elif finish_reason in TRUNCATED:
            is_context_full = len(answer.token_ids) < self.request.max_tokens
            reason = "model_context_window_exceeded" if is_context_full else "max_tokens"
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop}

    async def _changes(self) -> AsyncIterator[list[PartEvent]]:
        """Yield what each step changes in the answer."""
        async for _, changes in answer_changes(self.generation, [self._answer]):
            yield [] if self.is_prewarm else changes
        self.generation.raise_error()

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `message`."""
        async for _ in self._changes():
            pass
        parts = () if self.is_prewarm else self._answer.parts or (EMPTY_TEXT,)
        return self._message([self._whole_block(part) for part in parts], **self._stop_fields())

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of server-sent events."""
        begun = False
        async for changes in self._changes():
            if not begun:
                begun = True
                yield _event("message_start", message=self._message([]))
                yield _event("ping")
            for change in changes:
                for event in self._change_events(change):
                    yield event
        if not self.is_prewarm and not self._answer.parts:
            yield _begin_event(EMPTY_TEXT)
            yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=self._stop_fields(), usage=self.usage())
        yield _event("message_stop")

    def _change_events(self, change: PartEvent) -> list[dict[str, Any]]:
        """The events of a change of the answer. Reasoning ends with its signature."""
        index = change.part.index
        match change:
            case PartBegin(part):
                return [_begin_event(part)]
            case PartDelta(part, _) if part.kind == "reasoning" and self._omits_thinking:
                return []
            case PartDelta(part, text):
                delta_type, name = DELTAS[part.kind]
                delta = {"type": delta_type, name: text}
                return [_event("content_block_delta", index=index, delta=delta)]
            case PartEnd(part):
                stop = _event("content_block_stop", index=index)
                if part.kind != "reasoning":
                    return [stop]
                delta = {"type": "signature_delta", "signature": self._signature(part.text)}
                return [_event("content_block_delta", index=index, delta=delta), stop]

    def _whole_block(self, part: AnswerPart) -> dict[str, Any]:
        """A block of the `content` of a whole message."""
        text = part.text
        if part.kind == "reasoning" and self._omits_thinking:
            return _block(part, text="", arguments={}, signature=self._signature(text))
        arguments = partial_object(text) if part.kind == "call" else {}
        return _block(part, text=text, arguments=arguments, signature=SIGNATURE)

    def _signature(self, thinking: str) -> str:
        """The signature of a thinking block; the thinking itself if the block does not show it."""
        return encode_opaque(thinking) if self._omits_thinking else SIGNATURE


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": name} | fields


def _begin_event(part: AnswerPart) -> dict[str, Any]:
    block = _block(part, text="", arguments={}, signature="")
    return _event("content_block_start", index=part.index, content_block=block)


def _block(
    part: AnswerPart, *, text: str, arguments: dict[str, Any], signature: str
) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": signature}
    if part.kind == "text":
        return {"type": "text", "text": text, "citations": None}
    # Other ids are those that the family's template needs.
    call_id = re.sub("^call_", "toolu_", part.id)
    return {"type": "tool_use", "id": call_id, "name": part.name, "input": arguments}
