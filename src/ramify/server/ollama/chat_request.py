"""Read requests of /api/chat: a `Conversation` of each, and the generation request of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.conversation.conversation import Conversation, ToolDefinition
from ramify.server.conversation.named_prefix import prefix_of, tools_with
from ramify.server.conversation.parts import (
    CallPart,
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


def refuse_images(images: Sequence[object] | None, path: str) -> None:
    """Raise ApiError 400 if there are images."""
    if images:
        raise ApiError(
            400, "images are not served: only the model's text part is; send text", param=path
        )


def _read_message(message: OllamaMessage, path: str) -> Message:
    """A message as its parts.

    Raises:
        ApiError: 400, its role is unknown, or it has images.
    """
    role = message.role.lower()
    if role not in ROLES:
        roles = ", ".join(ROLES)
        raise ApiError(
            400, f"{role[:50]!r} is no role; the roles are {roles}", param=f"{path}.role"
        )
    refuse_images(message.images, f"{path}.images")
    where, content = f"{path}.content", message.content
    text = TextPart(where, (content,)) if content else TextPart("", ())
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
