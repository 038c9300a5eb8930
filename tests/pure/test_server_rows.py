"""Rows and queue of a server are shared between tenants; a refusal tells nothing of others."""

import asyncio

from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.pure.server_bench import Answer, ServerBench, chat, run
from tests.pure.test_server_one_trip import StepGate, posted

CHAT = "/v1/chat/completions"
KEYS = ApiKeys.of("key-ann", "key-bob")


def test_long_answers_of_one_tenant_do_not_keep_another_waiting() -> None:
    """Bob is answered while all of ann's rows are still decoding; ann's answers do not change."""
    bench = ServerBench(keys=KEYS, max_num_seqs=4, max_model_len=1024)
    body = chat("a long story", max_tokens=300, ignore_eos=True, temperature=0)
    gate = StepGate(bench.device)
    gate.is_open = True
    bench.core.executor = gate

    async def main() -> tuple[Answer, list[Answer], int]:
        async with bench.running():
            alone = await bench.post(CHAT, body, "key-ann")
            gate.close()
            greedy = [asyncio.ensure_future(bench.post(CHAT, body, "key-ann"))]
            await gate.arrive()
            greedy += [asyncio.ensure_future(bench.post(CHAT, body, "key-ann")) for _ in range(5)]
            await posted(bench, 5)
            gate.allowed.release()
            await gate.arrive()  # now four of them run
            other = asyncio.ensure_future(bench.post(CHAT, chat("x"), "key-bob"))
            await posted(bench, 1)
            num_plans = len(gate.plans)
            gate.open()
            assert (await other).status == 200
            return alone, list(await asyncio.gather(*greedy)), num_plans

    alone, answers, num_plans = run(main())

    plans = [plan.request_ids for plan in gate.plans[num_plans:]]
    latest = max(map(max, plans))
    assert next(count for count, ids in enumerate(plans) if latest in ids) <= 10
    assert len(plans) > 300
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


def test_prompts_that_can_never_wait_together_are_no_overload() -> None:
    """400, where 429 or 503 would have a client try for ever; what just fits is served."""
    quota = Quota(max_requests=8, max_waiting_tokens=60)
    keys = ApiKeys(
        {hash_key("key-ann"): Caller("ann"), hash_key("key-eve"): Caller("eve", quota=quota)}
    )
    bench = ServerBench(keys=keys, max_num_seqs=2, max_waiting=8)

    async def main() -> list[Answer]:
        async with bench.running():
            calls = []
            for key, num_prompts, num_answers, num_tokens in (
                ("key-ann", 4, 2, 5),
                ("key-ann", 5, 2, 5),
                ("key-eve", 4, 2, 15),
                ("key-eve", 3, 3, 5),
                ("key-eve", 4, 1, 16),
            ):
                prompts = [[7 + at] * num_tokens for at in range(num_prompts)]
                body = {"prompt": prompts, "n": num_answers, "max_tokens": 2}
                calls.append(await bench.post("/v1/completions", body, key))
            return calls

    answers = run(main())

    assert [answer.status for answer in answers] == [200, 400, 200, 400, 400]
    assert {answer.json["error"]["param"] for answer in answers if answer.status == 400} == {
        "prompt"
    }
    assert bench.service.quotas.num_live == 0
