"""Translate requests of the Messages API to generation requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.params import SamplingParams
from ramify.server.answers.constraint import CallChoice, OfferedTool, schema_format
from ramify.server.anthropic.blocks import Unserved, blocks_of
from ramify.server.anthropic.history import render_turns
from ramify.server.anthropic.protocol import (
    Block,
    CountRequest,
    InputTool,
    MessageRequest,
    ToolChoice,
)
from ramify.server.anthropic.tools import tool_set
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest, with_output_parser
from ramify.server.history.request_history import HistoryEntry, fingerprint
from ramify.server.http.wire import encode_json
from ramify.server.prompts.content_placeholders import placeholder_warnings
from ramify.server.prompts.prompt_parts import PromptPart, text_variants
from ramify.server.prompts.renderer import MAX_BREAKPOINTS
from ramify.server.prompts.role_order import joined
from ramify.server.request_fields.reasoning_options import (
    THINKING_TYPES,
    ReasoningOptions,
    unknown_thinking,
)
from ramify.server.service import Service

# Some agents begin their system prompt with this line. It ends in a number that differs in every
# request, so nothing after it would hit the cache.
VOLATILE_SYSTEM = "x-anthropic-billing-header:"


def messages_to_generation(
    request: MessageRequest, service: Service, tenant: str = ""
) -> GenerationRequest:
    """Translate a Messages request for the engine.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    warnings: list[str] = []
    history_entry = render_messages(request, service, tenant, warnings)
    output_format, where = request.output_format, "output_format.schema"
    if request.output_config is not None and request.output_config.format is not None:
        output_format, where = request.output_config.format, "output_config.format.schema"
    answer_format = None
    if output_format is not None:
        answer_format = schema_format(output_format.schema, where, warnings, strict=False)
    choice = request.tool_choice or ToolChoice("auto")
    tools = tool_set(_shown_tools(request, service))
    forbids_calls = choice.type == "none"
    callable_tools = [] if forbids_calls else tools.definitions
    forces_call = choice.type in ("any", "tool")
    name = tools.chosen(choice) if forces_call else None
    single_call = bool(choice.disable_parallel_tool_use)
    structured = service.constraints.of_answer(
        OfferedTool.of(callable_tools, [part.path for part in tools.parts]),
        CallChoice(is_forced=forces_call, name=name, is_single=single_call),
        prompt_end=history_entry.prompt.turn_opening,
        tenant=tenant,
        answer_format=answer_format,
        warnings=warnings,
    )
    params = SamplingParams(
        **service.sampling_defaults.filled(
            temperature=request.temperature, top_k=request.top_k, top_p=request.top_p
        ),
        max_tokens=_output_limit(request, history_entry, service),
        stop=request.stop_sequences or (),
        structured=structured,
    )
    if forbids_calls and tools.definitions:
        params = service.constraints.without_calls(params, tenant)
    generation_request = GenerationRequest(
        history_entry,
        params,
        salt=request.cache_salt or "",
        priority=request.priority,
        is_prewarm=request.max_tokens == 0,
        is_chat=True,
        warnings=tuple(warnings),
    )
    return with_output_parser(
        generation_request,
        service.output_format,
        callable_tools,
        forced=forces_call,
        single=single_call,
        is_streamed=bool(request.stream),
        has_format=answer_format is not None,
    )


def _output_limit(
    request: MessageRequest, history_entry: HistoryEntry, service: Service
) -> int | None:
    """`max_tokens` for the engine; None (all the room) if the client asks for more than there is.

    Agents send the same large limit with every request, whatever the context of the model is.
    """
    config = service.engine.config
    room = min(config.max_model_len, config.kv_cache_tokens) - len(history_entry.prompt.ids)
    return max(1, request.max_tokens) if request.max_tokens <= room else None


def render_messages(
    request: CountRequest, service: Service, tenant: str, warnings: list[str]
) -> HistoryEntry:
    """Render the prompt of a request; returns it as an entry of the request history.

    Args:
        warnings: is extended by warnings for the client.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    texts = (request.messages, request.system, request.tools)
    service.check_prompt_bytes(len(encode_json(texts)), "messages")
    _check_num_breakpoints(request)
    system = _system_blocks(request)
    system_texts = [block.text or "" for _, block in system]
    unserved: Unserved = []
    turns = render_turns(request.messages, unserved)
    messages = [{"role": "system", "content": "\n".join(system_texts)}] if system else []
    messages += joined([message for turn in turns for message in turn.messages])
    if not messages:
        raise ApiError(400, "there is nothing to answer in them", param="messages")
    tools = tool_set(_shown_tools(request, service))
    parts = list(tools.parts)
    for path, block in system:
        ttl_s = None if block.cache_control is None else block.cache_control.ttl_s
        parts.append(PromptPart(path, text_variants(block.text or ""), ttl_s, "system"))
    parts += (part for turn in turns for part in turn.parts)
    warnings += placeholder_warnings(unserved, wrapper=service.wrapper) + tools.warnings()
    if request.context_management:
        warnings.append("context_management is ignored")
    if request.thinking is not None and request.thinking.type not in THINKING_TYPES:
        warnings.append(unknown_thinking(request.thinking.type))
    if request.mcp_servers:
        warnings.append("mcp_servers is ignored: tools that this server does not run are left out")
    prompt = service.prompt_renderer.chat(
        messages,
        parts,
        tools=tools.definitions or None,
        continue_final_message=messages[-1]["role"] == "assistant",
        tenant=tenant,
        template_options=_reasoning_options(request).template_variables(
            service.tokenizer.chat_template_names
        ),
    )
    prompt = prompt.with_turns(
        [(f"messages[{index}]", message.role) for index, message in enumerate(request.messages)]
    )
    if request.cache_control is not None:  # of the request: a breakpoint after its last block
        prompt = prompt.with_breakpoint(request.cache_control.ttl_s)
    return HistoryEntry(
        model=model,
        options={
            "tool_choice": fingerprint(request.tool_choice),
            "thinking": fingerprint(request.thinking),
            "effort": fingerprint(_reasoning_options(request).effort),
        },
        tools=tuple(fingerprint(tool) for tool in tools.definitions),
        system=fingerprint(system_texts),
        messages=tuple(fingerprint(turn.messages) for turn in turns),
        prompt=prompt,
        max_shared=prompt.max_shared_tokens(),
    )


def _shown_tools(request: CountRequest, service: Service) -> Sequence[InputTool]:
    """The tools that the prompt has."""
    choice = request.tool_choice
    is_none = choice is not None and choice.type == "none"
    return () if is_none and service.drops_forbidden_tools else request.tools or ()


def _reasoning_options(request: CountRequest) -> ReasoningOptions:
    """Reasoning options of a request. An effort alone turns reasoning neither on nor off."""
    thinking, config = request.thinking, request.output_config
    options = ReasoningOptions(effort=None if config is None else config.effort)
    if thinking is None:
        return options
    return replace(
        options, is_enabled=THINKING_TYPES.get(thinking.type), budget=thinking.budget_tokens
    )


def _check_num_breakpoints(request: CountRequest) -> None:
    blocks = [block for message in request.messages for block in blocks_of(message.content)]
    items: list[InputTool | Block | CountRequest] = [*blocks, *blocks_of(request.system), request]
    items += request.tools or ()
    num_breakpoints = sum(item.cache_control is not None for item in items)
    if num_breakpoints > MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"{num_breakpoints} blocks have cache_control, the limit is {MAX_BREAKPOINTS}",
            param="cache_control",
        )


def _system_blocks(request: CountRequest) -> list[tuple[str, Block]]:
    """Paths and blocks of the system prompt, without the volatile line of some agents."""
    blocks = []
    for index, block in enumerate(blocks_of(request.system)):
        path = "system" if isinstance(request.system, str) else f"system[{index}]"
        if block.type != "text" or block.text is None:
            raise ApiError(400, "the system prompt is text", param=f"{path}.type")
        if not block.text.startswith(VOLATILE_SYSTEM):
            blocks.append((path, block))
    return blocks
