"""Anthropic's requests in the engine's words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from ramify.params import SamplingParams, StructuredOutput
from ramify.server.anthropic.protocol import (
    Block,
    CacheControl,
    CountRequest,
    InputTool,
    MessageRequest,
)
from ramify.server.errors import ApiError
from ramify.server.openai.chat_request import max_shared_tokens, num_json_bytes, tool_parts
from ramify.server.prompt_renderer import PromptPart, RenderedPrompt, text_variants
from ramify.server.request_history import HistoryEntry, canonical_json
from ramify.server.service import GenerationRequest, Service
from ramify.server.tool_calls import detect_format, stop_after_call, tool_call_schema

TTL_S = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4
# A line that some agents put first into their system prompts, with a number that changes with every
# request; it would keep everything behind it from being found again.
VOLATILE_SYSTEM = "x-anthropic-billing-header:"


def messages_to_generation(
    request: MessageRequest, service: Service, tenant: str = ""
) -> GenerationRequest:
    """A request for a message as a job.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    prompt, record = render_messages(request, service, tenant)
    others: dict[str, Any] = {}
    config = request.output_config
    if config is not None and config.format is not None:
        others["structured"] = StructuredOutput(json_schema=config.format.schema)
    choice = request.tool_choice
    tools = _template_tools(request)
    if choice is not None and choice.type in ("any", "tool"):
        if not tools:
            raise ApiError(400, f"{choice.type!r} needs tools", param="tool_choice")
        names = [tool["function"]["name"] for tool in tools]
        if choice.type == "tool" and choice.name not in names:
            raise ApiError(400, f"{choice.name!r} is not among {names}", param="tool_choice.name")
        others["structured"] = tool_call_schema(
            tools, choice.name if choice.type == "tool" else None
        )
    params = SamplingParams(
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k if request.top_k is not None and request.top_k > 0 else None,
        top_p=1.0 if request.top_p is None else max(request.top_p, 1e-9),
        max_tokens=max(1, request.max_tokens),
        stop=request.stop_sequences or (),
        **others,
    )
    may_call = choice is not None and choice.type == "auto"  # a forced call is one in any case
    if tools and may_call and choice is not None and choice.disable_parallel_tool_use:
        params = stop_after_call(params, detect_format(service.chat_template))
    return GenerationRequest(
        prompt=prompt,
        params=params,
        history_entry=record,
        salt=request.cache_salt or "",
        priority=request.priority,
        is_prewarm=request.max_tokens == 0,
        max_shared=record.max_shared,
        is_chat=True,
    )


def render_messages(
    request: CountRequest, service: Service, tenant: str = ""
) -> tuple[RenderedPrompt, HistoryEntry]:
    """The prompt of a request and what is remembered of it.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    model = service.check_model(request.model)
    told = num_json_bytes(request.messages, request.system, request.tools)
    service.check_prompt_bytes(told, "messages")
    asked = [
        control
        for control in (
            *(tool.cache_control for tool in request.tools or ()),
            *(block.cache_control for block in _blocks(request.system)),
            *(block.cache_control for one in request.messages for block in _blocks(one.content)),
            request.cache_control,
        )
        if control is not None
    ]
    if len(asked) > MAX_BREAKPOINTS:
        raise ApiError(
            400,
            f"{len(asked)} blocks have cache_control, the limit is {MAX_BREAKPOINTS}",
            param="cache_control",
        )
    system = _system_blocks(request)
    messages: list[dict[str, Any]] = []
    parts: list[PromptPart] = []
    if system:
        messages.append({"role": "system", "content": "\n".join(one.text or "" for one in system)})
        parts += _text_parts("system", request.system, system)
    for at, one in enumerate(request.messages):
        made = list(_template_messages(one.role, one.content, f"messages[{at}]"))
        messages += made
        parts += _message_parts(one.content, f"messages[{at}].content")
    if not messages:
        raise ApiError(400, "there is nothing to answer in them", param="messages")
    continues = messages[-1]["role"] == "assistant"
    tools = _template_tools(request)
    found_tools = [
        PromptPart(part.path, part.texts, *_breakpoint(tool.cache_control))
        for part, tool in zip(tool_parts(tools), request.tools or (), strict=False)
    ]
    prompt = service.prompt_renderer.chat(
        messages,
        [*found_tools, *parts],
        tools=tools or None,
        continue_final_message=continues,
        tenant=tenant,
    )
    if request.cache_control is not None:  # of the request: its last block
        prompt = prompt.with_breakpoint("messages", TTL_S[request.cache_control.ttl])
    record = HistoryEntry(
        model=model,
        options={
            "tool_choice": canonical_json(_plain(request.tool_choice)),
            "thinking": canonical_json(_plain(request.thinking)),
        },
        tools=tuple(canonical_json(tool) for tool in tools),
        system=canonical_json([one.text for one in system]),
        messages=tuple(
            canonical_json(list(_template_messages(one.role, one.content, f"messages[{at}]")))
            for at, one in enumerate(request.messages)
        ),
        prompt=prompt,
        max_shared=max_shared_tokens(prompt, None),
    )
    return prompt, record


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _blocks(content: str | list[Block] | None) -> list[Block]:
    if content is None:
        return []
    return [Block("text", text=content)] if isinstance(content, str) else content


def _system_blocks(request: CountRequest) -> list[Block]:
    """The blocks of the system prompt that the model sees."""
    found = []
    for at, block in enumerate(_blocks(request.system)):
        if block.type != "text" or block.text is None:
            raise ApiError(400, "the system prompt is text", param=f"system[{at}].type")
        if not block.text.startswith(VOLATILE_SYSTEM):
            found.append(block)
    return found


def _text_parts(
    path: str, given: str | list[Block] | None, blocks: Sequence[Block]
) -> list[PromptPart]:
    if isinstance(given, str):
        return [PromptPart(path, text_variants(given))]
    places = {id(block): at for at, block in enumerate(given or ())}
    return [
        PromptPart(
            f"{path}[{places[id(one)]}]",
            text_variants(one.text or ""),
            *_breakpoint(one.cache_control),
        )
        for one in blocks
    ]


def _breakpoint(control: CacheControl | None) -> tuple[float | None, bool]:
    return (None, False) if control is None else (TTL_S[control.ttl], True)


def _template_tools(request: CountRequest) -> list[dict[str, Any]]:
    """Tools as chat templates expect them."""
    if request.tool_choice is not None and request.tool_choice.type == "none":
        return []
    return [_template_tool(tool, f"tools[{at}]") for at, tool in enumerate(request.tools or ())]


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
    """One message as those that chat templates expect: results of tools are messages there."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thinking: list[str] = []
    for at, block in enumerate(_blocks(content)):
        place = f"{where}.content[{at}]"
        if block.type == "text":
            texts.append(_required(block.text, f"{place}.text"))
        elif block.type == "thinking":
            thinking.append(block.thinking or "")
        elif block.type == "redacted_thinking":
            continue
        elif block.type == "tool_use":
            name = _required(block.name, f"{place}.name")
            function = {"name": name, "arguments": block.input or {}}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result":
            if texts:
                yield {"role": role, "content": "\n".join(texts)}
                texts = []
            yield {
                "role": "tool",
                "tool_call_id": block.tool_use_id or "",
                "content": _result_text(block, place),
            }
        else:
            raise ApiError(
                400,
                f"blocks of type {block.type!r} are not served by this model; send text",
                param=f"{place}.type",
            )
    if texts or calls or thinking or not _blocks(content):
        told: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thinking:
            told["reasoning_content"] = "\n".join(thinking)
        if calls:
            told["tool_calls"] = calls
        yield told


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise ApiError(400, "it is missing", param=where)
    return value


def _result_text(block: Block, where: str) -> str:
    texts = [
        _required(one.text if one.type == "text" else None, f"{where}.content[{at}].text")
        for at, one in enumerate(_blocks(block.content))
    ]
    return "\n".join(texts)


def _message_parts(content: str | list[Block], path: str) -> list[PromptPart]:
    """What to look for in the rendered text, block by block."""
    if isinstance(content, str):
        return [PromptPart(path, text_variants(content))]
    parts = []
    for at, block in enumerate(content):
        if block.type == "tool_use":
            forms: tuple[str, ...] = (
                json.dumps(block.input or {}, ensure_ascii=False),
                block.name or "",
            )
        elif block.type == "tool_result":
            forms = text_variants("\n".join(one.text or "" for one in _blocks(block.content)))
        elif block.type == "thinking":
            forms = text_variants(block.thinking or "")
        else:
            forms = text_variants(block.text or "")
        parts.append(PromptPart(f"{path}[{at}]", forms, *_breakpoint(block.cache_control)))
    return parts
