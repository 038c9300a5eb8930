"""Responses API: the whole response, and the numbered events of a stream; both are stored."""

from __future__ import annotations

import time
from array import array
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ramify.errors import RamifyError
from ramify.outputs import FinishReason, RequestOutput
from ramify.server.answers.answer import TRUNCATED, AnswerParts
from ramify.server.errors import as_api_error
from ramify.server.generation import Generation, answer_changes
from ramify.server.http.wire import encode_json
from ramify.server.openai.answer_formats import named_schema
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import ResponseFormat
from ramify.server.openai.responses.conversations import append_to_conversation
from ramify.server.openai.responses.items import OutputItems
from ramify.server.openai.responses.protocol import Reasoning, ResponsesRequest
from ramify.server.openai.responses.request import TranslatedRequest
from ramify.server.openai.responses.store import (
    CHAIN_PREFIX,
    ResponseChain,
    StoredResponse,
    joined_lists,
    numbered_items,
)
from ramify.server.prompts.renderer import KnownPrefix
from ramify.server.service import RequestService


class ResponsesResponseBuilder:
    """Builds the response to a Responses request from its generation."""

    def __init__(
        self,
        service: RequestService,
        request: ResponsesRequest,
        translated: TranslatedRequest,
        generation: Generation,
    ) -> None:
        self.service, self.request, self.translated = service, request, translated
        self.generation = generation
        self.inner = ChatResponseBuilder(service, translated.chat, generation)
        includes = request.include or ()
        self._items = OutputItems(
            self.inner.choices[0],
            generation.id,
            translated.tools.forms,
            self._logprobs,
            carries_reasoning="reasoning.encrypted_content" in includes,
        )

    @property
    def _choice(self) -> AnswerParts:
        return self.inner.choices[0]

    def _logprobs(self) -> list[dict[str, Any]]:
        """Entries of the answer's tokens; none unless the request asks for them."""
        payload = self.inner.logprobs(self._choice.logprobs)
        return payload["content"] if payload else []

    def _body(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        request, params = self.request, self.generation.request.params
        reasoning = request.reasoning or Reasoning()
        text = {"format": {"type": "text"}}
        if request.text is not None:
            text = msgspec.to_builtins(request.text) | {
                "format": _shown_format(request.text.format)
            }
        options, cache_options = request.prompt_cache_options, None
        if options is not None:
            cache_options = {
                "mode": options.mode or "implicit",
                "ttl": options.ttl or "30m",
                "comparison_response_id": options.comparison_response_id,
            }
        conversation = self.translated.earlier.conversation
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
            "conversation": None if conversation is None else {"id": conversation.id},
            "max_tool_calls": request.max_tool_calls,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": request.safety_identifier,
            "store": request.store is not False,
            "temperature": params.temperature
            if request.temperature is None
            else request.temperature,
            "top_p": params.top_p if request.top_p is None else request.top_p,
            "text": text,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "truncation": request.truncation or "disabled",
            "metadata": request.metadata or {},
            "prompt_cache_key": request.prompt_cache_key,
            "prompt_cache_options": cache_options,
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
        if is_incomplete:
            is_aborted = self._choice.finish_reason is FinishReason.ABORT
            body["incomplete_details"] = {"reason": "abort" if is_aborted else "max_output_tokens"}
        body["completed_at"] = int(time.time())
        body["usage"] = self._usage()
        return body | self.inner.diagnostics()

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `response`."""
        async for _ in answer_changes(self.generation, self.inner.choices):
            pass
        self.generation.raise_error()
        end = self._end()
        self._store(end, array("I"))
        return end

    def _store(self, body: Mapping[str, Any], delta_lens: array[int]) -> None:
        """Store the ended response, for a next request to continue, unless `store` is false.

        Those of a batch are not stored: they would take the place of all others of their tenant.
        A conversation gets the request's items and the answer in any case.
        """
        output, earlier = self.generation.output, self.translated.earlier
        is_stored = self.request.store is not False and not self.generation.caller.is_background
        conversation = earlier.conversation
        if output is None or not (is_stored or conversation):
            return
        tenant, name = self.generation.caller.tenant, self.generation.id
        known = self._known(output)
        taken = () if conversation is None else conversation.items
        items = numbered_items(self.translated.items, name, taken=taken)
        if conversation is not None:
            append_to_conversation(
                self.service, tenant, conversation.id, [*items, *body["output"]], known
            )
        if not is_stored:
            return
        packed_input = joined_lists([earlier.packed_items(), encode_json(items)])
        chain = self._chain()
        chain.last = name
        stored = StoredResponse(packed_input, encode_json(body), known, delta_lens, chain)
        entry = self.generation.request.history_entry.without_text()
        self.service.history.put(tenant, name, replace(entry, response=stored))

    def _chain(self) -> ResponseChain:
        """The chain that the response continues, unless its session is another."""
        earlier, session = self.translated.earlier.response, self.generation.request.session
        if earlier is not None and earlier.chain.session == session:
            return earlier.chain
        return ResponseChain(session, session.startswith(CHAIN_PREFIX))

    def _known(self, output: RequestOutput) -> tuple[KnownPrefix, ...]:
        """The prompt with the answer, then without, as texts with their token ids."""
        completion = output.completions[0]
        ids = list(completion.token_ids)
        if isinstance(completion.stop_reason, int):
            ids = ids[:-1]  # the template writes the stop token
        prompt, shown = self.generation.request.prompt, completion.text
        decode = self.service.tokenizer.decode
        text = decode(ids, skip_special_tokens=False)
        known = [KnownPrefix(prompt.text, prompt.ids)]
        # They differ if a stop string was cut off.
        if shown in (text, decode(ids)):
            known.insert(0, KnownPrefix(prompt.text + text, prompt.ids + array("i", ids)))
        return tuple(known)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of server-sent events, numbered by `sequence_number`."""
        number, delta_lens = 0, array("I")

        def event(kind: str, **fields: Any) -> dict[str, Any]:
            nonlocal number
            number += 1
            if kind.endswith(".delta"):
                delta_lens.append(len(fields["delta"]))
            return {"type": f"response.{kind}", "sequence_number": number - 1} | fields

        body = self._body("in_progress", [])
        yield event("created", response=body)
        yield event("in_progress", response=body)
        async for _, changes in answer_changes(self.generation, self.inner.choices):
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
        self._store(end, delta_lens)
        yield event(end["status"], response=end)


def _shown_format(text_format: ResponseFormat | None) -> dict[str, Any]:
    """The format of the answer's text as OpenAI's clients read it, however the client wrote it."""
    kind = "text" if text_format is None else text_format.type
    if text_format is None or kind != "json_schema":
        return {"type": kind}
    schema, strict, _ = named_schema(text_format, "text.format")
    nested = text_format.json_schema or {}
    return {
        "type": kind,
        "name": text_format.name or nested.get("name") or "",
        "description": text_format.description or nested.get("description"),
        "schema": schema,
        "strict": strict,
    }
