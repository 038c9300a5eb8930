"""One answer of a generation: its text, reasoning and tool calls, as a list of parts that grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ramify.outputs import FinishReason, StepOutput, TokenLogprob
from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    OutputParser,
    ReasoningDelta,
    TextDelta,
)

TRUNCATED = (FinishReason.LENGTH, FinishReason.ABORT)  # ABORT: the server shut down
PartKind = Literal["text", "reasoning", "call"]


class PlainTextParser:
    """The parser of an answer that is text only."""

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:  # noqa: ARG002
        """The text, as it is; nothing is ever held back until `is_last`."""
        return [TextDelta(text)] if text else []


@dataclass(slots=True)
class AnswerPart:
    """Consecutive output of one kind: text, reasoning, or one tool call."""

    kind: PartKind
    index: int  # in `AnswerParts.parts`
    number: int  # among the parts of this kind
    name: str = ""  # of a call's tool
    id: str = ""  # of a call: "call_…"
    is_complete: bool = True  # False: a call that was cut off inside
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, the reasoning, or a call's arguments, as far as they were generated."""
        return "".join(self.pieces)


EMPTY_TEXT = AnswerPart("text", 0, 0)  # stands for an answer without parts; nothing is added to it


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part begins; it is empty."""

    part: AnswerPart


@dataclass(frozen=True, slots=True)
class PartDelta:
    """A part grows by `text`."""

    part: AnswerPart
    text: str


@dataclass(frozen=True, slots=True)
class PartEnd:
    """A part ends; the next one begins after it."""

    part: AnswerPart


def _num_chars(event: OutputEvent) -> int:
    match event:
        case TextDelta(text) | ReasoningDelta(text) | ArgumentsDelta(text=text):
            return len(text)
        case CallStart(name=name):
            return len(name)
        case CallEnd():
            return 0


PartEvent = PartBegin | PartDelta | PartEnd


@dataclass(slots=True)
class AnswerParts:
    """An answer of a generation, as far as it was generated.

    Every part begins, grows and ends before the next begins; the last ends with the answer.

    A step's tokens count as reasoning in proportion to the characters that it releases: all of them
    if it releases reasoning only. A step that releases nothing, because the parser holds its text,
    counts as the next step that does.
    """

    parser: OutputParser
    stop_token_ids: frozenset[int] = frozenset()  # they end an answer and are not shown with it
    ends_after_call: bool = False  # the first call is the end; what the model writes on is dropped
    parts: list[AnswerPart] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    _num_parts: dict[PartKind, int] = field(default_factory=dict)  # by kind
    _num_held_tokens: int = 0  # of the steps that released nothing yet
    _is_open: bool = False  # the last part still grows

    @property
    def text(self) -> str:
        """All text, without reasoning and calls."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def calls(self) -> list[AnswerPart]:
        """The tool calls, in order."""
        return [part for part in self.parts if part.kind == "call"]

    def visible_logprobs(self, event: StepOutput) -> tuple[TokenLogprob, ...]:
        """Logprobs of an event's tokens, without the stop token that ended the answer."""
        logprobs = event.logprobs
        if (
            event.finish_reason is FinishReason.STOP
            and logprobs
            and logprobs[-1].token_id in self.stop_token_ids
        ):
            return logprobs[:-1]
        return logprobs

    def add(self, step: StepOutput) -> list[PartEvent]:
        """Append the output of a step; returns what it changes, in order.

        The answer must not have ended. It ends with `finish_reason`, of the step or after its call.
        """
        assert self.finish_reason is None, "the answer has ended"
        self.logprobs += self.visible_logprobs(step)
        self.finish_reason = step.finish_reason
        events = self.parser.feed(step.text, is_last=step.finish_reason is not None)
        if self.ends_after_call and step.finish_reason is not FinishReason.ERROR:
            events = self._up_to_call(events)
        is_last = self.finish_reason is not None
        self._count_tokens(len(step.new_token_ids), events, is_last=is_last)
        changes: list[PartEvent] = []
        for event in events:
            self._append(event, changes)
        if is_last:
            self._end_part(changes)
        return changes

    def _up_to_call(self, events: list[OutputEvent]) -> list[OutputEvent]:
        """The events up to the end of a whole call, with which the answer ends."""
        for index, event in enumerate(events):
            if isinstance(event, CallEnd) and event.is_complete:
                self.finish_reason = FinishReason.STOP
                return events[: index + 1]
        return events

    def _count_tokens(
        self, num_tokens: int, events: Sequence[OutputEvent], *, is_last: bool
    ) -> None:
        self.num_tokens += num_tokens
        self._num_held_tokens += num_tokens
        num_chars = num_reasoning_chars = 0
        for event in events:
            num_chars += _num_chars(event)
            if isinstance(event, ReasoningDelta):
                num_reasoning_chars += len(event.text)
        if num_chars:
            share = num_reasoning_chars / num_chars
        elif is_last:
            share = float(self._is_open and self.parts[-1].kind == "reasoning")
        else:
            return
        self.num_reasoning_tokens += round(self._num_held_tokens * share)
        self._num_held_tokens = 0

    def _append(self, event: OutputEvent, changes: list[PartEvent]) -> None:
        match event:
            case TextDelta("") | ReasoningDelta(""):
                pass
            case TextDelta(text):
                self._grow(self._open_part("text", changes), text, changes)
            case ReasoningDelta(text):
                self._grow(self._open_part("reasoning", changes), text, changes)
            case CallStart(name=name, id=call_id):
                self._begin_part("call", changes, name, call_id)
            case ArgumentsDelta(text=text):
                self._grow(self.parts[-1], text, changes)
            case CallEnd(is_complete=is_complete):
                call = self.parts[-1]
                call.is_complete = is_complete
                if is_complete and not call.pieces:
                    self._grow(call, "{}", changes)  # clients parse the arguments as JSON
                self._end_part(changes)

    def _open_part(self, kind: PartKind, changes: list[PartEvent]) -> AnswerPart:
        """The part of this kind that grows; a new one after output of another kind."""
        if self._is_open and self.parts[-1].kind == kind:
            return self.parts[-1]
        return self._begin_part(kind, changes)

    def _begin_part(
        self, kind: PartKind, changes: list[PartEvent], name: str = "", call_id: str = ""
    ) -> AnswerPart:
        self._end_part(changes)
        number = self._num_parts.get(kind, 0)
        part = AnswerPart(kind, len(self.parts), number, name, call_id)
        self._num_parts[kind] = number + 1
        self.parts.append(part)
        self._is_open = True
        changes.append(PartBegin(part))
        return part

    def _end_part(self, changes: list[PartEvent]) -> None:
        if self._is_open:
            self._is_open = False
            changes.append(PartEnd(self.parts[-1]))

    @staticmethod
    def _grow(part: AnswerPart, text: str, changes: list[PartEvent]) -> None:
        if text:
            part.pieces.append(text)
            changes.append(PartDelta(part, text))
