"""Read chat completion requests: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ramify.server.conversation.conversation import Conversation, ToolDefinition
from ramify.server.conversation.named_prefix import prefix_of, tools_with
from ramify.server.conversation.to_generation import to_generation
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.history.stored_requests import fingerprint
from ramify.server.http.wire import encode_json
from ramify.server.openai.answer_formats import FORMAT_PATH, answer_format
from ramify.server.openai.messages import call_choice, function_fields, read_message
from ramify.server.openai.options import (
    breakpoint_ttl_s,
    cache_options,
    compared_options,
    output_limit,
    sampling_params,
    truncated_len,
)
from ramify.server.openai.protocol import ChatRequest, ReasoningOption, ThinkingOption
from ramify.server.request_fields.reasoning_options import (
    THINKING_TYPES,
    ReasoningOptions,
    first_set,
    implied_switch,
    unknown_thinking,
)
from ramify.server.service import RequestService

# Names that `chat_template_kwargs` must not have: the server sets these itself.
RESERVED_TEMPLATE_NAMES = frozenset(
    "self messages parts tools documents known add_generation_prompt".split()
)


def chat_to_generation(
    request: ChatRequest, service: RequestService, tenant: str = ""
) -> GenerationRequest:
    """Translate a chat completion request for the engine.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    return to_generation(read_chat(request, service, tenant), service, tenant)


def read_chat(request: ChatRequest, service: RequestService, tenant: str = "") -> Conversation:
    """What a chat completion request says.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    service.check_model(request.model)
    _reject_unsupported(request)
    texts = (request.messages, request.tools, request.documents, request.chat_template_kwargs)
    service.check_prompt_bytes(len(encode_json(texts)), "messages")
    ttl_s = breakpoint_ttl_s(request)
    messages = tuple(
        read_message(message, f"messages[{index}]", ttl_s)
        for index, message in enumerate(request.messages)
    )
    prefix = prefix_of(service, tenant, request.prefix)
    own_tools = [
        ToolDefinition.of(f"tools[{index}]", function_fields(tool.function))
        for index, tool in enumerate(request.tools or ())
    ]
    tools = tools_with(prefix, own_tools)
    if request.tool_choice not in (None, "auto", "none") and not tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    return replace(read_options(request, tools, service), messages=messages, prefix=prefix)


def read_options(
    request: ChatRequest,
    tools: Sequence[ToolDefinition],
    service: RequestService,
    format_path: str = FORMAT_PATH,
) -> Conversation:
    """What a request says beside its messages; the Responses API has some of the same options.

    Args:
        tools: those of the request.
        format_path: of the answer's format, for errors and warnings.

    Raises:
        ApiError, RequestError: an option is not served.
    """
    warnings, thinking = list[str](), request.thinking
    if isinstance(thinking, ThinkingOption) and thinking.type not in THINKING_TYPES:
        warnings.append(unknown_thinking(thinking.type))
    format_, path = answer_format(request, warnings, format_path)
    reasoning = reasoning_options(request)
    return Conversation(
        model=service.check_model(request.model),
        messages=(),
        continues_answer=bool(request.continue_final_message),
        opens_answer=request.add_generation_prompt is not False,
        max_prompt_tokens=truncated_len(request, service),
        tools=tuple(tools),
        allowed_tools=frozenset() if request.tool_choice == "none" else None,
        choice=call_choice(request.tool_choice, tools, request.parallel_tool_calls),
        answer_format=format_,
        format_path=path,
        reasoning=reasoning,
        template_variables=_template_variables(request, service),
        sampling=sampling_params(
            request,
            service.tokenizer,
            service.sampling_defaults,
            max_tokens=1 if request.is_prewarm else _output_limit(request),
            logprobs=_num_logprobs(request),
            prompt_logprobs=request.prompt_logprobs,
        ),
        cache=cache_options(request),
        compared=compared_options(request) | {"thinking": fingerprint(reasoning)},
        priority=request.priority or 0,
        is_prewarm=request.is_prewarm,
        is_streamed=bool(request.stream),
        is_remembered=request.store is not False,
        warnings=tuple(warnings),
    )


def _reject_unsupported(request: ChatRequest) -> None:
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


def _num_logprobs(request: ChatRequest) -> int | None:
    """Number of logprobs of each token, beside its own; None if it has none."""
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _output_limit(request: ChatRequest) -> int | None:
    if request.max_completion_tokens is None:
        return output_limit("max_tokens", request.max_tokens)
    return output_limit("max_completion_tokens", request.max_completion_tokens)


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


def _template_variables(request: ChatRequest, service: RequestService) -> dict[str, Any]:
    """Variables of the chat template that the client sets; `chat_template_kwargs` win over others."""
    variables: dict[str, Any] = dict(request.chat_template_kwargs or {})
    reserved = sorted(RESERVED_TEMPLATE_NAMES & variables.keys())
    if reserved:
        raise ApiError(
            400, f"the server sets {reserved[0]!r}; leave it out", param="chat_template_kwargs"
        )
    if request.documents:
        if "documents" not in service.tokenizer.chat_template_names:
            raise ApiError(
                400,
                "the model's chat template takes no documents; send them in a message",
                param="documents",
            )
        variables["documents"] = [
            {"text": document} if isinstance(document, str) else document
            for document in request.documents
        ]
    return variables
