"""Answers as all three APIs write them: what is streamed adds up to the whole response."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.outputs import (
    CacheReport,
    Completion,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    StepOutput,
)
from ramify.params import SamplingParams
from ramify.server.answers.partial_json import partial_object
from ramify.server.anthropic.messages_response import MessageResponseBuilder
from ramify.server.anthropic.protocol import MessageRequest
from ramify.server.model_dialects.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    ReasoningDelta,
    TextDelta,
)
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import (
    ChatMessage,
    ChatRequest,
    NamedFunction,
    NamedTool,
    ReasoningOption,
)
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.openai.responses.request import TranslatedRequest
from ramify.server.openai.responses.response import ResponsesResponseBuilder
from ramify.server.openai.responses.store import EarlierTurns
from ramify.server.openai.responses.tools import ServedTools
from ramify.server.prompts.renderer import RenderedPrompt
from tests.pure.server_bench import ServerBench

SERVICE = ServerBench().service
Part = tuple[str, str]  # kind or name of the tool; text or arguments
Step = tuple[list[OutputEvent], int]  # what the parser yields; number of new tokens


@dataclass
class Script:
    """A parser that yields the events of the next step, whatever it is fed."""

    steps: list[list[OutputEvent]]

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        assert is_last == (len(self.steps) == 1)
        return self.steps.pop(0)


@dataclass
class Played:
    """A generation that plays back steps, with all that the builders read of one."""

    steps: list[Step]
    finish_reason: FinishReason
    id: str = "id"
    created: int = 0
    cache: None = None
    output: RequestOutput | None = None
    is_prewarm: bool = False
    prompt: RenderedPrompt = field(default_factory=lambda: RenderedPrompt(array("i", [1, 2])))
    model: str = "m"
    num_cached: int = 0
    ends_after_call: bool = False
    is_completed: bool = False
    params: SamplingParams = field(default_factory=SamplingParams)

    @property
    def request(self) -> Any:
        return self

    @property
    def history_entry(self) -> Any:
        return self

    def new_parser(self) -> Script:
        return Script([events for events, _ in self.steps])

    async def complete(self, request_id: int) -> None:
        assert not self.is_completed
        assert self.output is None
        self.is_completed = True

    def raise_error(self, index: int | None = None) -> None:
        assert index in (None, 0)

    async def __aiter__(self) -> AsyncIterator[StepOutput]:
        ids: tuple[int, ...] = ()
        for number, (_, num_tokens) in enumerate(self.steps):
            is_last = number == len(self.steps) - 1
            ids += (1,) * num_tokens
            if is_last:
                self.output = _output(ids, self.finish_reason)
            yield StepOutput(
                0, (1,) * num_tokens, finish_reason=self.finish_reason if is_last else None
            )


def _output(ids: tuple[int, ...], reason: FinishReason) -> RequestOutput:
    metrics = RequestMetrics(0.0, 0.0, 0.0, None)
    completion = Completion("", ids, reason)
    return RequestOutput(0, None, (), (completion,), metrics, CacheReport(0, 0, 0))


TEXTS = st.text('abé \n{}"\\', min_size=1, max_size=6)


@st.composite
def scripts(draw: st.DrawFn) -> tuple[list[Part], list[Step], FinishReason]:
    """An answer's parts, the steps that generate it, and how it ends."""
    reason = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    kinds = draw(st.lists(st.sampled_from(["text", "reasoning", "find", "count"]), max_size=5))
    parts: list[Part] = []
    events: list[OutputEvent] = []
    num_calls = 0
    for place, kind in enumerate(kinds):
        if kind in ("text", "reasoning"):
            pieces = draw(st.lists(TEXTS, min_size=1, max_size=3))
            events += [(TextDelta if kind == "text" else ReasoningDelta)(piece) for piece in pieces]
            joins = bool(parts) and parts[-1][0] == kind
            before = parts.pop()[1] if joins else ""
            parts.append((kind, before + "".join(pieces)))
            continue
        arguments = json.dumps(draw(st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2)))
        is_cut = reason is FinishReason.LENGTH and place == len(kinds) - 1 and draw(st.booleans())
        if is_cut:
            arguments = arguments[: draw(st.integers(0, len(arguments) - 1))]
        middle = draw(st.integers(0, len(arguments)))
        pieces = [piece for piece in (arguments[:middle], arguments[middle:]) if piece]
        events.append(CallStart(kind, f"call_{num_calls}"))
        events += [ArgumentsDelta(piece) for piece in pieces]
        events.append(CallEnd(not is_cut))
        parts.append((kind, arguments))
        num_calls += 1
    steps: list[Step] = [([], draw(st.integers(0, 3)))]
    for event in events:
        if draw(st.booleans()):
            steps.append(([], draw(st.integers(0, 3))))
        steps[-1][0].append(event)
    return parts, steps, reason


async def all_events(builder: Any) -> list[dict[str, Any]]:
    return [event async for event in builder.events()]


def both(make: Any, steps: list[Step], reason: FinishReason) -> tuple[Any, list[Any]]:
    """The whole response of a script, and the events of its stream."""
    body = asyncio.run(make(Played(steps, reason)).body())
    return body, asyncio.run(all_events(make(Played(steps, reason))))


def chat_builder(played: Any, **fields: Any) -> ChatResponseBuilder:
    request = ChatRequest(messages=[ChatMessage("user", "Who?")], **fields)
    return ChatResponseBuilder(SERVICE, request, played)


def message_builder(played: Any) -> MessageResponseBuilder:
    request = MessageRequest(model="m", messages=[], max_tokens=1)
    return MessageResponseBuilder(SERVICE, request, played)


def response_builder(played: Any) -> ResponsesResponseBuilder:
    request = ResponsesRequest(input="Who?", store=False, include=["reasoning.encrypted_content"])
    chat = ChatRequest(messages=[ChatMessage("user", "Who?")])
    items = [{"role": "user", "content": "Who?"}]
    translated = TranslatedRequest(chat, played.request, items, EarlierTurns(), ServedTools())
    return ResponsesResponseBuilder(SERVICE, request, translated, played)


@given(scripts())
def test_chat_chunks_add_up_to_the_message(
    script: tuple[list[Part], list[Step], FinishReason],
) -> None:
    """Deltas joined are the whole message; a call's first chunk has its name, then arguments only."""
    parts, steps, reason = script

    body, chunks = both(chat_builder, steps, reason)

    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": ""}
    calls: list[dict[str, Any]] = []
    finish_reasons = []
    for chunk in chunks:
        [choice] = chunk["choices"]
        finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        for name in message:
            message[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", ()):
            if call["index"] == len(calls):
                assert call["function"]["arguments"] == ""
                calls.append({key: call[key] for key in ("id", "type", "function")})
            else:
                assert call["index"] == len(calls) - 1
                assert call.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    [choice] = body["choices"]
    whole = choice["message"]
    assert message["content"] == (whole["content"] or "")
    assert message["reasoning"] == message["reasoning_content"] == whole.get("reasoning", "")
    assert message["reasoning"] == whole.get("reasoning_content", "")
    assert calls == whole.get("tool_calls", [])
    assert finish_reasons == [choice["finish_reason"]]
    assert message["content"] == "".join(text for kind, text in parts if kind == "text")
    assert message["reasoning"] == "".join(text for kind, text in parts if kind == "reasoning")
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == [
        part for part in parts if part[0] not in ("text", "reasoning")
    ]
    is_stopped = reason is FinishReason.STOP
    assert choice["finish_reason"] == (
        "length" if not is_stopped else "tool_calls" if calls else "stop"
    )


@given(scripts())
def test_message_events_add_up_to_the_message(
    script: tuple[list[Part], list[Step], FinishReason],
) -> None:
    """Each block starts, grows and stops before the next; joined they are the whole content."""
    parts, steps, reason = script

    body, events = both(message_builder, steps, reason)

    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    is_open = False
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                arguments.append("")
                is_open = True
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(blocks) - 1
                delta = dict(event["delta"])
                if delta.pop("type") == "input_json_delta":
                    arguments[-1] += delta["partial_json"]
                else:
                    [(name, text)] = delta.items()
                    blocks[-1][name] += text
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
                is_open = False
                if blocks[-1]["type"] == "tool_use":
                    blocks[-1]["input"] = partial_object(arguments[-1])
    assert not is_open
    assert blocks == body["content"]
    [delta] = [event for event in events if event["type"] == "message_delta"]
    assert delta["delta"]["stop_reason"] == body["stop_reason"]
    assert delta["usage"] == body["usage"]
    names = {"text": "text", "thinking": "thinking"}
    kinds = {"text": "text", "thinking": "reasoning"}
    written = [
        (kinds.get(block["type"], block.get("name")), block.get(names.get(block["type"], ""), text))
        for block, text in zip(blocks, arguments, strict=True)
    ]
    assert written == (parts or [("text", "")])
    if reason is FinishReason.STOP:
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        assert body["stop_reason"] == ("tool_use" if has_calls else "end_turn")
    else:
        assert body["stop_reason"] in ("max_tokens", "model_context_window_exceeded")


@given(scripts())
def test_response_events_add_up_to_the_response(
    script: tuple[list[Part], list[Step], FinishReason],
) -> None:
    """Items that the events build are the output of the last event and of the whole response."""
    parts, steps, reason = script

    body, events = both(response_builder, steps, reason)

    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
            texts.append("")
        elif kind.endswith(".delta"):
            assert event["output_index"] == len(items) - 1
            assert event["item_id"] == items[-1]["id"]
            texts[-1] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[-1]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[-1]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1] = event["item"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert items == events[-1]["response"]["output"]
    assert [_without_id(item) for item in items] == [_without_id(item) for item in body["output"]]
    written = [
        (item["name"], item["arguments"])
        if item["type"] == "function_call"
        else ({"message": "text"}.get(item["type"], item["type"]), item["content"][0]["text"])
        for item in items
    ]
    assert written == (parts or [("text", "")])
    assert body["status"] == ("completed" if reason is FinishReason.STOP else "incomplete")
    assert body["usage"] == events[-1]["response"]["usage"]


def _without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


@given(scripts())
def test_reasoning_tokens_are_counted_by_the_characters_of_their_step(
    script: tuple[list[Part], list[Step], FinishReason],
) -> None:
    """A step's tokens are split in proportion to its characters; held tokens count as the next."""
    _, steps, reason = script

    body = asyncio.run(chat_builder(Played(steps, reason)).body())

    expected = held = 0
    last = "text"
    for events, num_tokens in steps:
        held += num_tokens
        shares = [kind for event in events for kind in [_kind(event)] * _num_chars(event)]
        if shares:
            expected += round(held * shares.count("reasoning") / len(shares))
            held = 0
        last = _kind(events[-1]) if events else last
    expected += held if last == "reasoning" else 0
    usage = body["usage"]
    assert usage["completion_tokens"] == sum(num_tokens for _, num_tokens in steps)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}


def _kind(event: OutputEvent) -> str:
    return "reasoning" if isinstance(event, ReasoningDelta) else "text"


def _num_chars(event: OutputEvent) -> int:
    if isinstance(event, CallEnd):
        return 0
    return len(event.name if isinstance(event, CallStart) else event.text)


@given(scripts())
def test_a_single_call_is_the_end(script: tuple[list[Part], list[Step], FinishReason]) -> None:
    """Without parallel calls nothing follows the first whole call; the engine ends the request."""
    parts, steps, reason = script
    ends = [
        number
        for number, (events, _) in enumerate(steps)
        if any(isinstance(event, CallEnd) and event.is_complete for event in events)
    ]
    played: Any = Played(steps, reason, ends_after_call=True)

    body = asyncio.run(chat_builder(played).body())

    [choice] = body["choices"]
    assert played.is_completed == bool(ends and ends[0] < len(steps) - 1)
    if not ends:
        assert body == asyncio.run(chat_builder(Played(steps, reason)).body())
        return
    first = next(place for place, (kind, _) in enumerate(parts) if kind in ("find", "count"))
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == parts[first]
    texts = [text for kind, text in parts[:first] if kind == "text"]
    assert (choice["message"]["content"] or "") == "".join(texts)
    assert choice["finish_reason"] == "tool_calls"
    num_tokens = sum(num_tokens for _, num_tokens in steps[: ends[0] + 1])
    assert body["usage"]["completion_tokens"] == num_tokens
    message = asyncio.run(message_builder(Played(steps, reason, ends_after_call=True)).body())
    assert message["stop_reason"] == "tool_use"
    events = asyncio.run(all_events(chat_builder(Played(steps, reason, ends_after_call=True))))
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert reasons[-1] == "tool_calls"


def test_the_call_of_a_named_tool_ends_with_stop() -> None:
    """As OpenAI's: `tool_calls` where the model chose to call, `stop` where the tool was named."""
    events: list[OutputEvent] = [CallStart("find", "call_0"), CallEnd()]
    named = NamedTool(NamedFunction("find"))

    endings = []
    for choice in (None, "required", named):
        played: Any = Played([(events, 1)], FinishReason.STOP)
        body = asyncio.run(chat_builder(played, tool_choice=choice).body())
        endings.append(body["choices"][0]["finish_reason"])
        [call] = body["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "find", "arguments": "{}"}

    assert endings == ["tool_calls", "tool_calls", "stop"]


@pytest.mark.parametrize(
    ("call_id", "shown"),
    [("call_1", "toolu_1"), ("functions.call_api:0", "functions.call_api:0")],
)
def test_the_id_of_a_tool_use_is_anthropics_or_the_familys(call_id: str, shown: str) -> None:
    """Kimi's template writes the id of a call, which names the tool: it stays as it is."""
    played: Any = Played([([CallStart("find", call_id), CallEnd()], 1)], FinishReason.STOP)

    body = asyncio.run(message_builder(played).body())

    assert [block["id"] for block in body["content"]] == [shown]


@pytest.mark.parametrize(
    "fields", [{"include_reasoning": False}, {"reasoning": ReasoningOption(exclude=True)}]
)
def test_reasoning_is_left_out_on_request(fields: dict[str, Any]) -> None:
    """`include_reasoning: false` and `reasoning.exclude` hide the reasoning, which still counts."""
    steps: list[Step] = [([ReasoningDelta("Hm.")], 2), ([TextDelta("Ann.")], 1)]

    body, chunks = both(lambda played: chat_builder(played, **fields), steps, FinishReason.STOP)

    assert "Hm." not in json.dumps([body, chunks])
    assert body["choices"][0]["message"]["content"] == "Ann."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2
