"""The official Anthropic client against a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import Running, Start

MODEL = "ramify-tiny"
SYSTEM = "You answer questions about people and their cities in a few words, and nothing else. "
PAGE = 16
TOOL = {
    "name": "look_up",
    "description": "Where somebody lives.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def asked(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    greedy = {"temperature": 0}  # the client no longer has a name for it
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "extra_body": greedy} | options


def test_a_message_is_answered_and_streamed_alike(server: Running) -> None:
    """Whole, by the helper that checks the order of events, and by the async client."""
    client = server.anthropic()
    options = asked("Who lives in Rome?", system=SYSTEM)
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()

    assert whole.content[0].type == "text"
    assert streamed.content[0].text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert whole.id.startswith("msg_")
    assert whole.model == MODEL
    assert whole.diagnostics is None

    async def again() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as other,
            other.messages.stream(**options) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(again()) == whole.content[0].text


def test_ends_are_told_apart(server: Running) -> None:
    """The limit, and a stop text that is named and not shown."""
    client = server.anthropic()
    whole = client.messages.create(**asked("Tell me of Ann"))
    cut = client.messages.create(**asked("Tell me of Ann", max_tokens=1))
    assert whole.stop_reason == "end_turn"
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 1
    letter = whole.content[0].text.strip()[1]
    stopped = client.messages.create(**asked("Tell me of Ann", stop_sequences=[letter]))
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == letter
    assert letter not in stopped.content[0].text


def test_a_marked_prefix_is_written_once_and_read_again(server: Running) -> None:
    """Input, read and written tokens add up to the prompt, and 5m and 1h are told apart."""
    client = server.anthropic()
    system = [
        {"type": "text", "text": "First. " + SYSTEM * 4, "cache_control": {"type": "ephemeral"}},
        {
            "type": "text",
            "text": "Second. " + SYSTEM * 4,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ]
    total = client.messages.count_tokens(
        model=MODEL, system=system, messages=asked("Who lives in Rome?")["messages"]
    ).input_tokens
    cold = client.messages.create(**asked("Who lives in Rome?", system=system)).usage
    warm = client.messages.create(**asked("Who lives in Oslo?", system=system)).usage

    for use in (cold, warm):
        assert total == pytest.approx(
            use.input_tokens + use.cache_read_input_tokens + use.cache_creation_input_tokens, abs=4
        )
    assert cold.cache_creation.ephemeral_5m_input_tokens > PAGE
    assert cold.cache_creation.ephemeral_1h_input_tokens > PAGE
    assert cold.cache_creation_input_tokens == (
        cold.cache_creation.ephemeral_5m_input_tokens
        + cold.cache_creation.ephemeral_1h_input_tokens
    )
    assert warm.cache_creation_input_tokens == 0
    assert warm.cache_read_input_tokens >= cold.cache_creation_input_tokens
    marks = [one["ttl_s"] for one in pins(server)]
    assert marks.count(300.0) == 1
    assert marks.count(3600.0) == 1


def pins(server: Running) -> list[dict[str, Any]]:
    found: Any = server.openai().get("/cache/pins", cast_to=object)
    return list(found["pins"])


def test_a_pinned_prefix_survives_a_flood(start: Start) -> None:
    """And one that was not marked does not."""
    server = start("--kv-cache-tokens", "2048")
    client = server.anthropic()
    mark = {"cache_control": {"type": "ephemeral"}}

    def ask(name: str, **block: Any) -> Any:
        text = {"type": "text", "text": f"{name}. {SYSTEM * 2}"} | block
        return client.messages.create(**asked("Who?", system=[text], max_tokens=1)).usage

    ask("marked", **mark)
    ask("plain")
    for at in range(100):
        ask(f"{at} flood")

    assert ask("marked", **mark).cache_read_input_tokens >= 2 * PAGE
    plain = ask("plain")
    assert plain.cache_read_input_tokens < PAGE
    assert plain.ramify_cache["miss"]["reason"] in ("evicted", "diverged")


def test_five_marks_are_refused(server: Running) -> None:
    """With the field that is at fault."""
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        server.anthropic().messages.create(
            **asked("x") | {"messages": [{"role": "user", "content": [block] * 5}]}
        )


def test_no_tokens_are_asked_for_to_prewarm(server: Running) -> None:
    """Nothing is said, and the next request reads it."""
    client = server.anthropic()
    options = asked("Who?", system="Warm. " + SYSTEM * 3)
    quiet = client.messages.create(**options | {"max_tokens": 0})
    loud = client.messages.create(**options)
    assert quiet.content == []
    assert quiet.usage.output_tokens == 0
    assert loud.usage.cache_read_input_tokens >= PAGE
    with client.messages.stream(**options | {"max_tokens": 0}) as stream:
        assert stream.get_final_message().content == []


def test_a_tool_is_called_and_its_result_goes_back(start: Start, talker: str) -> None:
    """Whole and streamed; the arguments follow the schema."""
    server = start(model=talker)
    client = server.anthropic()
    options = asked("Where does Ann live?", max_tokens=800, model="talker") | {
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
    }
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    call: Any = None
    for answer in (client.messages.create(**options), streamed):
        assert answer.stop_reason == "tool_use"
        [call] = answer.content
        assert call.type == "tool_use"
        assert call.name == "look_up"
        assert call.input["city"] in ("Rome", "Paris")
    talk = [
        *options["messages"],
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rome"}],
        },
    ]
    last = client.messages.create(**options | {"messages": talk, "tool_choice": {"type": "auto"}})
    assert last.usage.cache_read_input_tokens >= PAGE


def test_structured_output_is_json(server: Running) -> None:
    """By output_config.format."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = server.anthropic().messages.create(**asked("Who?", output_config=form, max_tokens=800))
    assert json.loads(answer.content[0].text)["city"] in ("Rome", "Paris")


def test_errors_are_the_clients_exceptions(server: Running, start: Start) -> None:
    """By status, in Anthropic's envelope."""
    client = server.anthropic()
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**asked("x") | {"model": "claude"})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**asked("x", extra_body={"temperature": 2.0}))
    with pytest.raises(anthropic.BadRequestError, match="2048"):
        client.messages.create(**asked("word " * 5000))
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]"):
        client.messages.create(**asked("x") | {"messages": [{"role": "user", "content": [image]}]})
    guarded = start("--api-key", "ann", "--api-key", "bob", "--admin-key", "root")
    with pytest.raises(anthropic.AuthenticationError):
        guarded.anthropic("eve").messages.create(**asked("x"))
    assert guarded.anthropic("ann").messages.create(**asked("x")).content
