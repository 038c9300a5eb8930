"""Isolation of tenants: no key learns anything about another tenant's prompts."""

from typing import Any

import pytest

from ramify.server.routes import ENDPOINTS
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import Answer, ServerBench, chat, run

SECRET = "zanzibar-quokka"  # in ann's prompts only
PROMPT = f"The password of the vault is {SECRET}. " * 8
KEYS = ApiKeys.of("key-ann", "key-bob", admin="key-admin")
OPEN = {"/", "/ui", "/ui/{name}", "/livez", "/readyz", "/health", "/ping", "/version"} | {
    "/openapi.json",
    "/api/version",
}
ADMIN = {"/v1/cache", "/v1/cache/tree", "/v1/cache/pins", "/v1/cache/pins/{name}"} | {
    "/v1/loads",
    "/reset_prefix_cache",
    "/metrics",
    "/v1/weights",
}


def operations() -> list[Any]:
    return [
        pytest.param(endpoint, id=f"{endpoint.method} {endpoint.path}") for endpoint in ENDPOINTS
    ]


@pytest.mark.parametrize("endpoint", operations())
def test_every_path_needs_a_key_that_is_known(endpoint: Any) -> None:
    """401 in the form of the API; health, versions, live page and OpenAPI document are open."""
    bench = ServerBench(keys=KEYS)
    path = endpoint.path.replace("/ui/{name}", "/ui/app.js")
    path = path.replace("{name:path}", "x").replace("{name}", "x")

    async def main() -> list[Answer]:
        async with bench.running():
            return [
                await bench.call(endpoint.method, path, b"{}", key=key)
                for key in (None, "", "key-anna", "key-an", "\xe9", "k" * 5000)
            ]

    for answer in run(main()):
        if endpoint.path in OPEN:
            assert answer.status == 200
            continue
        assert answer.status == 401, answer.body
        assert answer.headers["www-authenticate"] == "Bearer"
        if path.startswith("/api/"):
            assert "an API key is needed" in answer.json["error"] or "known" in answer.json["error"]
        else:
            assert answer.json["error"]["type"] == "authentication_error"
        assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")
        assert b"ann" not in answer.body


@pytest.mark.parametrize("endpoint", operations())
def test_what_shows_or_changes_the_cache_needs_the_admin_key(endpoint: Any) -> None:
    """403 for other keys on admin paths, and on no other path."""
    bench = ServerBench(keys=KEYS)
    path = endpoint.path.replace("{name:path}", "tiny").replace("{name}", "7")
    body = {"token_ids": [1, 2]} if endpoint.method == "POST" else b""

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            user_answer = await bench.call(endpoint.method, path, body, key="key-ann")
            return user_answer, await bench.call(endpoint.method, path, body, key="key-admin")

    user, admin = run(main())

    assert (user.status == 403) == (endpoint.path in ADMIN)
    assert admin.status not in (401, 403)


def test_without_keys_admin_paths_are_for_local_servers_only() -> None:
    """A public server without keys (--insecure) shows its cache to nobody."""
    for is_local in (True, False):
        bench = ServerBench(local_admin=is_local)

        async def main(bench: ServerBench = bench) -> int:
            async with bench.running():
                return (await bench.call("GET", "/v1/cache/tree")).status

        assert run(main()) == (200 if is_local else 403)


def test_a_prefix_is_found_again_by_its_tenant_only() -> None:
    """For another tenant it is cold, with any salt."""
    bench = ServerBench(keys=KEYS)

    async def main() -> None:
        async with bench.running():
            post = bench.post
            first = await post("/v1/chat/completions", chat(PROMPT), "key-ann")
            second = await post("/v1/chat/completions", chat(PROMPT), "key-ann")
            assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
            for salt in ("", "x", "key-ann", bench.server.keys.caller("key-ann").tenant):  # type: ignore[union-attr]
                body = chat(PROMPT, cache_salt=salt)
                usage = (await post("/v1/chat/completions", body, "key-bob")).json["usage"]
                if salt == "":
                    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
                assert usage["ramify_cache"].get("miss", {"reason": "cold"})["reason"] in (
                    "cold",
                    "other_namespace",  # bob's own prompt, with another salt
                )

    run(main())


def test_why_a_prompt_missed_tells_nothing_of_other_tenants() -> None:
    """Another tenant's equal, similar or evicted prompt: `cold`, without text or times."""
    bench = ServerBench(keys=KEYS)
    similar = PROMPT.replace("vault", "house")

    async def main() -> list[Answer]:
        answers = []
        async with bench.running():
            await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            for text in (PROMPT, similar, PROMPT[:100]):
                answers.append(await bench.post("/v1/cache/explain", chat(text), "key-bob"))
            await bench.call("DELETE", "/v1/cache", key="key-admin")
            answers.append(await bench.post("/v1/cache/explain", chat(PROMPT), "key-bob"))
            own = await bench.post("/v1/cache/explain", chat(PROMPT), "key-ann")
            assert own.json["miss"]["reason"] == "evicted"
        return answers

    for answer in run(main()):
        miss = answer.json["miss"]
        assert miss["reason"] == "cold", miss
        assert answer.json["cached_tokens"] == 0
        assert "had" not in miss
        assert "got" not in miss
        assert "evicted_ago_s" not in miss


@pytest.mark.parametrize("guess", [PROMPT, PROMPT.replace("vault", "house"), PROMPT[:40], "No."])
def test_explanations_are_the_same_whatever_others_have_asked(guess: str) -> None:
    """A right guess of another tenant's prompt looks like a wrong one, also after a common beginning."""

    async def main(bench: ServerBench, *, is_cached: bool) -> list[Any]:
        async with bench.running():
            if is_cached:
                await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            await bench.post("/v1/chat/completions", chat(PROMPT[:30] + "xyz " * 20), "key-bob")
            explained = await bench.post("/v1/cache/explain", chat(guess), "key-bob")
            answer = await bench.post("/v1/chat/completions", chat(guess), "key-bob")
            return [explained.json, answer.json["usage"]["ramify_cache"]]

    uncached, cached = (
        run(main(ServerBench(keys=KEYS), is_cached=is_cached)) for is_cached in (False, True)
    )

    assert uncached == cached


def test_a_salt_separates_and_the_tenant_is_told_so() -> None:
    """The tenant's own prefix with another salt is reported as `other_namespace`."""
    bench = ServerBench(keys=KEYS)

    async def main() -> dict[str, Any]:
        async with bench.running():
            await bench.post("/v1/chat/completions", chat(PROMPT, cache_salt="a"), "key-ann")
            answer = await bench.post(
                "/v1/chat/completions", chat(PROMPT, cache_salt="b"), "key-ann"
            )
            return dict(answer.json["usage"]["ramify_cache"])

    report = run(main())

    assert report["read"] == 0
    assert report["miss"]["reason"] == "other_namespace"


def test_responses_and_comparisons_of_other_tenants_do_not_exist() -> None:
    """The same 404 and message for another tenant's id as for an id that never existed."""
    bench = ServerBench(keys=KEYS)

    async def main() -> None:
        async with bench.running():
            created = await bench.post(
                "/v1/responses", {"input": PROMPT, "max_output_tokens": 3}, "key-ann"
            )
            assert created.status == 200
            response_id, unknown_id = created.json["id"], "resp_" + "0" * 32
            path = "/v1/responses/"
            assert (await bench.call("GET", path + response_id, key="key-ann")).status == 200
            for method in ("GET", "DELETE"):
                foreign = await bench.call(method, path + response_id, key="key-bob")
                unknown = await bench.call(method, path + unknown_id, key="key-bob")
                assert foreign.status == unknown.status == 404
                assert foreign.body.replace(response_id.encode(), b"") == unknown.body.replace(
                    unknown_id.encode(), b""
                )
            body = {"input": "and?", "previous_response_id": response_id, "max_output_tokens": 3}
            assert (await bench.post("/v1/responses", body, "key-bob")).status == 404
            assert (await bench.post("/v1/responses", body, "key-ann")).status == 200
            chatted = await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            options = {"comparison_response_id": chatted.json["id"]}
            answer = await bench.post(
                "/v1/chat/completions", chat(PROMPT, prompt_cache_options=options), "key-bob"
            )
            diagnostics = answer.json["prompt_cache_diagnostics"]
            assert "comparison_response_not_found" in str(diagnostics), diagnostics
            body = {
                "model": "tiny",
                "max_tokens": 3,
                "messages": [{"role": "user", "content": PROMPT}],
            }
            first = await bench.post("/v1/messages", body, "key-ann")
            body["diagnostics"] = {"previous_message_id": first.json["id"]}
            answer = await bench.post("/v1/messages", body, "key-bob")
            assert "previous_message_not_found" in str(answer.json["diagnostics"])

    run(main())


def test_no_body_holds_a_word_of_another_tenant() -> None:
    """On every path, with valid and invalid bodies: bob's answers hold no text, tenant or id of ann's."""
    bench = ServerBench(keys=KEYS, pool_tokens=2048)
    answers: list[tuple[str, Answer]] = []

    async def main() -> set[str]:
        async with bench.running():
            words = {SECRET, KEYS.caller("key-ann").tenant}
            for path, body in (
                ("/v1/chat/completions", chat(PROMPT, n=2)),
                ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
                ("/v1/responses", {"input": PROMPT, "max_output_tokens": 3}),
            ):
                words.add((await bench.post(path, body, "key-ann")).json["id"])
            for endpoint in ENDPOINTS:
                path = endpoint.path.replace("{name:path}", "x").replace("{name}", "1")
                bodies: tuple[object, ...] = (
                    b"{}",
                    b"nonsense",
                    chat(PROMPT.replace(SECRET, "guess")),
                    {"prompt": "The password of the vault is ", "max_tokens": 3},
                    {"input": "The password of the vault is "},
                    {"tokens": list(range(50))},
                )
                for payload in bodies:
                    answer = await bench.call(endpoint.method, path, payload, key="key-bob")
                    answers.append((path, answer))
            flood = [
                bench.post("/v1/completions", {"prompt": [[index + 1] * 500]}, "key-bob")
                for index in range(12)
            ]
            for request in flood:
                answers.append(("flood", await request))
            return words

    words = run(main())

    for path, answer in answers:
        text = answer.body.decode() + str(answer.headers)
        assert not [word for word in words if word in text], (path, text)


def test_a_flood_of_one_tenant_leaves_the_prefix_of_another() -> None:
    """Above `max_cached_share` a tenant evicts its own pages; without it, everybody's."""
    shares = {"fair": 0.5, "greedy": None}
    num_read = {}
    for name, share in shares.items():
        keys = ApiKeys(
            {
                hash_key(key): Caller(key, quota=Quota(max_cached_share=share))
                for key in ("ann", "bob")
            }
        )
        bench = ServerBench(keys=keys, pool_tokens=2048)

        async def main(bench: ServerBench = bench) -> int:
            async with bench.running():
                await bench.post("/v1/chat/completions", chat(PROMPT), "ann")
                for index in range(40):
                    body = {"prompt": [[index + 20] * 300], "max_tokens": 3}
                    assert (await bench.post("/v1/completions", body, "bob")).status == 200
                answer = await bench.post("/v1/chat/completions", chat(PROMPT), "ann")
                return int(answer.json["usage"]["ramify_cache"]["read"])

        num_read[name] = run(main())

    assert num_read["fair"] > 64
    assert num_read["greedy"] == 0


def test_a_tenant_beyond_its_share_keeps_what_it_used_last() -> None:
    """Its least recently used prefixes are evicted, never the prefix that the prompt itself hits."""
    bench = ServerBench(keys=KEYS, pool_tokens=2048)
    prompts = [[index + 20] * 300 for index in range(30)]

    async def main() -> list[int]:
        read = []
        async with bench.running():
            for prompt in prompts:
                body = {"prompt": [prompt], "max_tokens": 2}
                await bench.post("/v1/completions", body, "key-ann")
                answer = await bench.post("/v1/completions", body, "key-ann")
                read.append(answer.json["usage"]["ramify_cache"]["read"])
            answer = await bench.post("/v1/completions", {"prompt": [prompts[-2]]}, "key-ann")
            read.append(answer.json["usage"]["ramify_cache"]["read"])
        return read

    assert run(main()) == [288] * 31


def test_a_tenant_over_its_quota_is_told_and_the_others_are_served() -> None:
    """429 with Retry-After, in the form of the API; another tenant is served."""
    keys = ApiKeys(
        {
            hash_key("ann"): Caller("ann", quota=Quota(tokens_per_minute=60)),
            hash_key("bob"): Caller("bob"),
        }
    )
    bench = ServerBench(keys=keys)

    async def main() -> tuple[Answer, Answer, Answer]:
        async with bench.running():
            first = await bench.post("/v1/chat/completions", chat(PROMPT), "ann")
            second = await bench.post("/v1/chat/completions", chat("more"), "ann")
            return first, second, await bench.post("/v1/chat/completions", chat(PROMPT), "bob")

    first, second, other = run(main())

    assert (first.status, second.status, other.status) == (200, 429, 200)
    assert second.json["error"]["type"] == "rate_limit_error"
    assert int(second.headers["retry-after"]) > 1


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping"])
def test_health_without_the_admin_key_tells_no_activity(path: str) -> None:
    """Only the status, also with another key and with a wrong one; the operator sees the engine."""
    bench = ServerBench(keys=KEYS)

    async def main() -> list[Answer]:
        async with bench.running():
            keys = (None, "wrong", "key-ann", "key-admin")
            return [await bench.call("GET", path, key=key) for key in keys]

    *others, admin = run(main())

    assert [answer.json for answer in others] == [{"status": "ok"}] * 3
    assert admin.json.keys() == {"status", "engine", "busy", "step_age_s"}
