"""Named prefixes with the official clients, over a real model."""

from __future__ import annotations

from typing import Any

from tests.e2e.conftest import Running

MODEL = "ramify-tiny"
PAGE = 16
SYSTEM = "You answer questions about people and their cities in a few words, and nothing else. " * 3
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Who lives in Rome?"}]


def make(server: Running, name: str, **fields: Any) -> dict[str, Any]:
    made: Any = server.openai().post("/prefixes", body={"name": name} | fields, cast_to=object)
    return dict(made)


def test_logprobs_of_an_answer_are_those_of_the_text_inlined(server: Running) -> None:
    """To the last bit: one prompt read from the prefix's pages, one computed cold."""
    made = make(server, "cities", system=SYSTEM)
    create: Any = server.openai().chat.completions.create
    options = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    options |= {"logprobs": True, "top_logprobs": 5}
    inlined: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}, *QUESTION]

    cold = create(messages=inlined, extra_body={"cache_salt": "cold"}, **options)
    named = create(messages=QUESTION, extra_body={"prefix": "cities"}, **options)

    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    read = named.usage.ramify_cache["prefix"]["read"]
    assert read >= made["pinned_tokens"] == made["tokens"] // PAGE * PAGE > 0
    assert named.choices == cold.choices


def test_all_apis_and_streams_know_a_name(server: Running) -> None:
    """Responses, Messages and a stream say the same words, and read the whole pages of the prefix."""
    made = make(server, "towns", messages=[{"role": "system", "content": SYSTEM}])
    client = server.openai()
    greedy: dict[str, Any] = {"model": MODEL, "extra_body": {"prefix": "towns", "temperature": 0}}

    stream: Any = client.chat.completions.create(
        messages=QUESTION,
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
        **greedy,
    )
    chunks = list(stream)
    response: Any = client.responses.create(input=QUESTION, max_output_tokens=6, **greedy)
    message: Any = server.anthropic().messages.create(messages=QUESTION, max_tokens=6, **greedy)

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == response.output_text == message.content[0].text
    assert message.usage.cache_read_input_tokens >= made["pinned_tokens"]
    for usage in (chunks[-1].usage, response.usage, message.usage):
        assert usage.ramify_cache["prefix"]["read"] >= made["pinned_tokens"]
    listed: Any = client.get("/prefixes", cast_to=object)
    assert "towns" in [entry["name"] for entry in listed["data"]]
    client.delete("/prefixes/towns", cast_to=object)
