"""Calls whose parameters are tagged text: `<function=f><parameter=key>value</parameter></function>`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ramify.server.model_dialects.json_calls import tail
from ramify.server.model_dialects.json_scanner import json_text
from ramify.server.model_dialects.reader import (
    EndOfAnswerError,
    Marks,
    MismatchError,
    Reader,
    Steps,
)
from ramify.server.model_dialects.tagged_values import STRING, allowed_types, as_json
from ramify.server.model_dialects.value_types import Types, argument_names
from ramify.server.model_dialects.writer import EventWriter


@dataclass(frozen=True, slots=True)
class KeyEnd:
    """The text between the key and the value of a parameter."""

    literals: tuple[str, ...]
    is_string: bool | None = None  # what it says of the value; None: nothing


# No text has it: what it ends is followed by nothing, or by no match.
_END_OF_ANSWER = "\0"


@dataclass(frozen=True, slots=True)
class CallTags:
    """The tags of a call. White space between tags is dropped."""

    name_end: str
    parameter: str  # before a parameter's key
    key_ends: tuple[KeyEnd, ...]
    value_end: str
    call_end: str
    call: str = ""  # before the name; "" if the mark of the call is
    end: str = ""  # after the last call
    strips_newlines: bool = False  # the line feeds around a value are not of the value

    def after_forgotten_end(self, names: Collection[str]) -> tuple[str, ...]:
        """Texts that end a value whose end tag is forgotten: not what a value may well contain.

        Args:
            names: of parameters that may follow.
        """
        keys = (
            f"{self.parameter}{name}{end.literals[0]}" for name in names for end in self.key_ends
        )
        ends = (
            f"{self.call_end}{blank}{tag}"
            for blank in ("", "\n", "\n\n")
            for tag in (self.end, self.call, _END_OF_ANSWER)
            if tag
        )
        return (*keys, *ends)

    @property
    def after_value(self) -> tuple[str, ...]:
        """Texts that may follow a value; an end tag that none follows is text of the value."""
        return tuple(filter(None, (self.parameter, self.call_end, self.end, self.call)))


def tagged_calls(reader: Reader, writer: EventWriter, *, tags: CallTags) -> Steps[None]:
    """Read calls until other text follows.

    A value becomes a JSON string if the tag or the tool's schema says that it is one; otherwise JSON if
    it is JSON, and a string if not.
    """
    name_marks = Marks({mark for mark in (tags.name_end, tags.parameter, tags.call_end) if mark})
    follows = True
    while follows:
        yield from reader.skip_blank()
        if tags.call:
            yield from reader.expect(tags.call)
        name = writer.check_name(
            (yield from reader.word(name_marks, writer.max_name_chars)).strip()
        )
        yield from reader.accept(tags.name_end)
        writer.start_call(name)
        yield from _parameters(reader, writer, tags, name)
        follows = yield from _follows(reader, tags)
    yield from tail(reader, writer, tags.end)


def _parameters(reader: Reader, writer: EventWriter, tags: CallTags, name: str) -> Steps[None]:
    """Read the parameters of an open call, and end it."""
    separator, names = "{", set(argument_names(writer.tools[name]))
    while True:
        try:
            key = yield from _key(reader, writer, tags, separator)
        except MismatchError:
            # What is held is text after the call.
            writer.arguments("{}" if separator == "{" else "}")
            writer.end_call()
            raise
        if key is None:
            break
        types = allowed_types(writer.tools[name], key.text, is_string=key.is_string)
        names.discard(key.text)
        yield from _value(reader, writer, tags, types, names)
        separator = ", "
    writer.arguments("{}" if separator == "{" else "}")
    writer.end_call()


@dataclass(frozen=True, slots=True)
class _Key:
    text: str
    is_string: bool | None


def _key(reader: Reader, writer: EventWriter, tags: CallTags, separator: str) -> Steps[_Key | None]:
    """Read the key of the next parameter; None if no parameter follows.

    Raises:
        MismatchError: something like a parameter follows; it is held.
    """
    yield from _skip_blank_before(reader, tags.after_value)
    if not (yield from reader.next_is(tags.parameter)):
        return None
    reader.hold()
    yield from reader.expect(tags.parameter)
    ends = {end.literals[0]: end for end in tags.key_ends}
    try:
        text = (yield from reader.word(Marks(ends))).strip()
    except EndOfAnswerError:
        writer.arguments(separator + json_text(reader.rest())[:-1])
        raise
    end = ends[(yield from reader.next_is(*ends))]
    try:
        for literal in end.literals:
            yield from reader.skip_blank()
            yield from reader.expect(literal)
    except EndOfAnswerError:
        reader.rest()
        writer.arguments(separator + json_text(text))
        raise
    reader.release()
    writer.arguments(f"{separator}{json_text(text)}: ")
    return _Key(text, end.is_string)


def _value(
    reader: Reader, writer: EventWriter, tags: CallTags, types: Types, names: Collection[str]
) -> Steps[None]:
    """Read a parameter's value and the tag after it. A string is written as it arrives.

    Args:
        names: of the tool's other parameters that have not come yet.
    """
    if types == STRING:
        writer.arguments('"')
        yield from _copy_value(
            reader, tags, names, lambda text: writer.arguments(json_text(text)[1:-1])
        )
        writer.arguments('"')
        return
    parts = list[str]()
    try:
        yield from _copy_value(reader, tags, names, parts.append)
    except EndOfAnswerError:
        writer.arguments(json_text("".join(parts))[:-1])
        raise
    writer.arguments(as_json("".join(parts), types))


def _copy_value(
    reader: Reader, tags: CallTags, names: Collection[str], write: Callable[[str], None]
) -> Steps[None]:
    """Write the value up to an end tag after which another tag follows, or nothing.

    Where the model forgets that tag, the value ends before the tag of another of the tool's parameters,
    and before the end of the whole call.
    """
    marks, held = Marks({tags.value_end, tags.parameter, tags.call_end}), list[str]()
    followers = tags.after_forgotten_end(names)

    def write_but_last_newline(text: str) -> None:
        text = "".join((*held, text))
        held[:] = ["\n"] if text.endswith("\n") else []
        write(text[:-1] if held else text)

    copy = write_but_last_newline if tags.strips_newlines else write
    if tags.strips_newlines:
        yield from reader.accept("\n")
    while True:
        try:
            mark = yield from reader.copy_until(marks, copy)
        except EndOfAnswerError:
            write("".join(held))
            raise
        if mark != tags.value_end:
            try:
                if (yield from reader.next_is(*followers)):
                    return
            except EndOfAnswerError:
                if mark == tags.call_end:
                    return
                write("".join((*held, reader.rest())))
                raise
            copy(reader.take(len(mark)))
            continue
        reader.take(len(tags.value_end))
        blanks = list[str]()
        try:
            yield from reader.skip_blank(blanks.append)
            if (yield from reader.next_is(*tags.after_value)):
                return
        except EndOfAnswerError:
            reader.rest()
            return
        copy("".join((tags.value_end, *blanks)))


def _skip_blank_before(reader: Reader, literals: tuple[str, ...]) -> Steps[None]:
    """Skip white space, and what begins one of the literals at the end of the answer."""
    try:
        yield from reader.skip_blank()
        yield from reader.next_is(*literals)
    except EndOfAnswerError:
        reader.rest()
        raise


def _follows(reader: Reader, tags: CallTags) -> Steps[bool]:
    """Drop the tag after a call; returns whether another call follows."""
    try:
        yield from reader.skip_blank()
        if not (tags.end and (yield from reader.next_is(tags.end))):
            yield from reader.expect(tags.call_end)
            reader.drop()
            yield from reader.skip_blank()
        return bool(tags.call and (yield from reader.next_is(tags.call)))
    except EndOfAnswerError:
        reader.rest()
        reader.drop()
        return False
