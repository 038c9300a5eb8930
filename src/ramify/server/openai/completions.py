"""Translate completion requests (no chat template) to generation requests, and build their responses."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ramify.counts import counted
from ramify.errors import PromptTooLongError
from ramify.outputs import RequestOutput
from ramify.server.errors import ApiError
from ramify.server.generation import Generation, GenerationRequest, total_usage
from ramify.server.history.stored_requests import HistoryEntry, fingerprint
from ramify.server.http.request_body import convert_value
from ramify.server.openai.answer_formats import answer_format
from ramify.server.openai.chat_response import (
    FINISH_REASONS,
    response_header,
    usage_json,
)
from ramify.server.openai.completion_logprobs import CompletionLogprobs
from ramify.server.openai.options import (
    cache_options,
    compared_options,
    output_limit,
    sampling_params,
    truncated_len,
)
from ramify.server.openai.protocol import CompletionRequest, StreamOptions
from ramify.server.prompts.jobs import stop_if_abandoned
from ramify.server.prompts.renderer import RenderedPrompt
from ramify.server.service import RequestService

MAX_COMPLETION_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's


def completion_to_generations(
    request: CompletionRequest, service: RequestService
) -> list[GenerationRequest]:
    """Translate a completion request: one generation request for each prompt.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    if request.suffix:
        raise ApiError(400, "suffix is not served; leave it out", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of other than n is not served", param="best_of")
    if request.max_tokens == 0 and not (request.echo or request.is_prewarm):
        raise ApiError(400, "max_tokens is 0, which needs echo: true", param="max_tokens")
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.is_prewarm or limit == 0:
        limit = 1
    num_logprobs = num_top_logprobs(request)
    of_prompt = [request.prompt_logprobs, num_logprobs if request.echo else None]
    warnings: list[str] = []
    structured, format_path = answer_format(request, warnings)
    params = sampling_params(
        request,
        service.tokenizer,
        service.sampling_defaults,
        structured=structured,
        max_tokens=output_limit("max_tokens", limit),
        logprobs=num_logprobs,
        prompt_logprobs=max((num for num in of_prompt if num is not None), default=None),
    )
    prompts = _prompts(request.prompt)
    if len(prompts) * params.n > MAX_COMPLETION_PROMPTS:
        raise ApiError(
            400,
            f"{counted(len(prompts), 'prompt')} with {counted(params.n, 'answer')} each; the limit is "
            f"{MAX_COMPLETION_PROMPTS} answers; send several requests",
            param="n",
        )
    max_ids = truncated_len(request, service)
    if max_ids is not None:
        prompts = [prompt if isinstance(prompt, str) else prompt[-max_ids:] for prompt in prompts]
    check_prompts(prompts, service)
    cache, generation_requests = cache_options(request), []
    for text_or_ids, param in zip(
        prompts, prompt_paths(request.prompt, prompts, "prompt"), strict=True
    ):
        stop_if_abandoned()
        special = request.add_special_tokens is not False
        ids = prompt_ids(text_or_ids, param, service, add_special_tokens=special)
        if request.truncate_prompt_tokens is None and len(ids) > service.max_model_len:
            # the prompts after it need not be tokenised
            raise PromptTooLongError(len(ids), service.max_model_len)
        prompt = RenderedPrompt(ids, num_stable_tokens=len(ids))
        if max_ids is not None:
            prompt = prompt.last_tokens(max_ids)
        prompt = cache.with_breakpoints(prompt)
        entry = HistoryEntry(
            model=model,
            options=compared_options(request),
            messages=(fingerprint(text_or_ids),),
            prompt=prompt,
            paths=("prompt",),
            max_shared=cache.max_shared(prompt),
        )
        generation_requests.append(
            GenerationRequest(
                history_entry=entry,
                params=params,
                salt=cache.salt,
                session=cache.session,
                ends_session=cache.ends_session,
                priority=request.priority or 0,
                format_path=format_path,
                is_prewarm=request.is_prewarm,
                warnings=tuple(warnings),
            )
        )
    return generation_requests


def num_top_logprobs(request: CompletionRequest) -> int | None:
    """Number of logprobs of each token, beside its own; None if it has none."""
    return None if request.logprobs is False else request.logprobs


def encode_text(text: str, service: RequestService, *, add_special_tokens: bool) -> array[int]:
    """Tokenise a plain prompt.

    Raises:
        ApiError, RequestError: it is longer than any context, or not valid Unicode.
    """
    service.check_prompt_bytes(len(text), "prompt")
    service.check_prompt_bytes(len(text.encode("utf-8", "replace")), "prompt")
    return service.tokenizer.encode(text, add_special_tokens)


def read_token_ids(value: Sequence[object], param: str) -> array[int]:
    """The token ids of a prompt.

    Args:
        param: path of the prompt in the request.

    Raises:
        ApiError: 400, an item is no 31-bit number; `param` leads to the item.
    """
    token_ids = convert_value(value, list[int], param)
    for index, token in enumerate(token_ids):
        if not 0 <= token < 2**31:
            message = f"{token} is no token id: it must be in 0..{2**31 - 1}"
            raise ApiError(400, message, param=f"{param}[{index}]")
    return array("i", token_ids)


def prompt_ids(
    text_or_ids: str | Sequence[object],
    param: str,
    service: RequestService,
    *,
    add_special_tokens: bool,
) -> array[int]:
    """The token ids of a prompt that is a text or a list of token ids.

    Raises:
        ApiError, RequestError: as `encode_text` and `read_token_ids`.
    """
    if isinstance(text_or_ids, str):
        return encode_text(text_or_ids, service, add_special_tokens=add_special_tokens)
    return read_token_ids(text_or_ids, param)


def prompt_paths(value: object, prompts: Sequence[object], field: str) -> list[str]:
    """The path of each prompt in a field that is a prompt or a list of prompts."""
    is_list = isinstance(value, list) and len(value) > 0 and not isinstance(value[0], int)
    return [f"{field}[{index}]" if is_list else field for index in range(len(prompts))]


def check_prompts(prompts: Sequence[Any], service: RequestService) -> None:
    """Refuse prompts of which one exceeds the context, or which together exceed the queue.

    A text counts as the fewest tokens that its characters could be.
    """
    bytes_per_token = service.max_prompt_bytes // service.max_model_len
    num_tokens = 0
    for prompt in prompts:
        if isinstance(prompt, str):
            service.check_prompt_bytes(len(prompt), "prompt")
            num_tokens += len(prompt) // bytes_per_token
        elif len(prompt) > service.max_model_len:
            raise PromptTooLongError(len(prompt), service.max_model_len)
        else:
            num_tokens += len(prompt)
    if num_tokens > service.max_queued_tokens:
        raise ApiError(
            400,
            f"{counted(len(prompts), 'prompt')} with at least {num_tokens} tokens; at most "
            f"{service.max_queued_tokens} tokens may wait here. Send several requests",
            param="prompt",
        )


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a completion request: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "there is no prompt", param="prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ApiError(400, "prompts must be all texts or all lists of token ids", param="prompt")
    if kinds == {int}:
        return [prompt]
    if not all(prompt):
        raise ApiError(400, "a prompt is empty", param="prompt")
    if len(prompt) > MAX_COMPLETION_PROMPTS:
        raise ApiError(
            400,
            f"{len(prompt)} prompts, the limit is {MAX_COMPLETION_PROMPTS}; send several requests",
            param="prompt",
        )
    return prompt


class CompletionResponseBuilder:
    """Builds the response to a completion request from its generations, one for each prompt.

    Choice `index` is answer `index % n` to prompt `index // n`.
    """

    def __init__(
        self, service: RequestService, request: CompletionRequest, generations: Sequence[Generation]
    ) -> None:
        self.service, self.request, self.generations = service, request, generations
        self.is_prewarm = generations[0].request.is_prewarm
        self.num_tokens = 0
        self.num_logprobs = num_top_logprobs(request)
        self._logprobs: dict[int, CompletionLogprobs] = {}  # of each choice

    def _base(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        header = response_header(self.generations[0], "text_completion")
        return header | {"choices": [] if self.is_prewarm else choices}

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(generation.request.prompt.ids) for generation in self.generations)
        return usage_json(total_usage(self.generations), num_prompt, self.num_tokens)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield `text_completion` chunks, prompt after prompt."""
        options = self.request.stream_options or StreamOptions()
        async for index, choice in self._choices():
            payload = self._base([choice | {"index": index}])
            if options.include_usage:
                payload["usage"] = self._usage() if options.continuous_usage_stats else None
            yield payload
        if options.include_usage:
            yield self._base([]) | {"usage": self._usage()}

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the `text_completion`."""
        choices: dict[int, dict[str, Any]] = {}
        async for index, piece in self._choices():
            choice = choices.setdefault(
                index, piece | {"index": index, "text": "", "logprobs": None}
            )
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                earlier = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                choice["logprobs"] = {
                    name: earlier[name] + values for name, values in piece["logprobs"].items()
                }
        for choice in choices.values():
            if choice["logprobs"] is not None:
                # Tokens behind a stop string, which is cut off.
                offsets, end = choice["logprobs"]["text_offset"], len(choice["text"])
                choice["logprobs"]["text_offset"] = [min(offset, end) for offset in offsets]
        return self._base([choices[index] for index in sorted(choices)]) | {"usage": self._usage()}

    async def _choices(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Yield the index of a choice with its new text, prompt after prompt."""
        per_prompt, shows_answer = self.request.n or 1, self.request.max_tokens != 0
        for number, generation in enumerate(self.generations):
            first_index = number * per_prompt
            if self.is_prewarm:
                await generation.wait()
                continue
            if self.request.echo and self.num_logprobs is not None:
                # The prompt's logprobs arrive with the last event and come first in the response.
                output = await generation.wait()
                for index in range(per_prompt):
                    yield first_index + index, self._echoed(output, index, first_index + index)
                continue
            begun: set[int] = set()
            async for event in generation:
                index = first_index + event.index
                text = event.text if shows_answer else ""
                if self.request.echo and event.index not in begun:
                    text = self.service.tokenizer.decode(generation.request.prompt.ids) + text
                begun.add(event.index)
                finish = None
                if event.finish_reason is not None:
                    generation.raise_error(event.index)
                    finish = FINISH_REASONS[event.finish_reason]
                self.num_tokens += len(event.new_token_ids) * shows_answer
                of_choice = self._logprobs_of(index)
                logprobs = None if of_choice is None else of_choice.add(event.logprobs)
                yield index, {"text": text, "logprobs": logprobs, "finish_reason": finish}

    def _echoed(self, output: RequestOutput, number: int, index: int) -> dict[str, Any]:
        """A prompt with its whole answer of this number, and the logprobs of both."""
        answer = output.completions[number]
        text = self.service.tokenizer.decode(output.prompt_token_ids)
        of_choice = self._logprobs_of(index)
        assert of_choice is not None, "only called with logprobs"
        first_token = output.prompt_token_ids[0]
        logprobs = of_choice.add_prompt(first_token, output.prompt_logprobs or (), text)
        if self.request.max_tokens != 0:
            text += answer.text
            of_answer = of_choice.add(answer.logprobs or ())
            logprobs = {name: values + of_answer[name] for name, values in logprobs.items()}
            self.num_tokens += len(answer.token_ids)
        return {
            "text": text,
            "logprobs": logprobs,
            "finish_reason": FINISH_REASONS[answer.finish_reason],
        }

    def _logprobs_of(self, index: int) -> CompletionLogprobs | None:
        """Those of a choice; None unless the request asks for them."""
        if self.num_logprobs is None:
            return None
        if index not in self._logprobs:
            self._logprobs[index] = CompletionLogprobs(
                self.request, self.service.tokenizer, self.num_logprobs
            )
        return self._logprobs[index]
