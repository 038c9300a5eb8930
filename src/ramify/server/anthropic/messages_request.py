"""Read requests of the Messages API: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.params import SamplingParams, StructuredOutput
from ramify.prompt_rules import BILLING
from ramify.server.anthropic.blocks import blocks_of
from ramify.server.anthropic.protocol import (
    Block,
    CountRequest,
    InputTool,
    MessageRequest,
    ToolChoice,
)
from ramify.server.anthropic.tools import ToolSet, tool_set
from ramify.server.anthropic.turns import read_messages
from ramify.server.conversation.conversation import CacheOptions, Conversation, NamedPrefix
from ramify.server.conversation.moved_text import TakenText, left_out, without_taken
from ramify.server.conversation.named_prefix import prefix_of, tools_with
from ramify.server.conversation.parts import Message, TextPart
from ramify.server.conversation.to_generation import to_generation, within_context
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.grammars.constraint import CallChoice, schema_format
from ramify.server.history.stored_requests import fingerprint
from ramify.server.http.wire import encode_json
from ramify.server.prompts.renderer import MAX_BREAKPOINTS
from ramify.server.request_fields.reasoning_options import (
    THINKING_TYPES,
    ReasoningOptions,
    unknown_thinking,
)
from ramify.server.service import RequestService


def messages_to_generation(
    request: MessageRequest, service: RequestService, tenant: str = ""
) -> GenerationRequest:
    """Translate a Messages request for the engine.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    conversation, warnings = read_count_request(request, service, tenant), list[str]()
    choice = request.tool_choice or ToolChoice("auto")
    forces_call = choice.type in ("any", "tool")
    tools = _tool_set(request, service, conversation.prefix)
    conversation = replace(
        conversation,
        allowed_tools=frozenset() if choice.type == "none" else None,
        choice=CallChoice(
            is_forced=forces_call,
            name=tools.chosen(choice) if forces_call else None,
            is_single=bool(choice.disable_parallel_tool_use),
        ),
        answer_format=_answer_format(request, warnings),
        format_path=_format_path(request),
        sampling=SamplingParams(
            **service.sampling_defaults.filled(
                temperature=request.temperature, top_k=request.top_k, top_p=request.top_p
            ),
            max_tokens=max(1, request.max_tokens),
            stop=request.stop_sequences or (),
        ),
        cache=replace(
            conversation.cache,
            salt=request.cache_salt or "",
            session=request.session_id or "",
            ends_session=bool(request.end_session),
        ),
        priority=request.priority,
        is_prewarm=request.max_tokens == 0,
        is_streamed=bool(request.stream),
        warnings=(*conversation.warnings, *warnings),
    )
    return within_context(to_generation(conversation, service, tenant), service)


def _format_path(request: MessageRequest) -> str:
    """The field that sets the format; output_config has the last word."""
    is_nested = request.output_config is not None and request.output_config.format is not None
    return "output_config.format" if is_nested else "output_format"


def _answer_format(request: MessageRequest, warnings: list[str]) -> StructuredOutput | None:
    output_format, where = request.output_format, "output_format.schema"
    if request.output_config is not None and request.output_config.format is not None:
        output_format, where = request.output_config.format, "output_config.format.schema"
    if output_format is None:
        return None
    return schema_format(output_format.schema, where, warnings, strict=False)


def read_count_request(
    request: CountRequest, service: RequestService, tenant: str = ""
) -> Conversation:
    """What a request says of its prompt.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    texts = (request.messages, request.system, request.tools)
    service.check_prompt_bytes(len(encode_json(texts)), "messages")
    _check_num_breakpoints(request)
    system, taken = _system(request)
    messages = read_messages(request.messages)
    prefix = prefix_of(service, tenant, request.prefix)
    tools = _tool_set(request, service, prefix)
    warnings = tools.warnings()
    if request.context_management:
        warnings.append("context_management is ignored")
    if request.thinking is not None and request.thinking.type not in THINKING_TYPES:
        warnings.append(unknown_thinking(request.thinking.type))
    if request.mcp_servers:
        warnings.append("mcp_servers is ignored: tools that this server does not run are left out")
    reasoning = _reasoning_options(request)
    return Conversation(
        model=model,
        messages=messages,
        system=system,
        prefix=prefix,
        joins_roles=True,
        continues_answer=None,
        tools=tools.definitions,
        reasoning=reasoning,
        cache=CacheOptions(
            # of the request: a breakpoint behind its last block
            end_ttl_s=None if request.cache_control is None else request.cache_control.ttl_s,
        ),
        compared={
            "tool_choice": fingerprint(request.tool_choice),
            "thinking": fingerprint(request.thinking),
            "effort": fingerprint(reasoning.effort),
        },
        warnings=tuple(warnings),
        applied=left_out(taken),
    )


def _tool_set(
    request: CountRequest, service: RequestService, prefix: NamedPrefix | None
) -> ToolSet:
    """The tools of the prompt: the request's own, or those of its prefix."""
    tools = tool_set(_shown_tools(request, service))
    return replace(tools, definitions=tools_with(prefix, tools.definitions))


def _shown_tools(request: CountRequest, service: RequestService) -> Sequence[InputTool]:
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


def _system(request: CountRequest) -> tuple[Message | None, list[TakenText]]:
    """The system prompt without the billing header, which is not for the model: see `prompt_rules`."""
    texts = []
    for index, block in enumerate(blocks_of(request.system)):
        path = "system" if isinstance(request.system, str) else f"system[{index}]"
        if block.type != "text" or block.text is None:
            raise ApiError(400, "the system prompt is text", param=f"{path}.type")
        ttl_s = None if block.cache_control is None else block.cache_control.ttl_s
        texts.append(TextPart(path, (block.text,), ttl_s))
    taken: list[TakenText] = []
    system = without_taken(Message("system", "system", tuple(texts)), [BILLING], taken)
    return system if any(isinstance(part, TextPart) for part in system.parts) else None, taken
