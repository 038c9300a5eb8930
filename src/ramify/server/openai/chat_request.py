"""Translate chat completion requests to generation requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec

from ramify.engine.text.chat_template import with_parameters
from ramify.server.answers.call_arguments import call_arguments
from ramify.server.answers.constraint import CallChoice, OfferedTool
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest, with_output_parser
from ramify.server.history.request_history import HistoryEntry, fingerprint
from ramify.server.http.wire import encode_json
from ramify.server.openai.answer_formats import FORMAT_PATH, answer_format
from ramify.server.openai.options import (
    breakpoint_ttl_s,
    compared_options,
    limit_breakpoints,
    max_shared_tokens,
    output_limit,
    sampling_params,
    truncate_prompt,
)
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    NamedTool,
    ReasoningOption,
    ThinkingOption,
    Tool,
    ToolCall,
)
from ramify.server.prompts.content_placeholders import content_placeholder, placeholder_warnings
from ramify.server.prompts.prompt_parts import (
    PromptPart,
    call_variants,
    result_variants,
    text_variants,
    tool_parts,
)
from ramify.server.prompts.renderer import BREAKPOINT_TTL_S, KnownPrefix
from ramify.server.request_fields.reasoning_options import (
    THINKING_TYPES,
    ReasoningOptions,
    first_set,
    implied_switch,
    unknown_thinking,
)
from ramify.server.service import Service

# Types of content parts: text of the message, and reasoning.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "redacted_thinking"})
# Names that `chat_template_kwargs` must not have: the server sets these itself.
RESERVED_TEMPLATE_NAMES = frozenset(
    "self messages parts tools documents known add_generation_prompt".split()
)


def chat_to_generation(
    request: ChatRequest,
    service: Service,
    tenant: str = "",
    *,
    known: Sequence[KnownPrefix] = (),
    names: Sequence[str] = (),
    tool_paths: Sequence[str] = (),
    allowed: Collection[str] | None = None,
    format_path: str = FORMAT_PATH,
) -> GenerationRequest:
    """Translate a chat completion request for the engine.

    See `PromptRenderer.chat` for `tenant` and `known`.

    Args:
        names: of the messages, for errors and segments; by default `messages[i]`.
        tool_paths: of the tools, for errors, warnings and segments; by default `tools[i]`.
        allowed: names of the tools that may be called, if `tool_choice` allows calls; None: all.
        format_path: of the answer's format, likewise.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    reject_unsupported(request)
    texts = (request.messages, request.tools, request.documents, request.chat_template_kwargs)
    service.check_prompt_bytes(len(encode_json(texts)), "messages")
    paths = tuple(names)
    names = names or [f"messages[{index}]" for index in range(len(request.messages))]
    messages = [
        _template_message(message, name)
        for message, name in zip(request.messages, names, strict=True)
    ]
    tools = _template_tools(request)
    tool_paths = tool_paths or [f"tools[{index}]" for index in range(len(tools))]
    if request.tool_choice == "none":
        allowed = ()
    offered = [
        (tool, path)
        for tool, path in zip(tools, tool_paths, strict=True)
        if allowed is None or tool["function"]["name"] in allowed
    ]
    callable_tools, callable_paths = [tool for tool, _ in offered], [path for _, path in offered]
    if service.drops_forbidden_tools:
        tools, tool_paths = callable_tools, callable_paths
    prompt = service.prompt_renderer.chat(
        messages,
        [
            *tool_parts(tool_paths),
            *message_parts(request.messages, names, breakpoint_ttl_s(request)),
        ],
        tools=tools or None,
        continue_final_message=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt is not False,
        known=known,
        tenant=tenant,
        template_options=_template_options(request, service),
    )
    prompt = prompt.with_turns(
        [(name, message.role) for name, message in zip(names, request.messages, strict=True)]
    )
    prompt = limit_breakpoints(truncate_prompt(prompt, request, service), request)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    forces_call = request.tool_choice not in (None, "auto", "none")
    if forces_call and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    warnings = unserved_content(request.messages, names, service.wrapper)
    thinking = request.thinking
    if isinstance(thinking, ThinkingOption) and thinking.type not in THINKING_TYPES:
        warnings.append(unknown_thinking(thinking.type))
    single_call = request.parallel_tool_calls is False
    name = chosen_tool(request.tool_choice, request.tools)
    choice = CallChoice(is_forced=forces_call, name=name, is_single=single_call)
    format_ = answer_format(request, warnings, format_path)
    structured = service.constraints.of_answer(
        OfferedTool.of(callable_tools, callable_paths),
        choice,
        prompt_end=prompt.turn_opening,
        tenant=tenant,
        answer_format=format_,
        warnings=warnings,
    )
    if request.max_completion_tokens is None:
        limit = output_limit("max_tokens", request.max_tokens)
    else:
        limit = output_limit("max_completion_tokens", request.max_completion_tokens)
    history_entry = HistoryEntry(
        model=model,
        options=compared_options(request) | {"thinking": fingerprint(reasoning_options(request))},
        tools=tuple(fingerprint(tool) for tool in tools),
        messages=tuple(fingerprint(message) for message in messages),
        prompt=prompt,
        paths=paths,
        max_shared=max_shared_tokens(prompt, request),
    )
    params = sampling_params(
        request,
        service.tokenizer,
        service.sampling_defaults,
        max_tokens=1 if request.is_prewarm else limit,
        structured=structured,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    if tools and not callable_tools:
        params = service.constraints.without_calls(params, tenant)
    generation_request = GenerationRequest(
        history_entry,
        params,
        salt=request.cache_salt or "",
        priority=request.priority or 0,
        is_prewarm=request.is_prewarm,
        is_chat=True,
        is_remembered=request.store is not False,
        warnings=tuple(warnings),
    )
    return with_output_parser(
        generation_request,
        service.output_format,
        callable_tools,
        forced=forces_call,
        single=single_call,
        is_streamed=bool(request.stream),
        has_format=format_ is not None,
    )


def reject_unsupported(request: ChatRequest) -> None:
    """Raise ApiError for options that are not served or exclude each other."""
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            400,
            "the final message is either continued or followed by a new one; leave out one of "
            "continue_final_message and add_generation_prompt",
            param="add_generation_prompt",
        )
    if request.modalities not in (None, [], ["text"]):
        raise ApiError(400, "only text is served", param="modalities")


def message_text(message: ChatMessage, where: str) -> str:
    """The text of a message: its content and an assistant's refusal beside it, on lines of their own.

    Raises:
        ApiError: as `content_text`.
    """
    text = content_text(message.content, content_path(where))
    return "\n".join(filter(None, (text, _refusal(message))))


def _refusal(message: ChatMessage) -> str | None:
    """The refusal of an assistant's message; other roles have none."""
    return message.refusal if message.role == "assistant" else None


def content_text(content: str | list[ContentPart] | None, where: str) -> str:
    """The text of a message's content; its parts are joined by newlines.

    Images, audio and files become placeholders; `unserved_content` has the warnings.

    Raises:
        ApiError: 400, a part is of another type.
    """
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(
        _part_text(part, f"{where}[{index}]")
        for index, part in enumerate(content)
        if part.type not in REASONING_PARTS
    )


def _part_text(part: ContentPart, where: str) -> str:
    text = part.text if part.type in TEXT_PARTS else part.refusal
    if text is None:
        text = content_placeholder(part.type)
    if text is None and part.type in TEXT_PARTS:
        raise ApiError(400, "it is missing", param=f"{where}.text")
    if text is None:
        raise ApiError(
            400,
            f"content of type {part.type!r} is not served by this model; send text",
            param=f"{where}.type",
        )
    return text


def unserved_content(
    messages: Sequence[ChatMessage], names: Sequence[str], wrapper: str | None
) -> list[str]:
    """`placeholder_warnings` of the messages."""
    blocks = (
        (f"{content_path(name)}[{index}]", part.type)
        for message, name in zip(messages, names, strict=True)
        if isinstance(message.content, list)
        for index, part in enumerate(message.content)
    )
    return placeholder_warnings(blocks, wrapper=wrapper)


def _template_role(message: ChatMessage) -> str:
    """The role of a message as chat templates take it."""
    return {"developer": "system", "function": "tool"}.get(message.role, message.role)


def _template_message(message: ChatMessage, where: str) -> dict[str, Any]:
    """A message as chat templates take it."""
    fields: dict[str, Any] = {
        "role": _template_role(message),
        "content": message_text(message, where),
    }
    named = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": _reasoning_text(message),
    }
    fields |= {name: value for name, value in named.items() if value is not None}
    calls = message_calls(message)
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": call_arguments(
                        call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"
                    ),
                },
            }
            for index, call in enumerate(calls)
        ]
    return fields


def message_calls(message: ChatMessage) -> list[ToolCall]:
    """The tool calls of a message; the older `function_call` is one."""
    if message.function_call is not None and not message.tool_calls:
        return [ToolCall(message.function_call)]
    return message.tool_calls or []


def _reasoning_text(message: ChatMessage) -> str | None:
    """The reasoning of an assistant's message, in whichever form the client sends it back."""
    text = first_set(message.reasoning_content, message.reasoning)
    if text is not None or not isinstance(message.content, list):
        return text
    texts: list[str] = []
    for part in message.content:
        inner = part.thinking
        texts += [inner] if isinstance(inner, str) else [piece.text or "" for piece in inner or ()]
    return "".join(texts) or None


def content_path(message: str) -> str:
    """The path of a message's content. A path like `instructions` is the content itself."""
    return f"{message}.content" if message.endswith("]") else message


def message_parts(
    messages: Sequence[ChatMessage], names: Sequence[str], ttl_s: float
) -> list[PromptPart]:
    """The parts to locate in the rendered text: one for each message, or each of its blocks.

    Args:
        ttl_s: of breakpoints that set no lifetime.
    """
    parts = []
    for message, name in zip(messages, names, strict=True):
        where, role = content_path(name), _template_role(message)
        variants_of = result_variants if role == "tool" else text_variants
        if thoughts := _reasoning_text(message):
            # Items of the Responses API have no such field.
            path = f"{name}.reasoning_content" if name.startswith("messages[") else name
            parts.append(PromptPart(path, text_variants(thoughts), role=role, may_be_dropped=True))
        if isinstance(message.content, list):
            for index, block in enumerate(message.content):
                point, path = block.prompt_cache_breakpoint, f"{where}[{index}]"
                own_ttl_s = None if point is None else BREAKPOINT_TTL_S.get(point.ttl or "", ttl_s)
                variants = (
                    () if block.type in REASONING_PARTS else variants_of(_part_text(block, path))
                )
                parts.append(PromptPart(path, variants, own_ttl_s, role))
        elif message.content:
            parts.append(PromptPart(where, variants_of(message.content), role=role))
        if refusal := _refusal(message):
            parts.append(PromptPart(f"{name}.refusal", text_variants(refusal), role=role))
        parts += [
            PromptPart(
                f"{name}.tool_calls[{index}]",
                call_variants(
                    call.function.name,
                    call_arguments(call.function.arguments, f"{name}.tool_calls[{index}]"),
                ),
                role=role,
                may_be_dropped=True,
            )
            for index, call in enumerate(message_calls(message))
        ]
    return parts


def reasoning_options(request: ChatRequest) -> ReasoningOptions:
    """Reasoning options of a request, by any of the names that clients use."""
    reasoning, thinking = request.reasoning or ReasoningOption(), request.thinking
    if isinstance(thinking, ThinkingOption):
        switch, thinking_budget = THINKING_TYPES.get(thinking.type), thinking.budget_tokens
    else:
        switch, thinking_budget = thinking, None
    effort = first_set(request.reasoning_effort, reasoning.effort)
    budget = first_set(request.thinking_budget, thinking_budget, reasoning.max_tokens)
    switch = first_set(request.enable_thinking, switch, reasoning.enabled)
    return ReasoningOptions(first_set(switch, implied_switch(effort, budget)), effort, budget)


def _template_options(request: ChatRequest, service: Service) -> dict[str, Any]:
    """Variables of the chat template that the client sets; `chat_template_kwargs` win."""
    options: dict[str, Any] = dict(request.chat_template_kwargs or {})
    reserved = sorted(RESERVED_TEMPLATE_NAMES & options.keys())
    if reserved:
        raise ApiError(
            400, f"the server sets {reserved[0]!r}; leave it out", param="chat_template_kwargs"
        )
    names = service.tokenizer.chat_template_names
    if request.documents:
        if "documents" not in names:
            raise ApiError(
                400,
                "the model's chat template takes no documents; send them in a message",
                param="documents",
            )
        options["documents"] = [
            {"text": document} if isinstance(document, str) else document
            for document in request.documents
        ]
    return reasoning_options(request).template_variables(names) | options


def _template_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Tool definitions as chat templates take them.

    Templates write them as they are, and models were trained with the type first.
    """
    return [
        {
            "type": tool.type,
            "function": with_parameters(_without_none(msgspec.to_builtins(tool.function))),
        }
        for tool in request.tools or ()
    ]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def chosen_tool(choice: object, tools: Sequence[Tool] | None) -> str | None:
    """The name of the tool that the model must call; None if it may be any.

    Raises:
        ApiError: the request has no tool of that name.
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
