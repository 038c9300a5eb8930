"""OpenAI's chat and text completions: the official client against a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.e2e.conftest import Running

SYSTEM = "You answer questions about people and their cities in a few words, and nothing else. "
MODEL = "ramify-tiny"


def talk(*texts: str) -> list[dict[str, str]]:
    roles = ["system", "user", "assistant"]
    turns = [roles[0], *(roles[1 + index % 2] for index in range(len(texts) - 1))]
    return [{"role": role, "content": text} for role, text in zip(turns, texts, strict=True)]


def test_models_are_listed(server: Running) -> None:
    """With `max_model_len`, which tools read."""
    client = server.openai()
    [model] = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).max_model_len > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-6")


def test_a_chat_is_answered_and_its_prefix_is_read_again(server: Running) -> None:
    """The second time all full pages before the last token come from the cache."""
    client = server.openai()
    messages = talk("Chat. " + SYSTEM * 3, "Who lives in Rome?")
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_completion_tokens=6
        )
        for _ in range(2)
    ]

    cold, warm = (answer.usage for answer in answers)
    assert cold is not None and warm is not None
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert cold.prompt_tokens_details is not None and warm.prompt_tokens_details is not None
    assert warm.prompt_tokens_details.cached_tokens == (warm.prompt_tokens - 1) // 16 * 16
    assert cold.prompt_tokens_details.cache_write_tokens == cold.prompt_tokens // 16 * 16
    assert cold.prompt_tokens + cold.completion_tokens == cold.total_tokens
    report = cold.ramify_cache
    assert report["read"] + report["shared_in_flight"] + report["computed"] == cold.prompt_tokens


def test_a_stream_is_the_same_answer_in_pieces(server: Running) -> None:
    """Role, text, finish reason and usage, in this order; also with the async client."""
    options = {
        "model": MODEL,
        "messages": talk(SYSTEM, "Who lives in Paris?"),
        "temperature": 0,
        "max_tokens": 8,
    }
    whole = server.openai().chat.completions.create(**options)
    streamed = server.openai().chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **options
    )
    chunks = list(streamed)

    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == whole.choices[0].finish_reason
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def ask_async() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as async_client:
            client: Any = async_client
            stream = await client.chat.completions.create(stream=True, **options)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask_async()) == text


def test_several_answers_have_seeds_of_their_own(server: Running) -> None:
    """And the same `seed` gives the same answers."""
    client = server.openai()
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=talk("", "Tell me"), n=4, seed=5, max_tokens=8, temperature=1.5
        )
        for _ in range(2)
    ]
    first, second = ([choice.message.content for choice in answer.choices] for answer in answers)
    assert first == second
    assert len(set(first)) > 1


def test_logprobs_have_their_tokens(server: Running) -> None:
    """Alternatives are sorted by logprob; greedy decoding takes the first."""
    answer = server.openai().chat.completions.create(
        model=MODEL,
        messages=talk("", "Who?"),
        logprobs=True,
        top_logprobs=3,
        max_tokens=4,
        temperature=0,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for entry in logprobs.content:
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert entry.top_logprobs[0].token == entry.token
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completions_echo_their_prompt_with_its_scores(server: Running) -> None:
    """As lm-eval requests it: token ids, `echo`, `logprobs`, a single token."""
    client = server.openai()
    ids = client.post("/../tokenize", body={"prompt": "Ann lives in Rome."}, cast_to=object)[
        "tokens"
    ]
    answer = client.completions.create(
        model=MODEL, prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    assert answer.choices[0].text.startswith("Ann lives in Rome.")


def test_several_prompts_are_answered_in_order(server: Running) -> None:
    """With n answers for each."""
    answer = server.openai().completions.create(
        model=MODEL, prompt=["a b", "c d", "e f"], n=2, max_tokens=3, seed=1
    )
    assert [choice.index for choice in answer.choices] == list(range(6))


def test_structured_output_is_json(server: Running) -> None:
    """That follows the schema, for any model."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}, "n": {"type": "boolean"}},
        "required": ["city", "n"],
        "additionalProperties": False,
    }
    answer = server.openai().chat.completions.create(
        model=MODEL,
        messages=talk("", "Who?"),
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
        max_tokens=800,
    )
    content = json.loads(answer.choices[0].message.content or "")
    assert content["city"] in ("Rome", "Paris")
    assert isinstance(content["n"], bool)


def test_a_tool_that_must_be_called_is_called(server: Running) -> None:
    """Name and arguments follow its schema."""
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Paris"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for stream in (False, True):
        options = {
            "model": MODEL,
            "messages": talk("", "Who?"),
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 800,
        }
        client = server.openai()
        if stream:
            with client.chat.completions.stream(**options) as events:
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        assert call.function.name == "look_up"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Paris")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"n": 1000}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}]}, None),
    ],
)
def test_wrong_values_are_told_by_their_field(
    server: Running, change: dict[str, object], param: str | None
) -> None:
    """400 with OpenAI's error body."""
    options = {"model": MODEL, "messages": talk("", "x"), "max_tokens": 1} | change
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().chat.completions.create(**options)
    body = caught.value.body
    assert isinstance(body, dict)
    assert body["type"] == "invalid_request_error"
    if param is not None:
        assert body["param"] == param


def test_a_prompt_that_is_too_long_is_told_with_both_lengths(server: Running) -> None:
    """And with the code `context_length_exceeded`."""
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        server.openai().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "word " * 5000}]
        )
    assert caught.value.code == "context_length_exceeded"
