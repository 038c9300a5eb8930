"""The Responses API for agents: the official client's tools, items, conversations and helpers."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.conftest import Start

SHELL: Any = {"type": "local_shell"}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits a file.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]{1,8}"},
}
MAIL: Any = {
    "type": "namespace",
    "name": "mcp__mail__",
    "description": "Mails.",
    "tools": [
        {
            "type": "function",
            "name": "send",
            "parameters": {
                "type": "object",
                "properties": {"to": {"enum": ["Ann", "Bob"]}},
                "required": ["to"],
                "additionalProperties": False,
            },
        }
    ],
}
TOOLS: Any = [SHELL, PATCH, MAIL, {"type": "web_search"}]


@pytest.fixture
def client(start: Start, talker: str) -> openai.OpenAI:
    """Of a server whose model has a chat template with tools."""
    connected: openai.OpenAI = start(model=talker).openai()
    return connected


def options(question: str, **others: Any) -> dict[str, Any]:
    return {
        "model": "talker",
        "input": question,
        "temperature": 0,
        "max_output_tokens": 24,
    } | others


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "custom", "name": "apply_patch"}, "custom_tool_call"),
        ({"type": "function", "name": "send", "namespace": "mcp__mail__"}, "function_call"),
    ],
)
def test_a_call_streams_in_the_form_of_its_tool(
    client: openai.OpenAI, choice: dict[str, Any], kind: str
) -> None:
    """The client's stream helper collects what the whole response has, and the tools are told."""
    fields = options("Do it.", tools=TOOLS, tool_choice=choice, max_output_tokens=800)
    raw = client.responses.with_raw_response.create(**fields)
    whole = raw.parse()
    with client.responses.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    assert "web_search" in raw.headers["x-ramify-warning"]
    [call], [again] = whole.output, streamed.output
    assert call.type == again.type == kind
    if call.type == "custom_tool_call" and again.type == "custom_tool_call":
        deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
        assert call.name == "apply_patch"
        assert call.input == again.input == "".join(deltas)
        assert 1 <= len(call.input) <= 8
    elif call.type == "function_call" and again.type == "function_call":
        assert (call.name, call.namespace) == ("send", "mcp__mail__")
        assert json.loads(call.arguments)["to"] in ("Ann", "Bob")
        assert again.arguments == call.arguments
    replayed = list(client.responses.retrieve(streamed.id, stream=True))
    assert [event.type for event in replayed] == [
        event.type
        for event in client.responses.retrieve(streamed.id, stream=True, starting_after=-1)
    ]
    assert replayed[-1].type == f"response.{streamed.status}"
    assert len(replayed) == 1 + max(event.sequence_number for event in replayed)


def test_the_results_of_calls_go_back(client: openai.OpenAI) -> None:
    """Custom and local shell calls with their outputs, statelessly."""
    items: Any = [
        {"role": "user", "content": "Fix it."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "abc", "call_id": "1"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "done"},
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "2",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
            "status": "completed",
        },
        {"type": "local_shell_call_output", "id": "2", "output": "a.py"},
    ]
    fields = options("", input=items, tools=TOOLS, store=False, parallel_tool_calls=True)
    answer = client.responses.create(**fields, include=["reasoning.encrypted_content"])
    counted = client.responses.input_tokens.count(model="talker", input=items, tools=TOOLS)

    assert answer.status in ("completed", "incomplete")
    assert counted.input_tokens == answer.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_a_conversation_is_kept_for_the_client(client: openai.OpenAI) -> None:
    """Created, continued twice, listed page by page, changed and deleted."""
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "I am Ann."}], metadata={"a": "b"}
    )
    client.responses.create(**options("Who lives in Rome?", conversation=conversation.id))
    answer = client.responses.create(**options("And in Paris?", conversation=conversation.id))
    assert answer.conversation is not None and answer.conversation.id == conversation.id
    items = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    before = list(client.responses.input_items.list(answer.id, order="asc", limit=2))

    assert [item.type for item in items] == ["message"] * 5
    assert [item.id for item in items[:-1]] == [item.id for item in before]
    item = client.conversations.items.retrieve(items[0].id or "", conversation_id=conversation.id)
    assert item == items[0]
    client.conversations.items.delete(items[0].id or "", conversation_id=conversation.id)
    assert len(list(client.conversations.items.list(conversation.id))) == 4
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def test_a_conversation_is_compacted(client: openai.OpenAI) -> None:
    """The output of `compact` is the input of the next request."""
    first = client.responses.create(**options("Who lives in Rome?"))
    compacted = client.responses.compact(model="talker", previous_response_id=first.id)
    kinds = [item.type for item in compacted.output]
    window: Any = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
    answer = client.responses.create(
        **options("", input=[*window, {"role": "user", "content": "And in Paris?"}])
    )

    assert kinds == ["message", "compaction"]
    assert compacted.usage.output_tokens > 0
    assert answer.usage is not None and answer.usage.output_tokens > 0


class Place(BaseModel):
    """Where somebody lives."""

    city: Literal["Rome", "Paris"]


def test_a_model_of_pydantic_is_parsed(client: openai.OpenAI) -> None:
    """`responses.parse` with `text_format`."""
    answer = client.responses.parse(**options("Where?", max_output_tokens=800), text_format=Place)

    assert isinstance(answer.output_parsed, Place)


def test_nothing_can_be_cancelled(client: openai.OpenAI) -> None:
    """400 with the reason."""
    answer = client.responses.create(**options("Who?"))

    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(answer.id)
