"""Calls as JSON: `{"name": "f", "arguments": {…}}`, one or several, or a list of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from ramify.server.model_dialects.json_scanner import (
    PYTHON_CONSTANTS,
    EncodedObjectScanner,
    ObjectScanner,
    unescape,
)
from ramify.server.model_dialects.literal_scanner import LiteralScanner
from ramify.server.model_dialects.reader import EndOfAnswerError, MismatchError, Reader, Steps
from ramify.server.model_dialects.writer import EventWriter

NAME_KEYS = frozenset({"name", "tool_name", "function"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
IGNORED_KEYS = frozenset({"id", "tool_call_id", "type", "index"})
# In quotes of JSON, or of Python.
STRING = re.compile(
    r"""(?P<quote>["'])(?P<text>(?:(?!(?P=quote)|\\).|\\(?:u[0-9a-fA-F]{4}|[^u]))*+)(?P=quote)""",
    re.DOTALL,
)
PARTIAL_STRING = re.compile(
    r"""(?:(?P<quote>["'])(?:(?!(?P=quote)|\\).|\\(?:u[0-9a-fA-F]{4}|[^u]))*+"""
    r"""(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?""",
    re.DOTALL,
)
OBJECT_BEGIN = re.compile(r"\{?\s*+")
PARTIAL_ID = re.compile(r'"?[-.:\w]*+', re.ASCII)
CUT_MEMBER = re.compile(r'[-.:\w\s,"]*+', re.ASCII)
LIST_BEGIN = re.compile(r"\[\s*+(?=\{)")
PARTIAL_LIST_BEGIN = re.compile(r"\[\s*+")
# An id, a number or null; dropped, and so it must not contain what a model may mean to say.
ID = re.compile(r'"[-.:\w]*+"|[-.\w]++(?=[\s,}])', re.ASCII)


def json_calls(reader: Reader, writer: EventWriter, *, end: str = "") -> Steps[None]:
    """Read calls up to the mark `end`, which is left out if it is ""."""
    yield from reader.skip_blank()
    if (yield from reader.char()) == "[":
        # Not the bracket alone, with which a mark may begin.
        yield from reader.match(LIST_BEGIN, PARTIAL_LIST_BEGIN)
        yield from _one_call(reader, writer)
        while (yield from _separator(reader, (",",))):
            yield from _one_call(reader, writer)
        yield from tail(reader, writer, "]", end)
        return
    yield from _one_call(reader, writer)
    while (yield from _separator(reader, (";", ","))):
        yield from _one_call(reader, writer)
    yield from tail(reader, writer, end)


def fenced_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read calls in a fence of Markdown, after a mark."""
    yield from reader.skip_blank()
    yield from reader.expect("```json", "```")
    yield from json_calls(reader, writer, end="```")


def _separator(reader: Reader, separators: tuple[str, ...]) -> Steps[bool]:
    """Whether another call follows; consumes what separates it."""
    try:
        yield from reader.skip_blank()
        separator = yield from reader.accept(*separators)
        yield from reader.skip_blank()
    except EndOfAnswerError:
        return False
    return bool(separator) or (yield from reader.next_is("{")) == "{"


def tail(reader: Reader, writer: EventWriter, *marks: str) -> Steps[None]:
    """Consume and drop the marks that follow a call; the answer may end before or within them.

    Raises:
        MismatchError: another text follows.
    """
    for mark in filter(None, marks):
        try:
            yield from reader.skip_blank()
            yield from reader.expect(mark)
        except EndOfAnswerError:
            reader.rest()
        reader.drop()
    writer.delimiter()


def _one_call(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read an object with name and arguments, in either order."""
    num_calls = writer.num_calls
    try:
        yield from _members(reader, writer)
    except EndOfAnswerError:
        # The name of a key, or an id, that the end of the answer cut off after the arguments.
        if writer.num_calls > num_calls and CUT_MEMBER.fullmatch(reader.take_all_held()):
            reader.drop()
        raise


def _members(reader: Reader, writer: EventWriter) -> Steps[None]:
    yield from reader.expect("{")
    name, captured, is_written, literal = "", list[str](), False, ","
    while literal == ",":
        yield from reader.skip_blank()
        key = yield from read_string(reader)
        yield from reader.skip_blank()
        yield from reader.expect(":")
        yield from reader.skip_blank()
        if key in NAME_KEYS and not name:
            name = writer.check_name((yield from read_string(reader)))
            if captured:
                writer.whole_call(name, "".join(captured))
                is_written = True
        elif key in ARGUMENT_KEYS and not captured and not is_written:
            if name:
                yield from read_arguments(reader, writer, name)
                is_written = True
            elif (yield from reader.next_is("{")):
                yield from scan(reader, AnyObjectScanner(), captured.append)
            else:
                raise MismatchError
        elif key in IGNORED_KEYS:
            yield from reader.match(ID, PARTIAL_ID)
        else:
            raise MismatchError
        yield from reader.skip_blank()
        literal = yield from reader.expect(",", "}")
    if not name:
        raise MismatchError
    if not is_written:
        writer.whole_call(name, "{}")
    reader.drop()


def read_string(reader: Reader) -> Steps[str]:
    """Consume a short JSON string, and decode it."""
    return unescape((yield from reader.match(STRING, PARTIAL_STRING)).group("text"))


def read_arguments(
    reader: Reader, writer: EventWriter, name: str, call_id: str = ""
) -> Steps[None]:
    """Read a whole call's arguments and begin the call with their first character.

    They are an object, null (no arguments), or an object as JSON in a string.

    Args:
        call_id: the id that the model gave to the call; "": the writer makes one.

    Raises:
        MismatchError: they are something else, and no call has begun.
    """
    literal = yield from reader.next_is("{", "null", '""', '"')
    if literal in ("null", '""'):
        yield from reader.expect(literal)
        writer.whole_call(name, "{}", call_id)
    elif literal == "{":
        writer.start_call(name, call_id)
        yield from scan(reader, AnyObjectScanner(), writer.arguments)
        writer.end_call()
    elif literal:
        yield from reader.expect('"')
        yield from reader.skip_blank()
        if not (yield from reader.next_is("{")):
            raise MismatchError
        writer.start_call(name, call_id)
        yield from scan(reader, EncodedObjectScanner(), writer.arguments)
        writer.end_call()
    else:
        raise MismatchError


class Scanner(Protocol):
    """Converts a value to JSON while it arrives."""

    @property
    def is_done(self) -> bool:
        """Whether the value has been read to its end."""
        ...

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The value's JSON from `start`, and where it stops: after the value, or for more text."""
        ...

    def finish(self) -> str:
        """The text that was held back, when the answer ends inside the value."""
        ...


class AnyObjectScanner:
    """Reads an object of JSON, with constants of Python or not, or a dict in Python's quotes."""

    def __init__(self) -> None:
        self._scanner: Scanner = ObjectScanner(PYTHON_CONSTANTS)
        self._begin: str | None = ""  # the bracket and white space so far; None: text follows them

    @property
    def is_done(self) -> bool:
        """Whether the object has been read to its end."""
        return self._scanner.is_done

    def scan(self, text: str, start: int = 0) -> tuple[str, int]:
        """The object's JSON from `start`, and where it stops: after the object, or for more text."""
        written = ""
        if self._begin is not None:
            match = OBJECT_BEGIN.match(text, start)
            assert match is not None, "an empty text matches"
            written, start = self._scanner.scan(match[0])[0], match.end()
            self._begin += match[0]
            if start == len(text):
                return written, start
            if text[start] == "'":
                self._scanner = LiteralScanner()
                self._scanner.scan(self._begin)
            self._begin = None
        more, end = self._scanner.scan(text, start)
        return written + more, end

    def finish(self) -> str:
        """The text that was held back, when the answer ends inside the object."""
        return self._scanner.finish()


def scan(reader: Reader, scanner: Scanner, write: Callable[[str], None]) -> Steps[None]:
    """Write the JSON of a value until it ends."""
    try:
        while not scanner.is_done:
            text, end = scanner.scan((yield from reader.chunk()))
            reader.take(end)
            write(text)
            if not end:
                yield from reader.more()
    except EndOfAnswerError:
        write(scanner.finish())
        raise
