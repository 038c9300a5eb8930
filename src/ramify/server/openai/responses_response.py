"""Answers of the Responses API: whole, and as numbered events."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.outputs import FinishReason
from ramify.server.errors import as_api_error
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import ChatMessage, ChatRequest, FunctionCall, ToolCall
from ramify.server.openai.responses_request import INSTRUCTIONS, ResponsesRequest, StoredResponse
from ramify.server.prompt_renderer import KnownPrefix
from ramify.server.service import Generation, Service
from ramify.server.tool_calls import ParsedToolCall, TextOrCall


@dataclass(slots=True)
class OutputMessage:
    """A stretch of text; calls may stand before and behind it."""

    id: str
    text: str = ""
    scored: bool = False  # it has the log probabilities of the answer


class ResponsesResponseBuilder:
    """The answer to a request for a response."""

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
        self._is_open = False  # the last one is a message that grows, in a stream

    @property
    def _choice(self) -> Any:
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
        told = self.inner.usage()
        details = told.get("prompt_tokens_details", {})
        made = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": details.get("cached_tokens", 0),
                "cache_write_tokens": details.get("cache_write_tokens", 0),
            },
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }
        return made | ({"ramify_cache": told["ramify_cache"]} if "ramify_cache" in told else {})

    def _end(self) -> dict[str, Any]:
        """The whole response."""
        cut = self._choice.finish == "length"
        show = not self.generation.request.is_prewarm
        if show and not self._items:
            self._message()
        last = self._items[-1] if cut and self._items else None
        output = [
            self._text(item, "incomplete" if item is last else "completed")
            if isinstance(item, OutputMessage)
            else self._call(item, "completed")
            for item in self._items
        ]
        body = self._body("incomplete" if cut and show else "completed", output)
        told = self.generation.output
        aborted = told is not None and told.completions[0].finish_reason is FinishReason.ABORT
        if cut and show and not aborted:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        body["completed_at"] = int(time.time())
        body["usage"] = self._usage()
        return body | self.inner.diagnostics()

    def _message(self) -> OutputMessage:
        """The message that text belongs to now: a call ends the one before."""
        if not self._items or not isinstance(self._items[-1], OutputMessage):
            first = not any(isinstance(item, OutputMessage) for item in self._items)
            self._items.append(OutputMessage(f"msg_{secrets.token_hex(16)}", scored=first))
        found = self._items[-1]
        assert isinstance(found, OutputMessage)
        return found

    def _text(self, message: OutputMessage, status: str) -> dict[str, Any]:
        return {
            "id": message.id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [self._part(message)] if status != "in_progress" else [],
        }

    def _part(self, message: OutputMessage) -> dict[str, Any]:
        logprobs = self.inner.logprobs(self._choice.logprobs)
        told = logprobs["content"] if logprobs and message.scored and message.text else []
        return {"type": "output_text", "text": message.text, "annotations": [], "logprobs": told}

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
        """`response`."""
        async for event in self.generation:
            pieces = self._choice.add(event)
            for piece in () if self.generation.request.is_prewarm else pieces:
                if isinstance(piece, ParsedToolCall):
                    self._items.append(piece)
                else:
                    self._message().text += piece
        self.generation.raise_error()
        return self._end()

    def stored_response(self, body: Mapping[str, Any]) -> StoredResponse | None:
        """What the next response can go on from; after the end."""
        output = self.generation.output
        if output is None or self.request.store is False:
            return None
        choice, ids = self._choice, list(output.completions[0].token_ids)
        calls = [
            ToolCall(FunctionCall(call.name, call.arguments), call.id) for call in choice.calls
        ]
        answer = ChatMessage("assistant", choice.text, tool_calls=calls or None)
        messages = list(self.chat.messages)
        if self.request.instructions:
            messages[0] = msgspec.structs.replace(messages[0], name=INSTRUCTIONS)
        if isinstance(output.completions[0].stop_reason, int):
            ids = ids[:-1]  # the template writes the end itself
        prompt = self.generation.request.prompt
        text = output.completions[0].text
        known = [KnownPrefix(prompt.text, prompt.ids)]
        if self.service.tokenizer.decode(ids) == text:  # not so if a stop text was cut off
            known.insert(0, KnownPrefix(prompt.text + text, prompt.ids + array("i", ids)))
        return StoredResponse((*messages, answer), tuple(known), body)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events, numbered."""
        number = 0

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1} | fields

        body = self._body("in_progress", [])
        yield event("created", response=body)
        yield event("in_progress", response=body)
        show = not self.generation.request.is_prewarm
        async for step in self.generation:
            pieces = self._choice.add(step)
            for piece in pieces if show else ():
                for told in self._piece_events(event, piece):
                    yield told
        try:
            self.generation.raise_error()
        except RamifyError as error:
            failed = {"code": "server_error", "message": as_api_error(error).message}
            yield event("failed", response=self._body("failed", []) | {"error": failed})
            return
        if show and not self._items:  # it said nothing
            for told in self._message_begin_events(event):
                yield told
        end = self._end()
        if self._is_open:
            status = "incomplete" if end["status"] == "incomplete" else "completed"
            for told in self._message_end_events(event, status):
                yield told
        yield event(end["status"], response=end)

    def _where(self, message: OutputMessage) -> dict[str, Any]:
        place = len(self._items) - 1
        return {"item_id": message.id, "output_index": place, "content_index": 0}

    def _piece_events(self, event: Any, piece: TextOrCall) -> list[dict[str, Any]]:
        """What a piece of the answer adds to the stream."""
        if isinstance(piece, ParsedToolCall):
            closed = self._message_end_events(event, "completed") if self._is_open else []
            return [*closed, *self._call_events(event, piece)]
        begun = [] if self._is_open else self._message_begin_events(event)
        message = self._message()
        message.text += piece
        delta = event("output_text.delta", **self._where(message), delta=piece, logprobs=[])
        return [*begun, delta]

    def _call_events(self, event: Any, call: ParsedToolCall) -> list[dict[str, Any]]:
        """A call, whole."""
        place = {"output_index": len(self._items)}
        self._items.append(call)
        begun, done = self._call(call, "in_progress"), self._call(call, "completed")
        item = {"item_id": begun["id"]} | place
        text = call.arguments
        return [
            event("output_item.added", **place, item=begun),
            event("function_call_arguments.delta", **item, delta=text),
            event("function_call_arguments.done", **item, name=call.name, arguments=text),
            event("output_item.done", **place, item=done),
        ]

    def _message_begin_events(self, event: Any) -> list[dict[str, Any]]:
        """The beginning of a message."""
        self._is_open = True
        message = self._message()
        where, item = self._where(message), self._text(message, "in_progress")
        return [
            event("output_item.added", output_index=where["output_index"], item=item),
            event("content_part.added", **where, part=self._part(message)),
        ]

    def _message_end_events(self, event: Any, status: str) -> list[dict[str, Any]]:
        """The end of the last message."""
        self._is_open = False
        message = self._message()
        where, item = self._where(message), self._text(message, status)
        return [
            event("output_text.done", **where, text=message.text, logprobs=[]),
            event("content_part.done", **where, part=self._part(message)),
            event("output_item.done", output_index=where["output_index"], item=item),
        ]
