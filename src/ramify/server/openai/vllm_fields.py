"""Response fields that vLLM adds to OpenAI's: token ids, logprobs of the prompt, the echo of a chat."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ramify.engine.text.tokenizer import Tokenizer
from ramify.outputs import StepOutput, TokenLogprob
from ramify.server.context import ResponseBuilder
from ramify.server.generation import Generation
from ramify.server.openai.chat_response import MIN_LOGPROB
from ramify.server.openai.messages import read_message
from ramify.server.openai.protocol import ChatRequest, CompletionRequest


def with_vllm_fields(
    builder: ResponseBuilder,
    request: ChatRequest | CompletionRequest,
    generations: Sequence[Generation],
    tokenizer: Tokenizer,
) -> ResponseBuilder:
    """A builder whose responses have the fields that a request asks for; the same one if none."""
    echoed = echoed_text(request) if isinstance(request, ChatRequest) else ""
    if not (request.return_token_ids or request.prompt_logprobs is not None or echoed):
        return builder
    return VllmFieldsBuilder(builder, request, generations, tokenizer, echoed)


def echoed_text(request: ChatRequest) -> str:
    """The text of the last message, if it is the beginning of the answer and `echo` is set."""
    last = request.messages[-1]
    if not (request.echo and last.role == "assistant"):
        return ""
    return read_message(last, "", ttl_s=0.0).text


class VllmFieldsBuilder:
    """Adds `token_ids`, `prompt_token_ids`, `prompt_logprobs` and an echo to another's responses.

    Those of the prompt are fields of the response in a chat, and of each choice in a completion.

    Args:
        generations: one for each prompt; choice `index` is answer `index % n` of generation
            `index // n`.
        echoed: text that each answer begins with.
    """

    def __init__(
        self,
        builder: ResponseBuilder,
        request: ChatRequest | CompletionRequest,
        generations: Sequence[Generation],
        tokenizer: Tokenizer,
        echoed: str,
    ) -> None:
        self.builder, self.request, self.generations = builder, request, generations
        self.tokenizer, self.echoed = tokenizer, echoed
        self.is_chat, self.num_answers = isinstance(request, ChatRequest), request.n or 1
        self.shows_answer = self.is_chat or request.max_tokens != 0
        self._new_ids: dict[int, list[int]] = {}  # choice -> tokens that no chunk has had
        self._begun: set[int] = set()  # choices, or -1 for the response
        for number, generation in enumerate(generations):
            self._collect(generation, number * self.num_answers)

    def _collect(self, generation: Generation, first_choice: int) -> None:
        """Collect the tokens of a generation's answers as they come."""

        def add(_: Generation, event: StepOutput) -> None:
            choice = first_choice + event.index
            self._new_ids.setdefault(choice, []).extend(event.new_token_ids)

        if generation.first_output is not None:
            add(generation, generation.first_output)
        generation.on_event = [*generation.on_event, add]

    async def body(self) -> dict[str, Any]:
        """The whole response with the fields added."""
        payload = await self.builder.body()
        for choice in payload["choices"]:
            self._add_prompt(payload, choice)
            self._add_answer(choice)
            if self.echoed:
                message = choice["message"]
                message["content"] = self.echoed + (message["content"] or "")
        return payload

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks with the fields added: those of the prompt in the first, tokens as they come."""
        async for payload in self.builder.events():
            for choice in payload.get("choices", ()):
                is_first = choice["index"] not in self._begun
                self._begun.add(choice["index"])
                if is_first and (not self.is_chat or len(self._begun) == 1):
                    self._add_prompt(payload, choice)
                self._add_answer(choice)
                if is_first and self.echoed:
                    delta = choice["delta"]
                    delta["content"] = self.echoed + (delta.get("content") or "")
            yield payload

    def _add_answer(self, choice: dict[str, Any]) -> None:
        if self.request.return_token_ids:
            token_ids = self._new_ids.pop(choice["index"], [])
            choice["token_ids"] = token_ids if self.shows_answer else []

    def _add_prompt(self, payload: dict[str, Any], choice: dict[str, Any]) -> None:
        generation = self.generations[choice["index"] // self.num_answers]
        target = payload if self.is_chat else choice
        if self.request.return_token_ids:
            target["prompt_token_ids"] = generation.request.prompt.ids.tolist()
        if self.request.prompt_logprobs is not None and generation.output is not None:
            logprobs = generation.output.prompt_logprobs or ()
            target["prompt_logprobs"] = [self._entries(logprob) for logprob in logprobs]

    def _entries(self, logprob: TokenLogprob | None) -> dict[str, Any] | None:
        """The logprob of a prompt token and of the likeliest at its place, by token id."""
        if logprob is None:  # the first token has none
            return None
        top = list(logprob.top.items())
        ranks = {token: rank for rank, (token, _) in enumerate(top, 1)}
        values = {logprob.token_id: logprob.logprob} | dict(top[: self.request.prompt_logprobs])
        return {
            str(token): {
                "logprob": max(value, MIN_LOGPROB),
                "rank": ranks.get(token),  # None: not among the likeliest
                "decoded_token": self.tokenizer.token_text(token),
            }
            for token, value in values.items()
        }
