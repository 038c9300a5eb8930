"""Messages of the Messages API as parts of a `Conversation`."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.anthropic.blocks import (
    HIDDEN_TYPES,
    block_lines,
    content_lines,
    missing,
    required,
)
from ramify.server.anthropic.protocol import Block, InputMessage
from ramify.server.conversation.parts import (
    CallPart,
    HiddenPart,
    Message,
    Part,
    ReasoningPart,
    ResultPart,
    TextPart,
)
from ramify.server.request_fields.opaque_text import decode_opaque


def read_messages(messages: Sequence[InputMessage]) -> tuple[Message, ...]:
    """The messages of a request as their parts.

    Raises:
        ApiError: 400, a block cannot be served.
    """
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    return tuple(
        Message(f"messages[{index}]", message.role, _parts(message, index, last_user))
        for index, message in enumerate(messages)
    )


def _parts(message: InputMessage, index: int, last_user: int) -> tuple[Part, ...]:
    """The parts of message `index`; none if it is not shown."""
    is_cleared = message.clear_at == "next_user_message" and index < last_user
    if message.role == "system" and (message.content is None or is_cleared):
        return ()
    path = f"messages[{index}].content"
    content = message.content
    if content is None:
        raise missing(path)
    if isinstance(content, str):
        return (TextPart(path, (content,)),)
    return tuple(_part(block, f"{path}[{place}]") for place, block in enumerate(content)) or (
        TextPart("", ()),
    )


def _part(block: Block, path: str) -> Part:
    """A block as a part; the result of a tool is a message by itself."""
    ttl_s = None if block.cache_control is None else block.cache_control.ttl_s
    if block.type == "thinking":
        thought = block.thinking or decode_opaque(block.signature or "") or ""
        return ReasoningPart(path, thought, ttl_s)
    if block.type == "tool_use":
        name = required(block.name, f"{path}.name")
        arguments = call_arguments(block.input, f"{path}.input")
        return CallPart(path, name, arguments, block.id or "", ttl_s)
    if block.type == "tool_result":
        lines = tuple(content_lines(block.content, f"{path}.content"))
        return ResultPart((TextPart(path, lines, ttl_s),), block.tool_use_id or "")
    if block.type in HIDDEN_TYPES:
        return HiddenPart(path, ttl_s)
    return TextPart(path, tuple(block_lines(block, path)), ttl_s)
