"""OpenAI's prompt caching and the smaller features of its API, with the official client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from ramify.server.tenants import hash_key
from tests.e2e.conftest import Running, Start

MODEL = "ramify-tiny"
PAGE = 16
RULES = "You answer questions about people and their cities in a few words, and nothing else. "


def body(first: str, **options: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{first}. {RULES * 2}"},
        {"role": "user", "content": "Who lives in Rome?"},
    ]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0} | options


def marked(first: str, **mark: Any) -> list[dict[str, Any]]:
    part: dict[str, Any] = {"type": "text", "text": f"{first}. {RULES * 2}"}
    part |= {"prompt_cache_breakpoint": {"mode": "explicit"} | mark}
    return [
        {"role": "system", "content": [part]},
        {"role": "user", "content": "Who lives in Rome?"},
    ]


def lifetimes(server: Running) -> list[float]:
    response: Any = server.openai().get("/cache/pins", cast_to=object)
    return [pin["ttl_s"] for pin in response["pins"]]


def test_a_breakpoint_is_kept_for_its_time(server: Running) -> None:
    """The TTL of the breakpoint, of `prompt_cache_options`, or of `prompt_cache_retention`."""
    create = server.openai().chat.completions.create
    known = len(lifetimes(server))
    create(**body("a", messages=marked("own", ttl="12h")))
    create(**body("b", messages=marked("none")))
    options = {"mode": "explicit", "ttl": "30m"}
    create(**body("c", messages=marked("options")), prompt_cache_options=options)
    create(**body("retained"), prompt_cache_retention="24h")
    create(**body("implicit"), prompt_cache_options={"mode": "implicit", "ttl": "30m"})
    create(**body("plain"), prompt_cache_retention="in_memory", prompt_cache_key="me")

    assert lifetimes(server)[known:] == [12 * 3600.0, 1800.0, 1800.0, 24 * 3600.0, 1800.0]


def test_only_what_is_marked_is_written_in_explicit_mode(server: Running) -> None:
    """Without a breakpoint, nothing is."""
    create = server.openai().chat.completions.create
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    answers = [create(**body("bare"), **explicit) for _ in range(2)]
    assert [answer.usage.prompt_tokens_details.cache_write_tokens for answer in answers] == [0, 0]
    assert answers[1].usage.prompt_tokens_details.cached_tokens < PAGE

    first = create(**body("x", messages=marked("Zebra")), **explicit).usage
    second = create(**body("x", messages=marked("Zebra")), **explicit).usage
    written = first.prompt_tokens_details.cache_write_tokens
    assert PAGE <= written < first.prompt_tokens - PAGE
    assert second.prompt_tokens_details.cached_tokens >= written


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_prewarmed(server: Running, stream: bool) -> None:
    """No output; the next request reads the prompt from the cache."""
    create = server.openai().chat.completions.create
    extra = {"extra_body": {"prompt_cache_options": {"prewarm": True}}}
    name = f"Prewarm {stream}"
    if stream:
        chunks = list(create(**body(name), stream=True, **extra))
        assert all(not chunk.choices for chunk in chunks)
    else:
        prewarmed = create(**body(name), **extra)
        assert prewarmed.choices == []
        assert prewarmed.usage.completion_tokens == 0
    assert create(**body(name)).usage.prompt_tokens_details.cached_tokens >= PAGE


def test_usage_can_come_with_every_piece(server: Running) -> None:
    """With `continuous_usage_stats`; without it, usage comes in a last chunk without choices."""
    create = server.openai().chat.completions.create
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(create(**body("always"), stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 2
    plain = list(create(**body("always"), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in plain)
    text = list(
        server.openai().completions.create(
            model=MODEL, prompt="Ann", max_tokens=3, stream=True, stream_options=options
        )
    )
    assert text[-1].choices == []
    assert text[-1].usage.prompt_tokens_details is not None


def test_headers_tell_of_the_cache_and_the_request(server: Running) -> None:
    """`X-Cache` has the tokens read; `X-Request-Id` is the client's own."""
    create_raw = server.openai().chat.completions.with_raw_response.create
    responses = [
        create_raw(**body("headers"), extra_headers={"X-Request-Id": "mine-1"}) for _ in range(2)
    ]
    assert responses[0].headers["x-request-id"] == "mine-1"
    assert responses[0].headers["x-cache"].startswith(("MISS", "HIT"))
    usage = responses[1].parse().usage
    assert (
        responses[1]
        .headers["x-cache"]
        .startswith(
            f"HIT; read={usage.prompt_tokens_details.cached_tokens}; total={usage.prompt_tokens}"
        )
    )


def test_stops_biases_and_seeds_are_honoured(server: Running) -> None:
    """A stop string is cut off; a bias of -100 bans a token; equal seeds give equal answers."""
    create = server.openai().completions.create
    options = {"model": MODEL, "prompt": "Ann lives in", "max_tokens": 8, "temperature": 0}
    whole = create(**options).choices[0].text
    assert len(whole) > 2
    stopped = create(**options, stop=[whole[2]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert whole[2] not in stopped.text
    [first] = create(**options | {"max_tokens": 1}, logprobs=1).choices
    text = first.logprobs.tokens[0]
    token = next(iter(tokens(server, text, add_special_tokens=False)))
    other = create(**options | {"max_tokens": 1}, logit_bias={str(token): -100}).choices[0]
    assert other.text != first.text
    drawn = [create(**options | {"temperature": 2, "n": 3}, seed=7) for _ in range(2)]
    assert drawn[0].choices == drawn[1].choices


def tokens(server: Running, text: str, **options: Any) -> list[int]:
    answer: Any = server.openai().post(
        "/../tokenize", body={"prompt": text} | options, cast_to=object
    )
    assert answer["count"] == len(answer["tokens"])
    return list(answer["tokens"])


def test_texts_become_tokens_and_back(server: Running) -> None:
    """Of a prompt and of a conversation; with token strings on request."""
    ids = tokens(server, "Ann lives in Rome.", add_special_tokens=False)
    client = server.openai()
    detokenized = client.post("/../detokenize", body={"tokens": ids}, cast_to=object)
    assert detokenized["prompt"] == "Ann lives in Rome."
    conversation = client.post(
        "/../tokenize",
        body={"messages": body("t")["messages"], "return_token_strs": True},
        cast_to=object,
    )
    assert "".join(conversation["token_strs"]).endswith("<|assistant|>")
    answer = client.chat.completions.create(**body("t"))
    assert answer.usage.prompt_tokens == conversation["count"]


def test_scores_of_a_prompt_alone(server: Running) -> None:
    """`max_tokens` 0 with `echo`: no output, and a logprob for every prompt token."""
    answer = server.openai().completions.create(
        model=MODEL, prompt="Ann lives in Rome.", echo=True, logprobs=2, max_tokens=0
    )
    [choice] = answer.choices
    assert choice.text == "Ann lives in Rome."
    assert answer.usage.completion_tokens == 0
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == answer.usage.prompt_tokens
    assert all(
        score <= max(top.values()) + 1e-6
        for score, top in zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
    )


def test_nulls_are_as_good_as_nothing(server: Running) -> None:
    """Clients send null for fields that are not set."""
    names = ["stream", "stop", "tools", "tool_choice", "seed", "n", "logprobs", "top_logprobs"]
    names += ["stream_options", "response_format", "logit_bias", "user", "prompt_cache_options"]
    names += ["prompt_cache_retention", "parallel_tool_calls", "metadata", "functions", "top_p"]
    answer = server.openai().chat.completions.create(
        **body("nulls"), extra_body=dict.fromkeys(names)
    )
    assert answer.choices[0].message.content is not None


def test_what_would_be_ignored_is_refused(server: Running) -> None:
    """400 for a field that cannot be honoured and would change the answer."""
    for change, param in (
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"regex": "a(", "max_tokens": 5}, "regex"),
        ({"regex": "a", "choice": ["b"]}, "choice"),
        ({"prompt_cache_options": {"mode": "sometimes"}}, "prompt_cache_options.mode"),
        ({"stop": ["x"] * 4097}, "stop"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai().chat.completions.create(**body("no"), extra_body=change)
        error_body: Any = caught.value.body
        assert error_body["param"] == param


def test_errors_are_the_clients_exceptions(start: Start, server: Running, tmp_path: Path) -> None:
    """By HTTP status and code, on every path."""
    client = server.openai()
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**body("x") | {"model": "gpt"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)
    invalid_prompts: list[Any] = [[[10**6]], [-1], [2**40], [[]], [["a"]], ["a", [1]], []]
    for prompt in invalid_prompts:
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    guarded = start("--api-key", "ann", "--api-key", "bob", "--admin-key", "root")
    with pytest.raises(openai.AuthenticationError) as refused:
        guarded.openai("eve").models.list()
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError):
        guarded.openai("ann").get("/cache", cast_to=object)
    file = tmp_path / "keys.json"
    entry = {"hash": hash_key("cy"), "tenant": "cy", "quota": {"tokens_per_minute": 1}}
    file.write_text(json.dumps({"keys": [entry]}))
    limited = start("--api-key-file", str(file)).openai("cy")
    assert limited.chat.completions.create(**body("x")).choices
    with pytest.raises(openai.RateLimitError) as limited_error:
        limited.chat.completions.create(**body("x"))
    assert int(limited_error.value.response.headers["retry-after"]) > 1
