"""Chat completions: the whole response, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ramify import __version__
from ramify.outputs import FinishReason, TokenLogprob
from ramify.server.answers.answer import AnswerPart, AnswerParts, PartBegin, PartDelta, PartEvent
from ramify.server.generation import CacheUsage, Generation, answer_changes
from ramify.server.openai.options import diagnostics, token_name
from ramify.server.openai.protocol import ChatRequest, NamedTool, StreamOptions
from ramify.server.service import RequestService

SYSTEM_FINGERPRINT = f"ramify-{__version__}"
MIN_LOGPROB = -9999.0  # JSON has no -inf
FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",  # the server shut down, or an operator ended the request
    FinishReason.ERROR: "error",
}


def usage_json(
    usage: CacheUsage | None, num_prompt: int, num_output: int, num_reasoning: int = 0
) -> dict[str, Any]:
    """`usage`: token counts, and where the prompt tokens came from."""
    payload: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "completion_tokens_details": {"reasoning_tokens": num_reasoning},
    }
    if usage is not None:
        payload["prompt_tokens_details"] = {
            "cached_tokens": usage.cached,
            "cache_write_tokens": usage.written,
        }
        payload["ramify_cache"] = usage.as_json()
    return payload


def response_header(generation: Generation, kind: str) -> dict[str, Any]:
    """The fields before `choices` of a response or a chunk."""
    return {
        "id": generation.id,
        "object": kind,
        "created": generation.created,
        "model": generation.request.history_entry.model,
        "system_fingerprint": SYSTEM_FINGERPRINT,
    }


class ChatResponseBuilder:
    """Builds the response to a chat completion request from its generation."""

    def __init__(
        self, service: RequestService, request: ChatRequest, generation: Generation
    ) -> None:
        self.service, self.request, self.generation = service, request, generation
        self.is_prewarm = generation.request.is_prewarm
        self._shows_reasoning = _shows_reasoning(request)
        translated, stop_token_ids = generation.request, service.special_token_ids
        self.choices = [
            AnswerParts(translated.new_parser(), stop_token_ids, translated.ends_after_call)
            for _ in range(request.n or 1)
        ]

    def usage(self) -> dict[str, Any]:
        """`usage` with the tokens so far."""
        num_prompt = len(self.generation.request.prompt.ids)
        choices = () if self.is_prewarm else self.choices
        num_output = sum(choice.num_tokens for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return usage_json(self.generation.cache, num_prompt, num_output, num_reasoning)

    def diagnostics(self) -> dict[str, Any]:
        """The field `prompt_cache_diagnostics`, if the request asks for it."""
        payload = diagnostics(self.service, self.request, self.generation)
        return {} if payload is None else {"prompt_cache_diagnostics": payload}

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `chat.completion`."""
        async for _ in answer_changes(self.generation, self.choices):
            pass
        self.generation.raise_error()
        header = response_header(self.generation, "chat.completion")
        choices = [
            {
                "index": index,
                "message": self._message(choice),
                "logprobs": self.logprobs(choice.logprobs),
                "finish_reason": self._finish_reason(choice),
            }
            for index, choice in enumerate(() if self.is_prewarm else self.choices)
        ]
        return header | {"choices": choices, "usage": self.usage()} | self.diagnostics()

    def _message(self, choice: AnswerParts) -> dict[str, Any]:
        text, reasoning, calls = choice.text, choice.reasoning, choice.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if reasoning and self._shows_reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = [_call(call, call.text) for call in calls]
        return message

    def _finish_reason(self, choice: AnswerParts) -> str | None:
        """`finish_reason` of a choice; None before its end.

        As OpenAI's: an answer that had to call a named tool ends with `stop`.
        """
        reason, is_named = choice.finish_reason, isinstance(self.request.tool_choice, NamedTool)
        if choice.calls and reason is FinishReason.STOP and not is_named:
            return "tool_calls"
        return None if reason is None else FINISH_REASONS[reason]

    def logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """`logprobs` of tokens; None unless the request asks for them."""
        if not self.request.logprobs:
            return None
        return {"content": [self._logprob(logprob) for logprob in logprobs], "refusal": None}

    def _logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            tokenizer = self.service.tokenizer
            return {
                "token": token_name(token, self.request, tokenizer),
                "logprob": max(value, MIN_LOGPROB),
                "bytes": list(tokenizer.token_bytes(token)),
            }

        top = [entry(token, value) for token, value in logprob.top.items()]
        return entry(logprob.token_id, logprob.logprob) | {"top_logprobs": top}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield `chat.completion.chunk` objects while tokens arrive."""
        options = self.request.stream_options or StreamOptions()

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            header = response_header(self.generation, "chat.completion.chunk")
            payload = header | {"choices": choices}
            if options.include_usage:
                payload["usage"] = self.usage() if options.continuous_usage_stats else None
            return payload

        begun: set[int] = set()
        async for event, changes in answer_changes(self.generation, self.choices):
            choice = self.choices[event.index]
            if self.is_prewarm:
                continue
            if event.index not in begun:
                begun.add(event.index)
                yield chunk([_delta(event.index, {"role": "assistant", "content": ""})])
            shown = [
                change
                for change in changes
                if self._shows_reasoning or change.part.kind != "reasoning"
            ]
            deltas = [delta for change in shown if (delta := _delta_of(change)) is not None]
            logprobs = choice.visible_logprobs(event)
            if logprobs and not deltas:
                deltas = [{}]
            for number, delta in enumerate(deltas):
                # a step's logprobs come with its first delta
                values = self.logprobs(logprobs if number == 0 else ())
                yield chunk([_delta(event.index, delta) | {"logprobs": values}])
            if choice.finish_reason is not None:
                self.generation.raise_error(event.index)
                yield chunk(
                    [_delta(event.index, {}) | {"finish_reason": self._finish_reason(choice)}]
                )
        cache_diagnostics = self.diagnostics()
        if options.include_usage or cache_diagnostics:
            yield chunk([]) | {"usage": self.usage()} | cache_diagnostics


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _shows_reasoning(request: ChatRequest) -> bool:
    is_excluded = request.reasoning is not None and bool(request.reasoning.exclude)
    return request.include_reasoning is not False and not is_excluded


def _delta_of(change: PartEvent) -> dict[str, Any] | None:
    """`delta` of a change of the answer; None if clients see nothing of it."""
    match change:
        case PartBegin(part) if part.kind == "call":
            return {"tool_calls": [{"index": part.number} | _call(part, "")]}
        case PartDelta(part, text) if part.kind == "call":
            return {"tool_calls": [{"index": part.number, "function": {"arguments": text}}]}
        case PartDelta(part, text):
            return _reasoning(text) if part.kind == "reasoning" else {"content": text}
    return None


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call: AnswerPart, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
