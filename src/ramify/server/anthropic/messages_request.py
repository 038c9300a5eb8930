"""Messages requests to generation requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ramify.params import SamplingParams
from ramify.server.answer_constraint import CallChoice, OfferedTool, schema_format
from ramify.server.anthropic.protocol import (
    Block,
    CacheControl,
    CountRequest,
    InputTool,
    MessageRequest,
    ToolChoice,
)
from ramify.server.errors import ApiError
from ramify.server.generation import (
    GenerationRequest,
    sampling_filters,
    with_output_parser,
)
from ramify.server.http.wire import encode_json
from ramify.server.prompt_renderer import (
    BREAKPOINT_TTL_S,
    MAX_BREAKPOINTS,
    PromptPart,
    text_variants,
    tool_parts,
)
from ramify.server.reasoning_options import THINKING_TYPES, ReasoningOptions
from ramify.server.request_history import HistoryEntry, fingerprint
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
    history_entry = render_messages(request, service, tenant)
    warnings: list[str] = []
    answer_format = None
    if request.output_config is not None and request.output_config.format is not None:
        schema = request.output_config.format.schema
        where = "output_config.format.schema"
        answer_format = schema_format(schema, where, warnings, strict=False)
    choice, tools = request.tool_choice or ToolChoice("auto"), _template_tools(request)
    forces_call = choice.type in ("any", "tool")
    if forces_call:
        if not tools:
            raise ApiError(400, f"{choice.type!r} needs tools", param="tool_choice")
        names = [tool["function"]["name"] for tool in tools]
        if choice.type == "tool" and choice.name not in names:
            raise ApiError(400, f"{choice.name!r} is not among {names}", param="tool_choice.name")
    single_call = bool(choice.disable_parallel_tool_use)
    name = choice.name if choice.type == "tool" else None
    structured = service.constraint(
        OfferedTool.of(tools),
        CallChoice(is_forced=forces_call, name=name, is_single=single_call),
        history_entry.prompt,
        tenant,
        answer_format=answer_format,
        warnings=warnings,
    )
    params = SamplingParams(
        **sampling_filters(request.temperature, request.top_k, request.top_p),
        max_tokens=max(1, request.max_tokens),
        stop=request.stop_sequences or (),
        structured=structured,
    )
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
        generation_request, service.output_format, tools, forced=forces_call, single=single_call
    )


def render_messages(request: CountRequest, service: Service, tenant: str = "") -> HistoryEntry:
    """Render the prompt of a request; returns it as an entry of the request history.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    texts = (request.messages, request.system, request.tools)
    service.check_prompt_bytes(len(encode_json(texts)), "messages")
    _check_num_breakpoints(request)
    system = _system_blocks(request)
    system_texts = [block.text or "" for _, block in system]
    turns = [
        list(_template_messages(message.role, message.content, f"messages[{index}]"))
        for index, message in enumerate(request.messages)
    ]
    messages = [{"role": "system", "content": "\n".join(system_texts)}] if system else []
    messages += [message for turn in turns for message in turn]
    if not messages:
        raise ApiError(400, "there is nothing to answer in them", param="messages")
    tools = _template_tools(request)
    parts = [
        PromptPart(part.path, part.texts, _ttl_s(tool.cache_control))
        for part, tool in zip(tool_parts(tools), request.tools or (), strict=False)
    ]
    parts += [
        PromptPart(path, text_variants(block.text or ""), _ttl_s(block.cache_control))
        for path, block in system
    ]
    for index, message in enumerate(request.messages):
        parts += _message_parts(message.content, f"messages[{index}].content")
    prompt = service.prompt_renderer.chat(
        messages,
        parts,
        tools=tools or None,
        continue_final_message=messages[-1]["role"] == "assistant",
        tenant=tenant,
        template_options=_reasoning_options(request).template_variables(
            service.tokenizer.chat_template_names
        ),
    )
    if request.cache_control is not None:  # of the request: a breakpoint after its last block
        prompt = prompt.with_breakpoint(BREAKPOINT_TTL_S[request.cache_control.ttl])
    return HistoryEntry(
        model=model,
        options={
            "tool_choice": fingerprint(request.tool_choice),
            "thinking": fingerprint(request.thinking),
            "effort": fingerprint(_reasoning_options(request).effort),
        },
        tools=tuple(fingerprint(tool) for tool in tools),
        system=fingerprint(system_texts),
        messages=tuple(fingerprint(turn) for turn in turns),
        prompt=prompt,
        max_shared=prompt.max_shared_tokens(),
    )


def _reasoning_options(request: CountRequest) -> ReasoningOptions:
    """How much the model should think. An effort alone turns no reasoning on, nor off."""
    thinking, config = request.thinking, request.output_config
    options = ReasoningOptions(effort=None if config is None else config.effort)
    if thinking is None:
        return options
    return replace(
        options, is_enabled=THINKING_TYPES.get(thinking.type), budget=thinking.budget_tokens
    )


def _check_num_breakpoints(request: CountRequest) -> None:
    blocks = [block for message in request.messages for block in _blocks(message.content)]
    items: list[InputTool | Block | CountRequest] = [*blocks, *_blocks(request.system), request]
    items += request.tools or ()
    num_breakpoints = sum(item.cache_control is not None for item in items)
    if num_breakpoints > MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"{num_breakpoints} blocks have cache_control, the limit is {MAX_BREAKPOINTS}",
            param="cache_control",
        )


def _blocks(content: str | list[Block] | None) -> list[Block]:
    if content is None:
        return []
    return [Block("text", text=content)] if isinstance(content, str) else content


def _system_blocks(request: CountRequest) -> list[tuple[str, Block]]:
    """Paths and blocks of the system prompt, without the volatile line of some agents."""
    blocks = []
    for index, block in enumerate(_blocks(request.system)):
        path = "system" if isinstance(request.system, str) else f"system[{index}]"
        if block.type != "text" or block.text is None:
            raise ApiError(400, "the system prompt is text", param=f"{path}.type")
        if not block.text.startswith(VOLATILE_SYSTEM):
            blocks.append((path, block))
    return blocks


def _ttl_s(control: CacheControl | None) -> float | None:
    """`ttl_s` of a part."""
    return None if control is None else BREAKPOINT_TTL_S[control.ttl]


def _template_tools(request: CountRequest) -> list[dict[str, Any]]:
    """Tool definitions as chat templates take them; none if the model must not call any."""
    if request.tool_choice is not None and request.tool_choice.type == "none":
        return []
    return [
        _template_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())
    ]


def _template_tool(tool: InputTool, where: str) -> dict[str, Any]:
    if tool.input_schema is None:
        raise ApiError(
            400,
            f"tools of type {tool.type!r} run on Anthropic's servers and are not served here",
            param=where,
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


def _template_messages(
    role: str, content: str | list[Block], where: str
) -> Iterator[dict[str, Any]]:
    """A message as chat templates take it; each tool result becomes a message by itself."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    for index, block in enumerate(_blocks(content)):
        path = f"{where}.content[{index}]"
        if block.type == "text":
            texts.append(_required(block.text, f"{path}.text"))
        elif block.type == "thinking":
            thinking.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue
        elif block.type == "tool_use":
            name = _required(block.name, f"{path}.name")
            function = {"name": name, "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id or "",
                "content": _result_text(block, path),
            }
        else:
            raise ApiError(
                400,
                f"blocks of type {block.type!r} are not served by this model; send text",
                param=f"{path}.type",
            )
    if texts or calls or thinking or not _blocks(content):
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thinking:
            message["reasoning_content"] = "\n".join(thinking)
        if calls:
            message["tool_calls"] = calls
        yield message


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise ApiError(400, "it is missing", param=where)
    return value


def _result_text(block: Block, where: str) -> str:
    texts = [
        _required(part.text if part.type == "text" else None, f"{where}.content[{index}].text")
        for index, part in enumerate(_blocks(block.content))
    ]
    return "\n".join(texts)


def _message_parts(content: str | list[Block], path: str) -> list[PromptPart]:
    """The parts to locate in the rendered text: the message, or each of its blocks."""
    if isinstance(content, str):
        return [PromptPart(path, text_variants(content))]
    parts = []
    for index, block in enumerate(content):
        if block.type == "tool_use":
            variants: tuple[str, ...] = (
                json.dumps(block.input or {}, ensure_ascii=False),
                block.name or "",
            )
        elif block.type == "tool_result":
            variants = text_variants("\n".join(part.text or "" for part in _blocks(block.content)))
        elif block.type in ("thinking", "redacted_thinking"):
            variants = ()  # most templates drop it, and a short text may occur elsewhere
        else:
            variants = text_variants(block.text or "")
        parts.append(PromptPart(f"{path}[{index}]", variants, _ttl_s(block.cache_control)))
    return parts
