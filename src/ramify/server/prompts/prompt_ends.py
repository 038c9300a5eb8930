"""What a chat template writes at the end of a prompt, rendered once for all conversations of one shape.

Templates decide by roles, by which fields messages have, and by words that they look for in texts. So a
short conversation of the same shape tells, for any longer one without these words, what the end of its
prompt is, and whether the prompt of the next turn begins with all of it. Of templates that decide by
anything else, the whole conversation is rendered: see `template_tests`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ramify.errors import ChatTemplateError
from ramify.server.prompts.answer_opening import TemplateMessage, find_turn_opening
from ramify.server.prompts.next_turns import num_stable_chars
from ramify.server.prompts.prompt_parts import result_variants, text_variants
from ramify.server.prompts.template_probes import SCHEMA
from ramify.server.prompts.template_tests import TemplateTests

MAX_SHAPES = 1024  # remembered
MAX_MESSAGES = 24  # of a short conversation
MAX_OPTION_CHARS = 64
WORD = "ab"  # of every text of a short conversation
TOOL = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": SCHEMA},
}
Render = Callable[..., str]  # messages, tools and options → text
# Name, type and value: 1 and True are equal, but not for a template.
Option = tuple[str, str, bool | int | str | None]


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The end of prompts of one shape.

    Args:
        opening: see `find_turn_opening`.
        is_stable: the prompt of the next turn begins with the whole prompt.
    """

    opening: str
    is_stable: bool

    def opening_of(self, text: str, last: TemplateMessage) -> str | None:
        """The opening in a prompt; None unless its last message stands right before it."""
        content = str(last.get("content") or "")
        variants = result_variants if last["role"] == "tool" else text_variants
        if not content.strip() or not text.endswith(self.opening):
            return None
        ends_so = any(text.endswith(variant + self.opening) for variant in variants(content))
        return self.opening if ends_so else None


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a message that a template may decide by."""

    role: str
    text: str  # see `_short`
    thought: str | None  # None: there is no such field
    calls_with_arguments: tuple[bool, ...]  # for the first two calls
    has_name: bool

    @classmethod
    def of(cls, message: TemplateMessage) -> _Shape:
        thought = message.get("reasoning_content")
        calls = (message.get("tool_calls") or ())[:2]
        return cls(
            message["role"],
            _short(str(message.get("content") or "")),
            None if thought is None else _short(thought),
            tuple(bool(call["function"]["arguments"]) for call in calls),
            "name" in message,
        )

    def message(self, id_: str) -> dict[str, Any]:
        """A short message of this shape."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.has_name:
            message["name"] = WORD
        if self.role == "tool":
            message["tool_call_id"] = id_
        if self.thought is not None:
            message["reasoning_content"] = self.thought
        if self.calls_with_arguments:
            message["tool_calls"] = [
                {
                    "id": str(number),
                    "type": "function",
                    "function": {"name": WORD, "arguments": {WORD: WORD} if has_any else {}},
                }
                for number, has_any in enumerate(self.calls_with_arguments)
            ]
        return message


class PromptEnds:
    """Finds the ends of prompts. Thread-safe; what it finds depends on no earlier request.

    Args:
        render: raises ChatTemplateError for messages that the template refuses.
        sources: of the templates.
    """

    def __init__(self, render: Render, sources: Iterable[str]) -> None:
        self._render = render
        self._tests = TemplateTests.of(sources)
        self._find = lru_cache(MAX_SHAPES)(self._find_end)

    def of(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> PromptEnd | None:
        """The end of a prompt; None if a short conversation does not tell it."""
        if self._tests.is_unknown or not all(map(_is_plain, options.values())):
            return None
        if any(map(self._tests.are_passed_by, _texts(messages, tools))):
            return None
        shapes = _shortened([_Shape.of(message) for message in messages])
        if len(shapes) > MAX_MESSAGES:
            return None
        typed = tuple((name, str(type(options[name])), options[name]) for name in sorted(options))
        return self._find(shapes, min(len(tools), 2), add_generation_prompt, typed)

    def _find_end(
        self,
        shapes: tuple[_Shape, ...],
        num_tools: int,
        add_generation_prompt: bool,
        options: tuple[Option, ...],
    ) -> PromptEnd | None:
        messages: list[dict[str, Any]] = []
        num_results = 0  # of the last message with calls
        for shape in shapes:
            messages.append(shape.message(str(num_results)))
            num_results = num_results + 1 if shape.role == "tool" else 0
        variables: dict[str, Any] = {"tools": [TOOL] * num_tools or None}
        variables |= {name: value for name, _, value in options}

        def render(conversation: Sequence[TemplateMessage]) -> str:
            return self._render(
                conversation, add_generation_prompt=add_generation_prompt, **variables
            )

        def try_render(conversation: Sequence[TemplateMessage]) -> str | None:
            try:
                return self._render(conversation, **variables)
            except ChatTemplateError:
                return None

        try:
            text = render(messages)
        except ChatTemplateError:
            return None
        may_call = num_tools > 0 or any(shape.role == "tool" for shape in shapes)
        num_stable = num_stable_chars(text, try_render, messages, has_tools=may_call)
        opening = find_turn_opening(render, messages, len(messages), text)
        return PromptEnd(opening, num_stable == len(text))


def _short(text: str) -> str:
    """A text for one that begins and ends with the same white space, or has nothing else."""
    if not text.strip():
        return text[:1]
    return (text[0] if text[0].isspace() else "") + WORD + (text[-1] if text[-1].isspace() else "")


def _is_plain(option: object) -> bool:
    """Whether a variable can be remembered, and counts nothing."""
    if isinstance(option, str):
        return len(option) <= MAX_OPTION_CHARS
    return option is None or option in (0, 1)


def _texts(
    messages: Sequence[TemplateMessage], tools: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Texts of a conversation, with the names of tools; some templates get calls as texts."""
    for message in messages:
        fields = (message.get(field) for field in ("content", "reasoning_content", "name"))
        yield from (text for text in fields if text)
        for call in message.get("tool_calls") or ():
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            yield from (name, *arguments, json.dumps(arguments, ensure_ascii=False))
            yield from (value for value in arguments.values() if isinstance(value, str))
    for tool in tools:
        yield tool["function"]["name"]


def _shortened(shapes: Sequence[_Shape]) -> tuple[_Shape, ...]:
    """Shapes without the turns, and the steps of a turn, that there are before.

    A turn begins with a message of the user; a step is a message with the results behind it, of which
    the first and the last are kept. The last two turns, and the last two steps of each, stay.
    """
    turns: list[list[tuple[_Shape, ...]]] = [[]]
    for shape in shapes:
        if shape.role == "tool" and turns[-1]:
            step = turns[-1][-1]
            turns[-1][-1] = (*step[:2], shape)
            continue
        if shape.role == "user":
            turns.append([])
        turns[-1].append((shape,))
    short = _without_repeats([_without_repeats(turn) for turn in turns if turn])
    return tuple(shape for turn in short for step in turn for shape in step)


def _without_repeats(items: Sequence[Any]) -> tuple[Any, ...]:
    """Items, of which only the last two may be as one before."""
    return (*dict.fromkeys(items[:-2]), *items[-2:])
