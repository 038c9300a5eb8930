"""What planted causes hide from a log for ever: parts that no prompt has as they were. Stdlib only."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from tests.pure.analysis.planted_prompts import Message, Part, Prompt


def _name(part: Part) -> str | None:
    """Names a part that a cause may hide, whatever its white space and order of keys."""
    if part.kind == "thinking":
        return f"thinking {part.text}"
    return f"result {part.call_id}" if part.kind == "result" else None


def names_of_shown(clean: Prompt, sent: Prompt) -> set[str]:
    """Names of the parts that a prompt sends as they are in its clean form."""
    texts = {_name(part): part.text for message in clean.messages for part in message.parts}
    return {
        name
        for message in sent.messages
        for part in message.parts
        if (name := _name(part)) is not None and texts.get(name) == part.text
    }


def restore(sent: Prompt, mended: Prompt, shown: Collection[str]) -> Prompt:
    """The mended prompt, but as sent where it has a part that is not shown."""
    if len(sent.messages) != len(mended.messages):
        return mended  # messages are dropped long after they were shown
    messages = tuple(
        replace(message, parts=tuple(_parts(as_sent, message, shown)))
        for as_sent, message in zip(sent.messages, mended.messages, strict=True)
    )
    return replace(mended, messages=messages)


def _parts(sent: Message, mended: Message, shown: Collection[str]) -> Iterator[Part]:
    stubs = {part.call_id: part for part in sent.parts if part.kind == "result"}
    for part in mended.parts:
        name = _name(part)
        if name is None or name in shown:
            yield part
        elif part.kind == "result":
            yield stubs[part.call_id]
