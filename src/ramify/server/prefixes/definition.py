"""From the body of POST /v1/prefixes to a `NamedPrefix`, by the readers of the APIs."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ramify.counts import counted
from ramify.errors import PromptTooLongError, RequestError
from ramify.server.anthropic.messages_request import read_count_request
from ramify.server.anthropic.protocol import CountRequest
from ramify.server.conversation.conversation import Conversation, NamedPrefix
from ramify.server.conversation.named_prefix import as_prefix_message, as_prefix_tool
from ramify.server.conversation.parts import Message, TextPart
from ramify.server.conversation.to_generation import rendered, to_generation
from ramify.server.errors import ApiError
from ramify.server.http.request_body import convert_value
from ramify.server.openai.chat_request import read_chat
from ramify.server.openai.protocol import MAX_MESSAGES, ChatRequest, Name
from ramify.server.prompts.next_turns import common_prefix
from ramify.server.service import RequestService

# So that a name needs no escapes in a path, a header or a log line.
PrefixName = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$(?!\n)",
        description="A name has 1 to 128 characters: ASCII letters and digits, and after the first also _ . : "
        "and -",
    ),
]
PARTS = ("system", "messages", "tools")
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
# The first messages of requests: the tokens before the text of any are the same. A text may begin with
# what a tokenizer merges with the template's end of line.
FIRST_TEXTS = ("a", "\n1")


class PrefixRequest(Struct, kw_only=True):
    """POST /v1/prefixes: a name for system prompt, tools and messages, in the shape of any API."""

    name: PrefixName
    system: str | list[dict[str, Any]] | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    model: Name | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=1e9)] | None = None  # None: pinned until it is deleted
    replace: bool | None = None  # another prefix of this name
    public: bool | None = None  # for all tenants; needs the admin key


def read_prefix(
    request: PrefixRequest, service: RequestService, tenant: str, *, is_anthropic: bool
) -> tuple[NamedPrefix, list[str]]:
    """The prefix that a request defines, and warnings.

    Args:
        is_anthropic: the request comes from a client of Anthropic's API.

    Raises:
        ApiError, RequestError: it cannot be served; as if a request with these parts were sent.
    """
    parts = {name: getattr(request, name) for name in PARTS if getattr(request, name)}
    if not parts:
        raise ApiError(400, "a prefix needs system, messages or tools", param="messages")
    is_public = bool(request.public)
    conversation = _read(parts, service, request.model, is_anthropic=is_anthropic)
    prefix = NamedPrefix(
        name=request.name,
        model=conversation.model,
        messages=tuple(map(as_prefix_message, conversation.messages[:-1])),
        system=None if conversation.system is None else as_prefix_message(conversation.system),
        tools=tuple(map(as_prefix_tool, conversation.tools)),
        ttl_s=request.ttl_s,
        is_public=is_public,
        created=int(time.time()),
        definition=_encode_sorted(parts),
    )
    ids, warnings = _common_ids(prefix, service, "" if is_public else tenant)
    limit = min(service.max_model_len, service.engine.config.kv_cache_tokens)
    if len(ids) >= limit:
        raise PromptTooLongError(len(ids), limit)
    warnings = [*conversation.warnings, *warnings]
    if len(ids) < service.page_size:
        warnings.append(
            f"the prefix has {counted(len(ids), 'token')}, and only whole pages of {service.page_size} are cached"
        )
    return replace(prefix, ids=ids), warnings


def _read(
    parts: Mapping[str, Any], service: RequestService, model: str | None, *, is_anthropic: bool
) -> Conversation:
    """The parts with a message of the user behind them, read as Messages or as a chat completion."""
    service.check_model(model)
    tools = parts.get("tools", [])
    is_messages = is_anthropic or "system" in parts or any("input_schema" in tool for tool in tools)
    messages = parts.get("messages", [])
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": FIRST_TEXTS[0]}]}
    if not is_messages:
        body["tools"] = [_chat_tool(tool) for tool in tools]
        return read_chat(convert_value(body | {"model": model}, ChatRequest), service)
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            raise ApiError(
                400,
                "with system, the shape is that of Messages, where calls are blocks of the type tool_use; "
                "send the system prompt as a message of the role system for that of chat completions",
                param=f"messages[{index}].tool_calls",
            )
    body["tools"] = [_messages_tool(tool) for tool in tools]
    if "system" in parts:
        body["system"] = parts["system"]
    body["model"] = service.model if model is None else model
    return read_count_request(convert_value(body, CountRequest), service)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The function of a tool in OpenAI's shapes, nested or not; None: it has another."""
    if isinstance(function := tool.get("function"), Mapping):
        return function
    return tool if tool.get("type") == "function" else None


def _chat_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = _function_of(tool)
    return (
        tool if function is None or function is not tool else {"type": "function", "function": tool}
    )


def _messages_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = _function_of(tool)
    if function is None:
        return tool
    fields = {name: function.get(name) for name in ("name", "description", "strict")}
    return fields | {"input_schema": function.get("parameters")}


def _common_ids(
    prefix: NamedPrefix, service: RequestService, tenant: str
) -> tuple[array[int], list[str]]:
    """The token ids that requests with the prefix begin with, and warnings of one of them.

    Requests that differ in their first message, as all APIs make them: in some, consecutive messages of a
    role are joined. One may begin with an answer; where the template then writes system prompt or tools
    elsewhere, such requests have a prompt of their own.
    """
    texts = [_message("user", text) for text in FIRST_TEXTS]
    first = to_generation(_request(prefix, texts[0], joins_roles=False), service, tenant)
    ids = first.prompt.ids
    for message in texts:
        for joins_roles in (False, True):
            conversation = _request(prefix, message, joins_roles=joins_roles)
            prompt = rendered(conversation, service, tenant)[0].prompt
            ids = ids[: common_prefix(ids, prompt.ids)]
    answer_first = _request(prefix, _message("assistant", "b"), texts[0], joins_roles=True)
    with suppress(RequestError):  # a template may refuse it
        num_common = common_prefix(ids, rendered(answer_first, service, tenant)[0].prompt.ids)
        if num_common >= len(ids) // 2:
            ids = ids[:num_common]
    return ids, list(first.warnings)


def _request(prefix: NamedPrefix, *messages: Message, joins_roles: bool) -> Conversation:
    return Conversation(
        model=prefix.model,
        messages=messages,
        prefix=prefix,
        tools=prefix.tools,
        joins_roles=joins_roles,
    )


def _message(role: str, text: str) -> Message:
    return Message("", role, (TextPart("", (text,)),))
