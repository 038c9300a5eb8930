"""Parses an answer that marks reasoning and calls with delimiters, while it is generated."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ramify.server.output_formats.events import OutputEvent
from ramify.server.output_formats.reader import (
    EndOfAnswerError,
    Marks,
    MismatchError,
    Reader,
    Steps,
)
from ramify.server.output_formats.writer import EventWriter

CallSyntax = Callable[[Reader, EventWriter], Steps[None]]


@dataclass(frozen=True, slots=True)
class CallForm:
    """One way in which a family writes calls: a mark, then a syntax.

    Where `mark` is "", a call can only be the first text of an answer, and begins with a character of
    `first`.
    """

    mark: str
    syntax: CallSyntax
    first: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The delimiters of reasoning; `begin` is "" if a family has no reasoning."""

    begin: str = ""
    end: str = ""


class AnswerParser:
    """An `OutputParser` that runs the steps of a parser as text arrives."""

    def __init__(self, reader: Reader, writer: EventWriter, steps: Steps[None]) -> None:
        self._reader, self._writer, self._steps = reader, writer, steps

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        """Append text of the answer; returns the events that are certain now.

        Args:
            is_last: the answer ends here. Returns everything that was held back; open calls end.
        """
        self._reader.append(text, is_last=is_last)
        next(self._steps, None)
        if is_last:
            self._writer.finish()
        return self._writer.take()


def delimited_answer(
    reader: Reader,
    writer: EventWriter,
    *,
    reasoning: ReasoningMarks,
    forms: Collection[CallForm],
    hidden: Collection[str],
    is_reasoning: bool,
    prefill: str,
) -> Steps[None]:
    """Read reasoning, then text and calls.

    Args:
        hidden: marks that are dropped where they delimit nothing.
        is_reasoning: the prompt has begun the reasoning.
        prefill: the beginning of a call, mark included, with which the prompt ends.
    """
    try:
        if prefill:
            yield from _prefilled_call(reader, writer, forms, prefill)
        else:
            yield from _reasoning(reader, writer, reasoning, hidden, is_open=is_reasoning)
            yield from _bare_call(reader, writer, forms)
        yield from _text(reader, writer, forms, hidden)
    except EndOfAnswerError:
        writer.plain(reader.rest())


def _reasoning(
    reader: Reader,
    writer: EventWriter,
    marks: ReasoningMarks,
    hidden: Collection[str],
    *,
    is_open: bool,
) -> Steps[None]:
    if not marks.begin:
        return
    write = writer.reasoning if is_open else writer.text
    write("")
    yield from reader.skip_blank(write)
    # A model may repeat the mark with which its prompt ends.
    begin = yield from reader.accept(marks.begin)
    if not (is_open or begin):
        return
    writer.reasoning("")
    end_marks = Marks({marks.end, *hidden})
    while (mark := (yield from reader.copy_until(end_marks, writer.reasoning))) != marks.end:
        reader.take(len(mark))
    reader.take(len(marks.end))
    writer.text("")


def _bare_call(reader: Reader, writer: EventWriter, forms: Collection[CallForm]) -> Steps[None]:
    """Read a call without a mark, if the answer begins with one."""
    bare = [form for form in forms if not form.mark]
    if not bare:
        return
    yield from reader.skip_blank(writer.text)
    if (yield from reader.next_is(*(form.mark for form in forms if form.mark))):
        return
    first = yield from reader.char()
    for form in bare:
        if first in form.first:
            yield from _call(reader, writer, form.syntax)


def _text(
    reader: Reader, writer: EventWriter, forms: Collection[CallForm], hidden: Collection[str]
) -> Steps[None]:
    syntaxes = {form.mark: form.syntax for form in forms if form.mark}
    marks = Marks({*syntaxes, *hidden})
    while True:
        mark = yield from reader.copy_until(marks, writer.text)
        if mark in syntaxes:
            yield from _call(reader, writer, syntaxes[mark], mark)
        else:
            reader.take(len(mark))


def _prefilled_call(
    reader: Reader, writer: EventWriter, forms: Collection[CallForm], prefill: str
) -> Steps[None]:
    """Read a call of which the prompt has the beginning, `prefill`, which is no text of the answer."""
    for form in forms:
        if form.mark and prefill.startswith(form.mark):
            reader.prepend(prefill)
            yield from _call(reader, writer, form.syntax, form.mark, num_hidden=len(prefill))


def _call(
    reader: Reader, writer: EventWriter, syntax: CallSyntax, mark: str = "", num_hidden: int = 0
) -> Steps[None]:
    """Read what may be a call; if it is none, it is text.

    Args:
        num_hidden: characters that are not text of the answer.
    """
    num_calls = writer.num_calls
    reader.hold()
    try:
        reader.take(len(mark))
        yield from syntax(reader, writer)
        reader.release()
    except MismatchError:
        held = reader.release()
        if num_hidden and num_calls == writer.num_calls:
            reader.take(num_hidden - len(held))
            held = held[num_hidden:]
        writer.plain(held)
    except EndOfAnswerError:
        if writer.is_open:
            writer.arguments(reader.rest())
            writer.end_call(is_complete=False)
        else:
            reader.rest()
            held = reader.release()
            if num_hidden and num_calls == writer.num_calls:
                held = held[num_hidden:]
            writer.plain(held)
        raise
