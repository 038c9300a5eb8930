"""Ollama's API: the official client against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Running, Start

ollama: Any = pytest.importorskip("ollama", reason="the client `ollama` is not installed")
MODEL = "ramify-tiny"
SYSTEM = "You answer questions about people and their cities in a few words, and nothing else. "
GREEDY = {"temperature": 0, "num_predict": 6}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with ollama.Client(host=server.url) as client:
        yield client


def talk(text: str = "Who lives in Rome?") -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM * 3}, {"role": "user", "content": text}]


def test_a_chat_is_answered_and_streamed_alike(server: Running, client: Any) -> None:
    """By both clients, with counts and times at the end."""
    whole = client.chat(MODEL, talk(), options=GREEDY)
    pieces = list(client.chat(MODEL, talk(), options=GREEDY, stream=True))

    assert "".join(piece.message.content for piece in pieces) == whole.message.content != ""
    for last in (whole, pieces[-1]):
        assert last.done
        assert last.done_reason == whole.done_reason
        assert (last.prompt_eval_count, last.eval_count) == (
            whole.prompt_eval_count,
            whole.eval_count,
        )
        assert last.total_duration >= last.eval_duration > 0

    async def ask_async() -> str:
        async with ollama.AsyncClient(host=server.url) as other:
            lines = await other.chat(MODEL, talk(), options=GREEDY, stream=True)
            return "".join([line.message.content async for line in lines])

    assert asyncio.run(ask_async()) == whole.message.content


def test_the_prompt_is_that_of_openais_api(server: Running, client: Any) -> None:
    """In number of tokens, and what one computed the other reads."""
    messages = talk("Where is the violin?")
    openais = server.openai().chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=6
    )
    ours = client.chat(MODEL, messages, options=GREEDY)

    assert ours.prompt_eval_count == openais.usage.prompt_tokens
    assert ours.message.content == openais.choices[0].message.content
    again = server.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached >= 0.8 * openais.usage.prompt_tokens


def test_a_context_goes_on(client: Any) -> None:
    """The second question's prompt begins with the tokens of the first, and of its answer."""
    first = client.generate(MODEL, "Who lives in Rome?", system=SYSTEM, options=GREEDY)
    second = client.generate(MODEL, "And in Oslo?", context=first.context, options=GREEDY)

    assert first.response
    assert second.context[: len(first.context)] == first.context
    assert second.prompt_eval_count > len(first.context)


def test_a_format_is_followed(client: Any) -> None:
    """A JSON schema, or any JSON."""
    options = {"temperature": 0, "num_predict": 800}
    answer = client.chat(MODEL, talk(), format=SCHEMA, options=options)

    assert json.loads(answer.message.content)["city"] in ("Rome", "Paris")


def test_a_call_and_its_result_are_in_the_prompt(start: Start, talker: str) -> None:
    """A Python function, its call and what it returned; any model name with a tag is served."""

    def look_up(city: str) -> str:
        """Where somebody lives.

        Args:
            city: the city
        """
        return city

    options = {"temperature": 0, "num_predict": 40}
    with ollama.Client(host=start("--served-model-name", "*", model=talker).url) as client:
        messages = talk("Where does Ann live?")
        call = {"function": {"name": "look_up", "arguments": {"city": "Rome"}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_name": "look_up", "content": look_up("Rome")},
        ]
        alone = client.chat("any:7b", messages[:2], options=options)
        answer = client.chat("any:7b", messages, tools=[look_up], options=options)

    assert answer.model == "any:7b"
    assert answer.prompt_eval_count > alone.prompt_eval_count + 50


def test_the_model_is_listed_shown_and_embeds(client: Any) -> None:
    """With a context length, a size, and vectors of length 1."""
    [listed], [running] = client.list().models, client.ps().models
    shown = client.show(MODEL)
    vectors = client.embed(MODEL, ["Rome", "Oslo"]).embeddings

    assert listed.model == running.model == f"{MODEL}:latest"
    assert listed.digest == running.digest
    assert listed.size > 1_000_000
    assert listed.details.family == "llama"
    assert shown.modelinfo["llama.context_length"] == running.context_length
    assert "completion" in shown.capabilities
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1, 1], abs=1e-5)


def test_errors_are_the_clients_exceptions(client: Any, start: Start) -> None:
    """With status and text, in a stream too."""
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.chat("gone", talk())
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="maximum context"):
        list(client.generate(MODEL, "word " * 5000, stream=True))
    with pytest.raises(ollama.ResponseError, match="does not support thinking"):
        client.chat(MODEL, talk(), think=True)
    for call in (client.pull, client.push, client.delete):
        with pytest.raises(ollama.ResponseError, match="models are not managed here"):
            call(MODEL)
    guarded = start("--api-key", "ann", "--api-key", "bob", "--admin-key", "root")
    headers = {"Authorization": "Bearer eve"}
    with (
        ollama.Client(host=guarded.url, headers=headers) as eve,
        pytest.raises(ollama.ResponseError, match="not known"),
    ):
        eve.list()
    with ollama.Client(host=guarded.url, headers={"Authorization": "Bearer ann"}) as ann:
        assert ann.chat(MODEL, talk(), options=GREEDY).message.content
