"""Parses an answer that marks reasoning and calls with delimiters, while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from ramify.server.model_dialects.events import OutputEvent
from ramify.server.model_dialects.reader import (
    EndOfAnswerError,
    Marks,
    MismatchError,
    Reader,
    Steps,
)
from ramify.server.model_dialects.writer import EventWriter

ReadCalls = Callable[[Reader, EventWriter], Steps[None]]


@dataclass(frozen=True, slots=True)
class CallForm:
    """A form of a family's calls: a mark, then what `read` reads.

    Where `mark` is "", a call can only be the first text of an answer, and begins with a character of
    `first`, or with any if that is "".

    Args:
        is_part: the mark is of the call itself, and `read` reads it too.
    """

    mark: str
    read: ReadCalls
    first: str = ""
    is_part: bool = False

    def from_mark(self, reader: Reader, writer: EventWriter) -> Steps[None]:
        """Read a call whose mark has been seen and is not consumed."""
        if not self.is_part:
            reader.take(len(self.mark))
        yield from self.read(reader, writer)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The delimiters of reasoning, each in the ways in which it is written; empty: there is none."""

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()

    @property
    def are_tags(self) -> bool:
        """Whether no sentence contains the delimiters."""
        return bool(self.end) and all(mark.endswith((">", "]")) for mark in self.end)

    def are_open_after(self, prompt_end: str) -> bool:
        """Whether the prompt has begun reasoning that the answer continues."""
        return _last(prompt_end, self.begin) > _last(prompt_end, self.end)


@dataclass(frozen=True, slots=True)
class Delimiters:
    """Delimiters of the parts of an answer.

    Args:
        forms: of calls; empty if the request has no tools.
        call_end: the mark after a call, "" if there is none.
        hidden: marks that are dropped where they delimit nothing.
        is_streamed: what is certain is written at once; else all that decides what it is may come first.
    """

    reasoning: ReasoningMarks
    forms: tuple[CallForm, ...]
    call_end: str
    hidden: tuple[str, ...]
    is_streamed: bool = True

    @property
    def call_marks(self) -> tuple[str, ...]:
        """The marks before calls, which are no part of them."""
        return tuple(form.mark for form in self.forms if form.mark and not form.is_part)

    @property
    def readers(self) -> dict[str, ReadCalls]:
        """What reads a call behind its mark, by mark."""
        return {form.mark: form.from_mark for form in self.forms if form.mark}

    def begun_call(self, prompt_end: str) -> str:
        """The end of the prompt from the mark of a call that has not ended; "" if there is none."""
        start = _last(prompt_end, self.call_marks)
        is_begun = start >= 0 and not self.reasoning.are_open_after(prompt_end[:start])
        if not is_begun or (self.call_end and self.call_end in prompt_end[start:]):
            return ""
        return prompt_end[start:]


def _last(text: str, marks: Collection[str]) -> int:
    """Start of the last mark in the text; -1 if it has none."""
    return max(map(text.rfind, marks), default=-1)


class AnswerSyntax(Protocol):
    """Reads a whole answer: reasoning, text and calls."""

    def __call__(
        self, reader: Reader, writer: EventWriter, *, delimiters: Delimiters, prompt_end: str
    ) -> Steps[None]:
        """Read an answer to its end.

        Args:
            prompt_end: the end of the prompt, from the header of the answer's turn on.
        """
        ...


class AnswerParser:
    """An `OutputParser` that runs the steps of a parser as text arrives."""

    def __init__(self, reader: Reader, writer: EventWriter, steps: Steps[None]) -> None:
        self._reader, self._writer, self._steps = reader, writer, steps

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        """See `OutputParser.feed`."""
        self._reader.append(text, is_last=is_last)
        next(self._steps, None)
        if is_last:
            self._writer.finish()
        return self._writer.take()


def delimited_answer(
    reader: Reader, writer: EventWriter, *, delimiters: Delimiters, prompt_end: str
) -> Steps[None]:
    """Read reasoning, then text and calls."""
    may_end = False
    try:
        prefill = delimiters.begun_call(prompt_end)
        if prefill:
            yield from _prefilled_call(reader, writer, delimiters, prefill)
        else:
            is_open = delimiters.reasoning.are_open_after(prompt_end)
            has_begun = yield from _reasoning(reader, writer, delimiters, is_open=is_open)
            may_end = not has_begun and delimiters.reasoning.are_tags
            if may_end and not delimiters.is_streamed:
                may_end = not (yield from _unopened_reasoning(reader, writer, delimiters))
            yield from bare_call(reader, writer, delimiters.forms, delimiters.hidden)
        yield from _text(reader, writer, delimiters, may_end=may_end)
    except EndOfAnswerError:
        writer.plain(reader.rest())


def _reasoning(
    reader: Reader, writer: EventWriter, delimiters: Delimiters, *, is_open: bool = False
) -> Steps[bool]:
    """Read reasoning, if the answer begins with it; returns whether it does."""
    marks = delimiters.reasoning
    if not marks.begin:
        return False
    write = writer.reasoning if is_open else writer.text
    write("")
    yield from reader.skip_blank(write)
    # A model may repeat the mark with which its prompt ends.
    begin = yield from reader.accept(*marks.begin)
    if not (is_open or begin):
        return False
    writer.reasoning("")
    writer.delimiter()
    # Fences stand in thoughts too often to be held.
    call_marks = {mark for mark in delimiters.call_marks if not mark.startswith("`")}
    end_marks = Marks({*marks.end, *delimiters.hidden, *call_marks})
    while (mark := (yield from reader.copy_until(end_marks, writer.reasoning))) not in marks.end:
        if mark in call_marks:
            yield from _call_in_reasoning(reader, writer, delimiters)
        else:
            reader.take(len(mark))
    reader.take(len(mark))
    writer.text("")
    return True


def _call_in_reasoning(reader: Reader, writer: EventWriter, delimiters: Delimiters) -> Steps[None]:
    """Read from the mark of a call in reasoning to the end of the reasoning, which tells what it is.

    Reasoning that ends has quoted it; the mark of the end is not consumed. Where the answer ends first,
    the model has called without ending its reasoning.
    """
    readers, hidden, quoted = delimiters.readers, delimiters.hidden, ""
    try:
        quoted = yield from _held_text(reader, (*delimiters.reasoning.end, *hidden), hidden)
    except EndOfAnswerError:
        reader.prepend(reader.release())
        marks = Marks({*readers, *hidden})
        while True:
            mark = yield from reader.copy_until(marks, writer.reasoning)
            if mark in readers:
                yield from attempt(reader, writer, readers[mark])
            else:
                reader.take(len(mark))
    reader.release()
    writer.reasoning(quoted)


def _unopened_reasoning(reader: Reader, writer: EventWriter, delimiters: Delimiters) -> Steps[bool]:
    """Read reasoning that nothing opens and a mark ends; returns whether there is any.

    So write models that were told not to think, and those whose template has lost the opening mark.
    """
    marks, hidden = delimiters.reasoning, delimiters.hidden
    ends = (*marks.begin, *marks.end, *delimiters.call_marks, *hidden)
    thought = mark = ""
    try:
        thought = yield from _held_text(
            reader, ends, set(hidden).difference(marks.begin, marks.end, delimiters.call_marks)
        )
        mark = yield from reader.next_is(*ends)
    except EndOfAnswerError:
        pass  # there is no mark
    held = reader.release()
    if mark not in marks.end:
        reader.prepend(held)
        return False
    writer.reasoning(thought)
    reader.take(len(mark))
    writer.text("")
    return True


def _held_text(reader: Reader, marks: Collection[str], dropped: Collection[str]) -> Steps[str]:
    """Consume and hold the text up to a mark that is not `dropped`; returns it without those."""
    parts, finder = list[str](), Marks(set(marks))
    reader.hold()
    while (mark := (yield from reader.copy_until(finder, parts.append))) in dropped:
        reader.take(len(mark))
    return "".join(parts)


def bare_call(
    reader: Reader, writer: EventWriter, forms: Collection[CallForm], marks: Collection[str]
) -> Steps[None]:
    """Read a call without a mark, if the answer begins with it, and not with one of `marks`."""
    bare = [form for form in forms if not form.mark]
    if not bare:
        return
    yield from reader.skip_blank(writer.text)
    marked = (form.mark for form in forms if form.mark)
    if (yield from reader.next_is(*marked, *marks)):
        return
    first = yield from reader.char()
    for form in bare:
        if not form.first or first in form.first:
            yield from attempt(reader, writer, form.read)
            return


def _text(
    reader: Reader, writer: EventWriter, delimiters: Delimiters, *, may_end: bool
) -> Steps[None]:
    """Read text and calls to the end of the answer, and reasoning that a hidden mark begins.

    Args:
        may_end: the first mark of reasoning may be its end: it is dropped, the text before it is out.
    """
    readers, hidden, reasoning = delimiters.readers, delimiters.hidden, delimiters.reasoning
    plain_marks = Marks({*readers, *hidden})
    marks = Marks({*readers, *hidden, *reasoning.begin, *reasoning.end}) if may_end else plain_marks
    while True:
        mark = yield from reader.copy_until(marks, writer.text)
        if mark not in hidden:
            marks = plain_marks
        if mark in readers:
            yield from attempt(reader, writer, readers[mark])
        elif mark in hidden and mark in reasoning.begin:
            yield from _reasoning(reader, writer, delimiters)
        elif mark in hidden or mark in reasoning.end:
            reader.take(len(mark))
        else:
            writer.text(reader.take(len(mark)))


def _prefilled_call(
    reader: Reader, writer: EventWriter, delimiters: Delimiters, prefill: str
) -> Steps[None]:
    """Read a call of which the prompt has the beginning, `prefill`, which is no text of the answer."""
    form = next(form for form in delimiters.forms if form.mark and prefill.startswith(form.mark))
    reader.prepend(prefill)
    yield from attempt(reader, writer, form.from_mark, len(prefill))


def attempt(
    reader: Reader, writer: EventWriter, read: ReadCalls, num_hidden: int = 0
) -> Steps[None]:
    """Read what may be a call; if it is none, it is text.

    Args:
        num_hidden: characters at the beginning that are of the prompt, not of the answer.
    """
    start = reader.num_taken

    def give_up() -> None:
        held = reader.release()
        num_before = reader.num_taken - len(held) - start
        writer.plain(held[max(0, num_hidden - num_before) :])

    reader.hold()
    try:
        yield from read(reader, writer)
        reader.release()
    except MismatchError:
        give_up()
    except EndOfAnswerError:
        if writer.is_open:
            reader.release()
            writer.arguments(reader.rest())
            writer.end_call(is_complete=False)
            reader.release()
        else:
            reader.rest()
            give_up()
        raise
    # The rest of what is of the prompt.
    reader.take(num_hidden - (reader.num_taken - start))
