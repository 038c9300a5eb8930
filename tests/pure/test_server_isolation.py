"""Tenants: whoever has a key sees what is his own, and nothing of anybody else's."""

from typing import Any

import pytest

from ramify.server.routes import ENDPOINTS
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import Answer, ServerBench, chat, run

SECRET = "zanzibar-quokka"  # in ann's prompts only
PROMPT = f"The password of the vault is {SECRET}. " * 8
KEYS = ApiKeys.of("key-ann", "key-bob", admin="key-admin")
OPEN = {"/livez", "/readyz", "/health", "/ping", "/version", "/openapi.json"}
ADMIN = {"/v1/cache", "/v1/cache/tree", "/v1/cache/pins", "/v1/cache/pins/{name}"} | {
    "/reset_prefix_cache",
    "/metrics",
}


def operations() -> list[Any]:
    return [pytest.param(one, id=f"{one.method} {one.path}") for one in ENDPOINTS]


@pytest.mark.parametrize("one", operations())
def test_every_path_needs_a_key_that_is_known(one: Any) -> None:
    """401 in the envelope of the API; what tells of the process only is open to all."""
    bench = ServerBench(keys=KEYS)
    path = one.path.replace("{name:path}", "x").replace("{name}", "x")

    async def main() -> list[Answer]:
        async with bench.running():
            return [
                await bench.call(one.method, path, b"{}", key=key)
                for key in (None, "", "key-anna", "key-an", "\xe9", "k" * 5000)
            ]

    for answer in run(main()):
        if one.path in OPEN:
            assert answer.status == 200
            continue
        assert answer.status == 401, answer.body
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json["error"]["type"] == "authentication_error"
        assert (answer.json.get("type") == "error") == path.startswith("/v1/messages")
        assert b"ann" not in answer.body


@pytest.mark.parametrize("one", operations())
def test_what_shows_or_changes_the_cache_needs_the_admin_key(one: Any) -> None:
    """403 for other keys; the others are no worse for it."""
    bench = ServerBench(keys=KEYS)
    path = one.path.replace("{name:path}", "tiny").replace("{name}", "7")
    body = {"token_ids": [1, 2]} if one.method == "POST" else b""

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            theirs = await bench.call(one.method, path, body, key="key-ann")
            return theirs, await bench.call(one.method, path, body, key="key-admin")

    user, admin = run(main())

    assert (user.status == 403) == (one.path in ADMIN)
    assert admin.status not in (401, 403)


def test_without_keys_admin_paths_are_for_local_servers_only() -> None:
    """A server that everybody reaches, --insecure, shows its cache to nobody."""
    for is_local in (True, False):
        bench = ServerBench(local_admin=is_local)

        async def main(bench: ServerBench = bench) -> int:
            async with bench.running():
                return (await bench.call("GET", "/v1/cache/tree")).status

        assert run(main()) == (200 if is_local else 403)


def test_a_prefix_is_found_again_by_its_tenant_only() -> None:
    """For everybody else it is cold, whatever salt they give; in every API and in the explanation."""
    bench = ServerBench(keys=KEYS)

    async def main() -> None:
        async with bench.running():
            post = bench.post
            first = await post("/v1/chat/completions", chat(PROMPT), "key-ann")
            again = await post("/v1/chat/completions", chat(PROMPT), "key-ann")
            assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert again.json["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
            for salt in ("", "x", "key-ann", bench.server.keys.caller("key-ann").tenant):  # type: ignore[union-attr]
                body = chat(PROMPT, cache_salt=salt)
                told = (await post("/v1/chat/completions", body, "key-bob")).json["usage"]
                if salt == "":
                    assert told["prompt_tokens_details"]["cached_tokens"] == 0
                assert told["ramify_cache"].get("miss", {"reason": "cold"})["reason"] in (
                    "cold",
                    "other_namespace",  # bob's own, with another salt
                )

    run(main())


def test_why_a_prompt_missed_tells_nothing_of_other_tenants() -> None:
    """Another tenant's prompt that differs in a word, is the same, or was evicted: cold, no text."""
    bench = ServerBench(keys=KEYS)
    near = PROMPT.replace("vault", "house")

    async def main() -> list[Answer]:
        told = []
        async with bench.running():
            await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            for text in (PROMPT, near, PROMPT[:100]):
                told.append(await bench.post("/v1/cache/explain", chat(text), "key-bob"))
            await bench.call("DELETE", "/v1/cache", key="key-admin")
            told.append(await bench.post("/v1/cache/explain", chat(PROMPT), "key-bob"))
            mine = await bench.post("/v1/cache/explain", chat(PROMPT), "key-ann")
            assert mine.json["miss"]["reason"] == "evicted"
        return told

    for answer in run(main()):
        miss = answer.json["miss"]
        assert miss["reason"] == "cold", miss
        assert answer.json["cached_tokens"] == 0
        assert "had" not in miss
        assert "got" not in miss
        assert "evicted_ago_s" not in miss


@pytest.mark.parametrize("guess", [PROMPT, PROMPT.replace("vault", "house"), PROMPT[:40], "No."])
def test_explanations_are_the_same_whatever_others_have_asked(guess: str) -> None:
    """Also where one's own prompt goes along for a while: a right guess looks like a wrong one."""

    async def main(bench: ServerBench, *, asked: bool) -> list[Any]:
        async with bench.running():
            if asked:
                await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            await bench.post("/v1/chat/completions", chat(PROMPT[:30] + "xyz " * 20), "key-bob")
            found = await bench.post("/v1/cache/explain", chat(guess), "key-bob")
            told = await bench.post("/v1/chat/completions", chat(guess), "key-bob")
            return [found.json, told.json["usage"]["ramify_cache"]]

    quiet, other = (run(main(ServerBench(keys=KEYS), asked=asked)) for asked in (False, True))

    assert quiet == other


def test_a_salt_separates_and_the_tenant_is_told_so() -> None:
    """His own prefix with another salt is `other_namespace`; he may know, it is his."""
    bench = ServerBench(keys=KEYS)

    async def main() -> dict[str, Any]:
        async with bench.running():
            await bench.post("/v1/chat/completions", chat(PROMPT, cache_salt="a"), "key-ann")
            told = await bench.post("/v1/chat/completions", chat(PROMPT, cache_salt="b"), "key-ann")
            return dict(told.json["usage"]["ramify_cache"])

    told = run(main())

    assert told["read"] == 0
    assert told["miss"]["reason"] == "other_namespace"


def test_responses_and_comparisons_of_other_tenants_do_not_exist() -> None:
    """The same 404 and words as for an id that never was, whoever's it is."""
    bench = ServerBench(keys=KEYS)

    async def main() -> None:
        async with bench.running():
            made = await bench.post(
                "/v1/responses", {"input": PROMPT, "max_output_tokens": 3}, "key-ann"
            )
            assert made.status == 200
            name, never = made.json["id"], "resp_" + "0" * 32
            path = "/v1/responses/"
            assert (await bench.call("GET", path + name, key="key-ann")).status == 200
            for method in ("GET", "DELETE"):
                other = await bench.call(method, path + name, key="key-bob")
                none = await bench.call(method, path + never, key="key-bob")
                assert other.status == none.status == 404
                assert other.body.replace(name.encode(), b"") == none.body.replace(
                    never.encode(), b""
                )
            body = {"input": "and?", "previous_response_id": name, "max_output_tokens": 3}
            assert (await bench.post("/v1/responses", body, "key-bob")).status == 404
            assert (await bench.post("/v1/responses", body, "key-ann")).status == 200
            done = await bench.post("/v1/chat/completions", chat(PROMPT), "key-ann")
            options = {"comparison_response_id": done.json["id"]}
            told = await bench.post(
                "/v1/chat/completions", chat(PROMPT, prompt_cache_options=options), "key-bob"
            )
            kind = told.json["prompt_cache_diagnostics"]
            assert "comparison_response_not_found" in str(kind), kind
            body = {
                "model": "tiny",
                "max_tokens": 3,
                "messages": [{"role": "user", "content": PROMPT}],
            }
            first = await bench.post("/v1/messages", body, "key-ann")
            body["diagnostics"] = {"previous_message_id": first.json["id"]}
            told = await bench.post("/v1/messages", body, "key-bob")
            assert "previous_message_not_found" in str(told.json["diagnostics"])

    run(main())


def test_no_body_holds_a_word_of_another_tenant() -> None:
    """Every path, right and wrong requests: bob's answers never have ann's text, tenant or ids."""
    bench = ServerBench(keys=KEYS, pool_tokens=2048)
    found: list[tuple[str, Answer]] = []

    async def main() -> set[str]:
        async with bench.running():
            words = {SECRET, KEYS.caller("key-ann").tenant}
            for path, body in (
                ("/v1/chat/completions", chat(PROMPT, n=2)),
                ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
                ("/v1/responses", {"input": PROMPT, "max_output_tokens": 3}),
            ):
                words.add((await bench.post(path, body, "key-ann")).json["id"])
            for one in ENDPOINTS:
                path = one.path.replace("{name:path}", "x").replace("{name}", "1")
                bodies: tuple[object, ...] = (
                    b"{}",
                    b"nonsense",
                    chat(PROMPT.replace(SECRET, "guess")),
                    {"prompt": "The password of the vault is ", "max_tokens": 3},
                    {"input": "The password of the vault is "},
                    {"tokens": list(range(50))},
                )
                for sent in bodies:
                    told = await bench.call(one.method, path, sent, key="key-bob")
                    found.append((path, told))
            flood = [
                bench.post("/v1/completions", {"prompt": [[at + 1] * 500]}, "key-bob")
                for at in range(12)
            ]
            for at in flood:
                found.append(("flood", await at))
            return words

    words = run(main())

    for path, told in found:
        text = told.body.decode() + str(told.headers)
        assert not [word for word in words if word in text], (path, text)


def test_a_flood_of_one_tenant_leaves_the_prefix_of_another() -> None:
    """Beyond its share of the pages a tenant evicts its own; without quotas it would be all."""
    shares = {"fair": 0.5, "greedy": None}
    kept = {}
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
                for at in range(40):
                    body = {"prompt": [[at + 20] * 300], "max_tokens": 3}
                    assert (await bench.post("/v1/completions", body, "bob")).status == 200
                told = await bench.post("/v1/chat/completions", chat(PROMPT), "ann")
                return int(told.json["usage"]["ramify_cache"]["read"])

        kept[name] = run(main())

    assert kept["fair"] > 64
    assert kept["greedy"] == 0


def test_a_tenant_beyond_its_share_keeps_what_it_used_last() -> None:
    """The oldest of its own prefixes go, never the one that the prompt itself begins with."""
    bench = ServerBench(keys=KEYS, pool_tokens=2048)
    prompts = [[at + 20] * 300 for at in range(30)]

    async def main() -> list[int]:
        read = []
        async with bench.running():
            for prompt in prompts:
                body = {"prompt": [prompt], "max_tokens": 2}
                await bench.post("/v1/completions", body, "key-ann")
                told = await bench.post("/v1/completions", body, "key-ann")
                read.append(told.json["usage"]["ramify_cache"]["read"])
            told = await bench.post("/v1/completions", {"prompt": [prompts[-2]]}, "key-ann")
            read.append(told.json["usage"]["ramify_cache"]["read"])
        return read

    assert run(main()) == [288] * 31


def test_a_tenant_over_its_quota_is_told_and_the_others_are_served() -> None:
    """429 with Retry-After, in the envelope; what is refused costs nothing."""
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
