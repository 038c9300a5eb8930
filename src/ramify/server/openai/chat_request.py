"""OpenAI's requests in the engine's words."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ramify.params import SamplingParams, StructuredOutput
from ramify.server.errors import ApiError
from ramify.server.http.wire import convert_value, encode_json
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    NamedTool,
    PromptCacheOptions,
    Sampling,
    Tool,
)
from ramify.server.prompt_renderer import (
    KnownPrefix,
    PromptPart,
    RenderedPrompt,
    json_variants,
    text_variants,
)
from ramify.server.request_history import HistoryEntry, canonical_json
from ramify.server.service import GenerationRequest, Service
from ramify.server.tool_calls import detect_format, stop_after_call, tool_call_schema

TTL_S = {"30m": 1800.0, "1h": 3600.0, "12h": 12 * 3600.0, "24h": 24 * 3600.0}
MAX_BREAKPOINTS = 4  # written by one request, the implicit one included
MAX_COMPLETION_PROMPTS = 128
# What a template is given in any case, and our own words on the way there.
TEMPLATE_NAMES = frozenset(
    "self messages parts tools continue_final_message add_generation_prompt known tenant".split()
)
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI's


def sampling_params(request: Sampling, *, max_tokens: int | None, **others: Any) -> SamplingParams:
    """How the tokens of a request are chosen.

    Raises:
        ApiError, InvalidParamsError: a value cannot work.
    """
    bias: dict[int, float] = {}
    if request.logit_bias:
        try:
            bias = {int(token): value for token, value in request.logit_bias.items()}
        except ValueError as error:
            raise ApiError(400, "the keys must be token ids", param="logit_bias") from error
    top_p = 1.0 if request.top_p is None else request.top_p
    return SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k if request.top_k is not None and request.top_k > 0 else None,
        top_p=max(top_p, 1e-9),  # OpenAI allows 0: the likeliest token alone
        min_p=request.min_p or 0.0,
        n=request.n or 1,
        seed=None if request.seed is None else request.seed % 2**63,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop=[request.stop] if isinstance(request.stop, str) else request.stop or (),
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=request.ignore_eos,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=request.repetition_penalty or 1.0,
        logit_bias=bias,
        **{"structured": structured_output(request), **others},
    )


def structured_output(request: Sampling) -> StructuredOutput | None:
    """The form that an answer must have, if any was asked for."""
    found: list[StructuredOutput] = []
    form = request.response_format
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "json_schema is missing", param="response_format.json_schema")
        found.append(StructuredOutput(json_schema=form.json_schema.schema))
    elif form is not None and form.type == "json_object":
        found.append(StructuredOutput(json_object=True))
    if request.regex is not None:
        found.append(StructuredOutput(regex=request.regex))
    if request.grammar is not None:
        found.append(StructuredOutput(grammar=request.grammar))
    if request.choice is not None:
        found.append(StructuredOutput(choice=tuple(request.choice)))
    if len(found) > 1:
        raise ApiError(
            400,
            f"{len(found)} forms of the answer were asked for; one of response_format, regex, "
            "grammar and choice is possible",
            param="response_format",
        )
    return found[0] if found else None


def chat_to_generation(
    request: ChatRequest,
    service: Service,
    tenant: str = "",
    *,
    known: Sequence[KnownPrefix] = (),
    names: Sequence[str] = (),
    add_generation_prompt: bool = True,
) -> GenerationRequest:
    """A chat request as a job.

    See `PromptRenderer.chat` for `known` and `add_generation_prompt`.

    Args:
        tenant: what it asked before makes this faster, what others asked does not.
        names: of the messages, for errors and segments; by default `messages[i]`.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    reject_unsupported(request)
    told = (request.messages, request.tools, request.chat_template_kwargs)
    service.check_prompt_bytes(num_json_bytes(*told), "messages")
    names = names or [f"messages[{at}]" for at in range(len(request.messages))]
    messages = [
        _template_message(one, name) for one, name in zip(request.messages, names, strict=True)
    ]
    options: dict[str, Any] = dict(request.chat_template_kwargs or {})
    taken = sorted(TEMPLATE_NAMES & options.keys())
    if taken:
        raise ApiError(400, f"{taken[0]!r} is not for this", param="chat_template_kwargs")
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
    tools = None
    if request.tools and request.tool_choice != "none":
        tools = [msgspec.to_builtins(tool) for tool in request.tools]
        tools = [_without_none(tool) for tool in tools]
    prompt = service.prompt_renderer.chat(
        messages,
        [
            *tool_parts(tools or []),
            *message_parts(request.messages, names, breakpoint_ttl_s(request)),
        ],
        tools=tools,
        continue_final_message=request.continue_final_message,
        add_generation_prompt=add_generation_prompt,
        known=known,
        tenant=tenant,
        **options,
    )
    prompt = limit_breakpoints(prompt, request)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    others: dict[str, Any] = {}
    if request.logprobs:
        others["logprobs"] = request.top_logprobs or 0
    if request.tool_choice not in (None, "auto", "none"):
        if not tools:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        others["structured"] = tool_call_schema(
            tools, chosen_tool(request.tool_choice, request.tools)
        )
    limit = request.max_completion_tokens or request.max_tokens
    params = sampling_params(request, max_tokens=1 if is_prewarm(request) else limit, **others)
    if tools and request.parallel_tool_calls is False and "structured" not in others:
        params = stop_after_call(params, detect_format(service.chat_template))
    record = HistoryEntry(
        model=model,
        options=compared_options(request),
        tools=tuple(canonical_json(tool) for tool in tools or ()),
        system="",
        messages=tuple(canonical_json(one) for one in messages),
        prompt=prompt,
        paths=tuple(names),
        max_shared=max_shared_tokens(prompt, request.prompt_cache_options),
    )
    return GenerationRequest(
        prompt=prompt,
        params=params,
        history_entry=record,
        salt=cache_salt(request),
        priority=request.priority,
        is_prewarm=is_prewarm(request),
        max_shared=record.max_shared,
        is_chat=True,
    )


def reject_unsupported(request: ChatRequest) -> None:
    """Raise ApiError for what would change the answer and is not served."""
    for name in ("functions", "function_call", "audio", "web_search_options"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not served; leave it out, or send tools", param=name)
    if request.modalities not in (None, [], ["text"]):
        raise ApiError(400, "only text is served", param="modalities")


def completion_to_generations(
    request: CompletionRequest, service: Service
) -> list[GenerationRequest]:
    """A completion request as one job per prompt.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    if request.suffix:
        raise ApiError(400, "suffix is not served; leave it out", param="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise ApiError(400, "best_of other than n is not served", param="best_of")
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if is_prewarm(request):
        limit = 1
    others: dict[str, Any] = {}
    if request.logprobs is not None:
        others["logprobs"] = request.logprobs
        if request.echo:
            others["prompt_logprobs"] = request.logprobs
    if limit == 0 and not request.echo:
        raise ApiError(400, "max_tokens is 0, which needs echo: true", param="max_tokens")
    params = sampling_params(request, max_tokens=max(1, limit), **others)
    jobs = []
    prompts = _prompts(request.prompt)
    if len(prompts) * params.n > MAX_COMPLETION_PROMPTS:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {params.n} answers each; the limit is "
            f"{MAX_COMPLETION_PROMPTS} answers; send several requests",
            param="n",
        )
    for text in prompts:
        if isinstance(text, str):
            ids = encode_text(text, service, add_special_tokens=request.add_special_tokens)
        else:
            ids = _token_ids(text)
        prompt = limit_breakpoints(RenderedPrompt(ids, num_stable_tokens=len(ids)), request)
        kept = max_shared_tokens(prompt, request.prompt_cache_options)
        options = compared_options(request)
        told = (canonical_json(text),)
        record = HistoryEntry(
            model, options, (), "", told, prompt, paths=("prompt",), max_shared=kept
        )
        jobs.append(
            GenerationRequest(
                prompt=prompt,
                params=params,
                history_entry=record,
                salt=cache_salt(request),
                priority=request.priority,
                is_prewarm=is_prewarm(request),
                max_shared=kept,
            )
        )
    return jobs


def encode_text(text: str, service: Service, *, add_special_tokens: bool) -> array[int]:
    """The tokens of a plain prompt.

    Raises:
        ApiError, RequestError: it is too long, or no Unicode.
    """
    service.check_prompt_bytes(len(text), "prompt")
    service.check_prompt_bytes(len(text.encode("utf-8", "replace")), "prompt")
    return service.tokenizer.encode(text, add_special_tokens)


def num_json_bytes(*values: object) -> int:
    """About how much text is in decoded values."""
    return len(encode_json(values))


def _token_ids(ids: Sequence[object]) -> array[int]:
    given = convert_value(ids, list[int])
    wrong = next((one for one in given if not 0 <= one < 2**31), None)
    if wrong is not None:
        raise ApiError(400, f"{wrong} is no token id", param="prompt")
    return array("i", given)


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a completion request: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "there is no prompt", param="prompt")
    kinds = {type(one) for one in prompt}
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


# -- conversations -------------------------------------------------------------------------------


def content_text(content: str | list[ContentPart] | None, where: str) -> str:
    """The text of a message."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part_text(part: ContentPart, where: str) -> str:
    text = part.text if part.type in ("text", "input_text", "output_text") else part.refusal
    if text is None:
        raise ApiError(
            400,
            f"content of type {part.type!r} is not served by this model; send text",
            param=f"{where}.type",
        )
    return text


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as chat templates expect it."""
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {
        "role": "tool" if role == "function" else role,
        "content": content_text(message.content, content_path(where)),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            told[name] = value
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, f"{where}.tool_calls"),
                },
            }
            for call in message.tool_calls
        ]
    return told


def _arguments(text: str, where: str) -> object:
    """Arguments of a call: templates want the object, not its text."""
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise ApiError(400, f"arguments are no JSON: {error}", param=where) from error


def content_path(message: str) -> str:
    """The path of a message's content; some parts of a request are all of a message."""
    return f"{message}.content" if message.endswith("]") else message


def message_parts(
    messages: Sequence[ChatMessage], names: Sequence[str], ttl_s: float | None
) -> list[PromptPart]:
    """What to look for in the rendered text, message by message and block by block."""
    parts = []
    for message, name in zip(messages, names, strict=True):
        where = content_path(name)
        if isinstance(message.content, list):
            for place, part in enumerate(message.content):
                mark = part.prompt_cache_breakpoint
                own = None if mark is None or mark.ttl is None else TTL_S[mark.ttl]
                text = _part_text(part, f"{where}[{place}]")
                forms = text_variants(text)
                parts.append(PromptPart(f"{where}[{place}]", forms, own or ttl_s, mark is not None))
        elif message.content:
            parts.append(PromptPart(where, text_variants(message.content)))
        for place, call in enumerate(message.tool_calls or ()):
            forms = (call.function.name,)
            parts.append(PromptPart(f"{name}.tool_calls[{place}]", forms))
    return parts


def tool_parts(tools: Sequence[Mapping[str, Any]]) -> list[PromptPart]:
    """Tools as they stand in a rendered text."""
    return [
        PromptPart(f"tools[{at}]", (*json_variants(tool), *json_variants(tool["function"])))
        for at, tool in enumerate(tools)
    ]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(one) for name, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value


def chosen_tool(choice: object, tools: Sequence[Tool] | None) -> str | None:
    """The name of the tool that must be called; None if it may be any.

    Raises:
        ApiError: no such tool was given.
    """
    if not isinstance(choice, NamedTool):
        return None
    names = [tool.function.name for tool in tools or ()]
    if choice.function.name not in names:
        raise ApiError(
            400,
            f"the tool {choice.function.name!r} is not among the tools given: {names}",
            param="tool_choice",
        )
    return choice.function.name


# -- the cache's part ----------------------------------------------------------------------------


def is_prewarm(request: Sampling) -> bool:
    """Whether the prompt is only to be computed and kept."""
    return request.prompt_cache_options is not None and bool(request.prompt_cache_options.prewarm)


def breakpoint_ttl_s(request: Sampling) -> float:
    """Seconds for which the breakpoints of a request are kept."""
    options = request.prompt_cache_options
    if options is not None and options.ttl is not None:
        return TTL_S[options.ttl]
    return TTL_S["24h" if request.prompt_cache_retention == "24h" else "30m"]


def cache_salt(request: Sampling) -> str:
    """What separates prefixes inside a tenant. `prompt_cache_key` groups requests for routing, and
    one server needs no routing: it separates nothing."""  # noqa: D205, D209
    return request.cache_salt or ""


def compared_options(request: Sampling) -> dict[str, str]:
    """What else a later request is compared by."""
    told = {"prompt_cache_key": request.prompt_cache_key or "", "cache_salt": cache_salt(request)}
    if isinstance(request, ChatRequest):
        told["text_format"] = canonical_json(msgspec.to_builtins(request.response_format))
        told["reasoning_effort"] = request.reasoning_effort or ""
        told["verbosity"] = request.verbosity or ""
        told["service_tier"] = request.service_tier or ""
        told["chat_template_kwargs"] = canonical_json(request.chat_template_kwargs or {})
    return told


def limit_breakpoints(prompt: RenderedPrompt, request: Sampling) -> RenderedPrompt:
    """The breakpoints that count: the latest four, of which the implicit one is the prompt's end.

    The implicit one is in the cache anyway; it is kept from eviction if a lifetime was asked for.
    """
    options = request.prompt_cache_options or PromptCacheOptions()
    if options.mode == "explicit":
        return replace(prompt, breakpoints=prompt.breakpoints[-MAX_BREAKPOINTS:])
    prompt = replace(prompt, breakpoints=prompt.breakpoints[-(MAX_BREAKPOINTS - 1) :])
    if options.ttl is None and not options.prewarm and request.prompt_cache_retention != "24h":
        return prompt
    return prompt.with_breakpoint("prompt", breakpoint_ttl_s(request))


def max_shared_tokens(prompt: RenderedPrompt, options: PromptCacheOptions | None) -> int | None:
    """How much of a prompt may be kept for others; None is without limit."""
    if options is not None and options.mode == "explicit":
        return max((one.num_tokens for one in prompt.breakpoints), default=0)
    if prompt.num_stable_tokens < len(prompt.ids):  # what the next turn will not begin with
        return prompt.num_stable_tokens
    return None
