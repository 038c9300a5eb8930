"""Admission order: least work with ageing, priorities, tenants, and bounded cost per step."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache.key import CacheKey
from ramify.cache.types import Match
from ramify.engine.request import Request
from ramify.engine.scheduling.prefill import MAX_PROBES, NUM_RERANKED
from ramify.engine.scheduling.waiting_queue import (
    PRIORITY_TOKENS,
    SPARE_ENTRIES,
    SPARE_TENANTS,
    WaitingQueue,
)
from ramify.errors import ConfigError, OverloadedError, PromptTooLongError
from ramify.params import SamplingParams
from tests.budget import examples
from tests.pure.engine_bench import Bench, expected
from tests.pure.whole_steps import WholeSteps


def begun(bench: Bench, keys: Sequence[int]) -> list[int]:
    """Return the `keys` of requests that have left the waiting queue, in the given order."""
    waiting = {request.id for request in bench.core.scheduler.waiting}
    return [key for key in keys if key not in waiting]


# -- least work first, with ageing -----------------------------------------------------------


def test_of_those_that_come_together_the_least_uncached_work_is_first() -> None:
    """A long warm prompt goes before a shorter cold one."""
    bench = Bench(max_num_seqs=1)
    bench.add([7] * 60, max_tokens=1)
    bench.run()
    blocker = bench.add([1], max_tokens=2, ignore_eos=True)
    bench.step()
    cold = bench.add([2] * 20, max_tokens=1)
    warm = bench.add([7] * 60 + [3], max_tokens=1)

    order = [event.request_id for _ in range(3) for event in bench.step() if event.output]

    assert order == [blocker, warm, cold]


@pytest.mark.parametrize("num_queued", [0, 40, 200])
def test_short_warm_prompts_pass_a_long_cold_one_for_a_bounded_time(num_queued: int) -> None:
    """Short warm prompts overtake a long cold prompt until the clock reaches its rank.

    The clock counts computed tokens. The long prompt's rank is the clock at its arrival plus its
    length. A request that arrives at or after that rank starts after the long prompt, however
    long the queue is.
    """
    bench = Bench(20_000, 4, max_num_seqs=4, max_batch_tokens=32)
    bench.add([7] * 40, max_tokens=1)
    bench.run()
    scheduler = bench.core.scheduler
    filling = [bench.add([7] * 40 + [9, at % 40], max_tokens=8) for at in range(num_queued)]
    long = bench.add([2] * 300, max_tokens=1)
    rank = scheduler.num_tokens + 300
    passed, late = 0, []
    while not begun(bench, [long]):
        for at in range(5):
            key = bench.add([7] * 40 + [1 + at], max_tokens=8, ignore_eos=True)
            if scheduler.num_tokens >= rank:
                late.append(key)
            else:
                passed += 1
        bench.core.step()
        assert begun(bench, late) == []
        assert scheduler.num_tokens < rank + 32 * (num_queued + passed + 10)

    assert passed > 100
    assert len(begun(bench, filling)) == num_queued
    bench.check()


def test_eb15_decodes_that_fill_the_budget_keep_no_prompt_out() -> None:
    """Prompts start in bounded time although running decodes fill the whole token budget.

    An eighth of the budget is for prompts: 24 tokens each take 24 steps, one after the other.
    """
    bench = Bench(4096, 4, max_num_seqs=16, max_batch_tokens=8)
    for at in range(8):
        bench.add([20 + at], max_tokens=800, ignore_eos=True)
    bench.step()
    assert len(bench.core.scheduler.running) == 8
    late = [bench.add([1 + at] * 24, max_tokens=1) for at in range(6)]

    for _ in range(6 * 24 + 6):
        bench.step()

    assert all(key in bench.outputs for key in late)
    counts = [len(bench.tokens[key]) for key in range(8)]
    assert min(counts) >= 6 * 24 * 3 // 4  # an eighth, and what had begun meanwhile
    assert max(counts) - min(counts) <= 8  # a round
    for key in range(8):
        bench.abort(key)
    bench.run()


def test_yb23_prompts_stop_no_decode_and_a_shortage_of_pages_ends_nobody() -> None:
    """Every decode emits a token in every step while prompts fill the budget and the pool."""
    bench = Bench(400, 4, max_batch_tokens=24)
    decoding = [bench.add([30 + at], max_tokens=40, ignore_eos=True) for at in range(3)]
    bench.step()
    prompts = [[1 + at] * 110 for at in range(9)]
    keys = [bench.add(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]

    for _ in range(38):
        assert {event.request_id for event in bench.step()} >= set(decoding)
    outputs = bench.run()

    for key, prompt in zip(keys, prompts, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 3, ends=())


def test_a_short_prompt_passes_a_long_one_that_is_part_way() -> None:
    """A short prompt is answered in the next step; the long prompt gets the remaining budget."""
    bench = Bench(8000, 4, max_batch_tokens=64)
    long = bench.add([1] * 1500, max_tokens=1)
    bench.step()
    done = []
    for at in range(10):
        short = bench.add([2 + at] * 20, max_tokens=1)
        bench.step()
        done.append(short in bench.outputs)

    outputs = bench.run()

    assert all(done)
    ttft_s = outputs[long].metrics.ttft_s
    assert ttft_s is not None
    assert ttft_s <= (1500 + 10 * 20) // 60 + 2


def test_prompts_are_not_cut_into_slivers() -> None:
    """Non-final chunks have at least 64 tokens, and long chunks end on page boundaries."""
    bench = Bench(8000, 16, max_batch_tokens=512)
    bench.add([30], max_tokens=30, ignore_eos=True)
    bench.step()
    for at in range(6):
        bench.add([1 + at] * 900, max_tokens=1)
    chunks: list[tuple[int, int]] = []
    while bench.core.has_unfinished:
        before = {
            request.id: request.sequence.num_computed for request in bench.core.scheduler.running
        }
        bench.step()
        for request in bench.core.scheduler.running:
            if request.sequence.num_uncomputed > 1:
                start = before.get(request.id, 0)
                chunks.append((start, request.sequence.num_computed - start))

    assert chunks
    assert min(length for _, length in chunks if length) >= 64
    assert all((start + length) % 16 == 0 for start, length in chunks if length >= 16 * 16)


def test_eb16_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Queues and tables stay short after thousands of tenants, namespaces and parked followers."""
    bench = Bench(400, 4, max_num_seqs=4, max_batch_tokens=32)
    for at in range(300):
        tenant, params = f"tenant {at}", SamplingParams(max_tokens=2)
        prompts = [[1 + at % 40] * 20 + [part] for part in range(4)]
        keys = [bench.core.add_request(prompt, params, tenant=tenant) for prompt in prompts]
        if at % 3 == 0:
            bench.core.abort(keys[3])
        for _ in range(6):
            bench.core.step()
    while bench.core.has_unfinished:
        bench.core.step()

    core, queue = bench.core, bench.core.scheduler.waiting
    assert not core.live
    assert not core.scheduler.running
    assert not core.scheduler._requeued
    assert not core.context.planner._by_lease
    assert not core.context.planner._awaiting_leader
    assert (len(queue), queue.num_uncached, len(queue._parked)) == (0, 0, 0)
    assert len(queue._tenants) <= 2 * SPARE_TENANTS
    assert (
        sum(len(tenant_queue.heap) for tenant_queue in queue._tenants.values()) <= 2 * SPARE_TENANTS
    )


def test_nothing_is_kept_of_tenants_that_came_once() -> None:
    """Tenants that send a single request are forgotten, though the queue's clock stands still."""
    bench = Bench()
    for at in range(400):
        bench.core.add_request([1 + at % 40] * 5, SamplingParams(max_tokens=1), tenant=f"{at}")
        bench.core.step()

    assert not bench.core.has_unfinished
    queue = bench.core.scheduler.waiting
    assert len(queue._tenants) <= 2 * SPARE_TENANTS + 2
    assert len(queue._waits_since) <= 2 * SPARE_TENANTS + 2


@pytest.mark.parametrize("num_tenants", [1, 700])
def test_nothing_is_kept_of_those_that_gave_up_waiting(num_tenants: int) -> None:
    """Thousands of aborted waiting requests leave the queue short and its order unchanged."""
    bench = Bench(max_num_seqs=1)
    bench.add([1], max_tokens=200, ignore_eos=True)
    bench.step()
    kept = [bench.add([2] * 9, max_tokens=1), bench.add([3] * 5, max_tokens=1)]
    for at in range(2000):
        gone = bench.core.add_request(
            [4] * 9, SamplingParams(max_tokens=1), tenant=f"{at % num_tenants}"
        )
        bench.core.abort(gone)

    queue = bench.core.scheduler.waiting
    assert (
        sum(len(tenant_queue.heap) for tenant_queue in queue._tenants.values()) <= 2 * SPARE_ENTRIES
    )
    assert len(queue._tenant_heap) <= SPARE_ENTRIES + 2
    assert len(queue._tenants) <= SPARE_ENTRIES + 2 * SPARE_TENANTS
    ended = [event.request_id for _ in range(210) for event in bench.step() if event.output]
    assert ended[1:] == kept[::-1]


# -- priorities ------------------------------------------------------------------------------


def test_a_larger_priority_goes_first_and_costs_a_smaller_one_a_bounded_wait() -> None:
    """A higher priority goes first whatever its length; each level is worth PRIORITY_TOKENS."""
    queue = WaitingQueue()
    bench = Bench()
    for prompt, priority in (([1], 0), ([2] * 900, 1), ([3], -1), ([4] * 9, 1)):
        bench.add(prompt, priority=priority, max_tokens=1)
    requests = list(bench.core.scheduler.waiting)
    assert drained(bench.core.scheduler.waiting) == [3, 1, 0, 2]

    for request, came in zip(requests, (0, PRIORITY_TOKENS + 1000, 0, 0), strict=True):
        request.virtual_arrival = came - PRIORITY_TOKENS * request.priority
        queue.add(request, len(request.prompt_ids))

    assert drained(queue) == [3, 0, 1, 2]


def drained(queue: WaitingQueue) -> list[int]:
    ids = []
    while (request := queue.peek()) is not None:
        queue.admit(request)
        ids.append(request.id)
    return ids


def test_the_lowest_priority_is_preempted_and_the_first_never() -> None:
    """Four requests outgrow the pool: priority 0 is preempted, the first arrival never is."""
    bench = Bench(48, 4, max_batch_tokens=64)
    keys = [
        bench.add([1 + at] * 4, max_tokens=19, ignore_eos=True, priority=priority)
        for at, priority in enumerate((1, 0, 1, 0))
    ]

    outputs = bench.run()

    counts = [outputs[key].metrics.preemptions for key in keys]
    assert counts[0] == 0
    assert counts[1] + counts[3] > counts[2]
    for at, key in enumerate(keys):
        assert list(outputs[key].token_ids) == expected([1 + at] * 4, 19, ends=())


def test_of_one_priority_whoever_has_computed_least_is_preempted() -> None:
    """Among equal priorities, the request with the least computed work is preempted."""
    bench = Bench(64, 4, max_batch_tokens=64)
    first = bench.add([1] * 8, max_tokens=30, ignore_eos=True)
    little = bench.add([2] * 4, max_tokens=30, ignore_eos=True)
    much = bench.add([3] * 24, max_tokens=10, ignore_eos=True)

    outputs = bench.run()

    preemptions = [outputs[key].metrics.preemptions for key in (first, little, much)]
    assert preemptions[0] == preemptions[2] == 0
    assert preemptions[1] > 0


# -- tenants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_others", [10, 1000])
def test_a_thousand_requests_of_a_tenant_delay_anothers_by_one_admission(num_others: int) -> None:
    """A tenant's only request is admitted after at most one more request of the busy tenant."""
    bench = Bench(8000, 4, max_num_seqs=2, max_batch_tokens=32)
    many = [
        bench.add([1 + at % 40, 3], tenant="many", max_tokens=4, ignore_eos=True, priority=at % 3)
        for at in range(num_others)
    ]
    for _ in range(6):
        bench.step()
    before = len(begun(bench, many))
    single = bench.add([2] * 90, tenant="one", max_tokens=2)

    while not begun(bench, [single]):
        bench.step()

    assert len(begun(bench, many)) <= before + 1
    for _ in range(90 // 30 + 3):
        bench.step()
    assert single in bench.outputs
    for key in many:
        if key not in bench.outputs:
            bench.abort(key)
    bench.run()


def test_tenants_are_served_the_same_number_of_tokens() -> None:
    """Tenants with long and with short prompts get the same number of tokens."""
    bench = Bench(8000, 4, max_num_seqs=3, max_batch_tokens=32)
    heavy = [bench.add([1 + at % 9] * 100 + [at], tenant="heavy", max_tokens=9) for at in range(40)]
    light = [bench.add([20, at % 49], tenant="light", max_tokens=9) for at in range(400)]
    served = {"heavy": 0, "light": 0}
    execute = bench.device.execute

    class Counting(WholeSteps):
        def __getattr__(self, name: str) -> Any:
            return getattr(bench.device, name)

        def execute(self, plan: Any) -> Any:
            lengths = plan.batch.cu_seqlens_q[1:] - plan.batch.cu_seqlens_q[:-1]
            for name, length in zip(plan.request_ids, lengths.tolist(), strict=True):
                served["heavy" if name in heavy else "light"] += length
            return execute(plan)

    bench.core.context.executor = Counting()
    while len(begun(bench, light)) < 150:
        bench.step()

    longest = 100 + 9 + 32
    assert abs(served["heavy"] - served["light"]) <= 3 * longest
    for key in (*heavy, *light):
        if key not in bench.outputs:
            bench.abort(key)
    bench.run()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcd"), st.integers(0, 50), st.sampled_from(["add", "take"])),
        max_size=60,
    )
)
def test_whoever_waits_is_first_once(jobs: list[tuple[str, int, str]]) -> None:
    """Each request is admitted once, and the least served tenant always goes first."""
    queue, bench = WaitingQueue(), Bench()
    live: dict[int, Request] = {}
    for tenant, cost, job in jobs:
        if job == "add":
            key = bench.add([1], tenant=tenant)
            request = bench.core.lifecycle.requests[key]
            queue.add(request, cost)
            live[key] = request
        elif (first := queue.peek()) is not None:
            assert live.pop(first.id) is first
            lowest = min(queue.key(request)[0] for request in (first, *live.values()))
            assert queue.key(first)[0] == lowest
            assert queue.key(first) == min(
                queue.key(request)
                for request in (first, *live.values())
                if request.tenant == first.tenant
            )
            queue.admit(first)
            queue.charge(first, cost)
    assert len(queue) == len(live)

    rest = drained(queue)

    assert sorted(rest) == sorted(live)
    assert queue.num_uncached == 0


# -- overload, and what a step costs ---------------------------------------------------------


def test_too_many_waiting_requests_are_refused_with_a_time() -> None:
    """A full queue raises OverloadedError; a prompt that never fits raises PromptTooLongError."""
    bench = Bench(max_num_seqs=1, options={"max_waiting": 3}, max_model_len=64)
    for at in range(3):
        bench.add([1 + at], max_tokens=2)
    bench.time = 30.0

    with pytest.raises(OverloadedError, match="3 answers wait and max_waiting is 3") as caught:
        bench.core.add_request([9], SamplingParams())
    with pytest.raises(PromptTooLongError):
        bench.core.add_request([9] * 64, SamplingParams())

    error = caught.value
    assert (error.num_waiting, error.limit, error.retry_after_s) == (3, 3, 15.0)
    assert len(bench.run()) == 3
    bench.add([9], max_tokens=1)
    bench.run()


@pytest.mark.parametrize("options", [{"max_waiting": 0}, {"coalesce_steps": -1}])
def test_options_outside_their_range_are_refused(options: dict[str, Any]) -> None:
    """The error names the option that is out of range."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        Bench(options=options)


@pytest.mark.parametrize("hold", [0, 4])
def test_prompts_that_trickle_in_are_computed_together_if_asked(hold: int) -> None:
    """Prompts wait up to `coalesce_steps` steps while another request decodes."""
    bench = Bench(options={"coalesce_steps": hold}, max_batch_tokens=64)
    bench.add([1], max_tokens=40, ignore_eos=True)
    assert bench.step()
    with_prompt = 0
    for at in range(20):
        key = bench.add([2 + at] * 3, max_tokens=1)
        with_prompt += any(event.request_id > 0 for event in bench.step())
        waited = bench.core.lifecycle.requests.get(key)
        assert waited is None or hold

    bench.run()

    assert with_prompt == (20 if not hold else 4)
    waits = [output.metrics.ttft_s for output in bench.outputs.values()]
    assert max(wait_s for wait_s in waits if wait_s is not None) <= 1 + hold


class CountingMatches:
    """Wraps `bench.core.cache.match` and counts its calls."""

    def __init__(self, bench: Bench) -> None:
        self.count, self._match = 0, bench.core.cache.match
        bench.core.cache.match = self  # type: ignore[method-assign]

    def __call__(self, key: CacheKey) -> Match:
        self.count += 1
        return self._match(key)


@pytest.mark.parametrize("num_waiting", [100, 2000])
@pytest.mark.parametrize("shared", [0, 40])
def test_a_step_looks_at_a_bounded_number_of_waiting_requests(
    num_waiting: int, shared: int
) -> None:
    """Lookups per step are bounded, with free rows or without, also behind a shared leader."""
    rows = 4
    bench = Bench(4096, 4, max_num_seqs=rows, max_batch_tokens=16)
    for at in range(num_waiting):
        bench.add([7] * shared + [at % 40, at // 40], max_tokens=3)
    counting = CountingMatches(bench)

    for _ in range(30):
        counting.count = 0
        full = len(bench.core.scheduler.running) == rows
        bench.core.step()
        assert counting.count <= (0 if full else rows + MAX_PROBES + NUM_RERANKED)


def test_a_tenants_priorities_do_not_push_its_neighbours_out() -> None:
    """When pages run out, the tenant that runs most is preempted, whatever its priorities."""
    bench = Bench(pool_tokens=128, page_size=4, max_num_seqs=4)
    ids = []
    for tenant, priority, start in (("a", 9, 1), ("b", 0, 2), ("a", 9, 3), ("a", 9, 4)):
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        request_id = bench.core.add_request([start] * 16, params, tenant=tenant, priority=priority)
        bench.tokens[request_id] = []
        ids.append(request_id)

    outputs = bench.run()

    preempted = [outputs[key].metrics.preemptions for key in ids]
    assert preempted[1] <= 1
    assert sum(preempted) > preempted[1]
