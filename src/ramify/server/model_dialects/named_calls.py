"""Calls as a name, a mark and JSON arguments: Mistral, DeepSeek, Kimi, GLM-4."""

from __future__ import annotations

import re

from ramify.server.model_dialects.json_calls import json_calls, read_arguments, tail
from ramify.server.model_dialects.reader import (
    EndOfAnswerError,
    Marks,
    Reader,
    Steps,
)
from ramify.server.model_dialects.writer import EventWriter

MISTRAL_NAME_END = Marks({"[ARGS]", "[CALL_ID]", "{"})
MISTRAL_ID = re.compile(r"[-\w]*+(?=[^-\w])", re.ASCII)
PARTIAL_MISTRAL_ID = re.compile(r"[-\w]*+", re.ASCII)
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜>"
DEEPSEEK_NAME_END = Marks({DEEPSEEK_SEPARATOR})
DEEPSEEK_LINE_END = Marks({"\n", "{"})
LINE_END = re.compile(r"[ \t]*+\n\s*+(?=\S)")
PARTIAL_LINE_END = re.compile(r"[ \t]*+(?:\n\s*+)?")
KIMI_PREFIX = "functions."
KIMI_INDEX = re.compile(r"[:_.-][0-9]++$")
KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
KIMI_NAME_END = Marks({KIMI_SEPARATOR})


def mistral_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read `[{…}]` (tokenizers to v7), or `name[ARGS]{…}`, also with `[CALL_ID]id` after the name."""
    yield from reader.skip_blank()
    if (yield from reader.char()) in "[{":
        yield from json_calls(reader, writer)
        return
    name = writer.check_name(
        (yield from reader.word(MISTRAL_NAME_END, writer.max_name_chars)).strip()
    )
    if (yield from reader.accept("[CALL_ID]")):
        yield from reader.match(MISTRAL_ID, PARTIAL_MISTRAL_ID)
    yield from reader.accept("[ARGS]")
    yield from reader.skip_blank()
    yield from read_arguments(reader, writer, name)


def deepseek_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read `name<sep>{…}` (V3.1), or `function<sep>name` and a fence with JSON (V3, R1)."""
    name = (yield from reader.word(DEEPSEEK_NAME_END, writer.max_name_chars)).strip()
    yield from reader.expect(DEEPSEEK_SEPARATOR)
    yield from reader.skip_blank()
    fence = ""
    if name == "function" and (yield from reader.char()) != "{":
        name = (yield from reader.word(DEEPSEEK_LINE_END)).strip()
        yield from reader.skip_blank()
        if (yield from reader.accept("```json", "```")):
            fence = "```"
        yield from reader.skip_blank()
    writer.check_name(name)
    yield from read_arguments(reader, writer, name)
    yield from tail(reader, writer, fence, DEEPSEEK_END)


def kimi_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read `functions.name:index<begin of arguments>{…}`; the template writes the same id.

    Prefix and index may be missing, and the index may follow another character. An id that another call
    of the answer has is written anew, as results name their call by it.
    """
    call_id = (yield from reader.word(KIMI_NAME_END, writer.max_name_chars)).strip()
    full_name = call_id.removeprefix(KIMI_PREFIX)
    names = (full_name, KIMI_INDEX.sub("", full_name), call_id, KIMI_INDEX.sub("", call_id))
    name = writer.check_name(next((name for name in names if name in writer.tools), ""))
    if call_id in writer.call_ids:
        call_id = f"{KIMI_PREFIX}{name}:{writer.num_calls}"
    yield from reader.expect(KIMI_SEPARATOR)
    yield from reader.skip_blank()
    yield from read_arguments(reader, writer, name, call_id)
    yield from tail(reader, writer, "<|tool_call_end|>")


def line_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read a name, a line feed and JSON (GLM-4): nothing marks it, so it begins the answer.

    Further calls follow in the same way.
    """
    names = sorted(writer.tools, key=len, reverse=True)
    name = yield from reader.expect(*names)
    while name:
        yield from reader.match(LINE_END, PARTIAL_LINE_END)
        yield from read_arguments(reader, writer, name)
        reader.drop()
        try:
            yield from reader.skip_blank()
            name = yield from reader.accept(*names)
        except EndOfAnswerError:
            reader.rest()
            reader.drop()
            return
    writer.delimiter()
