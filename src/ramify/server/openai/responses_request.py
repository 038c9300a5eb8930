"""OpenAI's Responses API as chat: text and functions; a response can be gone on from by its id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ramify.server.errors import ApiError
from ramify.server.openai.chat_request import chat_to_generation, content_text
from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    JsonSchema,
    Name,
    NamedFunction,
    NamedTool,
    PositiveInt,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    ResponseFormat,
    Temperature,
    Tool,
    ToolCall,
    UnitInterval,
)
from ramify.server.prompt_renderer import KnownPrefix
from ramify.server.service import GenerationRequest, Service

Metadata = Annotated[  # it is kept with the response
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class InputPart(Struct):
    """A piece of an input message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class InputItem(Struct):
    """A message, a call of a function, or its result."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: Name | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(Struct):
    """A function, with its fields beside `type`."""

    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextFormat(Struct):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    """What is asked of the text."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ToolChoice(Struct):
    """The function that must be called."""

    type: str
    name: Name | None = None


class Reasoning(Struct):
    """How much the model should think."""

    effort: Name | None = None


class ResponsesRequest(Struct, kw_only=True):
    """POST /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: Name | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Temperature | None = None
    top_p: UnitInterval | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    include: list[str] | None = None
    conversation: Any = None  # these two are refused
    prompt: Any = None
    store: bool | None = None
    background: bool | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    service_tier: Name | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None
    user: Name | None = None


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """What is kept of a response, for the next one."""

    messages: tuple[ChatMessage, ...]  # the answer included
    known: tuple[KnownPrefix, ...]  # its prompt with the answer, then without
    body: Mapping[str, Any]  # as the client got it


def to_chat_request(
    request: ResponsesRequest, previous: StoredResponse | None
) -> tuple[ChatRequest, list[str]]:
    """The same as a chat request, and where its messages came from.

    Raises:
        ApiError: something is asked that is not served.
    """
    for name in ("background", "conversation", "prompt"):
        if getattr(request, name):
            raise ApiError(400, f"{name} is not served; leave it out", param=name)
    messages: list[ChatMessage] = []
    names: list[str] = []
    if request.instructions:
        messages.append(ChatMessage("system", request.instructions))
        names.append("instructions")
    if previous is not None:  # instructions are those of the new request alone
        old = previous.messages
        old = old[1:] if old and _is_instruction(old[0]) else old
        messages += old
        names += [f"previous_response[{at}]" for at in range(len(old))]
    if isinstance(request.input, str):
        messages.append(ChatMessage("user", request.input))
        names.append("input")
    else:
        for at, item in enumerate(request.input):
            where = f"input[{at}]"
            _add(messages, item, where)
            names += [where] * (len(messages) - len(names))
    if not messages:
        raise ApiError(400, "there is nothing to answer", param="input")
    tools = [_tool(one, f"tools[{at}]") for at, one in enumerate(request.tools or ())]
    options = request.text or TextOptions()
    with_scores = "message.output_text.logprobs" in (request.include or ())
    chat = ChatRequest(
        model=request.model,
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=request.top_logprobs is not None or with_scores or None,
        top_logprobs=request.top_logprobs,
        stream=request.stream,
        tools=tools or None,
        tool_choice=_choice(request.tool_choice),
        response_format=_form(options.format),
        verbosity=options.verbosity,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        service_tier=request.service_tier,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
        parallel_tool_calls=request.parallel_tool_calls,
        cache_salt=request.cache_salt,
    )
    return chat, names


def _is_instruction(message: ChatMessage) -> bool:
    return message.name == INSTRUCTIONS


INSTRUCTIONS = "ramify:instructions"


def _add(messages: list[ChatMessage], item: InputItem, where: str) -> None:
    if item.type == "message":
        if item.role is None:
            raise ApiError(400, "a message needs a role", param=f"{where}.role")
        content: str | list[ContentPart] | None
        if isinstance(item.content, list):
            content = [
                ContentPart(part.type, part.text, part.refusal, part.prompt_cache_breakpoint)
                for part in item.content
            ]
        else:
            content = item.content
        last = messages[-1] if messages else None
        if item.role == "assistant" and last and last.role == "assistant" and last.tool_calls:
            # text behind a call is an item of its own in an answer, and no message in a template
            joined = content_text(last.content, where) + content_text(content, where)
            messages[-1] = msgspec.structs.replace(last, content=joined)
        else:
            messages.append(ChatMessage(item.role, content))
    elif item.type == "function_call":
        if item.name is None:
            raise ApiError(400, "a call needs a name", param=f"{where}.name")
        call = ToolCall(FunctionCall(item.name, item.arguments or "{}"), item.call_id or "")
        if messages and messages[-1].role == "assistant":
            last = messages[-1]
            calls = [*(last.tool_calls or ()), call]
            messages[-1] = msgspec.structs.replace(last, tool_calls=calls)
        else:
            messages.append(ChatMessage("assistant", "", tool_calls=[call]))
    elif item.type == "function_call_output":
        text = item.output
        if isinstance(text, list):
            text = "\n".join(part.text or "" for part in text)
        messages.append(ChatMessage("tool", text or "", tool_call_id=item.call_id))
    elif item.type != "reasoning":
        raise ApiError(
            400, f"input of type {item.type!r} is not served; send messages", param=f"{where}.type"
        )


def _tool(tool: FunctionTool, where: str) -> Tool:
    if tool.type != "function" or tool.name is None:
        raise ApiError(400, f"tools of type {tool.type!r} are not served", param=f"{where}.type")
    return Tool(FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _choice(choice: object) -> Any:
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "function" or choice.name is None:
        raise ApiError(400, f"a choice of {choice.type!r} is not served", param="tool_choice.type")
    return NamedTool(NamedFunction(choice.name))


def _form(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    return ResponseFormat("json_schema", JsonSchema(form.name, form.schema or {}))


def response_to_generation(
    request: ResponsesRequest, previous: StoredResponse | None, service: Service, tenant: str = ""
) -> tuple[ChatRequest, GenerationRequest]:
    """A request for a response as a job; the tokens of the turns before are those computed then.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    chat, names = to_chat_request(request, previous)
    known = () if previous is None else previous.known
    return chat, chat_to_generation(chat, service, tenant, known=known, names=names)
