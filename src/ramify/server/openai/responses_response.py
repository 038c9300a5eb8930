"""Responses API: the whole response, and the numbered events of a stream; both are stored."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.outputs import FinishReason
from ramify.server.errors import as_api_error
from ramify.server.generation import TRUNCATED, Answer, Generation
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    ToolCall,
)
from ramify.server.openai.responses_protocol import ResponsesRequest
from ramify.server.openai.responses_request import INSTRUCTIONS, StoredResponse
from ramify.server.prompt_renderer import KnownPrefix
from ramify.server.service import Service
from ramify.server.tool_calls import ParsedToolCall, TextOrCall


@dataclass(slots=True)
class OutputMessage:
    """A text item of the output, between tool calls."""

    id: str
    text: str = ""
    has_logprobs: bool = False  # the first message has those of the whole answer


class ResponsesResponseBuilder:
    """Builds the response to a Responses request from its generation."""

    def __init__(
        self,
        service: Service,
        request: ResponsesRequest,
        chat: ChatRequest,
        generation: Generation,
    ) -> None:
        self.service, self.request, self.chat = service, request, chat
        self.generation = generation
        self.inner = ChatResponseBuilder(service, chat, generation)
        self._items: list[OutputMessage | ParsedToolCall] = []
        self._is_open = False  # in a stream: the last item is a message that still grows

    @property
    def _choice(self) -> Answer:
        return self.inner.choices[0]

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request = self.request
        options = request.prompt_cache_options
        return {
            "id": self.generation.id,
            "object": "response",
            "created_at": self.generation.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": self.generation.request.history_entry.model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": self.chat.reasoning_effort, "summary": None},
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "text": {"format": {"type": "text"}}
            if request.text is None
            else msgspec.to_builtins(request.text),
            "tool_choice": msgspec.to_builtins(request.tool_choice or "auto"),
            "tools": msgspec.to_builtins(request.tools or []),
            "truncation": "disabled",
            "metadata": request.metadata or {},
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": None
            if options is None
            else {
                "mode": options.mode or "implicit",
                "ttl": options.ttl or "30m",
                "comparison_response_id": options.comparison_response_id,
            },
            "prompt_cache_retention": request.prompt_cache_retention,
            "service_tier": "default",
            "top_logprobs": request.top_logprobs,
            "user": request.user,
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.inner.usage()
        no_details = {"cached_tokens": 0, "cache_write_tokens": 0}
        payload = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage.get("prompt_tokens_details", no_details),
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        if "ramify_cache" in usage:
            payload["ramify_cache"] = usage["ramify_cache"]
        return payload

    def _end(self) -> dict[str, Any]:
        """The whole response, after the last event."""
        is_truncated = self._choice.finish_reason in TRUNCATED
        is_prewarm = self.inner.is_prewarm
        if not is_prewarm and not self._items:
            self._message()
        last = self._items[-1] if is_truncated and self._items else None
        output = [
            self._text(item, "incomplete" if item is last else "completed")
            if isinstance(item, OutputMessage)
            else self._call(item, "completed")
            for item in self._items
        ]
        is_incomplete = is_truncated and not is_prewarm
        body = self._body("incomplete" if is_incomplete else "completed", output)
        result = self.generation.output
        aborted = result is not None and result.completions[0].finish_reason is FinishReason.ABORT
        if is_incomplete and not aborted:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["completed_at"] = int(time.time())
        body["usage"] = self._usage()
        return body | self.inner.diagnostics()

    def _message(self) -> OutputMessage:
        """The message that new text is appended to; a new one after a call."""
        if not self._items or not isinstance(self._items[-1], OutputMessage):
            is_first = not any(isinstance(item, OutputMessage) for item in self._items)
            self._items.append(OutputMessage(f"msg_{secrets.token_hex(16)}", has_logprobs=is_first))
        message = self._items[-1]
        assert isinstance(message, OutputMessage)
        return message

    def _text(self, message: OutputMessage, status: str) -> dict[str, Any]:
        return {
            "id": message.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part(message)] if status != "in_progress" else [],
        }

    def _part(self, message: OutputMessage) -> dict[str, Any]:
        payload = self.inner.logprobs(self._choice.logprobs)
        content = payload["content"] if payload and message.has_logprobs and message.text else []
        return {"type": "output_text", "text": message.text, "annotations": [], "logprobs": content}

    @staticmethod
    def _call(call: ParsedToolCall, status: str) -> dict[str, Any]:
        return {
            "id": call.id.replace("call_", "fc_", 1),
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments if status == "completed" else "",
            "status": status,
        }

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `response`."""
        async for event in self.generation:
            pieces = self._choice.add(event)
            for piece in () if self.inner.is_prewarm else pieces:
                if isinstance(piece, ParsedToolCall):
                    self._items.append(piece)
                else:
                    self._message().text += piece
        self.generation.raise_error()
        end = self._end()
        self._store(end)
        return end

    def _store(self, body: Mapping[str, Any]) -> None:
        """Store the ended response, for a next request to continue, unless `store` is false."""
        output = self.generation.output
        if output is None or self.request.store is False:
            return
        choice, ids = self._choice, list(output.completions[0].token_ids)
        calls = [
            ToolCall(FunctionCall(call.name, call.arguments), call.id) for call in choice.calls
        ]
        answer = ChatMessage("assistant", choice.text, tool_calls=calls or None)
        messages = list(self.chat.messages)
        if self.request.instructions:
            messages[0] = msgspec.structs.replace(messages[0], name=INSTRUCTIONS)
        if isinstance(output.completions[0].stop_reason, int):
            ids = ids[:-1]  # the template writes the stop token
        entry = self.generation.request.history_entry
        prompt = entry.prompt
        text = output.completions[0].text
        known = [KnownPrefix(prompt.text, prompt.ids)]
        # They differ if a stop string was cut off.
        if self.service.tokenizer.decode(ids) == text:
            known.insert(0, KnownPrefix(prompt.text + text, prompt.ids + array("i", ids)))
        stored = StoredResponse.of((*messages, answer), known, body)
        tenant = self.generation.caller.tenant
        self.service.history.put(tenant, self.generation.id, replace(entry, response=stored))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of server-sent events, numbered by `sequence_number`."""
        number = 0

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1} | fields

        body = self._body("in_progress", [])
        yield event("created", response=body)
        yield event("in_progress", response=body)
        async for step in self.generation:
            pieces = self._choice.add(step)
            for piece in () if self.inner.is_prewarm else pieces:
                for payload in self._piece_events(event, piece):
                    yield payload
        try:
            self.generation.raise_error()
        except RamifyError as error:
            failed = {"code": "server_error", "message": as_api_error(error).message}
            yield event("failed", response=self._body("failed", []) | {"error": failed})
            return
        if not self.inner.is_prewarm and not self._items:  # the answer is empty
            for payload in self._message_begin_events(event):
                yield payload
        end = self._end()
        if self._is_open:
            status = "incomplete" if end["status"] == "incomplete" else "completed"
            for payload in self._message_end_events(event, status):
                yield payload
        self._store(end)
        yield event(end["status"], response=end)

    def _where(self, message: OutputMessage) -> dict[str, Any]:
        index = len(self._items) - 1
        return {"item_id": message.id, "output_index": index, "content_index": 0}

    def _piece_events(self, event: Any, piece: TextOrCall) -> list[dict[str, Any]]:
        """The events of a new piece of text or a complete call."""
        if isinstance(piece, ParsedToolCall):
            closed = self._message_end_events(event, "completed") if self._is_open else []
            return [*closed, *self._call_events(event, piece)]
        begun = [] if self._is_open else self._message_begin_events(event)
        message = self._message()
        message.text += piece
        delta = event("output_text.delta", **self._where(message), delta=piece, logprobs=[])
        return [*begun, delta]

    def _call_events(self, event: Any, call: ParsedToolCall) -> list[dict[str, Any]]:
        """The events of a complete call."""
        position = {"output_index": len(self._items)}
        self._items.append(call)
        begun, done = self._call(call, "in_progress"), self._call(call, "completed")
        item = {"item_id": begun["id"]} | position
        text = call.arguments
        return [
            event("output_item.added", **position, item=begun),
            event("function_call_arguments.delta", **item, delta=text),
            event("function_call_arguments.done", **item, name=call.name, arguments=text),
            event("output_item.done", **position, item=done),
        ]

    def _message_begin_events(self, event: Any) -> list[dict[str, Any]]:
        """The events that begin a message."""
        self._is_open = True
        message = self._message()
        where, item = self._where(message), self._text(message, "in_progress")
        return [
            event("output_item.added", output_index=where["output_index"], item=item),
            event("content_part.added", **where, part=self._part(message)),
        ]

    def _message_end_events(self, event: Any, status: str) -> list[dict[str, Any]]:
        """The events that end the last message."""
        self._is_open = False
        message = self._message()
        where, item = self._where(message), self._text(message, status)
        return [
            event("output_text.done", **where, text=message.text, logprobs=[]),
            event("content_part.done", **where, part=self._part(message)),
            event("output_item.done", output_index=where["output_index"], item=item),
        ]
