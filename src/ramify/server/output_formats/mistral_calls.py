"""Calls after `[TOOL_CALLS]`: a JSON list, or a name and a JSON object."""

from __future__ import annotations

from ramify.server.output_formats.json_calls import json_calls, read_arguments
from ramify.server.output_formats.reader import Marks, Reader, Steps
from ramify.server.output_formats.writer import EventWriter

NAME_END = Marks({"[ARGS]", "[CALL_ID]", "{"})


def mistral_calls(reader: Reader, writer: EventWriter) -> Steps[None]:
    """Read `[{…}]` (tokenizers to v7), or `name[ARGS]{…}`, also with `[CALL_ID]id` after the name."""
    yield from reader.skip_blank()
    if (yield from reader.next_is("[{", "{", "[ ", "[\n")):
        yield from json_calls(reader, writer)
        return
    name = writer.check_name((yield from reader.word(NAME_END)).strip())
    if (yield from reader.accept("[CALL_ID]")):
        yield from reader.word(NAME_END)
    yield from reader.accept("[ARGS]")
    yield from reader.skip_blank()
    yield from read_arguments(reader, writer, name)
