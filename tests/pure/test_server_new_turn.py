"""Reasons for a miss: `new_turn` where a known conversation goes on, `shorter_than_a_page`."""

from typing import Any

import pytest

from ramify.server.tenants import ApiKeys
from tests.pure.server_bench import ServerBench, chat, run

QUESTION = "Who has the lamps, and where is the violin? " * 3
LONGER = QUESTION + "Where?"
USER, ASSISTANT = "user", "assistant"


def turns(*texts: str) -> list[dict[str, Any]]:
    roles = (USER, ASSISTANT) * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def answer_text(path: str, payload: Any) -> str:
    if path == "/v1/messages":
        return "".join(block["text"] for block in payload["content"])
    if path == "/v1/responses":
        return str(payload["output"][0]["content"][0]["text"])
    return str(payload["choices"][0]["message"]["content"])


def body_of(path: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    if path == "/v1/responses":
        return {"input": messages, "max_output_tokens": 40}
    return {"messages": messages, "max_tokens": 40, "model": "tiny"}


def miss_after(path: str, *, edit: str = "", other: bool = False) -> dict[str, Any]:
    """The miss of a second turn; its first answer edited, or the first turn another tenant's."""
    bench = ServerBench(keys=ApiKeys.of("ann", "bob"))
    script = bench.service.tokenizer.encode(" in the attic" * 3, add_special_tokens=False)
    num_prompt: list[int] = []

    def next_token(context: Any) -> int:
        num_prompt[:] = num_prompt or [len(context)]
        return script[(len(context) - num_prompt[0]) % len(script)]

    bench.device.next_token = next_token

    async def main() -> Any:
        async with bench.running():
            first = await bench.post(path, body_of(path, turns(QUESTION)), "ann")
            assert first.status == 200, first.body
            text = edit + answer_text(path, first.json)
            later = turns(QUESTION, text, "And why is that so? " * 3)
            key = "bob" if other else "ann"
            explained = await bench.post("/v1/cache/explain", body_of(path, later), key)
            second = await bench.post(path, body_of(path, later), key)
            assert second.status == 200, second.body
            usage = second.json["usage"]["ramify_cache"]
            assert explained.json["miss"]["reason"] == usage["miss"]["reason"]
            return usage["miss"]

    return dict(run(main()))


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_that_goes_on_is_a_new_turn(path: str) -> None:
    """Its earlier prompt and answer are read; the message after them was never seen."""
    assert miss_after(path)["reason"] == "new_turn"


@pytest.mark.parametrize("path", PATHS)
def test_an_edited_answer_is_no_new_turn(path: str) -> None:
    """The cached prompt diverges in the answer, which is what the client should know."""
    miss = miss_after(path, edit="Well, after all that has been said and done, they are")

    assert miss["reason"] == "diverged"


@pytest.mark.parametrize("path", PATHS)
def test_the_conversation_of_another_tenant_is_cold(path: str) -> None:
    """Nothing tells that somebody else had the same conversation."""
    miss = miss_after(path, other=True)

    assert (miss["reason"], miss["at_token"]) == ("cold", 0)


def test_a_prompt_shorter_than_a_page_says_so() -> None:
    """It cannot be cached, however often it is sent; a longer one ends in its tail."""

    async def main() -> list[str]:
        bench = ServerBench()
        async with bench.running():
            answers = [
                await bench.post("/v1/chat/completions", chat(text))
                for text in ("Hi", "Hi", LONGER, LONGER)
            ]
        return [answer.json["usage"]["ramify_cache"]["miss"]["reason"] for answer in answers]

    assert run(main()) == ["shorter_than_a_page", "shorter_than_a_page", "cold", "page_tail"]
