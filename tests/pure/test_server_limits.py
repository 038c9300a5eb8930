"""Limits of requests: what exceeds them is rejected at once, in the form of the API."""

import asyncio
import json
import logging
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.server.http.wire import MAX_BODY_BYTES
from ramify.server.operations.request_log import JsonFormatter, log_request
from ramify.server.run import ServeOptions
from ramify.server.tenants import ApiKeys, Caller, hash_key
from tests.pure.server_bench import Answer, ServerBench, chat, run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


LARGE = {"type": "object", "const": {"a": "x" * 70000}}
LARGE_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": LARGE}}

BEYOND: tuple[tuple[str, dict[str, Any], str], ...] = (
    (CHAT, chat("x", n=129), "n"),
    (CHAT, chat("x", n=10**30), "n"),
    (CHAT, chat("x", n=0), "n"),
    (CHAT, chat("x", max_tokens=-2), "max_tokens"),
    (CHAT, chat("x", stop=["s"] * 4097), "stop"),
    (CHAT, chat("x", stop="s" * 4097), "stop"),
    (CHAT, chat("x", bad_words=["s"] * 16_385), "bad_words"),
    (CHAT, chat("x", logit_bias={"1e9": 1}), "logit_bias"),
    (CHAT, chat("x", logit_bias={"99999999": 1}), "logit_bias"),
    (CHAT, chat("x", logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat("x", regex="a" * 20000), "regex"),
    (CHAT, chat("x", choice=["a"] * 1025), "choice"),
    (CHAT, chat("x", response_format=LARGE_FORM), "json_schema"),
    (CHAT, chat("x", cache_salt="s" * 1025), "cache_salt"),
    (CHAT, chat("x", chat_template_kwargs={"a": [1]}), "chat_template_kwargs"),
    (CHAT, chat("x" * 40000), "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 10001}, "messages"),
    (COMPLETIONS, {"prompt": "x" * 40000}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt"),
    (COMPLETIONS, {"prompt": ["x"] * 20, "n": 20}, "n"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": [1] * 3000}, "prompt"),
)


@pytest.mark.parametrize(("path", "body", "param"), BEYOND)
def test_what_is_beyond_a_limit_is_refused(path: str, body: dict[str, Any], param: str) -> None:
    """400 that names the field; nothing runs on the device."""
    bench = ServerBench()

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(path, body)

    answer = run(main())

    assert answer.status == 400, answer.body
    assert param in answer.json["error"]["param"], answer.body
    assert bench.device.num_steps == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "zstd"}, 415),
    ],
)
def test_large_and_compressed_bodies_are_not_read(headers: dict[str, str], status: int) -> None:
    """Decided by the headers, before any byte is read."""
    bench = ServerBench()

    async def main() -> Answer:
        async with bench.running():
            return await bench.call("POST", CHAT, chat("x"), headers=headers)

    assert run(main()).status == status


def test_a_body_without_a_length_is_cut_at_the_limit() -> None:
    """413 as soon as more bytes than the limit have come."""
    bench = ServerBench()

    async def main() -> Answer:
        async with bench.running():
            return await bench.call("POST", CHAT, b" " * (MAX_BODY_BYTES + 1))

    assert run(main()).status == 413


def test_a_request_that_can_never_fit_is_not_queued() -> None:
    """400 at once, where the pool is smaller than the context length."""
    bench = ServerBench(pool_tokens=512, max_model_len=2048)

    async def main() -> Answer:
        async with bench.running():
            return await bench.post(COMPLETIONS, {"prompt": [5] * 400, "max_tokens": 400})

    answer = run(main())

    assert answer.status == 400
    assert "512" in answer.body.decode() or "pages" in answer.body.decode()


def test_more_prompt_tokens_than_four_pools_do_not_wait() -> None:
    """503 with Retry-After; queued requests are served."""
    bench = ServerBench(pool_tokens=512, max_num_seqs=1, prefix_cache=False)

    async def main() -> list[Answer]:
        async with bench.running():
            bodies = [{"prompt": [index + 3] * 400, "max_tokens": 50} for index in range(12)]
            return list(await asyncio.gather(*(bench.post(COMPLETIONS, body) for body in bodies)))

    answers = run(main())

    rejected = [answer for answer in answers if answer.status != 200]
    assert {answer.status for answer in rejected} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in rejected)
    assert 4 <= len(answers) - len(rejected) < 12


def test_more_requests_than_may_wait_are_told_to_come_back() -> None:
    """503 with Retry-After; queued requests are served."""
    bench = ServerBench(max_waiting=2, max_num_seqs=1)

    async def main() -> list[Answer]:
        async with bench.running():
            requests = (bench.post(CHAT, chat(f"{index}", max_tokens=300)) for index in range(8))
            return list(await asyncio.gather(*requests))

    answers = run(main())

    rejected = [answer for answer in answers if answer.status != 200]
    assert rejected
    assert {answer.status for answer in rejected} == {503}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in rejected)


def test_more_prompts_in_a_request_than_may_wait_are_the_clients_fault() -> None:
    """400, not 503: a retry could not succeed either."""
    bench = ServerBench(max_waiting=2)

    async def main() -> list[Answer]:
        async with bench.running():
            return [
                await bench.post(COMPLETIONS, {"prompt": [[5, 6]] * count, "max_tokens": 2})
                for count in (2, 3)
            ]

    accepted, rejected = run(main())

    assert accepted.status == 200
    assert rejected.status == 400
    assert rejected.json["error"]["param"] == "prompt"
    assert "3 prompts" in rejected.json["error"]["message"]


@pytest.mark.parametrize("wrong", [{"regex": "(a|b" * 50}, {"grammar": "start: start start"}])
def test_a_format_that_cannot_be_followed_is_the_clients_fault(wrong: dict[str, str]) -> None:
    """400, and the engine serves the next request."""
    bench = ServerBench()

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            return await bench.post(CHAT, chat("x", **wrong)), await bench.post(CHAT, chat("x"))

    answer, after = run(main())

    assert (answer.status, after.status) == (400, 200), answer.body


def test_no_client_can_write_lines_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Tenants and ids are escaped, as text and as JSON; prompts are not logged."""
    evil = "ann\r\n2026-01-01 INFO forged\x1b[31m"
    keys = ApiKeys({hash_key("key"): Caller(evil)})
    bench = ServerBench(keys=keys)
    bench.service.listeners.append(log_request)
    caplog.set_level(logging.INFO)

    async def main() -> Answer:
        async with bench.running():
            headers = {"x-request-id": "a\nb", "user-agent": "c\nd"}
            body = chat("a secret\nforged", user="e\nf", model="tiny")
            raw = json.dumps(body).encode()
            return await bench.call("POST", CHAT, raw, key="key", headers=headers)

    answer = run(main())

    assert answer.status == 200
    assert answer.headers["x-request-id"].startswith("req_")
    records = [record for record in caplog.records if record.name == "ramify.requests"]
    assert len(records) == 1
    for line in (records[0].getMessage(), JsonFormatter().format(records[0])):
        assert not [char for char in line if ord(char) < 32 or ord(char) > 126], line
        assert "secret" not in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "example.org", "127.0.0.1.evil"])
def test_a_server_that_others_reach_needs_keys(host: str) -> None:
    """Unless --insecure is given."""
    with pytest.raises(ConfigError, match="--insecure"):
        ServeOptions(host=host).keys()

    assert ServeOptions(host=host, insecure=True).keys() is None
    assert ServeOptions(host=host, api_keys=("k",)).keys() is not None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_a_local_server_needs_none(host: str) -> None:
    """A loopback address is not reachable from elsewhere."""
    assert ServeOptions(host=host).keys() is None
