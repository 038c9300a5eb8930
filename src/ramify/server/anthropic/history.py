"""Messages of a conversation as chat templates take them, and the prompt parts of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.anthropic.blocks import (
    HIDDEN_TYPES,
    Unserved,
    block_text,
    blocks_of,
    content_text,
    required,
)
from ramify.server.anthropic.protocol import Block, InputMessage
from ramify.server.prompts.prompt_parts import (
    PromptPart,
    call_variants,
    result_variants,
    text_variants,
)
from ramify.server.request_fields.opaque_text import decode_opaque


@dataclass(slots=True)
class Turn:
    """A message of the request: its template messages, and its parts in the order of the text."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    parts: list[PromptPart] = field(default_factory=list)


def render_turns(messages: Sequence[InputMessage], unserved: Unserved) -> list[Turn]:
    """Translate the messages of a request, one turn for each.

    Args:
        unserved: is extended by path and type of blocks that became placeholders.

    Raises:
        ApiError: 400, a block cannot be served.
    """
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    turns = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role != "system":
            required(message.content, f"{path}.content")
        is_cleared = message.clear_at == "next_user_message" and index < last_user
        if message.role == "system" and (message.content is None or is_cleared):
            turns.append(Turn())
            continue
        turns.append(_turn(message.role, message.content, f"{path}.content", unserved))
    return turns


def _turn(role: str, content: str | list[Block] | None, path: str, unserved: Unserved) -> Turn:
    """A message; each tool result becomes a message by itself."""
    if isinstance(content, str):
        part = PromptPart(path, text_variants(content), role=role)
        return Turn([{"role": role, "content": content}], [part])
    turn = Turn()
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    is_shown = not content
    for index, block in enumerate(blocks_of(content)):
        where, part_role = f"{path}[{index}]", role
        if block.type == "thinking":
            thought = block.thinking or decode_opaque(block.signature or "") or ""
            variants = text_variants(thought)
            thoughts.append(thought)
        elif block.type == "tool_use":
            name = required(block.name, f"{where}.name")
            arguments = call_arguments(block.input, f"{where}.input")
            variants = call_variants(name, arguments)
            function = {"name": name, "arguments": arguments}
            calls.append({"id": block.id or "", "type": "function", "function": function})
        elif block.type == "tool_result":
            if texts:
                turn.messages.append({"role": role, "content": "\n".join(texts)})
                texts = []
            result = content_text(block.content, f"{where}.content", unserved)
            variants, part_role = result_variants(result), "tool"
            turn.messages.append(
                {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": result}
            )
        else:
            text = block_text(block, where, unserved)
            variants = text_variants(text)
            is_shown |= block.type not in HIDDEN_TYPES
            if text:
                texts.append(text)
        ttl_s = None if block.cache_control is None else block.cache_control.ttl_s
        may_be_dropped = block.type in ("thinking", "tool_use")
        turn.parts.append(PromptPart(where, variants, ttl_s, part_role, may_be_dropped))
    is_shown &= not turn.messages
    if texts or calls or thoughts or is_shown:
        message: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
        if thoughts:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        turn.messages.append(message)
    return turn
