"""Read requests of the Responses API: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ramify.counts import counted
from ramify.server.conversation.conversation import ToolDefinition
from ramify.server.conversation.named_prefix import prefix_of, tools_with
from ramify.server.conversation.to_generation import to_generation
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.http.request_body import convert_value
from ramify.server.http.wire import encode_json
from ramify.server.openai.chat_request import read_options
from ramify.server.openai.messages import function_fields, read_message
from ramify.server.openai.options import breakpoint_ttl_s
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionDefinition,
    is_given,
)
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import (
    PromptFields,
    ResponsesRequest,
    TextOptions,
)
from ramify.server.openai.responses.store import EarlierTurns, Item, reference_id
from ramify.server.openai.responses.tools import (
    CallForm,
    ServedTools,
    apply_tool_choice,
    served_tools,
)
from ramify.server.openai.responses.truncation import num_prompt_tokens, render_truncated
from ramify.server.service import RequestService


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


def _read_items(
    request: ResponsesRequest, items: Sequence[Item], earlier: EarlierTurns
) -> ItemTranslator:
    """Read all items before the answer.

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
    return translator


def _chat_options(request: ResponsesRequest, tool_choice: Any) -> ChatRequest:
    """The options that chat completions have too."""
    text_options = request.text or TextOptions()
    includes_logprobs = "message.output_text.logprobs" in (request.include or ())
    return ChatRequest(
        messages=[],
        model=request.model,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=request.top_logprobs is not None or includes_logprobs or None,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
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
        session_id=request.session_id,
        end_session=request.end_session,
    )


def response_to_generation(
    request: ResponsesRequest, earlier: EarlierTurns, service: RequestService, tenant: str = ""
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
    translator = _read_items(request, items, earlier)
    messages, names = translator.finish()
    if not messages:
        raise ApiError(400, "there is nothing to answer", param="input")
    prefix = prefix_of(service, tenant, request.prefix)
    tools = served_tools([("tools", request.tools or []), *translator.tools])
    if prefix is not None and not tools.functions:
        for tool in prefix.tools:
            form = CallForm("function", tool.name)
            tools.add(form, convert_value(tool.function, FunctionDefinition), tool.path)
    tool_choice, tools = apply_tool_choice(request.tool_choice, tools)
    warnings = translator.warnings + tools.warnings
    if request.context_management:
        warnings.append("context_management is ignored; use /v1/responses/compact")
    chat = _chat_options(request, tool_choice)
    own_tools = [
        ToolDefinition.of(tools.paths[function.function.name], function_fields(function.function))
        for function in tools.functions
    ]
    options = read_options(chat, tools_with(prefix, own_tools), service, "text.format")
    options = replace(options, known=earlier.known, prefix=prefix)
    if tools.allowed is not None:
        options = replace(options, allowed_tools=tools.allowed)

    def render(some: Sequence[ChatMessage], some_names: Sequence[str]) -> GenerationRequest:
        texts = (some, tools.functions or None, None, None)
        service.check_prompt_bytes(len(encode_json(texts)), "messages")
        read = tuple(map(partial(read_message, ttl_s=breakpoint_ttl_s(chat)), some, some_names))
        return to_generation(replace(options, messages=read), service, tenant)

    if request.truncation == "auto":
        max_tokens = num_prompt_tokens(service.max_request_len, request.max_output_tokens)
        generation_request, num_dropped = render_truncated(
            messages,
            names,
            render,
            max_tokens=max_tokens,
            max_bytes=service.max_prompt_bytes,
        )
        if num_dropped:
            warnings.append(f"truncation: left out {counted(num_dropped, 'message')}, the oldest")
    else:
        generation_request = render(messages, names)
    warnings += generation_request.warnings
    generation_request = replace(generation_request, warnings=tuple(warnings))
    return TranslatedRequest(chat, generation_request, items, earlier, tools)
