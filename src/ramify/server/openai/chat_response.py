"""Answers in OpenAI's words: whole, and in pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.outputs import FinishReason, StepOutput, TokenLogprob
from ramify.server.openai.chat_request import is_prewarm
from ramify.server.openai.protocol import ChatRequest, CompletionRequest, Sampling
from ramify.server.request_history import HistoryEntry, first_difference, is_fully_reused
from ramify.server.service import CacheUsage, Generation, Service
from ramify.server.tool_calls import (
    ParsedToolCall,
    TextOrCall,
    ToolCallParser,
    detect_format,
    split,
)

FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "length",  # cut off, by a server that goes away: not at its end
    FinishReason.ERROR: "error",
}
# What changed, in the words of OpenAI's diagnostics.
DIFFERENCE_REASONS = {
    "model": "model_changed",
    "tools": "tools_changed",
    "text_format": "text_format_changed",
    "reasoning_effort": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
    "service_tier": "service_tier_changed",
    "prompt_cache_key": "prompt_cache_key_changed",
}


def usage(use: CacheUsage | None, num_prompt: int, num_output: int) -> dict[str, Any]:
    """Token counts, with what the cache did."""
    told: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }
    if use is not None:
        told["prompt_tokens_details"] = {
            "cached_tokens": use.cached,
            "cache_write_tokens": use.written,
        }
        told["ramify_cache"] = use.as_json()
    return told


def diagnostics(
    service: Service, tenant: str, request: Sampling, entry: HistoryEntry, use: CacheUsage | None
) -> dict[str, Any] | None:
    """`prompt_cache_diagnostics`; None if nobody asked."""
    options = request.prompt_cache_options
    if options is None or options.comparison_response_id is None:
        return None
    old = service.history.get(tenant, options.comparison_response_id)
    if old is None:
        return {"type": "comparison_response_not_found"}
    change = first_difference(old, entry)
    cached = 0 if use is None else use.cached
    other_model = change is not None and change.kind == "model"
    if not other_model and is_fully_reused(old, entry, cached, service.page_size):
        return {"type": "cache_hit"}
    if change is None:
        return {"type": "unavailable"}  # nothing changed, and the prefix is gone: evicted
    return {
        "type": "cache_miss",
        "reason": DIFFERENCE_REASONS.get(change.kind, "input_changed"),
        "cache_missed_tokens": change.missed_tokens,
        "comparison_reusable_tokens": change.at_token,
        "segment": change.path,  # beyond OpenAI's fields
    }


@dataclass(slots=True)
class ChoiceState:
    """One answer while it grows."""

    parser: ToolCallParser | None
    stop_token_ids: frozenset[int] = (
        frozenset()
    )  # tokens that end an answer, and are not shown with it
    text: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    num_tokens: int = 0

    def visible_logprobs(self, event: StepOutput) -> tuple[TokenLogprob, ...]:
        """Scores of the tokens of an event, without the one that ended the answer."""
        found = event.logprobs
        if (
            event.finish_reason is FinishReason.STOP
            and found
            and found[-1].token_id in self.stop_token_ids
        ):
            return found[:-1]
        return found

    def add(self, event: StepOutput) -> list[TextOrCall]:
        """What an event adds: text to show, and complete calls."""
        self.num_tokens += len(event.new_token_ids)
        self.logprobs += self.visible_logprobs(event)
        pieces: list[TextOrCall] = [event.text] if event.text else []
        if self.parser is not None:
            pieces = self.parser.feed(event.text)
            if event.finish_reason is not None:
                pieces += self.parser.finish()
        text, calls = split(pieces)
        self.text += text
        self.calls += calls
        if event.finish_reason is not None:
            self.finish = FINISH_REASONS[event.finish_reason]
            if self.calls and self.finish == "stop":
                self.finish = "tool_calls"
        return pieces


class ChatResponseBuilder:
    """The answer to a chat request."""

    def __init__(self, service: Service, request: ChatRequest, generation: Generation) -> None:
        self.service, self.request, self.generation = service, request, generation
        self.choices = [
            ChoiceState(self._parser(), service.special_token_ids) for _ in range(request.n or 1)
        ]

    def _parser(self) -> ToolCallParser | None:
        tools = self.request.tools
        if not tools or self.request.tool_choice == "none":
            return None
        names = [tool.function.name for tool in tools]
        forced = self.request.tool_choice not in (None, "auto")
        single = self.request.parallel_tool_calls is False
        form = detect_format(self.service.chat_template)
        return ToolCallParser(form, names, forced=forced, single=single)

    def _base(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.generation.id,
            "object": kind,
            "created": self.generation.created,
            "model": self.generation.request.history_entry.model,
            "system_fingerprint": self.service.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts so far."""
        num_prompt = len(self.generation.request.prompt.ids)
        told = sum(choice.num_tokens for choice in self.choices)
        num_output = 0 if is_prewarm(self.request) else told
        return usage(self.generation.cache, num_prompt, num_output)

    def diagnostics(self) -> dict[str, Any]:
        """`prompt_cache_diagnostics`, if it was asked for."""
        generation = self.generation
        found = diagnostics(
            self.service,
            generation.caller.tenant,
            self.request,
            generation.request.history_entry,
            generation.cache,
        )
        return {} if found is None else {"prompt_cache_diagnostics": found}

    async def body(self) -> dict[str, Any]:
        """`chat.completion`."""
        async for event in self.generation:
            self.choices[event.index].add(event)
        self.generation.raise_error()
        show = not is_prewarm(self.request)
        return (
            self._base("chat.completion")
            | {
                "choices": [
                    {
                        "index": index,
                        "message": self._message(choice),
                        "logprobs": self.logprobs(choice.logprobs) if show else None,
                        "finish_reason": choice.finish,
                    }
                    for index, choice in enumerate(self.choices if show else ())
                ],
                "usage": self.usage(),
            }
            | self.diagnostics()
        )

    def _message(self, choice: ChoiceState) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text or (None if choice.calls else ""),
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return message

    def logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Log probabilities of tokens, if they were asked for."""
        if not self.request.logprobs:
            return None
        return {"content": [self._logprob(one) for one in found], "refusal": None}

    def _logprob(self, one: TokenLogprob) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.service.tokenizer.token_text(token)
            return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

        top = [entry(token, logprob) for token, logprob in one.top.items()]
        return entry(one.token_id, one.logprob) | {"top_logprobs": top}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """`chat.completion.chunk`, one after the other."""
        options = self.request.stream_options
        told = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        show = not is_prewarm(self.request)

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            made = self._base("chat.completion.chunk") | {"choices": choices}
            if told:
                made["usage"] = self.usage() if always else None
            return made

        begun: set[int] = set()
        async for event in self.generation:
            choice = self.choices[event.index]
            text, calls = split(choice.add(event))
            if not show:
                continue
            delta: dict[str, Any] = {}
            if event.index not in begun:
                begun.add(event.index)
                yield chunk([_delta(event.index, {"role": "assistant", "content": ""})])
            if text:
                delta["content"] = text
            first = len(choice.calls) - len(calls)
            if calls:
                delta["tool_calls"] = [
                    {"index": first + at} | _call(call) for at, call in enumerate(calls)
                ]
            scores = choice.visible_logprobs(event)
            if delta or scores:
                logprobs = self.logprobs(scores)
                yield chunk([_delta(event.index, delta) | {"logprobs": logprobs}])
            if choice.finish is not None:
                self.generation.raise_error(event.index)
                yield chunk([_delta(event.index, {}) | {"finish_reason": choice.finish}])
        found = self.diagnostics()
        if told or found:
            yield chunk([]) | {"usage": self.usage()} | found


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _call(call: ParsedToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class CompletionResponseBuilder:
    """The answer to a completion request, which may have several prompts."""

    def __init__(
        self, service: Service, request: CompletionRequest, generations: Sequence[Generation]
    ) -> None:
        self.service, self.request, self.generations = service, request, generations
        self.id, self.created = generations[0].id, generations[0].created
        self.num_tokens = 0
        self._text_offsets: dict[
            int, int
        ] = {}  # characters told, by choice: of logprobs' text_offset

    def _base(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.generations[0].request.history_entry.model,
            "system_fingerprint": self.service.fingerprint,
            "choices": [] if self.generations[0].request.is_prewarm else choices,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(one.request.prompt.ids) for one in self.generations)
        uses = [one.cache for one in self.generations if one.cache is not None]
        if not uses:
            return usage(None, num_prompt, self.num_tokens)
        total = CacheUsage(
            read=sum(one.read for one in uses),
            shared=sum(one.shared for one in uses),
            computed=sum(one.computed for one in uses),
            written=sum(one.written for one in uses),
            miss=next((one.miss for one in uses if one.miss is not None), None),
        )
        return usage(total, num_prompt, self.num_tokens)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """`text_completion` chunks, prompt after prompt."""
        options = self.request.stream_options
        told = options is not None and options.include_usage
        always = options is not None and options.continuous_usage_stats
        async for index, choice in self._choices():
            made = self._base([choice | {"index": index}])
            if told:
                made["usage"] = self._usage() if always else None
            yield made
        if told:
            yield self._base([]) | {"usage": self._usage()}

    async def body(self) -> dict[str, Any]:
        """`text_completion`."""
        choices: dict[int, dict[str, Any]] = {}
        async for index, piece in self._choices():
            known = choices.setdefault(
                index, piece | {"index": index, "text": "", "logprobs": None}
            )
            known["text"] += piece["text"]
            known["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                old = known["logprobs"] or {name: [] for name in piece["logprobs"]}
                known["logprobs"] = {
                    name: old[name] + more for name, more in piece["logprobs"].items()
                }
        return self._base([choices[index] for index in sorted(choices)]) | {"usage": self._usage()}

    async def _choices(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        per_prompt = self.request.n or 1
        for at, generation in enumerate(self.generations):
            if generation.request.is_prewarm:
                await generation.wait()
                generation.raise_error()
                continue
            if self.request.echo and self.request.logprobs is not None:
                await generation.wait()  # the prompt's scores come last, and are to stand first
                generation.raise_error()
                for index in range(per_prompt):
                    yield at * per_prompt + index, self._echoed(generation, index, at * per_prompt)
                continue
            begun: set[int] = set()
            async for event in generation:
                index = at * per_prompt + event.index
                text = "" if self.request.max_tokens == 0 else event.text
                if self.request.echo and event.index not in begun:
                    text = self._prompt_text(generation) + text
                begun.add(event.index)
                finish = None
                if event.finish_reason is not None:
                    generation.raise_error(event.index)
                    finish = FINISH_REASONS[event.finish_reason]
                self.num_tokens += len(event.new_token_ids) * (self.request.max_tokens != 0)
                logprobs = self._logprobs(index, event.logprobs)
                yield index, {"text": text, "logprobs": logprobs, "finish_reason": finish}

    def _echoed(self, generation: Generation, index: int, base: int) -> dict[str, Any]:
        """A whole answer behind its prompt, with the scores of both."""
        output = generation.output
        assert output is not None
        answer = output.completions[index]
        shown = self.request.max_tokens != 0
        text = self._prompt_text(generation) + (answer.text if shown else "")
        scores: list[TokenLogprob | None] = list(output.prompt_logprobs or ())
        if shown:
            scores += answer.logprobs or ()
            self.num_tokens += len(answer.token_ids)
        first = int(generation.request.prompt.ids[0])
        return {
            "text": text,
            "logprobs": self._logprobs(base + index, scores, first_token=first),
            "finish_reason": FINISH_REASONS[answer.finish_reason],
        }

    def _prompt_text(self, generation: Generation) -> str:
        return self.service.tokenizer.decode(generation.request.prompt.ids)

    def _logprobs(
        self, index: int, found: Sequence[TokenLogprob | None], *, first_token: int = 0
    ) -> dict[str, Any] | None:
        """Scores of tokens; only the first of a prompt has none."""
        if self.request.logprobs is None:
            return None
        text = self.service.tokenizer.token_text
        told: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for one in found:
            piece = text(first_token if one is None else one.token_id)
            place = self._text_offsets.get(index, 0)
            self._text_offsets[index] = place + len(piece)
            told["tokens"].append(piece)
            told["text_offset"].append(place)
            if one is None:
                told["token_logprobs"].append(None)
                told["top_logprobs"].append(None)
            else:
                told["token_logprobs"].append(max(one.logprob, -9999.0))
                top = {text(token): value for token, value in one.top.items()}
                told["top_logprobs"].append(top)
        return told
