"""Responses requests to chat completion requests; a response id continues that conversation."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.http.wire import encode_json
from ramify.server.openai.chat_request import chat_to_generation, content_text
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    FunctionCall,
    FunctionDefinition,
    JsonSchema,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    Tool,
    ToolCall,
)
from ramify.server.openai.responses_items import read_carried_reasoning
from ramify.server.openai.responses_protocol import (
    ChosenTool,
    FunctionTool,
    InputItem,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from ramify.server.prompt_renderer import KnownPrefix
from ramify.server.service import Service

INSTRUCTIONS = "ramify:instructions"  # `name` of a message that a request's instructions became


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that a later request may continue or fetch by its id.

    Kept as JSON: a tenth of the memory of objects, and its bytes can be counted.
    """

    packed_messages: bytes
    packed_body: bytes
    known: tuple[KnownPrefix, ...]  # the prompt with the answer, then without

    @classmethod
    def of(
        cls,
        messages: Sequence[ChatMessage],
        known: Sequence[KnownPrefix],
        body: Mapping[str, Any],
    ) -> StoredResponse:
        """Pack the messages of a conversation, its answer included, and the body of the response."""
        return cls(encode_json(messages), encode_json(body), tuple(known))

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages, the answer included."""
        return msgspec.json.decode(self.packed_messages, type=tuple[ChatMessage, ...])

    @property
    def body(self) -> msgspec.Raw:
        """The response as the client received it."""
        return msgspec.Raw(self.packed_body)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        known = sum(sys.getsizeof(prefix.text) + sys.getsizeof(prefix.ids) for prefix in self.known)
        return len(self.packed_messages) + len(self.packed_body) + known


def stored_response(service: Service, tenant: str, name: str, param: str) -> StoredResponse:
    """Look up a stored response of this tenant.

    Args:
        param: the request's field, named in the error.

    Raises:
        ApiError: 404, it has expired or was never stored.
    """
    entry = service.history.get(tenant, name)
    if entry is None or not isinstance(entry.response, StoredResponse):
        raise ApiError(
            404,
            f"there is no response {name[:100]!r}; it has expired or was never stored",
            param=param,
        )
    return entry.response


def previous_response(
    request: ResponsesRequest, service: Service, tenant: str
) -> StoredResponse | None:
    """The response that a request continues; None if it begins a conversation. See `stored_response`."""
    name = request.previous_response_id
    if name is None:
        return None
    return stored_response(service, tenant, name, "previous_response_id")


def to_chat_request(
    request: ResponsesRequest, previous: StoredResponse | None
) -> tuple[ChatRequest, list[str]]:
    """Translate to a chat completion request; returns the request fields of its messages as well.

    Args:
        previous: the response that `previous_response_id` names.

    Raises:
        ApiError: it has an option that is not served.
    """
    for name in ("background", "conversation", "prompt"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not served; leave it out", param=name)
    messages: list[ChatMessage] = []
    names: list[str] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
        names.append("instructions")
    if previous is not None:
        earlier = previous.messages
        # Only the instructions of the new request apply.
        if earlier and earlier[0].name == INSTRUCTIONS:
            earlier = earlier[1:]
        messages += earlier
        names += [f"previous_response[{index}]" for index in range(len(earlier))]
    if isinstance(request.input, str):
        messages.append(ChatMessage("user", request.input))
        names.append("input")
    else:
        for index, item in enumerate(request.input):
            where = f"input[{index}]"
            _append_item(messages, item, where)
            names += [where] * (len(messages) - len(names))
    if not messages:
        raise ApiError(400, "there is nothing to answer", param="input")
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
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
        tools=tools or None,
        tool_choice=_tool_choice(request.tool_choice),
        response_format=_response_format(text_options.format),
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
    return chat, names


def _append_item(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    """Append an input item as a message, or to the last message if that is the same turn."""
    last = messages[-1] if messages else None
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, "a message needs a role", param=f"{where}.role")
        is_same_turn = last is not None and (last.tool_calls or last.content is None)
        if item.role == "assistant" and last and last.role == "assistant" and is_same_turn:
            # The text after a call or reasoning is an item by itself; templates take one message.
            text = content_text(last.content, where) + content_text(item.content, where)
            messages[-1] = msgspec.structs.replace(last, content=text)
        else:
            messages.append(ChatMessage(item.role, item.content))
    elif item.type == "function_call":
        if item.name is None:
            raise ApiError(400, "a call needs a name", param=f"{where}.name")
        call = ToolCall(FunctionCall(item.name, item.arguments or "{}"), item.call_id or "")
        if last and last.role == "assistant":
            calls = [*(last.tool_calls or ()), call]
            messages[-1] = msgspec.structs.replace(last, tool_calls=calls)
        else:
            messages.append(ChatMessage("assistant", "", tool_calls=[call]))
    elif item.type == "function_call_output":
        messages.append(ChatMessage("tool", item.output or "", tool_call_id=item.call_id))
    elif item.type == "reasoning":
        reasoning = reasoning_text(item)
        if last and last.role == "assistant":
            reasoning = (last.reasoning_content or "") + reasoning
            messages[-1] = msgspec.structs.replace(last, reasoning_content=reasoning or None)
        elif reasoning:
            messages.append(ChatMessage("assistant", reasoning_content=reasoning))
    else:
        raise ApiError(
            400, f"input of type {item.type!r} is not served; send messages", param=f"{where}.type"
        )


def reasoning_text(item: InputItem) -> str:
    """The text of a reasoning item; "" if only another server could read it."""
    for parts in (item.content, item.summary):
        if parts:
            return parts if isinstance(parts, str) else "".join(part.text or "" for part in parts)
    return read_carried_reasoning(item.encrypted_content or "")


def _tool(tool: FunctionTool, where: str) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise ApiError(400, f"tools of type {tool.type!r} are not served", param=f"{where}.type")
    return Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: object) -> Any:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type != "function" or choice.name is None:
        raise ApiError(400, f"a choice of {choice.type!r} is not served", param="tool_choice.type")
    return NamedTool(NamedFunction(choice.name))


def _response_format(text_format: TextFormat | None) -> ResponseFormat | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return ResponseFormat("json_object")
    schema = JsonSchema(text_format.name, text_format.schema or {}, strict=text_format.strict)
    return ResponseFormat("json_schema", schema)


def response_to_generation(
    request: ResponsesRequest, previous: StoredResponse | None, service: Service, tenant: str = ""
) -> tuple[ChatRequest, GenerationRequest]:
    """Translate for the engine, through a chat completion request, which is returned as well.

    The prompt keeps the token ids of the turns before, as they were computed and generated.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    chat, names = to_chat_request(request, previous)
    known = () if previous is None else previous.known
    return chat, chat_to_generation(chat, service, tenant, known=known, names=names)
