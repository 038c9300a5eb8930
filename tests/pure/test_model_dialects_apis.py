"""What a model of each family writes means the same in the streams of all three APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.outputs import FinishReason, StepOutput
from ramify.server.model_dialects.events import OutputParser
from tests.pure.drawn_answers import answers
from tests.pure.model_answers import FAMILIES, SCHEMAS, Family
from tests.pure.test_model_dialects_families import Part, meaning
from tests.pure.test_server_answers import (
    Played,
    all_events,
    chat_builder,
    message_builder,
    response_builder,
)


@dataclass
class Spoken(Played):
    """A generation whose steps release pieces of an answer's text, which a family's parser reads."""

    family: Family = FAMILIES[0]
    pieces: list[str] = field(default_factory=list)

    def new_parser(self) -> OutputParser:  # type: ignore[override]
        """The parser of the family's format."""
        family = self.family
        return family.form.new_parser(family.names, prompt_end=family.prompt_end, schemas=SCHEMAS)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        """Yield a step for each piece."""
        pieces = iter(self.pieces)
        async for step in super().__aiter__():
            yield replace(step, text=next(pieces))


def of_chunks(chunks: list[dict[str, Any]]) -> list[Part]:
    """Reasoning, text and calls of the chunks of a chat completion."""
    message = {"reasoning_content": "", "content": ""}
    calls: list[list[str]] = []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for name in message:
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "name" in call["function"]:
                calls.append([call["function"]["name"], ""])
            calls[-1][1] += call["function"]["arguments"]
    parts = [("reasoning", message["reasoning_content"]), ("text", message["content"])]
    return [part for part in parts if part[1]] + [
        (f"call {name}", json.loads(arguments)) for name, arguments in calls
    ]


def of_blocks(events: list[dict[str, Any]]) -> list[Part]:
    """Reasoning, text and calls of the events of a message."""
    parts: list[Part] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                block = event["content_block"]
                kinds = {"text": "text", "thinking": "reasoning"}
                parts.append((kinds.get(block["type"]) or f"call {block['name']}", ""))
            case "content_block_delta":
                delta = event["delta"]
                text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
                parts[-1] = (parts[-1][0], parts[-1][1] + text)
    return [
        (kind, json.loads(text) if kind.startswith("call ") else text)
        for kind, text in parts
        if text
    ]


def of_items(events: list[dict[str, Any]]) -> list[Part]:
    """Reasoning, text and calls of the response that the last event has."""
    parts: list[Part] = []
    for item in events[-1]["response"]["output"]:
        if item["type"] == "function_call":
            parts.append((f"call {item['name']}", json.loads(item["arguments"])))
        else:
            kind = {"message": "text"}.get(item["type"], item["type"])
            parts.append((kind, item["content"][0]["text"]))
    return [part for part in parts if part[1] != ""]


APIS: dict[str, tuple[Callable[[Any], Any], Callable[[list[dict[str, Any]]], list[Part]]]] = {
    "chat": (chat_builder, of_chunks),
    "messages": (message_builder, of_blocks),
    "responses": (response_builder, of_items),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=4)
@given(data=st.data(), cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_streams_mean_what_the_model_meant(
    family: Family, data: st.DataObject, cuts: list[int]
) -> None:
    """Reasoning, text and calls of each stream are those that the answer was written from."""
    answer = data.draw(answers(family))
    text = family.write(answer)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[start:end] for start, end in pairwise(places)] or [""]

    for builder, parts in APIS.values():
        played = Spoken([([], 1)] * len(pieces), FinishReason.STOP, family=family, pieces=pieces)
        assert parts(asyncio.run(all_events(builder(played)))) == meaning(answer)
