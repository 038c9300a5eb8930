"""Sessions over HTTP: every way to name one and to end one, in every API."""

from typing import Any

import pytest

from ramify.server.tenants import ApiKeys, Caller, hash_key
from tests.pure.server_bench import Answer, ServerBench, chat, run

LONG = "Mara has 14 lamps in the attic of the old house, and she lights each of them at night. " * 3
HEADER = {"x-session-id": "a"}
MESSAGES = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", chat(LONG)),
    ("/v1/chat/completions", chat(LONG, prompt_cache_options={"mode": "explicit"})),
    ("/v1/completions", {"prompt": LONG, "max_tokens": 4}),
    ("/v1/responses", {"input": LONG, "max_output_tokens": 4, "store": False}),
    ("/v1/messages", MESSAGES),
]


async def alive(bench: ServerBench) -> int:
    return (await bench.llm.cache.stats()).num_sessions


async def end(bench: ServerBench, name: str, key: str | None = None) -> Answer:
    return await bench.call("DELETE", f"/v1/sessions/{name}", key=key)


def bench_run(main: Any, **options: Any) -> None:
    async def served() -> None:
        async with ServerBench(**options).running() as bench:
            await main(bench)

    run(served())


@pytest.mark.parametrize("where", ["body", "header", "both"])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_session_is_named_and_deleted(path: str, body: dict[str, Any], where: str) -> None:
    """By `session_id` or the header, of which the body wins; a session ends once."""
    name = "b" if where == "both" else "a"
    named = body if where == "header" else body | {"session_id": name}

    async def main(bench: ServerBench) -> None:
        headers = {} if where == "body" else HEADER
        answer = await bench.call("POST", path, named, headers=headers)
        assert answer.status == 200, answer.body
        assert "X-Ramify-Warning" not in answer.headers
        assert await alive(bench) == 1

        await bench.until_idle()
        ended = await end(bench, name)

        assert ended.status == 200
        assert ended.json.pop("pages") >= (0 if "prompt_cache_options" in body else 3)
        assert (ended.json["id"], ended.json["deleted"]) == (name, True)
        assert await alive(bench) == 0
        assert (await end(bench, name)).status == 404

    bench_run(main)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_session_ends_with_its_last_request(
    path: str, body: dict[str, Any], stream: bool
) -> None:
    """`end_session` ends it when the answer is complete; without a name it is refused."""

    async def main(bench: ServerBench) -> None:
        posted = body | {"stream": stream}
        assert (await bench.call("POST", path, posted, headers=HEADER)).status == 200
        assert await alive(bench) == 1
        last = posted | {"end_session": True}
        assert (await bench.call("POST", path, last, headers=HEADER)).status == 200
        assert await alive(bench) == 0

        refused = await bench.post(path, last)
        assert refused.status == 400
        assert "session_id" in refused.json["error"]["message"]

    bench_run(main)


def test_a_request_without_a_name_has_no_session() -> None:
    """Nothing is remembered of requests that name none."""

    async def main(bench: ServerBench) -> None:
        for path, body in BODIES:
            assert (await bench.post(path, body)).status == 200
        assert await alive(bench) == 0

    bench_run(main)


def test_responses_that_continue_each_other_are_one_session() -> None:
    """It ends when the newest of them is deleted, and not with an earlier one."""

    async def main(bench: ServerBench) -> None:
        body: dict[str, Any] = {"input": LONG, "max_output_tokens": 4}
        first = (await bench.post("/v1/responses", body)).json["id"]
        body |= {"input": "More.", "previous_response_id": first}
        second = (await bench.post("/v1/responses", body)).json["id"]
        assert await alive(bench) == 1

        assert (await bench.call("DELETE", f"/v1/responses/{first}")).status == 200
        assert await alive(bench) == 1
        assert (await bench.call("DELETE", f"/v1/responses/{second}")).status == 200
        assert await alive(bench) == 0

    bench_run(main)


def test_a_session_that_the_client_named_outlives_its_responses() -> None:
    """The name goes on with `previous_response_id`; only the client ends it."""

    async def main(bench: ServerBench) -> None:
        body: dict[str, Any] = {"input": LONG, "max_output_tokens": 4}
        first = (await bench.post("/v1/responses", body | {"session_id": "mine"})).json["id"]
        body |= {"input": "More.", "previous_response_id": first}
        second = (await bench.post("/v1/responses", body)).json["id"]
        assert await alive(bench) == 1

        assert (await bench.call("DELETE", f"/v1/responses/{second}")).status == 200
        assert await alive(bench) == 1
        assert (await end(bench, "mine")).json["pages"] > 0

    bench_run(main)


def test_a_conversation_is_a_session() -> None:
    """Its responses are in one session, which ends with it."""

    async def main(bench: ServerBench) -> None:
        name = (await bench.post("/v1/conversations", {})).json["id"]
        for text in (LONG, "More."):
            body = {"input": text, "max_output_tokens": 4, "conversation": name, "store": False}
            assert (await bench.post("/v1/responses", body)).status == 200
        assert await alive(bench) == 1

        assert (await bench.call("DELETE", f"/v1/conversations/{name}")).status == 200
        assert await alive(bench) == 0
        assert (await bench.llm.cache.stats()).ended_sessions == 1

    bench_run(main)


def test_sessions_of_other_tenants_do_not_exist() -> None:
    """404 as for one that never was; the pages of the other tenant stay where they are."""
    keys = ApiKeys({hash_key(f"key-{name}"): Caller(name) for name in ("ann", "bob")})

    async def main(bench: ServerBench) -> None:
        body = chat(LONG, session_id="s")
        assert (await bench.post("/v1/chat/completions", body, "key-ann")).status == 200

        strange, missing = await end(bench, "s", "key-bob"), await end(bench, "t", "key-bob")

        assert strange.status == missing.status == 404
        assert strange.body.replace(b"'s'", b"'t'") == missing.body
        assert (await end(bench, "s", "key-ann")).json["pages"] > 0

    bench_run(main, keys=keys)


def test_an_ended_session_makes_room_and_the_miss_says_so() -> None:
    """Its pages go before older ones that nobody ended, and `evicted_by` is the reason."""

    async def main(bench: ServerBench) -> None:
        prompts = {name: f"{name}: {LONG}" for name in ("kept", "ended")}
        await bench.post("/v1/completions", {"prompt": prompts["kept"], "max_tokens": 1})
        body = {"prompt": prompts["ended"], "max_tokens": 1}
        await bench.call("POST", "/v1/completions", body, headers=HEADER)
        stats = await bench.llm.cache.stats()
        await bench.until_idle()
        assert (await end(bench, "a")).json["pages"] > 0
        filling = {"prompt": [7] * ((stats.free_pages + 1) * 16), "max_tokens": 1}

        assert (await bench.post("/v1/completions", filling)).status == 200

        usages = [
            (await bench.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})).json["usage"]
            for prompt in prompts.values()
        ]
        assert usages[0]["ramify_cache"]["miss"]["reason"] == "page_tail"
        assert usages[1]["ramify_cache"]["miss"]["evicted_by"] == "session_ended"
        text = (await bench.call("GET", "/metrics")).body.decode()
        assert "ramify_ended_sessions_total 1.0" in text
        assert "ramify_sessions 0.0" in text
        assert float(text.partition("\nramify_cache_session_pages_total ")[2].split()[0]) > 0

    bench_run(main, pool_tokens=1024, max_model_len=1024)


def test_a_name_has_a_limit() -> None:
    """256 characters, in the body as in the header."""

    async def main(bench: ServerBench) -> None:
        for name, status in (("x" * 256, 200), ("x" * 257, 400)):
            by_header = await bench.call(
                "POST", "/v1/chat/completions", chat("a"), headers={"x-session-id": name}
            )
            by_body = await bench.post("/v1/chat/completions", chat("a", session_id=name))
            assert by_header.status == by_body.status == status

    bench_run(main)
