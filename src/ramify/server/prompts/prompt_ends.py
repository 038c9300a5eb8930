"""What a chat template writes at the end of a prompt, found once for all conversations of a shape.

Templates decide by roles, by which fields messages have, and by words that they look for in texts. So a
short conversation of the same shape tells, for any longer one without these words, what the end of its
prompt is, and whether the prompt of the next turn begins with all of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ramify.errors import ChatTemplateError
from ramify.server.prompts.answer_opening import TemplateMessage, find_turn_opening
from ramify.server.prompts.next_turns import num_stable_chars
from ramify.server.prompts.prompt_parts import result_variants, text_variants
from ramify.server.prompts.template_probes import SCHEMA

MAX_SHAPES = 1024  # remembered
MAX_MESSAGES = 24  # of a short conversation
MAX_OPTION_CHARS = 64
WORD = "a"  # every text of a short conversation
TOOL = {
    "type": "function",
    "function": {"name": WORD, "description": WORD, "parameters": SCHEMA},
}
# What a template looks for in a text: `'</think>' in content`, `content.split('</think>')`.
SOUGHT_WORD = re.compile(
    r"""(['"])(?P<left>[^'"\n]{3,})\1\s+(?:not\s+)?in\b"""
    r"""|\b(?:startswith|endswith|find|rfind|index|count|r?split|r?partition|replace)"""
    r"""\s*\(\s*(['"])(?P<argument>[^'"\n]{3,})\3"""
)

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
        """The opening in a prompt; None if its last message is not found right before it."""
        content = str(last.get("content") or "")
        variants = result_variants if last["role"] == "tool" else text_variants
        if not content.strip() or not text.endswith(self.opening):
            return None
        ends_so = any(text.endswith(each + self.opening) for each in variants(content))
        return self.opening if ends_so else None


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a message that a template may decide by."""

    role: str
    has_text: bool
    has_thought: bool | None  # None: there is no such field
    calls_with_arguments: tuple[bool, ...]  # for the first two calls
    has_name: bool

    @classmethod
    def of(cls, message: TemplateMessage) -> _Shape:
        thought = message.get("reasoning_content")
        calls = (message.get("tool_calls") or ())[:2]
        return cls(
            message["role"],
            bool(str(message.get("content") or "").strip()),
            None if thought is None else bool(thought.strip()),
            tuple(bool(call["function"]["arguments"]) for call in calls),
            "name" in message,
        )

    def message(self, id_: str) -> dict[str, Any]:
        """A short message of this shape."""
        message: dict[str, Any] = {"role": self.role, "content": WORD if self.has_text else ""}
        if self.has_name:
            message["name"] = WORD
        if self.role == "tool":
            message["tool_call_id"] = id_
        if self.has_thought is not None:
            message["reasoning_content"] = WORD if self.has_thought else ""
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
        tests = (match for source in sources for match in SOUGHT_WORD.finditer(source))
        self._sought_words = tuple({match["left"] or match["argument"] for match in tests})
        self._find = lru_cache(MAX_SHAPES)(self._find_end)

    def of(
        self,
        messages: Sequence[TemplateMessage],
        *,
        has_tools: bool,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> PromptEnd | None:
        """The end of a prompt; None if a short conversation does not tell it."""
        is_plain = all(
            value is None
            or isinstance(value, bool | int)
            or (isinstance(value, str) and len(value) <= MAX_OPTION_CHARS)
            for value in options.values()
        )
        if not is_plain or self._has_sought_word(messages):
            return None
        shapes = _shortened([_Shape.of(message) for message in messages])
        if len(shapes) > MAX_MESSAGES:
            return None
        typed = tuple((name, str(type(options[name])), options[name]) for name in sorted(options))
        return self._find(shapes, has_tools, add_generation_prompt, typed)

    def _has_sought_word(self, messages: Sequence[TemplateMessage]) -> bool:
        """Whether the template may find what it looks for in a text of a message."""
        texts = [
            text
            for message in messages
            for field in ("content", "reasoning_content")
            if (text := message.get(field))
        ]
        return any(word in text for word in self._sought_words for text in texts)

    def _find_end(
        self,
        shapes: tuple[_Shape, ...],
        has_tools: bool,
        add_generation_prompt: bool,
        options: tuple[Option, ...],
    ) -> PromptEnd | None:
        messages: list[dict[str, Any]] = []
        num_results = 0  # of the last message with calls
        for shape in shapes:
            messages.append(shape.message(str(num_results)))
            num_results = num_results + 1 if shape.role == "tool" else 0
        variables: dict[str, Any] = {"tools": [TOOL] if has_tools else None}
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
        may_call = has_tools or any(shape.role == "tool" for shape in shapes)
        num_stable = num_stable_chars(text, try_render, messages, has_tools=may_call)
        opening = find_turn_opening(render, messages, len(messages), text)
        return PromptEnd(opening, num_stable == len(text))


def _shortened(shapes: Sequence[_Shape]) -> tuple[_Shape, ...]:
    """Shapes without the turns, and the steps of a turn, that there are before.

    A turn begins with a message of the user; a step is a message with the results behind it, of which
    two are kept. The last two turns, and the last two steps of each, stay.
    """
    turns: list[list[tuple[_Shape, ...]]] = [[]]
    for shape in shapes:
        if shape.role == "tool" and turns[-1]:
            step = turns[-1][-1]
            if len(step) < 3:
                turns[-1][-1] = (*step, shape)
            continue
        if shape.role == "user":
            turns.append([])
        turns[-1].append((shape,))
    short = _without_repeats([_without_repeats(turn) for turn in turns if turn])
    return tuple(shape for turn in short for step in turn for shape in step)


def _without_repeats(items: Sequence[Any]) -> tuple[Any, ...]:
    """Items, of which only the last two may be as one before."""
    return (*dict.fromkeys(items[:-2]), *items[-2:])
