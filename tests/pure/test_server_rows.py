"""Rows and queue of a server are shared between tenants; a refusal tells nothing of others."""

import asyncio

from ramify.server.tenants import ApiKeys
from tests.pure.server_bench import Answer, ServerBench, chat, run

CHAT = "/v1/chat/completions"
KEYS = ApiKeys.of("key-ann", "key-bob")


def test_long_answers_of_one_tenant_do_not_keep_another_waiting() -> None:
    """Bob is answered while all of ann's rows are still decoding; ann's answers do not change."""
    bench = ServerBench(keys=KEYS, max_num_seqs=4, max_model_len=1024)
    body = chat("a long story", max_tokens=300, ignore_eos=True, temperature=0)

    async def main() -> tuple[Answer, list[Answer], int]:
        async with bench.running():
            alone = await bench.post(CHAT, body, "key-ann")
            greedy = [asyncio.ensure_future(bench.post(CHAT, body, "key-ann")) for _ in range(6)]
            while bench.device.num_steps < 320:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0)
            answer = await bench.post(CHAT, chat("x"), "key-bob")
            num_live = sum(not task.done() for task in greedy)
            assert answer.status == 200
            return alone, list(await asyncio.gather(*greedy)), num_live

    alone, answers, num_live = run(main())

    assert num_live >= 4
    assert bench.core.scheduler.num_fair_preemptions >= 1
    for answer in answers:
        assert answer.json["choices"] == alone.json["choices"]


def test_a_full_queue_refuses_its_tenant_and_tells_no_count() -> None:
    """Ten requests with n=128 of ann: bob is served; ann gets 503, with no number but a time."""
    bench = ServerBench(keys=KEYS, max_num_seqs=4, max_waiting=64)

    async def main() -> tuple[list[Answer], list[Answer]]:
        async with bench.running():
            many = [
                asyncio.ensure_future(bench.post(CHAT, chat("x", n=128), "key-ann"))
                for _ in range(10)
            ]
            while not bench.core.scheduler.running:  # noqa: ASYNC110 - of another thread
                await asyncio.sleep(0)
            others = await asyncio.gather(
                *(bench.post(CHAT, chat(f"{at}"), "key-bob") for at in range(3))
            )
            return list(await asyncio.gather(*many)), others

    many, others = run(main())

    assert [answer.status for answer in others] == [200] * 3
    refused = [answer for answer in many if answer.status != 200]
    assert {answer.status for answer in refused} == {503}
    assert len(many) - len(refused) <= 2
    for answer in refused:
        wait_s = answer.headers["retry-after"]
        message = answer.json["error"]["message"]
        assert message == f"too many requests wait here; try again in {wait_s} s"
