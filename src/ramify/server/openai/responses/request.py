"""Translate requests of the Responses API to generation requests, by way of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    is_given,
)
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import (
    PromptFields,
    ResponsesRequest,
    TextOptions,
)
from ramify.server.openai.responses.store import EarlierTurns, Item, reference_id
from ramify.server.openai.responses.tools import ServedTools, apply_tool_choice, served_tools
from ramify.server.openai.responses.truncation import num_prompt_tokens, render_truncated
from ramify.server.service import Service


@dataclass(frozen=True, slots=True)
class TranslatedRequest:
    """A Responses request, ready for the engine.

    `items` are those of the request, without the turns before; `tools` says how calls are returned.
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


def to_chat_request(
    request: ResponsesRequest, items: Sequence[Item], earlier: EarlierTurns
) -> tuple[ChatRequest, list[str], ServedTools, list[str]]:
    """Translate to a chat completion request.

    Returns:
        the chat request, the request fields of its messages, its tools, and warnings.

    Raises:
        ApiError: it has an option that is not served.
    """
    for name in ("background", "prompt"):
        if is_given(getattr(request, name)):
            raise ApiError(400, f"{name} is not served; leave it out", param=name)
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
    tool_choice, tools = apply_tool_choice(request.tool_choice, tools)
    warnings = translator.warnings + tools.warnings
    if request.context_management:
        warnings.append("context_management is ignored; use /v1/responses/compact")
    text_options = request.text or TextOptions()
    includes_logprobs = "message.output_text.logprobs" in (request.include or ())
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=request.top_logprobs is not None or includes_logprobs or None,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
        tools=tools.functions or None,
        tool_choice=tool_choice,
        response_format=text_options.format,
        verbosity=text_options.verbosity,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        service_tier=request.service_tier,
        store=request.store,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
        parallel_tool_calls=request.parallel_tool_calls,
        cache_salt=request.cache_salt,
    )
    return chat, names, tools, warnings


def response_to_generation(
    request: ResponsesRequest, earlier: EarlierTurns, service: Service, tenant: str = ""
) -> TranslatedRequest:
    """Translate for the engine.

    The prompt keeps the token ids of the turns before, as they were computed and generated.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    items = new_items(request, earlier)
    chat, names, tools, warnings = to_chat_request(request, items, earlier)

    def render(part: ChatRequest, part_names: Sequence[str]) -> GenerationRequest:
        return chat_to_generation(
            part,
            service,
            tenant,
            known=earlier.known,
            names=part_names,
            tool_paths=[tools.paths[tool.function.name] for tool in tools.functions],
            allowed=tools.allowed,
            format_path="text.format",
        )

    if request.truncation == "auto":
        max_tokens = num_prompt_tokens(service.max_model_len, request.max_output_tokens)
        chat, generation_request, num_dropped = render_truncated(
            chat,
            names,
            render,
            max_tokens=max_tokens,
            max_bytes=service.max_prompt_bytes,
        )
        if num_dropped:
            warnings.append(f"truncation: the oldest {num_dropped} messages are left out")
    else:
        generation_request = render(chat, names)
    warnings += generation_request.warnings
    generation_request = replace(generation_request, warnings=tuple(warnings))
    return TranslatedRequest(chat, generation_request, items, earlier, tools)
