"""Answers of gpt-oss: messages, each with a header that names its channel and its recipient.

`<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>final<|message|>text`, and
`<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>` for a call.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

from ramify.server.model_dialects.json_calls import scan
from ramify.server.model_dialects.json_scanner import ObjectScanner
from ramify.server.model_dialects.parser import Delimiters, attempt, bare_call
from ramify.server.model_dialects.reader import (
    EndOfAnswerError,
    Marks,
    Reader,
    Steps,
)
from ramify.server.model_dialects.writer import EventWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
HARMONY_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, RETURN, CALL)
MARKS = Marks(HARMONY_MARKS)
CALL_END = Marks({START, CHANNEL, END, RETURN, CALL})
RECIPIENT = re.compile(r"[^\s<]++(?=[\s<])")
PARTIAL_RECIPIENT = re.compile(r"[^\s<]*+")
# What may follow a mark, or white space, in a header.
HEADER_WORDS = {START: ("assistant",), CHANNEL: ("analysis", "commentary", "final")}
CONTENT_TYPES = ("json", "code")


@dataclass(frozen=True, slots=True)
class Header:
    """The parsed header of a message."""

    channel: str
    recipient: str  # name of a tool


def harmony_answer(
    reader: Reader, writer: EventWriter, *, delimiters: Delimiters, prompt_end: str
) -> Steps[None]:
    """Read messages: reasoning on the channel `analysis`, a call if the recipient is a tool, else text."""
    start = prompt_end.rfind(START)
    num_hidden = len(prompt_end) - start if start >= 0 else 0
    try:
        if num_hidden:
            reader.prepend(prompt_end[start:])
            yield from attempt(reader, writer, partial(_message, num_hidden=num_hidden), num_hidden)
        yield from bare_call(reader, writer, delimiters.forms, HARMONY_MARKS)
        while True:
            mark = yield from reader.copy_until(MARKS, writer.text)
            if mark in HEADER_WORDS:
                yield from attempt(reader, writer, _message)
            else:
                reader.take(len(mark))
    except EndOfAnswerError:
        writer.plain(reader.rest())


def _message(reader: Reader, writer: EventWriter, *, num_hidden: int = 0) -> Steps[None]:
    """Read a message; of its header and body, `num_hidden` characters are of the prompt."""
    header = yield from _header(reader)
    name = header.recipient.removeprefix("functions.")
    if name in writer.tools:
        yield from _call_body(reader, writer, name)
        return
    held = reader.release()
    write = writer.reasoning if header.channel == "analysis" else writer.text
    write("")
    writer.delimiter()
    if name:
        writer.plain(held[num_hidden:])
    reader.take(num_hidden - len(held))
    while (mark := (yield from reader.copy_until(MARKS, write))) in (CONSTRAIN, MESSAGE):
        reader.take(len(mark))
    if mark not in HEADER_WORDS:
        reader.take(len(mark))
    writer.text("")


def _header(reader: Reader) -> Steps[Header]:
    """Read a header up to the body; drop it if the answer ends before it names a recipient."""
    channel = recipient = literal = ""
    try:
        while literal != MESSAGE:
            yield from reader.skip_blank()
            literal = yield from reader.accept(START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
            if literal == "to=":
                match = yield from reader.match(RECIPIENT, PARTIAL_RECIPIENT)
                recipient = match.group()
            elif literal == CHANNEL:
                channel = yield from reader.expect(*HEADER_WORDS[CHANNEL])
            elif literal != MESSAGE:
                yield from reader.expect(*HEADER_WORDS.get(literal, CONTENT_TYPES))
    except EndOfAnswerError:
        if literal != "to=" and not recipient:
            reader.rest()
            reader.drop()
        raise
    return Header(channel, recipient)


def _call_body(reader: Reader, writer: EventWriter, name: str) -> Steps[None]:
    writer.start_call(name)
    yield from reader.skip_blank()
    if (yield from reader.next_is("{")):
        yield from scan(reader, ObjectScanner(), writer.arguments)
    elif (yield from reader.next_is(*HARMONY_MARKS)):
        writer.arguments("{}")
    else:
        yield from reader.copy_until(CALL_END, writer.arguments)
    writer.end_call()
    try:
        yield from reader.skip_blank()
        yield from reader.accept(END, RETURN, CALL)
    except EndOfAnswerError:
        reader.rest()
    reader.drop()
