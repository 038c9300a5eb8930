"""Calls in Python's syntax, `[f(a=1), g()]`, and in Gemma's, `call:f{a:<escape>x<escape>}`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ramify.server.model_dialects.json_calls import scan, tail
from ramify.server.model_dialects.literal_scanner import LiteralScanner
from ramify.server.model_dialects.reader import EndOfAnswerError, Marks, Reader, Steps
from ramify.server.model_dialects.writer import EventWriter

NAME = re.compile(r"[^\W\d][-\w.]*+(?=\()")
PARTIAL_NAME = re.compile(r"(?:[^\W\d][-\w.]*+)?")
FIRST_ARGUMENT = re.compile(r"\s*+(?:\)|[^\W\d]\w*+\s*+=)")
PARTIAL_FIRST_ARGUMENT = re.compile(r"\s*+(?:[^\W\d]\w*+\s*+)?")
GEMMA_NAME_END = Marks({"{"})


def pythonic_calls(reader: Reader, writer: EventWriter, *, end: str = "") -> Steps[None]:
    """Read calls: a list of them, or one a line."""
    yield from reader.skip_blank()
    bracket = yield from reader.accept("[")
    follows = True
    while follows:
        yield from reader.skip_blank()
        yield from _call(reader, writer)
        follows = yield from _follows(reader, bracket, end)
    yield from tail(reader, writer, "]" if bracket else "", end)


def _call(reader: Reader, writer: EventWriter) -> Steps[None]:
    name = (yield from reader.match(NAME, PARTIAL_NAME)).group()
    if name not in writer.tools:
        # Gemma writes `default_api.f(…)`.
        name = writer.check_name(name.rpartition(".")[2])
    yield from reader.expect("(")
    scanner = LiteralScanner()
    scanner.scan("(")
    first = yield from reader.match(FIRST_ARGUMENT, PARTIAL_FIRST_ARGUMENT)
    writer.start_call(name)
    writer.arguments("{" + scanner.scan(first.group())[0])
    yield from scan(reader, scanner, writer.arguments)
    writer.end_call()


def _follows(reader: Reader, bracket: str, end: str) -> Steps[bool]:
    """Whether another call follows; consumes what separates it."""
    try:
        yield from reader.skip_blank()
        if bracket or not end:
            return bool(bracket and (yield from reader.accept(",")))
        yield from reader.accept(",", ";")
        yield from reader.skip_blank()
        return not (yield from reader.next_is(end))
    except EndOfAnswerError:
        reader.rest()
        reader.drop()
        return False


def gemma_calls(
    reader: Reader, writer: EventWriter, *, quotes: Sequence[str], end: str
) -> Steps[None]:
    """Read `call:name{key:value,…}`, whose strings stand between `quotes`."""
    yield from reader.expect("call:")
    name = writer.check_name(
        (yield from reader.word(GEMMA_NAME_END, writer.max_name_chars)).strip()
    )
    writer.start_call(name)
    yield from scan(reader, LiteralScanner(quotes, has_escapes=False), writer.arguments)
    writer.end_call()
    yield from tail(reader, writer, end)
