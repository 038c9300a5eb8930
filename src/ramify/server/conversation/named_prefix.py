"""Named prefixes in requests: the conversation that a request with `prefix` stands for.

One rule: system prompt and tools of a prompt are those of the prefix, as they stand before everything
else. A request may repeat them; others are refused. Its messages follow those of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ramify.counts import counted
from ramify.errors import shortened
from ramify.prompt_rules import BILLING, take_out
from ramify.server.conversation.conversation import Conversation, NamedPrefix, ToolDefinition
from ramify.server.conversation.parts import Message, Part, ResultPart
from ramify.server.errors import ApiError
from ramify.server.prompts.next_turns import common_prefix
from ramify.server.prompts.renderer import CacheBreakpoint, NamedSpan, RenderedPrompt
from ramify.server.service import RequestService

PATH = "prefix:"  # before the paths of a prefix's parts
NUM_LISTED = 8  # names in an error
NUM_QUOTED = 60  # characters of a text in an error


def prefix_of(service: RequestService, tenant: str, name: str | None) -> NamedPrefix | None:
    """The prefix that a request names: the tenant's own, else a public one; None: it names none.

    Raises:
        ApiError: 404, there is no such name.
    """
    if name is None:
        return None
    prefix = service.prefixes.get(tenant, name) or service.public_prefixes.get("", name)
    if isinstance(prefix, NamedPrefix):
        return prefix
    known = [*service.prefixes.of(tenant), *service.public_prefixes.of("")]
    names = ", ".join(
        repr(prefix.name) for prefix in known[:NUM_LISTED] if isinstance(prefix, NamedPrefix)
    )
    listed = f"there are {names}{', …' * (len(known) > NUM_LISTED)}" if known else "there are none"
    raise ApiError(
        404,
        f"there is no prefix {shortened(name, NUM_QUOTED)!r}; {listed}. POST /v1/prefixes makes it",
        param="prefix",
        code="prefix_not_found",
    )


def tools_with(
    prefix: NamedPrefix | None, own: Sequence[ToolDefinition]
) -> tuple[ToolDefinition, ...]:
    """The tools of a request: its own, or those of its prefix, which it may repeat.

    Raises:
        ApiError: 400, it has others.
    """
    if prefix is None or not own:
        return tuple(own) if prefix is None else prefix.tools
    for place, tool in enumerate(own):
        if place >= len(prefix.tools) or tool.function != prefix.tools[place].function:
            raise _other_tools(prefix, tool.path, f"{tool.name!r} is not its tool {place}")
    if len(own) < len(prefix.tools):
        missing = prefix.tools[len(own)].name
        raise _other_tools(prefix, "tools", f"{missing!r} is missing")
    return prefix.tools


def _other_tools(prefix: NamedPrefix, path: str, difference: str) -> ApiError:
    has = f"has {counted(len(prefix.tools), 'tool')}" if prefix.tools else "has no tools"
    return ApiError(
        400,
        f"the prefix {prefix.name!r} {has}, and {difference}; tools stand in the prefix: leave them out, "
        "or make a prefix with these",
        param=path,
        code="prefix_conflict",
    )


def with_prefix(conversation: Conversation) -> Conversation:
    """The conversation with system prompt and messages of its prefix before its own.

    Raises:
        ApiError: 400, it has another system prompt, or its beginning would be cut off.
    """
    prefix = conversation.prefix
    if prefix is None:
        return conversation
    if conversation.max_prompt_tokens is not None:
        raise ApiError(
            400,
            f"it cuts off the beginning of the prompt, where the prefix {prefix.name!r} stands; leave out "
            "one of them",
            param="truncate_prompt_tokens",
            code="prefix_conflict",
        )
    own = _system_messages(conversation.system, conversation.messages)
    texts = _texts(own)
    if texts and texts != _texts(_system_messages(prefix.system, prefix.messages)):
        has = "another" if prefix.system is not None or _leading(prefix.messages) else "no"
        raise ApiError(
            400,
            f"the prefix {prefix.name!r} has {has} system prompt, not {shortened(texts[0], NUM_QUOTED)!r}; "
            "the system prompt stands in the prefix: leave it out, send it as a later message, or make a "
            "prefix with it",
            param=own[0].path,
            code="prefix_conflict",
        )
    later = conversation.messages[_leading(conversation.messages) :]
    return replace(conversation, system=prefix.system, messages=(*prefix.messages, *later))


def _leading(messages: Sequence[Message]) -> int:
    """The number of system messages before the first of another role."""
    roles = (message.role for message in messages)
    return next((place for place, role in enumerate(roles) if role != "system"), len(messages))


def _system_messages(system: Message | None, messages: Sequence[Message]) -> list[Message]:
    beside = [] if system is None else [system]
    return [*beside, *messages[: _leading(messages)]]


def _texts(messages: Sequence[Message]) -> list[str]:
    """Their texts, without the line that differs in each request of a client."""
    texts = (take_out(message.text, [BILLING])[0] for message in messages)
    return [text for text in texts if text]


def with_span(
    conversation: Conversation, prompt: RenderedPrompt, warnings: list[str]
) -> RenderedPrompt:
    """The prompt of a conversation with the span of its prefix, which is to be pinned.

    With a salt it is cached apart, and not pinned there. A public prefix is pinned already. A prompt that
    goes on differently within the prefix is a warning.
    """
    prefix = conversation.prefix
    if prefix is None:
        return prompt
    num_tokens, num_shared = len(prefix.ids), common_prefix(prompt.ids, prefix.ids)
    is_whole = num_shared == num_tokens
    is_pinned = is_whole and not conversation.cache.salt and not prefix.is_public
    prompt = replace(prompt, named=NamedSpan(prefix.name, num_tokens, num_shared, is_pinned))
    if not is_whole:
        warnings.append(
            f"the prompt has the first {num_shared} of the {num_tokens} tokens of the prefix "
            f"{prefix.name!r}: the chat template writes something else there: for an option such as "
            "reasoning_effort, for the date, or since it has tools before the last message"
        )
    elif is_pinned:
        pinned = CacheBreakpoint(num_tokens, prefix.ttl_s)
        prompt = replace(prompt, breakpoints=(pinned, *prompt.breakpoints))
    return prompt


def as_prefix_message(message: Message) -> Message:
    """A message as part of a prefix: with its path, and without breakpoints."""
    return replace(
        message, path=PATH + message.path, parts=tuple(map(_as_prefix_part, message.parts))
    )


def as_prefix_tool(tool: ToolDefinition) -> ToolDefinition:
    """A tool as part of a prefix."""
    return replace(tool, path=PATH + tool.path, ttl_s=None)


def _as_prefix_part(part: Part) -> Part:
    if isinstance(part, ResultPart):
        texts = (replace(text, path=_path(text.path), ttl_s=None) for text in part.texts)
        return replace(part, texts=tuple(texts))
    return replace(part, path=_path(part.path), ttl_s=None)


def _path(path: str) -> str:
    return PATH + path if path else ""
