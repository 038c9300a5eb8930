"""What a model of each family writes is parsed as what it means, however it is cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from tests.budget import examples
from tests.pure.drawn_answers import answers
from tests.pure.model_answers import FAMILIES, SCHEMAS, Family, ModelAnswer

Part = tuple[str, Any]


def events_of(family: Family, text: str, cuts: list[int]) -> list[OutputEvent]:
    """The events of an answer whose pieces end at `cuts`."""
    parser = family.form.new_parser(family.names, prompt_end=family.prompt_end, schemas=SCHEMAS)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    events = [event for start, end in pairwise(places) for event in parser.feed(text[start:end])]
    return events + parser.feed("", is_last=True)


def parts_of(events: list[OutputEvent]) -> list[Part]:
    """Reasoning, text and calls in their order; a call is (name, JSON text of the arguments)."""
    parts: list[Part] = []
    for event in events:
        match event:
            case CallStart(name, _):
                parts.append((f"call {name}", ""))
            case CallEnd(is_complete):
                assert is_complete
            case TextDelta(text) | ReasoningDelta(text) | ArgumentsDelta(text):
                kind = {TextDelta: "text", ReasoningDelta: "reasoning"}.get(type(event), "")
                if kind and (not parts or parts[-1][0] != kind):
                    parts.append((kind, ""))
                parts[-1] = (parts[-1][0], parts[-1][1] + text)
    return parts


def meaning(answer: ModelAnswer) -> list[Part]:
    """What an answer means, as `parts_of` gives it, with arguments as objects."""
    calls = [(f"call {call.name}", call.arguments) for call in answer.calls]
    parts = [("reasoning", answer.reasoning), ("text", answer.text)]
    return [part for part in parts if part[1]] + calls


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=examples(20))
@given(data=st.data(), cuts=st.lists(st.integers(0, 2000), max_size=30))
def test_an_answer_is_parsed_as_meant(family: Family, data: st.DataObject, cuts: list[int]) -> None:
    """Reasoning, text, names and arguments are those that the answer was written from."""
    answer = data.draw(answers(family))
    assume(answer.reasoning or "</think>" not in answer.text)  # else the mark may end reasoning
    text = family.write(answer)

    whole = parts_of(events_of(family, text, []))

    parsed = [
        (kind, json.loads(content) if kind.startswith("call ") else content)
        for kind, content in whole
    ]
    assert parsed == meaning(answer), text
    assert parts_of(events_of(family, text, cuts)) == whole
    assert parts_of(events_of(family, text, list(range(len(text))))) == whole
