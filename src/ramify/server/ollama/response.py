"""Answers of /api/chat and /api/generate: whole, or as lines of which the last has counts and times.

`ramify_cache` stands beside Ollama's fields, which have no place for what was read from the cache:
`prompt_eval_count` counts all tokens of the prompt.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ramify.outputs import FinishReason, TokenLogprob
from ramify.server.answers.answer import AnswerPart, AnswerParts, PartDelta, PartEnd, PartEvent
from ramify.server.answers.partial_json import partial_object
from ramify.server.generation import Generation, answer_changes
from ramify.server.openai.chat_response import MIN_LOGPROB
from ramify.server.service import RequestService

# Text, thoughts and calls of an answer, or a piece of it, as the fields of an API.
Shape = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]
NS = 1_000_000_000  # of a second
DONE_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",  # the server shut down, or an operator ended the request
    FinishReason.ERROR: "error",
}


def message_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """`message` of /api/chat."""
    return {"message": {"role": "assistant", "content": text} | _further(thinking, calls)}


def response_shape(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """`response` of /api/generate."""
    return {"response": text} | _further(thinking, calls)


def _further(thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {"thinking": thinking} if thinking else {}
    return fields | ({"tool_calls": calls} if calls else {})


def header(model: str) -> dict[str, Any]:
    """The fields with which each answer and each line begins."""
    return {"model": model, "created_at": timestamp(datetime.now(UTC))}


def timestamp(moment: datetime) -> str:
    """A time as Ollama writes it: RFC 3339 in UTC, with microseconds."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def loaded(model: str, shape: Shape) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients have a model loaded."""
    return header(model) | shape("", "", []) | {"done": True, "done_reason": "load"}


class AnswerBuilder:
    """Builds the response to a request from its generation.

    Args:
        arrived_s: when the request came, of `time.monotonic`.
        has_context: the answer has the token ids with which a next request may go on.
        has_logprobs: of the tokens.
    """

    def __init__(
        self,
        service: RequestService,
        generation: Generation,
        shape: Shape,
        *,
        arrived_s: float,
        has_context: bool,
        has_logprobs: bool,
    ) -> None:
        self.service, self.generation, self._shape = service, generation, shape
        self._arrived_s, self._has_context = arrived_s, has_context
        self._has_logprobs = has_logprobs
        translated = generation.request
        self.model = translated.history_entry.model
        self.is_prewarm = translated.is_prewarm
        self._answer = AnswerParts(translated.new_parser(), service.special_token_ids)

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the whole answer."""
        async for _ in answer_changes(self.generation, [self._answer]):
            pass
        self.generation.raise_error()
        if self.is_prewarm:
            return self._last(self._shape("", "", []))
        answer = self._answer
        calls = [_call(call) for call in answer.calls if call.is_complete]
        fields = self._shape(answer.text, answer.reasoning, calls)
        return self._last(fields | self._logprobs(answer.logprobs))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the lines of a stream: pieces of text and thoughts, whole calls, the end."""
        async for step, changes in answer_changes(self.generation, [self._answer]):
            if self.is_prewarm:
                continue
            pieces = [piece for change in changes if (piece := self._piece(change)) is not None]
            logprobs = self._logprobs(self._answer.visible_logprobs(step))
            if logprobs and not pieces:
                pieces = [self._shape("", "", [])]
            for number, piece in enumerate(pieces):
                # a step's logprobs come with its first piece
                line = header(self.model) | piece | {"done": False}
                yield line | (logprobs if number == 0 else {})
        self.generation.raise_error()
        yield self._last(self._shape("", "", []))

    def _piece(self, change: PartEvent) -> dict[str, Any] | None:
        """The fields of a change of the answer; None if clients see nothing of it.

        A call that was cut off inside is left out: its arguments are an object, not text.
        """
        match change:
            case PartEnd(part) if part.kind == "call" and part.is_complete:
                return self._shape("", "", [_call(part)])
            case PartDelta(part, text) if part.kind == "text":
                return self._shape(text, "", [])
            case PartDelta(part, text) if part.kind == "reasoning":
                return self._shape("", text, [])
        return None

    def _last(self, fields: dict[str, Any]) -> dict[str, Any]:
        """An answer that has ended, or the last line: `fields`, the reason, counts and times."""
        reason = FinishReason.LENGTH if self.is_prewarm else self._answer.finish_reason
        payload = header(self.model) | fields | {"done": True}
        payload["done_reason"] = DONE_REASONS[reason or FinishReason.STOP]
        if self._has_context:
            payload["context"] = self._context()
        payload |= self._metrics()
        if self.generation.cache is not None:
            payload["ramify_cache"] = self.generation.cache.as_json()
        return payload

    def _context(self) -> list[int]:
        """The token ids of the prompt and of the answer, without the token that ended it."""
        ids = self.generation.request.prompt.ids.tolist()
        if self.is_prewarm or self.generation.output is None:
            return ids
        completion, tokenizer = self.generation.output.completions[0], self.service.tokenizer
        answer = list(completion.token_ids)
        if isinstance(completion.stop_reason, str):  # its tokens are not part of the text
            answer = tokenizer.encode(completion.text, add_special_tokens=False).tolist()
        elif answer and completion.finish_reason is FinishReason.STOP:
            ends = self.service.engine.description.eos_token_ids
            answer = answer[:-1] if answer[-1] in ends else answer
        return ids + answer

    def _metrics(self) -> dict[str, int]:
        """Counts of tokens, and times in nanoseconds.

        The model is loaded: `load_duration` is the time before the first step of the prompt.
        """
        total_s = time.monotonic() - self._arrived_s
        prompt_s = answer_s = 0.0
        if self.generation.output is not None:
            metrics = self.generation.output.metrics
            begin_s = metrics.total_s if metrics.ttft_s is None else metrics.ttft_s
            prompt_s = max(0.0, begin_s - metrics.queue_s)
            answer_s = max(0.0, metrics.total_s - begin_s)
        durations = {
            "total_duration": total_s,
            "load_duration": max(0.0, total_s - prompt_s - answer_s),
            "prompt_eval_duration": prompt_s,
            "eval_duration": answer_s,
        }
        # Clients divide by them.
        times = {name: max(1, round(seconds * NS)) for name, seconds in durations.items()}
        num_output = 0 if self.is_prewarm else self._answer.num_tokens
        num_prompt = len(self.generation.request.prompt.ids)
        return {
            "total_duration": times["total_duration"],
            "load_duration": times["load_duration"],
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": times["prompt_eval_duration"],
            "eval_count": num_output,
            "eval_duration": times["eval_duration"],
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The field `logprobs`; {} unless the request asks for them, or without tokens."""
        if not self._has_logprobs or not logprobs:
            return {}
        return {"logprobs": [self._logprob(logprob) for logprob in logprobs]}

    def _logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        def entry(token: int, value: float) -> dict[str, Any]:
            tokenizer = self.service.tokenizer
            text, raw = tokenizer.token_text(token), list(tokenizer.token_bytes(token))
            return {"token": text, "logprob": max(value, MIN_LOGPROB), "bytes": raw}

        payload = entry(logprob.token_id, logprob.logprob)
        if logprob.top:
            payload["top_logprobs"] = [entry(*item) for item in logprob.top.items()]
        return payload


def _call(call: AnswerPart) -> dict[str, Any]:
    function = {"index": call.number, "name": call.name, "arguments": partial_object(call.text)}
    return {"id": call.id, "function": function}
