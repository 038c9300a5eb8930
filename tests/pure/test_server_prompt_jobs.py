"""Prompt jobs: fair between tenants, bounded, dropped when nobody waits, none lost."""

import asyncio
import gc
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import PromptTooLongError
from ramify.server.errors import ApiError
from ramify.server.http.body_budget import BodyBudget, BodyReservation
from ramify.server.prompts.jobs import AbandonedError, FairQueue, PromptWorkers, stop_if_abandoned
from ramify.server.prompts.prompt_parts import PromptPart, locate_parts
from ramify.server.tenants import ApiKeys, Caller, Quota, hash_key
from tests.budget import examples
from tests.pure.server_bench import TINY, Answer, ServerBench, chat, run

TENANTS = ("ann", "bob", "cat")
MAX_RUNNING = 2
LONGEST_S = 8


class QueueMachine(RuleBasedStateMachine):
    """A `FairQueue` beside lists of what was put, taken, removed."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(max_running=MAX_RUNNING)
        self.waiting: dict[str, list[int]] = {tenant: [] for tenant in TENANTS}
        self.running: list[tuple[str, int]] = []
        self.count = 0
        # Served while each of a pair of tenants had jobs that waited, without a break.
        self.served: dict[frozenset[str], dict[str, float]] = {}

    @rule(tenant=st.sampled_from(TENANTS))
    def put(self, tenant: str) -> None:
        self.queue.put(tenant, self.count)
        self.waiting[tenant].append(self.count)
        self.count += 1

    @rule(tenant=st.sampled_from(TENANTS), place=st.integers(0, 20))
    def remove(self, tenant: str, place: int) -> None:
        jobs = self.waiting[tenant]
        job = jobs[place % len(jobs)] if jobs else -1
        assert self.queue.remove(tenant, job) == bool(jobs)
        if jobs:
            jobs.remove(job)

    @rule()
    def take(self) -> None:
        busy = [tenant for tenant, _ in self.running]
        ready = [
            tenant
            for tenant in TENANTS
            if self.waiting[tenant] and busy.count(tenant) < MAX_RUNNING
        ]
        taken = self.queue.take()
        assert (taken is None) == (not ready)
        if taken is not None:
            tenant, job = taken
            assert tenant in ready
            assert job == self.waiting[tenant].pop(0)  # of one tenant, first come first served
            self.running.append(taken)

    @precondition(lambda self: self.running)
    @rule(place=st.integers(0, 20), took_s=st.integers(0, LONGEST_S))
    def finish(self, place: int, took_s: int) -> None:
        tenant, _ = self.running.pop(place % len(self.running))
        self.queue.finish(tenant, took_s)
        for pair, served in self.served.items():
            if tenant in pair:
                served[tenant] += took_s

    @invariant()
    def counts_agree(self) -> None:
        assert self.queue.num_waiting == sum(map(len, self.waiting.values()))
        for tenant in TENANTS:
            assert self.queue.num_waiting_of(tenant) == len(self.waiting[tenant])
        active = {t for t in TENANTS if self.waiting[t]} | {tenant for tenant, _ in self.running}
        assert set(self.queue._shares) == active  # nothing is left of a tenant without jobs

    @invariant()
    def the_backlogged_are_served_alike(self) -> None:
        """Of two tenants that both wait all the time, none gets much more time than the other."""
        for first in TENANTS:
            for second in TENANTS:
                pair = frozenset((first, second))
                if len(pair) == 2 and all(len(self.waiting[t]) > 0 for t in pair):
                    served = self.served.setdefault(pair, dict.fromkeys(pair, 0.0))
                    # Each may be ahead by the jobs that run, before and after the time that counts.
                    assert abs(served[first] - served[second]) <= 2 * MAX_RUNNING * LONGEST_S
                else:
                    self.served.pop(pair, None)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=60, deadline=None
)


def test_a_tenant_that_was_away_does_not_hold_up_the_others() -> None:
    """It comes back beside the others, not with all the time that it did not use."""
    queue: FairQueue[int] = FairQueue(max_running=1)
    queue.put("ann", 0)
    for job in range(1, 100):
        queue.put("ann", job)
        queue.take()
        queue.finish("ann", 1.0)
    for job in range(10):
        queue.put("bob", 1000 + job)
        queue.put("ann", 2000 + job)
    order = []
    for _ in range(10):
        tenant, _ = queue.take() or ("", 0)
        order.append(tenant)
        queue.finish(tenant, 1.0)

    assert 4 <= order.count("bob") <= 6


class Blocker:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.order = threading.Event(), threading.Event(), list[str]()

    def work(self) -> str:
        self.begun.set()
        assert self.go_on.wait(60)
        stop_if_abandoned()
        self.order.append("blocker")
        return "blocker"

    def note(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.order.append(name)
            return name

        return work


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - of a thread
        await asyncio.sleep(0.001)


def test_one_tenant_cannot_hold_every_thread() -> None:
    """While ann's jobs take for ever, bob's are done."""

    async def main() -> None:
        workers, blocker = PromptWorkers(2), Blocker()
        held = [asyncio.ensure_future(workers.run("ann", blocker.work)) for _ in range(5)]
        await until(blocker.begun.is_set)
        for _ in range(5):
            assert await asyncio.wait_for(workers.run("bob", blocker.note("bob")), 60) == "bob"
        blocker.go_on.set()
        assert await asyncio.gather(*held) == ["blocker"] * 5
        assert workers._queue.num_waiting == 0
        workers.shutdown()

    run(main())


def test_jobs_that_nobody_waits_for_are_dropped() -> None:
    """A waiting job does not run, a running one ends between its stages; others are not lost."""

    async def main() -> list[str]:
        workers, blocker = PromptWorkers(2), Blocker()
        running = asyncio.ensure_future(workers.run("ann", blocker.work))
        await until(blocker.begun.is_set)
        dropped = [
            asyncio.ensure_future(workers.run("ann", blocker.note("dropped"))) for _ in range(3)
        ]
        kept = asyncio.ensure_future(workers.run("ann", blocker.note("kept")))
        await asyncio.sleep(0)
        for task in (running, *dropped):
            task.cancel()
        await asyncio.gather(running, *dropped, return_exceptions=True)
        assert workers._queue.num_waiting == 1
        blocker.go_on.set()
        assert await kept == "kept"
        workers.shutdown()
        return blocker.order

    assert run(main()) == ["kept"]


def test_errors_of_a_job_reach_its_caller_alone() -> None:
    """Whatever it raises; the thread goes on."""

    async def main() -> None:
        workers = PromptWorkers(2)

        def fail() -> None:
            raise AbandonedError

        with pytest.raises(AbandonedError):
            await workers.run("ann", fail)
        assert await workers.run("ann", lambda: 1) == 1
        workers.shutdown()

    run(main())


def test_waiting_jobs_are_bounded() -> None:
    """429 for a tenant with too many, 503 where all have too many."""

    async def main() -> None:
        workers, blocker = PromptWorkers(2, max_waiting=5, max_tenant_waiting=3), Blocker()
        tasks = [asyncio.ensure_future(workers.run("ann", blocker.work))]
        await until(blocker.begun.is_set)
        tasks.append(asyncio.ensure_future(workers.run("bob", blocker.work)))
        for tenant in ("ann", "ann", "ann", "bob", "bob"):
            tasks.append(asyncio.ensure_future(workers.run(tenant, blocker.work)))
            await asyncio.sleep(0)
        with pytest.raises(ApiError) as over:
            await workers.run("ann", blocker.work)
        with pytest.raises(ApiError) as full:
            await workers.run("bob", blocker.work)
        assert (over.value.status, full.value.status) == (429, 503)
        assert over.value.retry_after_s
        assert full.value.retry_after_s
        blocker.go_on.set()
        assert len(await asyncio.gather(*tasks)) == 7
        workers.shutdown()

    run(main())


def test_bytes_of_bodies_are_bounded() -> None:
    """For each tenant and in all; what is released may come again."""
    budget = BodyBudget(max_bytes=100, max_tenant_bytes=60)
    first, second = BodyReservation(budget, "ann"), BodyReservation(budget, "ann")
    other = BodyReservation(budget, "bob")
    first.add(50)
    with pytest.raises(ApiError) as over:
        second.add(11)
    other.add(45)
    with pytest.raises(ApiError) as full:
        BodyReservation(budget, "cat").add(6)

    assert (over.value.status, full.value.status) == (429, 503)
    first.close()
    first.close()
    second.add(55)
    for reservation in (second, other):
        reservation.close()
    assert (budget.num_bytes, budget.bytes_of("ann"), budget.bytes_of("bob")) == (0, 0, 0)


def test_a_quota_counts_before_a_prompt_is_rendered() -> None:
    """A tenant whose quota is used up gets 429 without any rendering."""
    keys = ApiKeys({hash_key("ann"): Caller("ann", quota=Quota(tokens_per_minute=60))})

    async def main() -> None:
        async with ServerBench(keys=keys).running() as bench:
            assert (await bench.post("/v1/chat/completions", chat("x" * 500), "ann")).status == 200
            encoder = bench.service.prompt_renderer._encoder
            before = encoder.num_encoded
            for path in ("/v1/chat/completions", "/v1/cache/explain", "/tokenize"):
                assert (await bench.post(path, chat("y" * 500), "ann")).status == 429
            assert encoder.num_encoded == before

    run(main())


def test_a_large_body_that_is_refused_is_charged() -> None:
    """As for the fewest tokens that its bytes could be; its bytes are released."""
    keys = ApiKeys({hash_key("ann"): Caller("ann", quota=Quota(tokens_per_minute=10_000))})

    async def main() -> None:
        async with ServerBench(keys=keys).running() as bench:
            answer = await bench.post("/v1/chat/completions", chat("x" * 320_000), "ann")
            assert answer.status == 400
            assert bench.server.bodies.num_bytes == 0
            refused = await bench.post("/v1/chat/completions", chat("x"), "ann")
            assert refused.status == 429
            assert (
                60 <= int(refused.headers["retry-after"]) <= 70
            )  # 20,000 tokens at 10,000 a minute

    run(main())


@pytest.mark.parametrize(
    "value",
    [b"[]," * 200_000 + b"[]", b'"",' * 400_000 + b'""', b"1," * 3_000_000 + b"1"],
)
def test_a_body_of_many_values_is_refused_before_it_is_decoded(value: bytes) -> None:
    """400 that says how many may be: decoding would hold up the event loop."""

    async def main() -> Answer:
        async with ServerBench().running() as bench:
            body = b'{"messages":[{"role":"user","content":"x"}],"functions":[' + value + b"]}"
            return await bench.call("POST", "/v1/chat/completions", body)

    answer = run(main())
    assert answer.status == 400
    assert "more than" in answer.json["error"]["message"]


@pytest.mark.parametrize("value", ["null", "[]", "{}", "false"])
def test_a_field_that_is_not_served_may_be_empty(value: str) -> None:
    """Clients send all fields, empty; a value is refused by name."""

    async def main() -> list[Answer]:
        async with ServerBench().running() as bench:
            bodies = [
                b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"functions":%s}' % text
                for text in (value.encode(), b'[{"name":"f"}]')
            ]
            return [await bench.post("/v1/chat/completions", body) for body in bodies]

    empty, given = run(main())
    assert (empty.status, given.status) == (200, 400)
    assert given.json["error"]["param"] == "functions"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (["x" * 20_000] * 100, "100 prompts with at least"),
        ([[5] * 2000] * 60, "60 prompts with at least 120000 tokens"),
        ([[5] * 2049], "2049 tokens"),
        ("x" * 26_625, "26625 bytes"),  # the longest token of the vocabulary has 13
        (["x" * 20_000, "\ud7ff" * 8000], "20000 tokens"),
    ],
)
def test_prompts_beyond_context_and_queue_are_refused_early(prompt: object, words: str) -> None:
    """Before they are tokenised, or after the first that is too long; the error says the number."""

    async def main() -> Answer:
        async with ServerBench().running() as bench:
            assert bench.service.tokenizer.max_token_bytes == 13
            return await bench.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})

    answer = run(main())
    assert answer.status == 400
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize("text", ["a" * 101, "<|end|>" * 30])
def test_a_text_with_too_many_tokens_has_no_offsets(text: str) -> None:
    """The error comes before lists of as many Python objects are made, for escaped text as well."""
    tokenizer = Tokenizer.load(TINY)
    escaped = tokenizer.escape_special_tokens(text)
    num_tokens = len(tokenizer.encode_with_offsets(escaped)[0])

    assert len(tokenizer.encode_with_offsets(escaped, num_tokens)[0]) == num_tokens
    with pytest.raises(PromptTooLongError) as error:
        tokenizer.encode_with_offsets(escaped, num_tokens - 1)
    assert (error.value.num_tokens, error.value.limit) == (num_tokens, num_tokens - 1)


class SearchedText(str):  # noqa: SLOT000 - it counts
    """A text that counts the characters in which something was looked for."""

    num_searched = 0

    def find(self, *args: Any) -> int:
        place = super().find(*args)
        self.num_searched += (len(self) if place < 0 else place) - args[1]
        return place


def test_fields_that_the_template_left_out_are_not_searched_for_without_end() -> None:
    """All are located while that takes no more than some passes over the text; then none."""
    text = SearchedText("x" * 10_000_000 + "end")
    parts = [PromptPart(f"messages[{at}]", (f"missing{at}", "absent")) for at in range(1000)]

    spans = list(locate_parts(text, [*parts, PromptPart("end", ("end",))]))

    assert len(spans) == 1001
    assert all(start == end for _, start, end in spans)
    assert text.num_searched <= 650_000_000
    short = list(locate_parts("x" * 1000 + "end", [*parts, PromptPart("end", ("end",))]))
    assert short[-1][1:] == (1000, 1003)


@pytest.mark.parametrize("filler", [b"[]," * 3_000_000, b'"' + b"x" * 9_000_000])
def test_bodies_of_refused_requests_are_freed_at_once(filler: bytes) -> None:
    """No cycle of an error and its traceback keeps them until the garbage collector runs."""
    body = b'{"messages":[{"role":"user","content":["' + filler + b"[]]}]}"

    async def main() -> int:
        async with ServerBench().running() as bench:
            assert (await bench.call("POST", "/v1/chat/completions", body)).status == 400
            gc.collect()
            gc.disable()
            tracemalloc.start()
            try:
                for _ in range(4):
                    await bench.call("POST", "/v1/chat/completions", body)
                return tracemalloc.get_traced_memory()[0]
            finally:
                tracemalloc.stop()
                gc.enable()

    assert run(main()) < 2 * len(body)  # not one for each
