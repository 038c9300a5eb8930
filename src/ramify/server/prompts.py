"""A conversation becomes token ids, and every token knows which part of it it came from."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.engine.growing import Encoded, GrowingEncoder
from ramify.engine.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError

Message = Mapping[str, Any]
THINK = ("<think>", "</think>")  # marks of what a model thinks before it answers


@dataclass(frozen=True, slots=True)
class Known:
    """A text with its tokens as the model read and wrote them."""

    text: str
    ids: array[int]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `end` of a prompt came from the part `path`, as `messages[2].content`."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The caller asks to keep the prompt up to the end of a part."""

    path: str
    num_tokens: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks to be computed."""

    ids: array[int]
    text: str = ""
    segments: tuple[Segment, ...] = ()  # ascending; between them is the template's own text
    breakpoints: tuple[Breakpoint, ...] = ()
    stable_len: int = 0  # tokens that a later turn of the conversation begins with as well

    def with_breakpoint(self, path: str, ttl_s: float) -> Prompt:
        """The same with a breakpoint behind all that the next turn begins with."""
        mark = Breakpoint(path, self.stable_len, ttl_s)
        return replace(self, breakpoints=(*self.breakpoints, mark))

    def path_at(self, token: int) -> str:
        """The part that a token came from; template text belongs to the part after it."""
        for segment in self.segments:
            if token < segment.end:
                return segment.path
        return "generation_prompt" if self.segments else "prompt"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a conversation that is looked for in the rendered text."""

    path: str
    texts: tuple[str, ...]  # forms in which a template may write it, the likeliest first
    ttl_s: float | None = None
    is_breakpoint: bool = False


class PromptMaker:
    """Renders conversations with the checkpoint's template; a growing one is tokenised once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._encoder = GrowingEncoder(tokenizer)
        self._drops_thinking: bool | None = None  # until somebody asks

    def chat(
        self,
        messages: Sequence[Message],
        parts: Sequence[Part],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continues: bool = False,
        opens: bool = True,
        known: Sequence[Known] = (),
        owner: str = "",
        **options: Any,
    ) -> Prompt:
        """The prompt of a conversation.

        Args:
            messages: as the template wants them: role and text content.
            parts: in the order in which they appear in the text.
            continues: the last message is the beginning of the answer, to be gone on with.
            opens: end with what begins the answer.
            known: texts with their tokens, longest first; a prompt that begins with one keeps
                them, as they came from the model, whatever the tokenizer would make of the text.
            owner: whose earlier texts may make it faster.
            options: variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        render, guarded = self.tokenizer.apply_chat_template, self.tokenizer.guarded
        messages, tools, options = guarded(messages), guarded(tools), guarded(options)
        parts = [replace(part, texts=tuple(guarded(part.texts))) for part in parts]
        text = render(
            messages, tools=tools, add_generation_prompt=opens and not continues, **options
        )
        if continues:
            text = _cut_after(text, str(messages[-1]["content"]))
        stable = self._stable_text(text, messages, tools, options)
        front = next((one for one in known if one.text and text.startswith(one.text)), None)
        encoded = (
            self._encoder.encode(text, owner) if front is None else self._behind(front, text, owner)
        )
        places = list(_places(text, parts))
        cuts = sorted({cut for _, start, end in places for cut in (start, end)} | {len(stable)})
        at = {cut: bisect_right(encoded.ends, cut) for cut in cuts}  # whole tokens before it
        segments = tuple(Segment(part.path, at[start], at[end]) for part, start, end in places)
        breakpoints = tuple(
            Breakpoint(part.path, at[end], part.ttl_s)
            for part, _, end in places
            if part.is_breakpoint
        )
        return Prompt(encoded.ids, text, segments, breakpoints, at[len(stable)])

    def _behind(self, known: Known, text: str, owner: str) -> Encoded:
        """Known tokens, and those of the text behind them."""
        front, ids = known.text, known.ids
        rest = self._encoder.encode(text[len(front) :], owner)
        shift = len(front)
        # inside the known text only its length is sure: places in it are those of its own tokens
        own = self._encoder.encode(front, owner).ends
        ends = own[: len(ids)] + array("i", [shift]) * max(0, len(ids) - len(own))
        return Encoded(ids + rest.ids, ends + array("i", (shift + end for end in rest.ends)))

    def drops_thinking(self) -> bool:
        """Whether the template leaves out of history what an answer thought."""
        if self._drops_thinking is None:
            talk = [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": f"{THINK[0]}\n\u2042\n{THINK[1]}\n\nb"},
                {"role": "user", "content": "c"},
            ]
            try:
                self._drops_thinking = "\u2042" not in self.tokenizer.apply_chat_template(talk)
            except ChatTemplateError:  # it takes no such conversation
                self._drops_thinking = False
        return self._drops_thinking

    def _stable_text(
        self,
        text: str,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> str:
        """What of a prompt stands in the next turn's prompt too, whatever the answer is."""
        answer = {"role": "assistant", "content": "\u2042"}
        render = self.tokenizer.apply_chat_template
        try:
            later = render(
                [*messages, answer, {"role": "user", "content": "\u2042"}],
                tools=tools,
                add_generation_prompt=True,
                **options,
            )
        except ChatTemplateError:  # nothing can follow: it is not the template's usual order
            return text
        return text[: common_prefix(text, later)]


def common_prefix(one: str | array[int], other: str | array[int]) -> int:
    """How many characters or tokens two sequences begin with alike. O(log n) comparisons."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _cut_after(text: str, content: str) -> str:
    """Drop what the template writes after the last message."""
    place = text.rfind(content.strip())
    return text if place < 0 or not content.strip() else text[: place + len(content.strip())]


def _places(text: str, parts: Sequence[Part]) -> Iterator[tuple[Part, int, int]]:
    """Where each part stands; one that the template rewrote has an empty place."""
    cursor = 0
    for part in parts:
        for form in part.texts:
            start = text.find(form, cursor) if form else -1
            if start >= 0:
                yield part, start, start + len(form)
                cursor = start + len(form)
                break
        else:
            yield part, cursor, cursor


def text_forms(content: str) -> tuple[str, ...]:
    """A message's text as templates write it: as it is, or stripped."""
    return (content, content.strip())


def json_forms(value: object) -> tuple[str, ...]:
    """A tool as templates write it."""
    return (
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, indent=4),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    )
