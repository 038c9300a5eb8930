"""Faults of earlier servers: ids, roles, counts, reasons and errors of an answer are its own."""

import asyncio
from typing import Any

import pytest

from ramify.testing import FakeExecutor
from tests.pure.server_bench import Answer, ServerBench, ask, chat, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_eb17_a_stream_has_one_id_a_role_its_usage_and_its_reason() -> None:
    """All chunks of an answer have one id; the first has the role, the last the tokens."""
    options = {"stream_options": {"include_usage": True}, "max_tokens": 50}
    answer = ask(CHAT, chat("Hi", stream=True, **options), next_text="over to you")

    *chunks, last = answer.events
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert len({chunk["id"] for chunk in answer.events}) == 1
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in choices[1:])
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == "over to you"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_eb17_characters_of_several_tokens_arrive_whole() -> None:
    """A character that takes several tokens is never split between two chunks."""
    answer = ask(CHAT, chat("Hi", stream=True, max_tokens=50), next_text="Grüße, 世界 🌍!")

    texts = [
        choice["delta"].get("content") or ""
        for chunk in answer.events
        for choice in chunk["choices"]
    ]
    assert "".join(texts) == "Grüße, 世界 🌍!"
    assert not any("\ufffd" in text for text in texts)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        ({"messages": []}, 400),
        (chat("Hi", temperature=-1), 400),
        (chat("x" * 20000), 400),
        (chat("Hi", model="another"), 404),
    ],
)
def test_eb17_a_wrong_request_is_no_error_of_the_server(body: object, status: int) -> None:
    """Errors have their own status and a JSON body that says what is wrong."""
    answer = ask(CHAT, body)

    assert answer.status == status
    assert answer.json["error"]["message"]


def test_eb17_a_request_that_waits_for_its_answer_blocks_no_other() -> None:
    """While an answer without streaming is computed, the server answers other requests."""
    bench = ServerBench()

    async def main() -> tuple[Answer, bool]:
        async with bench.running():
            slow = asyncio.create_task(bench.post(CHAT, chat("Hi", max_tokens=500)))
            health = await bench.call("GET", "/health")
            was_running = not slow.done()
            await slow
            return health, was_running

    health, was_running = run(main())
    assert health.status == 200
    assert was_running


def test_yb22_model_reason_usage_and_cached_tokens_are_the_requests_own() -> None:
    """The model's name is checked; usage counts the rendered prompt; a second turn was cached."""
    bench = ServerBench(page_size=4)
    assert isinstance(bench.device, FakeExecutor)

    async def main() -> tuple[list[Any], Answer]:
        async with bench.running():
            bodies = [chat("A question of some length, twice", max_tokens=3)] * 2
            answers = [(await bench.post(CHAT, body)).json for body in bodies]
            return answers, await bench.post(COMPLETIONS, {"model": "another", "prompt": "Hi"})

    (first, second), refused = run(main())
    num_prompt = len(bench.ended[0].request.prompt.ids)
    assert refused.status == 404
    assert first["choices"][0]["finish_reason"] == "length"
    assert first["usage"]["prompt_tokens"] == num_prompt
    assert num_prompt > len("A question of some length, twice".split())
    assert first["usage"]["completion_tokens"] == 3
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, second)]
    assert cached == [0, num_prompt - 1]


def test_yb22_an_answer_that_ends_itself_says_stop() -> None:
    """Not every answer ends with its length."""
    answer = ask(CHAT, chat("Hi", max_tokens=50), next_text="done")

    assert answer.json["choices"][0]["finish_reason"] == "stop"
    assert answer.json["choices"][0]["message"]["content"] == "done"
