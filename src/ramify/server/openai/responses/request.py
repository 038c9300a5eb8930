"""Read requests of the Responses API: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ramify.server.conversation.conversation import Conversation, ToolDefinition
from ramify.server.conversation.to_generation import to_generation
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.history.request_history import fingerprint
from ramify.server.http.wire import encode_json
from ramify.server.openai.answer_formats import answer_format
from ramify.server.openai.messages import call_choice, function_fields, read_message
from ramify.server.openai.options import (
    breakpoint_ttl_s,
    cache_options,
    compared_options,
    sampling_params,
)
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    NamedTool,
    Sampling,
    is_given,
)
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import (
    PromptFields,
    ResponsesRequest,
)
from ramify.server.openai.responses.store import EarlierTurns, Item, reference_id
from ramify.server.openai.responses.tools import ServedTools, apply_tool_choice, served_tools
from ramify.server.openai.responses.truncation import num_prompt_tokens, render_truncated
from ramify.server.request_fields.reasoning_options import ReasoningOptions, implied_switch
from ramify.server.service import Service


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A Responses request, ready for the engine.

    `items` are those of the request, without the turns before; `tools` says how calls are returned;
    `chat` has the options of the response that chat completions have too.
    """

    chat: ChatRequest
    generation_request: GenerationRequest
    items: list[Item]
    earlier: EarlierTurns
    tools: ServedTools


def new_items(request: PromptFields, earlier: EarlierTurns) -> list[Item]:
    """The items of the input; references are replaced by the stored items.

    Raises:
        ApiError: 404, an item is not stored.
    """
    if request.input is None:
        return []
    if isinstance(request.input, str):
        return [{"type": "message", "role": "user", "content": request.input}]
    referenced = earlier.referenced_items()
    items = []
    for index, item in enumerate(request.input):
        name = reference_id(item)
        stored = item if name is None else referenced.get(name)
        if stored is None:
            raise ApiError(
                404,
                f"there is no item {str(name)[:100]!r}; it has expired or was never stored",
                param=f"input[{index}].id",
            )
        items.append(stored)
    return items


@dataclass(frozen=True, slots=True)
class _Input:
    """Items and tools of a request: messages with their request fields, functions, what may be called."""

    messages: list[ChatMessage]
    names: list[str]
    tools: ServedTools
    choice: str | NamedTool | None
    warnings: list[str]


def _read_input(request: ResponsesRequest, items: Sequence[Item], earlier: EarlierTurns) -> _Input:
    """Read items and tools.

    Raises:
        ApiError: one is malformed or not served.
    """
    translator = ItemTranslator()
    if request.instructions:
        translator.append_message(ChatMessage("system", request.instructions), "instructions")
    for index, item in enumerate(earlier.items()):
        translator.append(item, f"{earlier.name}[{index}]")
    for index, item in enumerate(items):
        is_text = isinstance(request.input, str)
        translator.append(item, "input" if is_text else f"input[{index}]")
    messages, names = translator.finish()
    if not messages:
        raise ApiError(400, "there is nothing to answer", param="input")
    tools = served_tools([("tools", request.tools or []), *translator.tools])
    choice, tools = apply_tool_choice(request.tool_choice, tools)
    return _Input(messages, names, tools, choice, translator.warnings + tools.warnings)


def _sampling(request: ResponsesRequest) -> Sampling:
    """The options that the request shares with completion requests."""
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        response_format=None if request.text is None else request.text.format,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
        cache_salt=request.cache_salt,
    )


def _read_options(
    request: ResponsesRequest, sampling: Sampling, input_: _Input, service: Service
) -> Conversation:
    """A conversation without its messages: tools and options.

    Raises:
        ApiError, RequestError: an option is not served.
    """
    tools, warnings = input_.tools, list[str]()
    definitions = tuple(
        ToolDefinition.of(tools.paths[tool.function.name], function_fields(tool.function))
        for tool in tools.functions
    )
    effort = None if request.reasoning is None else request.reasoning.effort
    reasoning = ReasoningOptions(implied_switch(effort, None), effort)
    return Conversation(
        model=service.check_model(request.model),
        messages=(),
        tools=definitions,
        allowed_tools=frozenset() if input_.choice == "none" else tools.allowed,
        choice=call_choice(input_.choice, definitions, request.parallel_tool_calls),
        answer_format=answer_format(sampling, warnings, "text.format"),
        reasoning=reasoning,
        sampling=sampling_params(
            sampling,
            service.tokenizer,
            service.sampling_defaults,
            max_tokens=1 if sampling.is_prewarm else request.max_output_tokens,
            logprobs=(request.top_logprobs or 0) if _shows_logprobs(request) else None,
            prompt_logprobs=None,
        ),
        cache=cache_options(sampling),
        compared=compared_options(
            sampling,
            effort=effort,
            verbosity=None if request.text is None else request.text.verbosity,
            service_tier=request.service_tier,
        )
        | {"thinking": fingerprint(reasoning)},
        is_prewarm=sampling.is_prewarm,
        is_streamed=bool(request.stream),
        is_remembered=request.store is not False,
        warnings=tuple(warnings),
    )


def _shows_logprobs(request: ResponsesRequest) -> bool:
    is_included = "message.output_text.logprobs" in (request.include or ())
    return is_included or request.top_logprobs is not None


def response_to_generation(
    request: ResponsesRequest, earlier: EarlierTurns, service: Service, tenant: str = ""
) -> TranslatedRequest:
    """Translate for the engine.

    The prompt keeps the token ids of the turns before, as they were computed and generated.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    items = new_items(request, earlier)
    for name in ("background", "prompt"):
        if is_given(getattr(request, name)):
            raise ApiError(400, f"{name} is not served; leave it out", param=name)
    input_ = _read_input(request, items, earlier)
    sampling = _sampling(request)
    options = _read_options(request, sampling, input_, service)
    ttl_s = breakpoint_ttl_s(sampling)

    def render(messages: Sequence[ChatMessage], names: Sequence[str]) -> GenerationRequest:
        texts = (messages, input_.tools.functions or None, None, None)
        service.check_prompt_bytes(len(encode_json(texts)), "messages")
        read = tuple(map(partial(read_message, ttl_s=ttl_s), messages, names))
        return to_generation(replace(options, messages=read, known=earlier.known), service, tenant)

    warnings = input_.warnings
    if request.context_management:
        warnings.append("context_management is ignored; use /v1/responses/compact")
    if request.truncation == "auto":
        max_tokens = num_prompt_tokens(service.max_model_len, request.max_output_tokens)
        generation_request, num_dropped = render_truncated(
            input_.messages,
            input_.names,
            render,
            max_tokens=max_tokens,
            max_bytes=service.max_prompt_bytes,
        )
        if num_dropped:
            warnings.append(f"truncation: the oldest {num_dropped} messages are left out")
    else:
        generation_request = render(input_.messages, input_.names)
    warnings += generation_request.warnings
    generation_request = replace(generation_request, warnings=tuple(warnings))
    chat = ChatRequest(
        messages=input_.messages,
        logprobs=_shows_logprobs(request) or None,
        prompt_cache_options=request.prompt_cache_options,
    )
    return TranslatedRequest(chat, generation_request, items, earlier, input_.tools)
