"""Responses API: the whole response, and the numbered events of a stream; both are stored."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.outputs import FinishReason
from ramify.server.answer import TRUNCATED, Answer
from ramify.server.errors import as_api_error
from ramify.server.generation import Generation
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    ToolCall,
)
from ramify.server.openai.responses_items import OutputItems
from ramify.server.openai.responses_protocol import ResponsesRequest
from ramify.server.openai.responses_request import INSTRUCTIONS, StoredResponse
from ramify.server.prompt_renderer import KnownPrefix
from ramify.server.service import Service


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
        includes = request.include or ()
        self._items = OutputItems(
            self.inner.choices[0],
            self._logprobs,
            carries_reasoning="reasoning.encrypted_content" in includes,
        )

    @property
    def _choice(self) -> Answer:
        return self.inner.choices[0]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Entries of the answer's tokens; none unless the request asks for them."""
        payload = self.inner.logprobs(self._choice.logprobs)
        return payload["content"] if payload else []

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
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        if "ramify_cache" in usage:
            payload["ramify_cache"] = usage["ramify_cache"]
        return payload

    def _end(self) -> dict[str, Any]:
        """The whole response, after the last event."""
        is_truncated = self._choice.finish_reason in TRUNCATED
        is_prewarm = self.inner.is_prewarm
        output = [] if is_prewarm else self._items.as_json()
        is_incomplete = is_truncated and not is_prewarm
        body = self._body("incomplete" if is_incomplete else "completed", output)
        result = self.generation.output
        aborted = result is not None and result.completions[0].finish_reason is FinishReason.ABORT
        if is_incomplete:
            body["incomplete_details"] = {"reason": "abort" if aborted else "max_output_tokens"}
        body["completed_at"] = int(time.time())
        body["usage"] = self._usage()
        return body | self.inner.diagnostics()

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `response`."""
        async for event in self.generation:
            self._choice.add(event)
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
            ToolCall(FunctionCall(call.name, call.text), call.id)
            for call in choice.calls
            if call.is_complete
        ]
        answer = ChatMessage(
            "assistant",
            choice.text,
            tool_calls=calls or None,
            reasoning_content=choice.reasoning or None,
        )
        messages = list(self.chat.messages)
        if self.request.instructions:
            messages[0] = msgspec.structs.replace(messages[0], name=INSTRUCTIONS)
        if isinstance(output.completions[0].stop_reason, int):
            ids = ids[:-1]  # the template writes the stop token
        entry = self.generation.request.history_entry
        prompt = entry.prompt
        shown, decode = output.completions[0].text, self.service.tokenizer.decode
        text = decode(ids, skip_special_tokens=False)
        known = [KnownPrefix(prompt.text, prompt.ids)]
        # They differ if a stop string was cut off.
        if shown in (text, decode(ids)):
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
            changes = self._choice.add(step)
            for change in () if self.inner.is_prewarm else changes:
                for payload in self._items.events(change, event):
                    yield payload
        try:
            self.generation.raise_error()
        except RamifyError as error:
            failed = {"code": "server_error", "message": as_api_error(error).message}
            yield event("failed", response=self._body("failed", []) | {"error": failed})
            return
        if not self.inner.is_prewarm and not self._choice.parts:
            for payload in self._items.empty_events(event):
                yield payload
        end = self._end()
        self._store(end)
        yield event(end["status"], response=end)
