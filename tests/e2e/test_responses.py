"""OpenAI's Responses API, by the official client, against a real server."""

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


def asked(question: str, **options: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "instructions": RULES,
        "input": question,
        "temperature": 0,
        "max_output_tokens": 24,
    } | options


def test_a_response_is_whole_and_streamed_alike(server: Running) -> None:
    """The helper checks the order of events; numbers go up by one; also for the async client."""
    client = server.openai()
    whole = client.responses.create(**asked("Who lives in Rome?"))
    with client.responses.stream(**asked("Who lives in Rome?")) as stream:
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

    async def again() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as other:
            found: Any = await other.responses.create(**asked("Who lives in Rome?"))
            return str(found.output_text)

    assert asyncio.run(again()) == whole.output_text


@pytest.mark.parametrize("stream", [False, True])
def test_the_next_turn_goes_on_from_the_tokens_of_the_last(server: Running, stream: bool) -> None:
    """Its prompt begins with the last prompt and the answer as they were computed: all are read."""
    client = server.openai()
    # greedy: drawn without a seed, an answer may be cut, which ends a stream with another event
    options = asked(f"Tell me who lives in Rome, {stream}.", temperature=0)
    if stream:
        with client.responses.stream(**options) as events:
            first = events.get_final_response()
    else:
        first = client.responses.create(**options)
    second = client.responses.create(
        **asked("And in Paris?", previous_response_id=first.id, max_output_tokens=4)
    )

    computed = first.usage.input_tokens + first.usage.output_tokens - 1  # the last was only said
    assert second.usage.input_tokens_details.cached_tokens >= computed // PAGE * PAGE - PAGE
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - PAGE
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text


def test_a_response_can_be_forgotten_or_never_kept(server: Running) -> None:
    """Then nothing goes on from it."""
    client = server.openai()
    first = client.responses.create(**asked("Who?"))
    client.responses.delete(first.id)
    secret = client.responses.create(**asked("Who?", store=False))
    for name in (first.id, secret.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(name)
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(**asked("And?", previous_response_id=name))
        body: Any = caught.value.body
        assert body["param"] == "previous_response_id"


def test_a_function_is_called(server: Running) -> None:
    """Whole and streamed, with arguments that follow the schema."""
    client = server.openai()
    options = asked("Where?", tools=[TOOL], tool_choice="required", max_output_tokens=800)
    with client.responses.stream(**options) as stream:
        streamed = stream.get_final_response()
    for answer in (client.responses.create(**options), streamed):
        [call] = answer.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Rome", "Paris")


def test_structured_text_is_json(server: Running) -> None:
    """By text.format."""
    form = {"type": "json_schema", "name": "place", "schema": TOOL["parameters"], "strict": True}
    answer = server.openai().responses.create(
        **asked("Where?", text={"format": form}, max_output_tokens=800)
    )
    assert json.loads(answer.output_text)["city"] in ("Rome", "Paris")


def test_scores_come_if_they_are_asked_for(server: Running) -> None:
    """By include and top_logprobs."""
    answer = server.openai().responses.create(
        **asked("Where?", include=["message.output_text.logprobs"], top_logprobs=2)
    )
    scores = answer.output[0].content[0].logprobs
    assert "".join(one.token for one in scores).strip() == answer.output_text.strip()
    assert all(len(one.top_logprobs) >= 2 for one in scores)


def test_a_prompt_can_be_prewarmed(server: Running) -> None:
    """Nothing is said, and the next request reads it."""
    client = server.openai()
    options = asked("Who?", instructions="Warm up. " + RULES)
    quiet = client.responses.create(**options, prompt_cache_options={"prewarm": True})
    loud = client.responses.create(**options)
    assert quiet.output == []
    assert quiet.usage.output_tokens == 0
    assert quiet.usage.input_tokens_details.cache_write_tokens >= PAGE
    assert loud.usage.input_tokens_details.cached_tokens >= PAGE
    assert quiet.prompt_cache_options.mode == "implicit"


def test_what_is_not_served_is_refused(server: Running) -> None:
    """With the field that is at fault."""
    for change, param in (
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "middle"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"model": "gpt"}, "model"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            server.openai().responses.create(**asked("x") | change)
        assert caught.value.status_code in (400, 404)
        body: Any = caught.value.body
        assert body["param"] == param
