"""Read requests of /api/chat: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.conversation.conversation import Conversation, ToolDefinition
from ramify.server.conversation.named_prefix import prefix_of, tools_with
from ramify.server.conversation.parts import (
    CallPart,
    Line,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    ResultPart,
    TextPart,
)
from ramify.server.conversation.to_generation import to_generation, within_context
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.http.wire import encode_json
from ramify.server.ollama.options import read_options
from ramify.server.ollama.protocol import OllamaChatRequest, OllamaMessage
from ramify.server.openai.messages import function_fields
from ramify.server.service import RequestService

ROLES = ("system", "user", "assistant", "tool")


def chat_to_generation(
    request: OllamaChatRequest, service: RequestService, tenant: str = ""
) -> GenerationRequest:
    """Translate a chat request for the engine.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    return within_context(
        to_generation(read_chat(request, service, tenant), service, tenant), service
    )


def read_chat(
    request: OllamaChatRequest, service: RequestService, tenant: str = ""
) -> Conversation:
    """What a chat request says.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    options, messages = read_options(request, service), request.messages or []
    service.check_prompt_bytes(len(encode_json((messages, request.tools))), "messages")
    prefix = prefix_of(service, tenant, request.prefix)
    own_tools = tuple(
        ToolDefinition.of(f"tools[{index}]", function_fields(tool.function))
        for index, tool in enumerate(request.tools or ())
    )
    return replace(
        options,
        messages=tuple(
            _read_message(message, f"messages[{index}]") for index, message in enumerate(messages)
        ),
        tools=tools_with(prefix, own_tools),
        prefix=prefix,
    )


def images_of(images: Sequence[object] | None, path: str = "") -> Iterator[MediaPart]:
    """The images of a message or a request at a path, after its text."""
    prefix = f"{path}." if path else ""
    for index in range(len(images or ())):
        yield MediaPart(f"{prefix}images[{index}]", "image")


def _read_message(message: OllamaMessage, path: str) -> Message:
    """A message as its parts.

    Raises:
        ApiError: 400, its role is unknown.
    """
    role = message.role.lower()
    if role not in ROLES:
        roles = ", ".join(ROLES)
        raise ApiError(
            400, f"{role[:50]!r} is no role; the roles are {roles}", param=f"{path}.role"
        )
    where, content = f"{path}.content", message.content
    lines: tuple[Line, ...] = (content,) if content else ()
    lines = (*lines, *images_of(message.images, path))
    text = TextPart(where, lines) if lines else TextPart("", ())
    if role == "tool":
        name = message.tool_name or message.name
        return Message(path, role, (ResultPart((text,), message.tool_call_id, name),))
    thoughts: list[Part] = []
    if message.thinking is not None:
        thoughts = [ReasoningPart(f"{path}.thinking", message.thinking)]
    calls = [
        CallPart(
            f"{path}.tool_calls[{index}]",
            call.function.name,
            call_arguments(
                call.function.arguments, f"{path}.tool_calls[{index}].function.arguments"
            ),
            call.id or "",
        )
        for index, call in enumerate(message.tool_calls or ())
    ]
    return Message(path, role, (*thoughts, text, *calls), message.name)
