"""Pins of tenants: a budget for each, room for the longest request of others, refusals that are told."""

import asyncio
from typing import Any

from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import Answer, ServerBench, run

MESSAGES, COMPLETIONS = "/v1/messages", "/v1/completions"
KEYS = ApiKeys.of("key-ann", "key-bob", admin="key-admin")


def message(number: int, num_words: int = 90) -> dict[str, Any]:
    """A request that asks to keep its prompt, of about 6 tokens a word."""
    text = f"{number} " + "lamps and violins, " * num_words
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [block]}]
    return {"model": "tiny", "max_tokens": 2, "messages": messages}


def usage(answer: Answer) -> dict[str, Any]:
    assert answer.status == 200, answer.body
    return dict(answer.json["usage"]["ramify_cache"])


async def post_messages(bench: ServerBench, count: int, key: str | None) -> list[Answer]:
    return [await bench.post(MESSAGES, message(number), key) for number in range(count)]


def pinned_share(bench: ServerBench) -> float:
    stats = bench.core.cache.stats()
    return stats.pinned_pages / stats.num_pages


def test_a_tenant_pins_a_quarter_beside_others_and_is_told() -> None:
    """Refused pins are in `usage` and in the header; the request itself is served."""
    bench = ServerBench(keys=KEYS)

    async def main() -> list[Answer]:
        async with bench.running():
            answers = await post_messages(bench, 12, "key-ann")
            await bench.until_idle()
            assert 0.15 < pinned_share(bench) <= 0.25
            other = await bench.post(MESSAGES, message(50), "key-bob")
            assert "pins_refused" not in usage(other)
            return answers

    answers = run(main())

    refused = [usage(answer).get("pins_refused", 0) for answer in answers]
    assert refused == sorted(refused)
    assert set(refused) == {0, 1}
    for answer, count in zip(answers, refused, strict=True):
        assert ("pins_refused=1" in answer.headers["x-cache"]) == bool(count)


def test_one_tenant_alone_may_pin_half() -> None:
    """As without keys; a quota sets another limit."""
    shares: list[float] = []
    quota = Quota(max_pinned_share=0.1)
    for keys in (None, ApiKeys.of("one"), ApiKeys({hash_key("one"): Caller("one", quota=quota)})):
        bench = ServerBench(keys=keys)

        async def main(bench: ServerBench = bench, *, with_key: bool = keys is not None) -> float:
            async with bench.running():
                await post_messages(bench, 20, "one" if with_key else None)
                await bench.until_idle()
                return pinned_share(bench)

        shares.append(run(main()))

    assert 0.4 < shares[0] == shares[1] <= 0.5
    assert 0.0 < shares[2] <= 0.1


def test_pins_leave_room_for_the_longest_request_of_another_tenant() -> None:
    """Pins of ann and of the operator together: bob's longest request is served."""
    bench = ServerBench(keys=KEYS, pool_tokens=4096, max_model_len=2560)

    tenant = KEYS.caller("key-admin").tenant

    async def main() -> tuple[list[int], Answer, Answer]:
        async with bench.running():
            pinned = []
            for number in range(8):
                prompt = [number + 5] * 480
                await bench.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1}, "key-admin")
                await bench.post(MESSAGES, message(number), "key-ann")
                ids = {"token_ids": prompt, "tenant": tenant}
                pinned.append((await bench.post("/v1/cache/pins", ids, "key-admin")).status)
            body = {"prompt": [[3] * 2500], "max_tokens": 60, "ignore_eos": True}
            large = await bench.post(COMPLETIONS, body, "key-bob")
            path = f"/v1/cache?tenant={tenant}&pins=true"
            return pinned, large, await bench.call("DELETE", path, key="key-admin")

    pinned, large, cleared = run(main())

    assert set(pinned) == {200, 409}
    assert large.status == 200, large.body
    assert cleared.json["pins"] == pinned.count(200)
    assert cleared.json["kept_pages"] == 0
    assert cleared.json["pages"] >= 30 * pinned.count(200)


def test_a_request_that_pins_make_impossible_may_come_again() -> None:
    """503 with Retry-After, not 500: pins end. The pins are older than the rule, or the operator's."""
    bench = ServerBench(keys=KEYS, pool_tokens=2048, max_model_len=2048)

    async def main() -> list[Answer]:
        async with bench.running():
            body = {"prompt": [[7] * 900], "max_tokens": 1}
            await bench.post(COMPLETIONS, body, "key-ann")
            pin = await bench.llm.cache.pin([7] * 896, tenant=KEYS.caller("key-ann").tenant)
            large = {"prompt": [[3] * 1900], "max_tokens": 2}
            refused = [
                await bench.post(COMPLETIONS, large | {"stream": stream}, "key-bob")
                for stream in (False, True)
            ]
            await bench.llm.cache.unpin(pin)
            return [*refused, await bench.post(COMPLETIONS, large, "key-bob")]

    *refused, served = run(main())

    assert served.status == 200
    assert refused[0].status == 503
    assert int(refused[0].headers["retry-after"]) >= 1
    assert refused[0].json["error"]["code"] == "no_room"
    assert b"no_room" in refused[1].body


def test_ending_pins_needs_a_tenant() -> None:
    """400 without one: public prefixes are pinned too."""
    bench = ServerBench()

    async def main() -> list[Answer]:
        async with bench.running():
            queries = ("pins=true", "pins=yes&tenant=a", "pins=false", "pins=true&tenant=a")
            calls = [bench.call("DELETE", f"/v1/cache?{query}") for query in queries]
            return list(await asyncio.gather(*calls))

    answers = run(main())

    assert [answer.status for answer in answers] == [400, 400, 200, 200]
    assert answers[3].json["pins"] == 0
