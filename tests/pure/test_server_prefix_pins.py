"""Pins of named prefixes: none is left without a name, and none with a name ends."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from ramify.cache.pins import Pin
from ramify.cluster.codecs import WirePin
from ramify.engine.cache_admin.async_view import AsyncCacheView
from ramify.engine.cache_admin.warmup import WarmPrompt, WarmupResult
from ramify.server.http.request_body import convert_value
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.protocol import ChatRequest
from ramify.server.tenants import Caller
from tests.pure.async_bench import Gate
from tests.pure.cluster_bench import until
from tests.pure.prefix_requests import CHAT, KEYS, PATH, QUESTION, SYSTEM, body, define, error_of
from tests.pure.server_bench import Answer, ServerBench, run


def test_a_request_does_not_pin_a_prefix_that_is_deleted_while_it_waits() -> None:
    """It was sent before, and is computed after: no pin is left that nobody could end."""
    bench = ServerBench()
    gate = Gate(bench.device)
    bench.core.executor = gate

    async def main() -> None:
        async with bench.running():
            await define(bench, system=SYSTEM)
            gate.is_open = False
            first = asyncio.create_task(bench.post(CHAT, body(CHAT, QUESTION)))
            await gate.arrive()
            second = asyncio.create_task(bench.post(CHAT, body(CHAT, QUESTION, prefix="desk")))
            await until(lambda: bench.service.live.num_waiting(None) == 2)
            deleting = asyncio.create_task(bench.call("DELETE", f"{PATH}/desk"))
            await until(lambda: not bench.service.prefixes.of(""))
            gate.open()
            assert [(await answer).status for answer in (first, second, deleting)] == [200] * 3
            assert not await bench.llm.cache.pins()

    run(main())


def test_a_replacement_with_the_same_whole_pages_stays_pinned() -> None:
    """Only the tokens behind the last whole page differ."""
    bench = ServerBench()
    texts = [SYSTEM + "Be brief." + " Now" * count for count in range(16)]

    async def main() -> tuple[Answer, Answer]:
        async with bench.running():
            before = await define(bench, system=texts[0])
            for text in texts[1:]:
                after = await define(bench, system=text, replace=True)
                if after.json["tokens"] // 16 == before.json["tokens"] // 16:
                    return before, await bench.call("GET", f"{PATH}/desk")
                before = after
            raise AssertionError("each text has another number of pages")

    before, after = run(main())

    assert before.json["tokens"] != after.json["tokens"]
    assert after.json["pinned_tokens"] == after.json["tokens"] // 16 * 16


def test_pins_of_the_same_tokens_with_a_salt_are_none_of_the_name() -> None:
    """They are the tenant's own: neither making nor deleting the name ends them, and they pin none of it."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            cache = bench.llm.cache
            made = await define(bench, system=SYSTEM)
            [named] = await cache.pins()
            ids = named.key.tokens().tolist()
            await cache.warm([WarmPrompt(ids, salt="s")])
            salted = await cache.pin(ids, owner="", salt="s")
            await define(bench, system=SYSTEM, replace=True)
            assert [pin.id for pin in await cache.pins() if pin.key == salted.key] == [salted.id]
            assert await cache.unpin_prefix(ids, owner="") == 1
            listed = await bench.call("GET", f"{PATH}/desk")
            assert (made.json["pinned_tokens"], listed.json["pinned_tokens"]) == (len(ids), 0)
            assert (await bench.call("DELETE", f"{PATH}/desk")).status == 200
            assert await cache.pins() == [salted]
            assert await cache.unpin_prefix(ids, owner="", salt="s") == 1

    run(main())


def test_a_salted_pin_after_a_public_beginning_pins_nothing_of_the_name() -> None:
    """Its key has the salt at the end of the public part, not in its namespace."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            cache = bench.llm.cache
            await define(bench, system=SYSTEM)
            [named] = await cache.pins()
            ids = named.key.tokens().tolist()
            await cache.share([WarmPrompt(ids[:16])])
            await cache.warm([WarmPrompt(ids, salt="s")])
            await cache.pin(ids, owner="", salt="s")
            await cache.unpin_prefix(ids, owner="")

            listed = await bench.call("GET", f"{PATH}/desk")

            assert listed.json["pinned_tokens"] == 0

    run(main())


@pytest.mark.parametrize("is_cluster", [False, True])
def test_a_name_may_begin_with_a_public_prefix(is_cluster: bool) -> None:
    """Its pages after the public ones are pinned for its tenant; the engines' keys have a salt between."""
    bench = ServerBench(keys=KEYS)
    pins = AsyncCacheView.pins

    async def of_replica(view: AsyncCacheView, owner: str | None = None) -> list[Pin]:
        return [WirePin.of(pin).pin() for pin in await pins(view, owner)]

    async def main(patch: pytest.MonkeyPatch) -> Answer:
        async with bench.running():
            await define(bench, "key-ann", system=SYSTEM)
            [named] = await bench.llm.cache.pins()
            await bench.call("DELETE", f"{PATH}/desk", key="key-ann")
            await bench.llm.cache.share([WarmPrompt(named.key.tokens()[:64].tolist())])
            if is_cluster:
                patch.setattr(AsyncCacheView, "pins", of_replica)
            return await define(bench, "key-ann", system=SYSTEM)

    with pytest.MonkeyPatch.context() as patch:
        answer = run(main(patch))

    assert answer.status == 200, answer.body
    assert answer.json["pinned_tokens"] == answer.json["tokens"] // 16 * 16


def test_a_pin_is_found_after_a_part_of_it_has_become_public() -> None:
    """Under the key with which it was made: new requests have another."""
    bench = ServerBench()

    async def main() -> None:
        async with bench.running():
            cache, ids = bench.llm.cache, [*range(3, 99)]
            await cache.warm([WarmPrompt(ids, tenant="ann")])
            await cache.pin(ids, owner="ann", tenant="ann")
            await cache.share([WarmPrompt(ids[:32])])
            assert await cache.unpin_prefix(ids, owner="ann") == 0
            assert await cache.unpin_prefix(ids, owner="ann", tenant="ann") == 1

    run(main())


def test_a_prefix_that_one_engine_could_not_compute_is_pinned_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """503, and neither name nor pin, though other engines have pinned it."""
    bench = ServerBench()
    warm = AsyncCacheView.warm

    async def failing(view: AsyncCacheView, prompts: Any) -> WarmupResult:
        return replace(await warm(view, prompts), num_failed=1, errors=("a replica is lost",))

    monkeypatch.setattr(AsyncCacheView, "warm", failing)

    async def main() -> Answer:
        async with bench.running():
            answer = await define(bench, system=SYSTEM)
            assert not await bench.llm.cache.pins()
            assert not bench.service.prefixes.of("")
            return answer

    assert error_of(run(main()))[0] == 503


def test_a_client_that_leaves_leaves_no_pin_of_a_deleted_prefix() -> None:
    """Its prompt is computed when it has gone, and pinned with its first token."""
    bench = ServerBench()
    gate = Gate(bench.device)
    bench.core.executor = gate
    service = bench.service

    async def main() -> None:
        async with bench.running():
            await define(bench, system=SYSTEM)
            chat = convert_value(body(CHAT, QUESTION, prefix="desk"), ChatRequest)
            request = chat_to_generation(chat, service)
            gate.is_open = False
            first = asyncio.create_task(bench.post(CHAT, body(CHAT, QUESTION)))
            await gate.arrive()
            leaving = asyncio.create_task(service.start(request, Caller(""), prefix="chatcmpl-"))
            await until(lambda: service.live.num_waiting(None) == 2)
            deleting = asyncio.create_task(bench.call("DELETE", f"{PATH}/desk"))
            await until(lambda: not service.prefixes.of(""))
            gate.allowed.release()
            await gate.arrive()  # the second prompt
            leaving.cancel()
            gate.open()
            assert [(await answer).status for answer in (first, deleting)] == [200] * 2
            with pytest.raises(asyncio.CancelledError):
                await leaving
            await bench.until_idle()
            assert not await bench.llm.cache.pins()

    run(main())
