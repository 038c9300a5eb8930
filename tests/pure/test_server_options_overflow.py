"""Prompts that the context cannot hold: the words by which clients know to compact."""

import re
from typing import Any

import pytest

from tests.pure.server_bench import Answer, ServerBench, ask, chat, run

ANTHROPIC = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
OPENAI = re.compile(
    r"This model's maximum context length is (\d+) tokens\. However, you requested (\d+) tokens"
)
LONG, HUGE = "word " * 3000, "word " * 40_000  # more tokens than 2,048; more bytes than they have


RUNNING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


@pytest.mark.parametrize(
    ("path", "text"),
    [*((path, text) for path in RUNNING for text in (LONG, HUGE)), ("/tokenize", HUGE)],
)
def test_openai_clients_learn_that_the_context_is_exceeded(path: str, text: str) -> None:
    """The code and the sentence that clients look for, with both numbers."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": text},
        "/v1/responses": {"input": text},
        "/tokenize": {"prompt": text},
    }

    answer = ask(path, bodies.get(path) or chat(text))

    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "context_length_exceeded")
    assert error["type"] == "invalid_request_error"
    match = OPENAI.match(error["message"])
    assert match is not None, error["message"]
    limit, requested = int(match[1]), int(match[2])
    assert limit == 2048 < requested


@pytest.mark.parametrize("text", [LONG, HUGE])
def test_anthropic_clients_learn_how_much_is_too_long(text: str) -> None:
    """Claude Code reads both numbers out of the message, which begins with these words."""
    answer = ask("/v1/messages", chat(text, model="tiny"))

    error = answer.json["error"]
    assert (answer.status, error["type"]) == (400, "invalid_request_error")
    match = ANTHROPIC.match(error["message"])
    assert match is not None, error["message"]
    assert int(match[1]) > int(match[2]) == 2047


def test_the_longest_prompt_that_fits_is_served() -> None:
    """The limit in the message is exact: one token less than it says is served."""
    longest = ask("/v1/completions", {"prompt": [5] * 2047, "max_tokens": 4})
    longer = ask("/v1/completions", {"prompt": [5] * 2048, "max_tokens": 4})

    assert (longest.status, longer.status) == (200, 400)
    assert "requested 2049 tokens" in longer.json["error"]["message"]


def test_a_prompt_larger_than_the_pool_exceeds_the_context_too() -> None:
    """A client can compact it; an answer that is too long for the pool is another error."""
    bench = ServerBench(pool_tokens=512)

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            return (
                await bench.post("/v1/completions", {"prompt": [5] * 600, "max_tokens": 4}),
                await bench.post("/v1/completions", {"prompt": [5] * 400, "max_tokens": 400}),
            )

    prompt, answer = run(main())

    assert prompt.json["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 513 tokens" in prompt.json["error"]["message"]
    assert (answer.status, answer.json["error"]["code"]) == (400, None)
