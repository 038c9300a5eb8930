"""Anthropic's Messages API: the official client against a real server."""

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


def request_body(text: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    greedy = {"temperature": 0}  # the client has no argument for it
    return {"model": MODEL, "messages": messages, "max_tokens": 6, "extra_body": greedy} | options


def test_a_message_is_answered_and_streamed_alike(server: Running) -> None:
    """Also with the client's stream helper, which checks the order of events, and its async client."""
    client = server.anthropic()
    options = request_body("Who lives in Rome?", system=SYSTEM)
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

    async def ask_async() -> str:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as async_client,
            async_client.messages.stream(**options) as stream,
        ):
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask_async()) == whole.content[0].text


def test_ends_are_told_apart(server: Running) -> None:
    """End of turn, limit, and a stop sequence, which is named and not part of the text."""
    client = server.anthropic()
    whole = client.messages.create(**request_body("Tell me of Ann"))
    cut = client.messages.create(**request_body("Tell me of Ann", max_tokens=1))
    assert whole.stop_reason == "end_turn"
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 1
    letter = whole.content[0].text.strip()[1]
    stopped = client.messages.create(**request_body("Tell me of Ann", stop_sequences=[letter]))
    assert stopped.stop_reason == "stop_sequence"
    assert stopped.stop_sequence == letter
    assert letter not in stopped.content[0].text


def test_a_marked_prefix_is_written_once_and_read_again(server: Running) -> None:
    """Input, read and written tokens add up to the prompt; 5m and 1h are counted apart."""
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
        model=MODEL, system=system, messages=request_body("Who lives in Rome?")["messages"]
    ).input_tokens
    cold = client.messages.create(**request_body("Who lives in Rome?", system=system)).usage
    warm = client.messages.create(**request_body("Who lives in Oslo?", system=system)).usage

    for usage in (cold, warm):
        assert total == pytest.approx(
            usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens,
            abs=4,
        )
    assert cold.cache_creation.ephemeral_5m_input_tokens > PAGE
    assert cold.cache_creation.ephemeral_1h_input_tokens > PAGE
    assert cold.cache_creation_input_tokens == (
        cold.cache_creation.ephemeral_5m_input_tokens
        + cold.cache_creation.ephemeral_1h_input_tokens
    )
    assert warm.cache_creation_input_tokens == 0
    assert warm.cache_read_input_tokens >= cold.cache_creation_input_tokens
    ttls = [pin["ttl_s"] for pin in pins(server)]
    assert ttls.count(300.0) == 1
    assert ttls.count(3600.0) == 1


def pins(server: Running) -> list[dict[str, Any]]:
    response: Any = server.openai().get("/cache/pins", cast_to=object)
    return list(response["pins"])


def test_a_pinned_prefix_survives_a_flood(start: Start) -> None:
    """A prefix without `cache_control` is evicted."""
    server = start("--kv-cache-tokens", "2048")
    client = server.anthropic()
    cache_control = {"cache_control": {"type": "ephemeral"}}

    def ask(name: str, **block: Any) -> Any:
        text = {"type": "text", "text": f"{name}. {SYSTEM * 2}"} | block
        return client.messages.create(**request_body("Who?", system=[text], max_tokens=1)).usage

    ask("marked", **cache_control)
    ask("plain")
    for index in range(100):
        ask(f"{index} flood")

    assert ask("marked", **cache_control).cache_read_input_tokens >= 2 * PAGE
    plain = ask("plain")
    assert plain.cache_read_input_tokens < PAGE
    assert plain.ramify_cache["miss"]["reason"] in ("evicted", "diverged")


def test_five_marks_are_refused(server: Running) -> None:
    """400 that names the field."""
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(anthropic.BadRequestError, match="cache_control"):
        server.anthropic().messages.create(
            **request_body("x") | {"messages": [{"role": "user", "content": [block] * 5}]}
        )


def test_no_tokens_are_asked_for_to_prewarm(server: Running) -> None:
    """With `max_tokens` 0: no output; the next request reads the prompt from the cache."""
    client = server.anthropic()
    options = request_body("Who?", system="Warm. " + SYSTEM * 3)
    prewarmed = client.messages.create(**options | {"max_tokens": 0})
    answered = client.messages.create(**options)
    assert prewarmed.content == []
    assert prewarmed.usage.output_tokens == 0
    assert answered.usage.cache_read_input_tokens >= PAGE
    with client.messages.stream(**options | {"max_tokens": 0}) as stream:
        assert stream.get_final_message().content == []


def test_a_tool_is_called_and_its_result_goes_back(start: Start, talker: str) -> None:
    """Streamed or not; the arguments follow the schema, and the next turn reads the cache."""
    server = start("--served-model-name", "*", model=talker)
    client = server.anthropic()
    options = request_body("Where does Ann live?", max_tokens=800, model="talker") | {
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
    messages = [
        *options["messages"],
        {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "Rome"}],
        },
    ]
    last = client.messages.create(
        **options | {"messages": messages, "tool_choice": {"type": "auto"}}
    )
    assert last.usage.cache_read_input_tokens >= PAGE


def test_structured_output_is_json(server: Running) -> None:
    """With `output_config.format`."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    output_config = {"format": {"type": "json_schema", "schema": schema}}
    answer = server.anthropic().messages.create(
        **request_body("Who?", output_config=output_config, max_tokens=800)
    )
    assert json.loads(answer.content[0].text)["city"] in ("Rome", "Paris")


def test_errors_are_the_clients_exceptions(server: Running, start: Start) -> None:
    """By HTTP status, with Anthropic's error body."""
    client = server.anthropic()
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**request_body("x") | {"model": "claude"})
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**request_body("x", extra_body={"temperature": 2.0}))
    with pytest.raises(anthropic.BadRequestError, match="2047 maximum"):
        client.messages.create(**request_body("word " * 5000))
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]"):
        client.messages.create(
            **request_body("x")
            | {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}
        )
    guarded = start("--api-key", "ann", "--api-key", "bob", "--admin-key", "root")
    with pytest.raises(anthropic.AuthenticationError):
        guarded.anthropic("eve").messages.create(**request_body("x"))
    assert guarded.anthropic("ann").messages.create(**request_body("x")).content


def test_a_request_of_an_agent_is_streamed(start: Start, talker: str) -> None:
    """By the beta client: tools of Anthropic's, an earlier image, more tokens than the context has."""
    server = start("--served-model-name", "*", model=talker)
    client = server.anthropic()
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    options = {
        "model": "claude-opus-4-5",
        "max_tokens": 32000,
        "betas": ["context-management-2025-06-27"],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "tools": [
            TOOL | {"name": "plugin:people/look_up"},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who?"}, image]},
            {"role": "assistant", "content": "Ann."},
            {"role": "user", "content": "And where?"},
        ],
    }
    with client.beta.messages.stream(**options) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
        warning = stream.response.headers["x-ramify-warning"]

    assert message.model == "claude-opus-4-5"
    assert message.stop_reason
    assert {"message_start", "message_delta", "message_stop"} <= kinds
    assert "image content" in warning
    assert "web_search" in warning


def test_models_are_listed_and_retrieved(server: Running) -> None:
    """By both clients, each in its own form."""
    claude, openai = server.anthropic(), server.openai()

    [model] = claude.models.list()
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert claude.models.retrieve(MODEL).created_at.year > 2000
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("nobody")

    [model] = openai.models.list()
    assert (model.id, model.object) == (MODEL, "model")
