"""OpenAI's Responses API: the official client against a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Running

MODEL = "ramify-tiny"
PAGE = 16
RULES = "You answer questions about people and their cities in a few words, and nothing else. " * 2
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def request_body(question: str, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "instructions": RULES,
        "input": question,
        "temperature": 0,
        "max_output_tokens": 24,
    } | options


def test_a_response_is_whole_and_streamed_alike(server: Running) -> None:
    """Also with the client's stream helper, which checks the order of events, and its async client."""
    client = server.openai()
    whole = client.responses.create(**request_body("Who lives in Rome?"))
    with client.responses.stream(**request_body("Who lives in Rome?")) as stream:
        events = list(stream)
        streamed = stream.get_final_response()

    assert whole.output_text
    assert streamed.output_text == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] == f"response.{streamed.status}"
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert streamed.usage.input_tokens_details.cached_tokens >= PAGE

    async def ask_async() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as async_client:
            response: Any = await async_client.responses.create(
                **request_body("Who lives in Rome?")
            )
            return str(response.output_text)

    assert asyncio.run(ask_async()) == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_goes_on_from_the_tokens_of_the_last(server: Running, stream: bool) -> None:
    """Its prompt begins with the last prompt and answer, token by token, which are read from the cache."""
    client = server.openai()
    # Greedy: a sampled answer may reach the limit, and then its stream ends with another event.
    options = request_body(f"Tell me who lives in Rome, {stream}.", temperature=0)
    if stream:
        with client.responses.stream(**options) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(**options)
    second = client.responses.create(
        **request_body("And in Paris?", previous_response_id=first.id, max_output_tokens=4)
    )

    computed = first.usage.input_tokens + first.usage.output_tokens - 1  # not the last token's K/V
    assert second.usage.input_tokens_details.cached_tokens >= computed // PAGE * PAGE - PAGE
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - PAGE
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_a_response_can_be_forgotten_or_never_kept(server: Running) -> None:
    """Then no request can continue from it."""
    client = server.openai()
    first = client.responses.create(**request_body("Who?"))
    client.responses.delete(first.id)
    unstored = client.responses.create(**request_body("Who?", store=False))
    for response_id in (first.id, unstored.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(**request_body("And?", previous_response_id=response_id))
        body: Any = caught.value.body
        assert body["param"] == "previous_response_id"


def test_a_function_is_called(server: Running) -> None:
    """Streamed or not, with arguments that follow the schema."""
    client = server.openai()
    options = request_body("Where?", tools=[TOOL], tool_choice="required", max_output_tokens=800)
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    for answer in (client.responses.create(**options), streamed):
        [call] = answer.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Rome", "Paris")


def test_structured_text_is_json(server: Running) -> None:
    """With `text.format`."""
    text_format = {
        "type": "json_schema",
        "name": "place",
        "schema": TOOL["parameters"],
        "strict": True,
    }
    answer = server.openai().responses.create(
        **request_body("Where?", text={"format": text_format}, max_output_tokens=800)
    )
    assert json.loads(answer.output_text)["city"] in ("Rome", "Paris")


def test_scores_come_if_they_are_asked_for(server: Running) -> None:
    """With `include` and `top_logprobs`."""
    answer = server.openai().responses.create(
        **request_body("Where?", include=["message.output_text.logprobs"], top_logprobs=2)
    )
    scores = answer.output[0].content[0].logprobs
    assert "".join(score.token for score in scores).strip() == answer.output_text.strip()
    assert all(len(score.top_logprobs) >= 2 for score in scores)


def test_a_prompt_can_be_prewarmed(server: Running) -> None:
    """No output; the next request reads the prompt from the cache."""
    client = server.openai()
    options = request_body("Who?", instructions="Warm up. " + RULES)
    prewarmed = client.responses.create(**options, prompt_cache_options={"prewarm": True})
    answered = client.responses.create(**options)
    assert prewarmed.output == []
    assert prewarmed.usage.output_tokens == 0
    assert prewarmed.usage.input_tokens_details.cache_write_tokens >= PAGE
    assert answered.usage.input_tokens_details.cached_tokens >= PAGE
    assert prewarmed.prompt_cache_options.mode == "implicit"


def test_what_is_not_served_is_refused(server: Running) -> None:
    """400 or 404 that names the field."""
    for change, param in (
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"model": "gpt"}, "model"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            server.openai().responses.create(**request_body("x") | change)
        assert caught.value.status_code in (400, 404)
        body: Any = caught.value.body
        assert body["param"] == param
