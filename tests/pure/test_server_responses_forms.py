"""Calls of the Responses API in the form of their tools: whole, streamed and replayed."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from ramify.outputs import FinishReason
from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from ramify.server.openai.protocol import ChatMessage, ChatRequest
from ramify.server.openai.responses.custom_input import CustomInputDecoder, custom_input
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.openai.responses.replay import replayed_events
from ramify.server.openai.responses.request import TranslatedRequest, response_to_generation
from ramify.server.openai.responses.response import ResponsesResponseBuilder
from ramify.server.openai.responses.store import EarlierTurns, stored_response
from ramify.server.openai.responses.tools import (
    CallForm,
    ServedTools,
)
from ramify.server.request_fields.opaque_text import decode_opaque, encode_opaque
from ramify.server.tenants import Caller
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench
from tests.pure.test_server_answers import Played

SERVICE = ServerBench(chat_template=TOOL_TEMPLATE).service
FORMS = {
    "look_up": CallForm("function", "look_up"),
    "mcp__mail__send": CallForm("function", "send", "mcp__mail__"),
    "apply_patch": CallForm("custom", "apply_patch"),
    "ns__write": CallForm("custom", "write", "ns"),
    "local_shell": CallForm("local_shell", "local_shell"),
    "shell": CallForm("shell", "shell"),
    "edit": CallForm("apply_patch", "apply_patch"),
}
# Arguments of a call of each kind, and the fields of its item.
ITEMS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "look_up": ({"city": "Rome"}, {"type": "function_call", "name": "look_up"}),
    "mcp__mail__send": (
        {"to": "Ann"},
        {"type": "function_call", "name": "send", "namespace": "mcp__mail__"},
    ),
    "apply_patch": (
        {"input": 'a\n"b"\u00e9\U0001f600'},
        {"type": "custom_tool_call", "name": "apply_patch", "input": 'a\n"b"\u00e9\U0001f600'},
    ),
    "ns__write": (
        {"input": ""},
        {"type": "custom_tool_call", "name": "write", "namespace": "ns", "input": ""},
    ),
    "local_shell": (
        {"command": ["ls", "-l"], "timeout_ms": 5},
        {
            "type": "local_shell_call",
            "action": {
                "type": "exec",
                "command": ["ls", "-l"],
                "env": {},
                "timeout_ms": 5,
                "working_directory": None,
                "user": None,
            },
        },
    ),
    "shell": (
        {"commands": ["ls", "pwd"]},
        {
            "type": "shell_call",
            "action": {"commands": ["ls", "pwd"], "timeout_ms": None, "max_output_length": None},
        },
    ),
    "edit": (
        {"type": "update_file", "path": "a.py", "diff": "+1"},
        {
            "type": "apply_patch_call",
            "operation": {"type": "update_file", "path": "a.py", "diff": "+1"},
        },
    ),
}
EVENT: Any = TypeAdapter(ResponseStreamEvent)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces that end at these places."""
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


PLACES = st.lists(st.integers(0, 1000), max_size=6)


@given(st.text(), st.booleans(), PLACES, st.sampled_from(["", " ", "\n  "]))
def test_a_custom_input_is_decoded_while_it_is_written(
    text: str, ascii_only: bool, places: list[int], space: str
) -> None:
    """However it is cut, and whichever characters are escaped."""
    value = json.dumps(text, ensure_ascii=ascii_only)
    arguments = f'{space}{{{space}"input"{space}:{space}{value}{space}}}'
    decoder = CustomInputDecoder()

    decoded = [decoder.feed(piece) for piece in cut(arguments, places)]

    assert "".join(decoded) == text
    assert decoder.finish(arguments) == ""


@given(
    st.one_of(
        st.text(),
        st.text('{"input:\\ud8d3a }n', max_size=40),
        st.from_regex(r'\{"input": "(\\[a-z"]|\\u[d0-9a-f]{2,4}|[a-z"]){0,9}', fullmatch=True),
    ),
    PLACES,
)
def test_any_arguments_give_one_input(arguments: str, places: list[int]) -> None:
    """Malformed or cut off: the pieces add up to what the whole gives, and it can be sent as JSON."""
    decoder = CustomInputDecoder()

    pieces = [decoder.feed(piece) for piece in cut(arguments, places)]
    pieces.append(decoder.finish(arguments))

    assert "".join(pieces) == custom_input(arguments)
    "".join(pieces).encode()


@given(st.text())
def test_opaque_texts_come_back(text: str) -> None:
    """And what others wrote does not."""
    assert decode_opaque(encode_opaque(text)) == text
    assert decode_opaque(text) is None or text.startswith("ramify1.")
    assert decode_opaque("ramify1." + text + "\u00e9") is None


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[tuple[list[OutputEvent], int]], FinishReason]:
    """Steps of an answer with text, reasoning and calls of every kind, the last maybe cut off."""
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    events: list[OutputEvent] = []
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", *FORMS]), max_size=5))
    num_calls = 0
    for number, kind in enumerate(kinds):
        if kind in FORMS:
            is_cut = number == len(kinds) - 1 and reason is FinishReason.LENGTH
            arguments = json.dumps(ITEMS[kind][0], ensure_ascii=draw(st.booleans()))
            arguments = arguments[: draw(st.integers(0, len(arguments)))] if is_cut else arguments
            events.append(CallStart(kind, f"call_{num_calls}"))
            pieces = cut(arguments, draw(PLACES))
            events += [ArgumentsDelta(piece) for piece in pieces if piece]
            events.append(CallEnd(is_complete=not is_cut))
            num_calls += 1
        else:
            delta = TextDelta if kind == "text" else ReasoningDelta
            events += [delta(draw(st.text(min_size=1, max_size=5)))]
    steps: list[tuple[list[OutputEvent], int]] = [([], 1)]
    for event in events:
        if draw(st.booleans()):
            steps.append(([], 1))
        steps[-1][0].append(event)
    return steps, reason


class Owned(Played):
    """A generation of a tenant, whose response is stored."""

    caller = Caller("ann")


def builder(
    steps: list[tuple[list[OutputEvent], int]], reason: FinishReason, name: str, include: list[str]
) -> ResponsesResponseBuilder:
    """The builder of a response with `FORMS`, whose history entry is that of a real request."""
    request = ResponsesRequest(input="Who?", include=include)
    real = response_to_generation(request, EarlierTurns(), SERVICE, "ann")
    played = Owned(steps, reason, id=f"resp_{name * 32}")
    chat = ChatRequest(messages=[ChatMessage("user", "Who?")])
    tools = ServedTools(forms=FORMS)
    translated = TranslatedRequest(chat, real.generation_request, real.items, EarlierTurns(), tools)

    class Request:
        """What the builder reads of a generation request."""

        is_prewarm = ends_after_call = False
        session = real.generation_request.session
        new_parser = staticmethod(played.new_parser)
        prompt, params = real.generation_request.prompt, real.generation_request.params
        history_entry = real.generation_request.history_entry

    Owned.request = property(lambda _: Request)  # type: ignore[assignment]
    return ResponsesResponseBuilder(SERVICE, request, translated, played)  # type: ignore[arg-type]


@given(scripts(), st.sampled_from([[], ["reasoning.encrypted_content"]]))
def test_the_events_add_up_and_can_be_replayed(
    script: tuple[list[tuple[list[OutputEvent], int]], FinishReason], include: list[str]
) -> None:
    """Every event is one of the SDK's; items are as in the whole response; a replay is equal."""
    steps, reason = script

    async def stream() -> list[dict[str, Any]]:
        return [event async for event in builder(steps, reason, "a", include).events()]

    whole = asyncio.run(builder(steps, reason, "a", include).body())
    of_whole = list(replayed_events(stored_response(SERVICE, "ann", "resp_" + "a" * 32, "")))
    events = asyncio.run(stream())
    replay = list(replayed_events(stored_response(SERVICE, "ann", "resp_" + "a" * 32, "")))

    for event in events:
        parsed = EVENT.validate_python(event)
        assert parsed.type == event["type"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done == whole["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    for item in done:
        content = item.get("content") or [{}]
        text = item.get("arguments", item.get("input", content[0].get("text", "")))
        assert deltas.get(item["id"], "") == text
    assert replay == json.loads(msgspec.json.encode(events))
    kinds = [
        [event["type"] for event in stream if "delta" not in event] for stream in (of_whole, replay)
    ]
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", FORMS)
def test_a_call_comes_back_in_the_form_of_its_tool(name: str) -> None:
    """And as an input item it is the same call again."""
    arguments, fields = ITEMS[name]
    steps: list[tuple[list[OutputEvent], int]] = [
        ([CallStart(name, "call_1"), ArgumentsDelta(json.dumps(arguments)), CallEnd()], 3)
    ]

    [item] = asyncio.run(builder(steps, FinishReason.STOP, "b", []).body())["output"]
    translator = ItemTranslator()
    translator.append(item, "input[0]")
    [message], _ = translator.finish()

    assert item.items() >= (fields | {"call_id": "call_1", "status": "completed"}).items()
    [call] = message.tool_calls or []
    assert (call.function.name, call.id) == (
        "apply_patch" if name == "edit" else name,
        "call_1",
    )
    assert call.function.arguments.items() >= arguments.items()
