"""Tool calls in the three APIs, over a fake device with scripted answers."""

from __future__ import annotations

import json
from typing import Any

from starlette.testclient import TestClient

from tests.cpu.test_server_turns import TALKER, Talk, ask, said

NAMES = ("find", "count")
SCHEMA: dict[str, Any] = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
THEIRS = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
CALLS = [f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in NAMES]


def answering(text: str) -> Talk:
    """Return a server whose model always answers `text`."""
    talk = Talk(TALKER)
    talk.answer = list(TALKER.encode(text, add_special_tokens=False))
    return talk


def events(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """Post a streaming /v1/responses request; returns its events."""
    response = client.post("/v1/responses", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def test_text_behind_a_call_is_an_item_of_its_own() -> None:
    """Text and calls become separate output items in written order, streamed or not."""
    wanted = [("message", "One."), ("function_call", "find"), ("message", "Two.")]
    wanted.append(("function_call", "count"))
    with answering(f"One.{CALLS[0]}Two.{CALLS[1]}").client() as client:
        whole = ask(client, "/v1/responses", input="Go.", tools=FLAT, max_output_tokens=300)
        stream = events(client, input="Go.", tools=FLAT, max_output_tokens=300)

    added = [event for event in stream if event["type"] == "response.output_item.added"]
    done = [event for event in stream if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [0, 1, 2, 3]
    assert [event["item"]["id"] for event in added] == [event["item"]["id"] for event in done]
    assert len({event["item"]["id"] for event in added}) == 4
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    for output in (
        whole["output"],
        [event["item"] for event in done],
        stream[-1]["response"]["output"],
    ):
        assert [(item["type"], _content(item)) for item in output] == wanted
    for place, (kind, text) in enumerate(wanted):
        pieces = [event["delta"] for event in stream if _is_text_of(event, place)]
        assert kind != "message" or "".join(pieces) == text


def _content(item: dict[str, Any]) -> str:
    text = item["name"] if item["type"] == "function_call" else item["content"][0]["text"]
    return str(text)


def _is_text_of(event: dict[str, Any], place: int) -> bool:
    return bool(event["type"] == "response.output_text.delta" and event["output_index"] == place)


def test_one_call_where_no_more_were_asked_for() -> None:
    """Without parallel calls the answer ends with its first call."""
    text = "\n".join(CALLS)
    with answering(text).client() as client:
        talk = said("Go.")
        many = ask(client, "/v1/chat/completions", messages=talk, tools=TOOLS, max_tokens=300)
        single = ask(
            client,
            "/v1/chat/completions",
            messages=talk,
            tools=TOOLS,
            max_tokens=300,
            parallel_tool_calls=False,
        )
        message = ask(
            client,
            "/v1/messages",
            model="m",
            messages=talk,
            tools=THEIRS,
            max_tokens=300,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        response = ask(
            client, "/v1/responses", input="Go.", tools=FLAT, parallel_tool_calls=False,
            max_output_tokens=300,
        )  # fmt: skip

    calls = [completion["choices"][0]["message"]["tool_calls"] for completion in (many, single)]
    assert [[call["function"]["name"] for call in tool_calls] for tool_calls in calls] == [
        ["find", "count"],
        ["find"],
    ]
    assert many["choices"][0]["message"]["content"] is None
    assert single["choices"][0]["finish_reason"] == "tool_calls"
    assert [block["type"] for block in message["content"]] == ["tool_use"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert [item["type"] for item in response["output"]] == ["function_call"]


def test_a_conversation_is_tokenized_with_or_without_the_opening() -> None:
    """/tokenize ends with the assistant's opening unless add_generation_prompt is false."""
    with answering("").client() as client:
        body = {"messages": said("Go.")}
        opened = ask(client, "/tokenize", **body)["tokens"]
        plain = ask(client, "/tokenize", **body, add_generation_prompt=False)["tokens"]

    assert TALKER.decode(opened, False).endswith("<|end|><|assistant|>")
    assert TALKER.decode(plain, False).endswith("Go.<|end|>")


def test_an_echoed_answer_is_one_message_again() -> None:
    """Echoing the output items and naming previous_response_id give the same prompt."""
    talk = answering(f"One.{CALLS[0]}\nTwo.{CALLS[1]}")
    with talk.client() as client:
        first = ask(client, "/v1/responses", input="Go.", tools=FLAT, max_output_tokens=300)
        calls = [item for item in first["output"] if item["type"] == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
            for call in calls
        ]
        named = {"input": results, "previous_response_id": first["id"]}
        echoed = {"input": [{"role": "user", "content": "Go."}, *first["output"], *results]}
        prompts = []
        for body in (named, echoed):
            ask(client, "/v1/responses", **body, tools=FLAT, max_output_tokens=10)
            prompts.append(talk.generations[-1].request.prompt.text)

    assert prompts[0] == prompts[1]
    assert prompts[0].count("<|assistant|>") == 2


def test_an_answer_of_nothing_is_announced_too() -> None:
    """The stream announces the item of an empty answer before the final response."""
    with answering("").client() as client:
        stream = events(client, input="Go.", max_output_tokens=9)

    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
