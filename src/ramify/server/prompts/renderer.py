"""Render conversations to token ids, and map request fields to the tokens that they became."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ramify.engine.text.incremental_encoder import Encoding, IncrementalEncoder
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError, PromptTooLongError
from ramify.prompt_rules import AppliedRule
from ramify.server.model_dialects.call_text import calls_text
from ramify.server.prompts.answer_opening import (
    RenderMessages,
    TemplateMessage,
    find_turn_opening,
    render_prefill,
)
from ramify.server.prompts.jobs import stop_if_abandoned
from ramify.server.prompts.next_turns import CALL, PLACEHOLDER, RESULT, num_stable_chars
from ramify.server.prompts.prompt_ends import PromptEnds
from ramify.server.prompts.prompt_parts import PromptPart, locate_parts
from ramify.server.prompts.template_conventions import WriteCalls
from ramify.server.prompts.template_probes import NEEDLE, find_conventions

JSON_CALLS: WriteCalls = partial(calls_text, "json", "")
_QUESTION: TemplateMessage = {"role": "user", "content": "a"}
MAX_BREAKPOINTS = 4  # of one request, the implicit one included
BREAKPOINT_TTL_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43_200.0, "24h": 86_400.0}


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """A text whose token ids are known, because the model read or wrote them."""

    text: str
    ids: array[int]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory."""
        return sys.getsizeof(self.text) + sys.getsizeof(self.ids)


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """Prompt tokens `[start, end)` came from the request field `path`, as `messages[2].content`."""

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class CacheBreakpoint:
    """The caller asks to pin the first `num_tokens` of the prompt for `ttl_s`; None: until it is unpinned."""

    num_tokens: int
    ttl_s: float | None


@dataclass(frozen=True, slots=True)
class NamedSpan:
    """The named prefix that a prompt was made with.

    Args:
        num_tokens: of the prefix.
        num_shared: of these, how many the prompt begins with: all, unless the request sets variables
            that the chat template writes before them.
        is_pinned: the request asks to pin them, if they are not.
    """

    name: str
    num_tokens: int
    num_shared: int
    is_pinned: bool = False

    def as_json(self, num_read: int) -> dict[str, Any]:
        """For a client: name, length, and how many of its tokens `num_read` tokens of the prompt cover."""
        num_covered = min(num_read, self.num_shared)
        return {"name": self.name, "tokens": self.num_tokens, "read": num_covered}


@dataclass(frozen=True, slots=True)
class ToolsBehindSystem:
    """Tools that stand behind the system prompt, and are computed again when it changes.

    Args:
        system_end, tools_end: in tokens of the prompt.
        can_be_first: the server can write them before it.
    """

    system_end: int
    tools_end: int
    can_be_first: bool


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Token ids of a prompt, and which request field each token came from."""

    ids: array[int]
    text: str = ""
    segments: tuple[PromptSegment, ...] = ()  # ascending; the template's own text lies between them
    breakpoints: tuple[CacheBreakpoint, ...] = ()
    num_stable_tokens: int = 0  # length of the prefix that the next turn's prompt shares
    num_earlier_tokens: int = 0  # up to the end of the message before the last answer; 0: no answer
    # The end of `text` after the messages: the header of the answer's turn, and what the template
    # or a prefill has begun of the answer.
    turn_opening: str = ""
    tools_behind_system: ToolsBehindSystem | None = None
    named: NamedSpan | None = None
    rules: tuple[AppliedRule, ...] = ()  # that have taken text out of the system prompt
    placeholders: tuple[
        str, ...
    ] = ()  # paths of images, audio and files that the model cannot read

    def with_breakpoint(self, ttl_s: float) -> RenderedPrompt:
        """Append a breakpoint at the end of the prefix that the next turn shares."""
        breakpoint_ = CacheBreakpoint(self.num_stable_tokens, ttl_s)
        return replace(self, breakpoints=(*self.breakpoints, breakpoint_))

    def last_tokens(self, num_tokens: int) -> RenderedPrompt:
        """The prompt without the tokens before its last `num_tokens`, which have no text any more."""
        cut = len(self.ids) - num_tokens
        if cut <= 0:
            return self
        segments = tuple(
            PromptSegment(segment.path, max(0, segment.start - cut), segment.end - cut)
            for segment in self.segments
            if segment.end > cut
        )
        breakpoints = tuple(
            CacheBreakpoint(point.num_tokens - cut, point.ttl_s)
            for point in self.breakpoints
            if point.num_tokens > cut
        )
        num_stable = max(0, self.num_stable_tokens - cut)
        num_earlier = max(0, self.num_earlier_tokens - cut)
        return replace(
            self,
            ids=self.ids[cut:],
            text="",
            segments=segments,
            breakpoints=breakpoints,
            num_stable_tokens=num_stable,
            num_earlier_tokens=num_earlier,
            tools_behind_system=None,
        )

    def with_turns(self, turns: Sequence[tuple[str, str]]) -> RenderedPrompt:
        """The prompt with `num_earlier_tokens`, given request field and role of each message."""
        roles = [role for _, role in turns[:-1]]
        if "assistant" not in roles:
            return self
        last = len(roles) - roles[::-1].index("assistant") - 1
        while last and roles[last - 1] == "assistant":
            last -= 1
        paths = tuple(path for path, _ in turns[:last])
        ends = [segment.end for segment in self.segments if segment.path.startswith(paths)]
        return replace(self, num_earlier_tokens=max(ends, default=0))

    def path_at(self, token: int) -> str:
        """The request field that a token came from; template text counts to the field after it."""
        for segment in self.segments:
            if token < segment.end:
                return segment.path
        return "generation_prompt" if self.segments else "prompt"

    def max_shared_tokens(self, *, breakpoints_only: bool = False) -> int | None:
        """Number of prompt tokens that may stay cached for other requests; None: all.

        The next turn does not begin with the tokens after `num_stable_tokens`; what the caller asks
        to pin stays nevertheless.

        Args:
            breakpoints_only: nothing after the last breakpoint may stay.
        """
        num_pinned = max((point.num_tokens for point in self.breakpoints), default=0)
        if breakpoints_only:
            return num_pinned
        num_shared = max(num_pinned, self.num_stable_tokens)
        return num_shared if num_shared < len(self.ids) else None


class PromptRenderer:
    """Renders conversations with the checkpoint's chat template.

    Encodes incrementally: of a growing conversation, only the new text is tokenised. Several threads
    may use it.

    Args:
        max_tokens: PromptTooLongError for a text with more; None: no limit.
        max_model_len: the limit that the error names; by default `max_tokens`.
        write_calls: for templates that have no place for calls.
        tools_first: write tools before the system prompt, if the template can.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int | None = None,
        max_model_len: int | None = None,
        write_calls: WriteCalls = JSON_CALLS,
        tools_first: bool = False,
    ) -> None:
        self.tokenizer, self._max_model_len = tokenizer, max_model_len
        self.conventions = find_conventions(tokenizer, tools_first=tools_first)
        self._write_calls = write_calls
        self._ends = PromptEnds(self._render, tokenizer.chat_template_sources)
        self._encoder = IncrementalEncoder(tokenizer, max_text_tokens=max_tokens)

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
        template_options: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """Render and tokenise the prompt of a conversation.

        Args:
            messages: as the template takes them: role and text content.
            parts: fields to locate, in the order of the request: of each of `tools`, system prompt,
                messages.
            continue_final_message: the last message is the beginning of the answer.
            add_generation_prompt: end with the header of the assistant's turn.
            known: texts with their token ids, longest first. A prompt that begins with one of them
                keeps these ids, even if the tokenizer would split the text otherwise.
            tenant: only texts that this tenant sent before are reused for tokenising.
            template_options: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
            PromptTooLongError: the text has more tokens than `max_tokens`.
        """
        escape = self.tokenizer.escape_special_tokens
        messages, tools, options = escape(messages), escape(tools), escape(template_options or {})
        parts = [replace(part, texts=tuple(escape(part.texts))) for part in parts]
        render: Callable[..., str] = partial(self._render, tools=tools, **options)
        if continue_final_message:
            render_prompt: RenderMessages = partial(render_prefill, render)
        else:
            render_prompt = partial(render, add_generation_prompt=add_generation_prompt)
        text = render_prompt(messages)
        stop_if_abandoned()
        end = (
            None
            if continue_final_message
            else self._ends.of(
                messages,
                tools=tools or (),
                add_generation_prompt=add_generation_prompt,
                options=options,
            )
        )
        num_stable = len(text)
        if end is None or not end.is_stable:
            num_stable = num_stable_chars(
                text,
                partial(self._try_render, tools=tools, **options),
                messages,
                has_tools=bool(tools) or any(message["role"] == "tool" for message in messages),
            )
            stop_if_abandoned()
        turn_opening = None if end is None else end.opening_of(text, messages[-1])
        if turn_opening is None:
            num_earlier = len(messages) - 1 if continue_final_message else len(messages)
            turn_opening = find_turn_opening(render_prompt, messages, num_earlier, text)
        prefix = next(
            (prefix for prefix in known if prefix.text and text.startswith(prefix.text)), None
        )
        stop_if_abandoned()
        encoding = (
            self._encode(text, tenant)
            if prefix is None
            else self._extend_known(prefix, text, tenant)
        )
        spans = locate_parts(text, parts, tools or (), self.conventions)
        offsets = {offset for _, start, end in spans for offset in (start, end)}
        # the number of whole tokens before each offset
        num_tokens = {
            offset: bisect_right(encoding.end_offsets, offset) for offset in offsets | {num_stable}
        }
        segments = tuple(
            PromptSegment(part.path, num_tokens[start], num_tokens[end])
            for part, start, end in spans
        )
        breakpoints = tuple(
            CacheBreakpoint(num_tokens[end], part.ttl_s)
            for part, _, end in spans
            if part.ttl_s is not None
        )
        return RenderedPrompt(
            encoding.ids,
            text,
            segments,
            breakpoints,
            num_stable_tokens=num_tokens[num_stable],
            turn_opening=turn_opening,
            tools_behind_system=self._tools_behind_system(
                [(part.role, num_tokens[end]) for part, start, end in spans if start < end]
            ),
        )

    def _tools_behind_system(self, ends: Sequence[tuple[str, int]]) -> ToolsBehindSystem | None:
        """Tools behind the system prompt, given roles and ends of the fields that were located."""
        system_end = max((end for role, end in ends if role == "system"), default=0)
        tools_end = max((end for role, end in ends if role == "tools"), default=0)
        if not system_end or self.conventions.has_tools_first or tools_end <= system_end:
            return None
        return ToolsBehindSystem(system_end, tools_end, self.conventions.can_write_tools_first)

    def _render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """Render messages in OpenAI's form, with arguments as objects, as the template reads them."""
        adapted = self.conventions.adapt(messages, self._write_calls)
        adapted, variables = self.conventions.adapt_tools(adapted, tools)
        return self.tokenizer.apply_chat_template(
            adapted, add_generation_prompt=add_generation_prompt, **variables | options
        )

    def _encode(self, text: str, tenant: str) -> Encoding:
        try:
            return self._encoder.encode(text, tenant)
        except PromptTooLongError as error:
            limit = error.limit if self._max_model_len is None else self._max_model_len
            raise PromptTooLongError(error.num_tokens, limit) from None

    def _extend_known(self, known: KnownPrefix, text: str, tenant: str) -> Encoding:
        """The known ids, then those of the text after them."""
        shift = len(known.text)
        suffix = self._encode(text[shift:], tenant)
        # Where the known tokens end in their text is not recorded. Use the offsets of the
        # tokenizer's own tokens, as many as there are known ids.
        offsets = self._encode(known.text, tenant).end_offsets
        num_missing = max(0, len(known.ids) - len(offsets))
        offsets = offsets[: len(known.ids)] + array("i", [shift]) * num_missing
        return Encoding(
            known.ids + suffix.ids,
            offsets + array("i", (shift + end for end in suffix.end_offsets)),
        )

    @cached_property
    def drops_reasoning(self) -> bool:
        """True if the template leaves the reasoning of earlier answers out of the prompt."""
        answer = {"role": "assistant", "content": "b", "reasoning_content": PLACEHOLDER}
        text = self._try_render([_QUESTION, answer, _QUESTION])
        return text is not None and PLACEHOLDER not in text

    @cached_property
    def drops_call_reasoning(self) -> bool:
        """True if it leaves out the reasoning before a call whose result comes next."""
        call = {**CALL, "reasoning_content": NEEDLE}
        text = self._try_render([_QUESTION, call, RESULT])
        return text is not None and NEEDLE not in text

    def _try_render(self, messages: Sequence[TemplateMessage], **options: Any) -> str | None:
        """The text of a conversation; None if the template refuses it."""
        try:
            return self._render(messages, **options)
        except ChatTemplateError:
            return None
