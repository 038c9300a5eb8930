"""A conversation becomes token ids, and every token knows which part of it it came from."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.engine.text.incremental_encoder import Encoding, IncrementalEncoder
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError

TemplateMessage = Mapping[str, Any]
REASONING_TAGS = ("<think>", "</think>")  # marks of what a model thinks before it answers


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """A text with its tokens as the model read and wrote them."""

    text: str
    ids: array[int]


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Tokens `start` to `end` of a prompt came from the part `path`, as `messages[2].content`."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """The caller asks to keep the prompt up to the end of a part."""

    path: str
    num_tokens: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """What one request asks to be computed."""

    ids: array[int]
    text: str = ""
    segments: tuple[PromptSegment, ...] = ()  # ascending; between them is the template's own text
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    num_stable_tokens: int = 0  # tokens that a later turn of the conversation begins with as well

    def with_breakpoint(self, path: str, ttl_s: float) -> RenderedPrompt:
        """The same with a breakpoint behind all that the next turn begins with."""
        mark = CacheBreakpoint(path, self.num_stable_tokens, ttl_s)
        return replace(self, breakpoints=(*self.breakpoints, mark))

    def path_at(self, token: int) -> str:
        """The part that a token came from; template text belongs to the part after it."""
        for segment in self.segments:
            if token < segment.end:
                return segment.path
        return "generation_prompt" if self.segments else "prompt"


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A piece of a conversation that is looked for in the rendered text."""

    path: str
    texts: tuple[str, ...]  # forms in which a template may write it, the likeliest first
    ttl_s: float | None = None
    is_breakpoint: bool = False


class PromptRenderer:
    """Renders conversations with the checkpoint's template; a growing one is tokenised once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._encoder = IncrementalEncoder(tokenizer)
        self._template_drops_reasoning: bool | None = None  # until somebody asks

    def chat(
        self,
        messages: Sequence[TemplateMessage],
        parts: Sequence[PromptPart],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        add_generation_prompt: bool = True,
        known: Sequence[KnownPrefix] = (),
        tenant: str = "",
        **options: Any,
    ) -> RenderedPrompt:
        """The prompt of a conversation.

        Args:
            messages: as the template wants them: role and text content.
            parts: in the order in which they appear in the text.
            continue_final_message: the last message is the beginning of the answer, to be gone on with.
            add_generation_prompt: end with what begins the answer.
            known: texts with their tokens, longest first; a prompt that begins with one keeps
                them, as they came from the model, whatever the tokenizer would make of the text.
            tenant: whose earlier texts may make it faster.
            options: variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        render, guarded = self.tokenizer.apply_chat_template, self.tokenizer.escape_special_tokens
        messages, tools, options = guarded(messages), guarded(tools), guarded(options)
        parts = [replace(part, texts=tuple(guarded(part.texts))) for part in parts]
        text = render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            **options,
        )
        if continue_final_message:
            text = _cut_after(text, str(messages[-1]["content"]))
        stable = self._stable_text(text, messages, tools, options)
        front = next((one for one in known if one.text and text.startswith(one.text)), None)
        encoded = (
            self._encoder.encode(text, tenant)
            if front is None
            else self._extend_known(front, text, tenant)
        )
        places = list(_locate_parts(text, parts))
        cuts = sorted({cut for _, start, end in places for cut in (start, end)} | {len(stable)})
        at = {cut: bisect_right(encoded.end_offsets, cut) for cut in cuts}  # whole tokens before it
        segments = tuple(
            PromptSegment(part.path, at[start], at[end]) for part, start, end in places
        )
        breakpoints = tuple(
            CacheBreakpoint(part.path, at[end], part.ttl_s)
            for part, _, end in places
            if part.is_breakpoint
        )
        return RenderedPrompt(encoded.ids, text, segments, breakpoints, at[len(stable)])

    def _extend_known(self, known: KnownPrefix, text: str, tenant: str) -> Encoding:
        """Known tokens, and those of the text behind them."""
        front, ids = known.text, known.ids
        rest = self._encoder.encode(text[len(front) :], tenant)
        shift = len(front)
        # inside the known text only its length is sure: places in it are those of its own tokens
        own = self._encoder.encode(front, tenant).end_offsets
        ends = own[: len(ids)] + array("i", [shift]) * max(0, len(ids) - len(own))
        return Encoding(
            ids + rest.ids, ends + array("i", (shift + end for end in rest.end_offsets))
        )

    def template_drops_reasoning(self) -> bool:
        """Whether the template leaves out of history what an answer thought."""
        if self._template_drops_reasoning is None:
            talk = [
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": f"{REASONING_TAGS[0]}\n\u2042\n{REASONING_TAGS[1]}\n\nb",
                },
                {"role": "user", "content": "c"},
            ]
            try:
                self._template_drops_reasoning = "\u2042" not in self.tokenizer.apply_chat_template(
                    talk
                )
            except ChatTemplateError:  # it takes no such conversation
                self._template_drops_reasoning = False
        return self._template_drops_reasoning

    def _stable_text(
        self,
        text: str,
        messages: Sequence[TemplateMessage],
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


def _locate_parts(text: str, parts: Sequence[PromptPart]) -> Iterator[tuple[PromptPart, int, int]]:
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


def text_variants(content: str) -> tuple[str, ...]:
    """A message's text as templates write it: as it is, or stripped."""
    return (content, content.strip())


def json_variants(value: object) -> tuple[str, ...]:
    """A tool as templates write it."""
    return (
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, indent=4),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    )
