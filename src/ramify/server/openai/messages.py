"""Messages and tools of OpenAI's chat format as parts of a `Conversation`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.conversation.conversation import ToolDefinition
from ramify.server.conversation.parts import (
    CallPart,
    HiddenPart,
    MediaPart,
    Message,
    Part,
    ReasoningPart,
    ResultPart,
    TextPart,
    line_text,
)
from ramify.server.errors import ApiError
from ramify.server.grammars.constraint import CallChoice
from ramify.server.openai.protocol import (
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    NamedTool,
    ToolCall,
)
from ramify.server.prompts.content_placeholders import PLACEHOLDER_NOUNS
from ramify.server.prompts.renderer import BREAKPOINT_TTL_S
from ramify.server.request_fields.reasoning_options import first_set

# Types of content parts: text of the message, and reasoning.
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "redacted_thinking"})
# Roles that templates call otherwise.
TEMPLATE_ROLES = {"developer": "system", "function": "tool"}


def read_message(message: ChatMessage, path: str, ttl_s: float) -> Message:
    """A message as its parts.

    Args:
        path: of the message. One that does not end in `]`, as `instructions`, is the content itself.
        ttl_s: of breakpoints that set no lifetime.

    Raises:
        ApiError: 400, its content or a call cannot be served.
    """
    role = TEMPLATE_ROLES.get(message.role, message.role)
    contents = content_parts(message.content, content_path(path), ttl_s)
    if role == "tool":
        texts = tuple(part for part in contents if isinstance(part, TextPart))
        result = ResultPart(texts, message.tool_call_id, message.name)
        return Message(path, role, (result,))
    if message.role == "assistant" and message.refusal:
        contents = _with_refusal(contents, TextPart(f"{path}.refusal", (message.refusal,)))
    calls = [
        CallPart(
            f"{path}.tool_calls[{index}]",
            call.function.name,
            call_arguments(
                call.function.arguments, f"{path}.tool_calls[{index}].function.arguments"
            ),
            call.id,
        )
        for index, call in enumerate(_calls(message))
    ]
    return Message(path, role, (*_reasoning(message, path), *contents, *calls), message.name)


def content_path(message: str) -> str:
    """The path of a message's content, from that of the message: see `read_message`."""
    return f"{message}.content" if message.endswith("]") else message


def content_text(content: str | list[ContentPart] | None, path: str) -> str:
    """The text of a message's content; its parts are joined by newlines.

    Raises:
        ApiError: 400, a part is of a type that is not served.
    """
    parts = content_parts(content, path, ttl_s=0.0)
    return line_text(line for part in parts if isinstance(part, TextPart) for line in part.lines)


def content_parts(
    content: str | list[ContentPart] | None, path: str, ttl_s: float
) -> list[TextPart | HiddenPart]:
    """The parts of a message's content; at least one is a text.

    Raises:
        ApiError: 400, a part is of a type that is not served.
    """
    if not isinstance(content, list):
        return [TextPart(path, (content,)) if content else TextPart("", ())]
    parts: list[TextPart | HiddenPart] = []
    for index, block in enumerate(content):
        point, where = block.prompt_cache_breakpoint, f"{path}[{index}]"
        own_ttl_s = None if point is None else BREAKPOINT_TTL_S.get(point.ttl or "", ttl_s)
        if block.type in REASONING_PARTS:
            parts.append(HiddenPart(where, own_ttl_s))
        else:
            parts.append(TextPart(where, (_line(block, where),), own_ttl_s))
    return [*parts, TextPart("", ())]


def _line(block: ContentPart, path: str) -> str | MediaPart:
    if block.type in PLACEHOLDER_NOUNS:
        return MediaPart(path, block.type)
    text = block.text if block.type in TEXT_PARTS else block.refusal
    if text is not None:
        return text
    if block.type in TEXT_PARTS:
        raise ApiError(400, "it is missing", param=f"{path}.text")
    raise ApiError(
        400,
        f"content of type {block.type!r} is not served by this model; send text",
        param=f"{path}.type",
    )


def _with_refusal(
    contents: list[TextPart | HiddenPart], refusal: TextPart
) -> list[TextPart | HiddenPart]:
    """Content, and the refusal on a line of its own."""
    if not any(isinstance(part, TextPart) and part.text for part in contents):
        contents = [
            replace(part, lines=()) if isinstance(part, TextPart) else part for part in contents
        ]
    return [*contents, refusal]


def _calls(message: ChatMessage) -> list[ToolCall]:
    """The tool calls of a message; the older `function_call` is one."""
    if message.function_call is not None and not message.tool_calls:
        return [ToolCall(message.function_call)]
    return message.tool_calls or []


def _reasoning(message: ChatMessage, path: str) -> list[Part]:
    """The reasoning of a message, in whichever form the client sends it back."""
    text = first_set(message.reasoning_content, message.reasoning)
    if text is None and isinstance(message.content, list):
        texts: list[str] = []
        for part in message.content:
            inner = part.thinking
            texts += (
                [inner] if isinstance(inner, str) else [part.text or "" for part in inner or ()]
            )
        text = "".join(texts) or None
    if text is None:
        return []
    # Items of the Responses API have no such field.
    field = f"{path}.reasoning_content" if path.startswith("messages[") else path
    return [ReasoningPart(field if text else "", text)]


def function_fields(function: FunctionDefinition) -> dict[str, Any]:
    """The fields of a function as chat templates take them: they write them as they are."""
    fields: dict[str, Any] = _without_none(msgspec.to_builtins(function))
    return fields


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def call_choice(
    choice: str | NamedTool | None, tools: Sequence[ToolDefinition], is_parallel: bool | None
) -> CallChoice:
    """Which calls an answer may have, from `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400, there is no tool of the name that must be called.
    """
    name, names = None, [tool.name for tool in tools]
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in names:
            raise ApiError(
                400,
                f"the tool {name!r} is not among the tools given: {', '.join(names) or 'none'}",
                param="tool_choice",
            )
    is_forced = choice not in (None, "auto", "none")
    return CallChoice(is_forced=is_forced, name=name, is_single=is_parallel is False)
