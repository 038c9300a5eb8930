"""Tenants that wait get a row within a bound; preempted requests lose nothing, and none starves."""

from array import array
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramify.errors import OverloadedError, TokensWaitError
from ramify.params import SamplingParams
from tests.budget import examples
from tests.pure.engine_bench import EOS, Bench, expected
from tests.pure.overlapping_device import LateDevice

WAIT_STEPS = 4


def steps_until_first_token(bench: Bench, request_id: int, limit: int) -> int:
    for count in range(1, limit + 1):
        bench.step()
        if bench.tokens[request_id]:
            return count
    raise AssertionError(f"no token within {limit} steps")


@pytest.mark.parametrize("prompt_len", [2, 60])
@pytest.mark.parametrize("num_queued", [0, 6])
def test_a_tenant_without_a_row_gets_one_within_a_bound(prompt_len: int, num_queued: int) -> None:
    """Though another holds all rows for 150 steps, and has more requests that wait."""
    bench = Bench(8192, 4, max_num_seqs=4, options={"fair_wait_steps": WAIT_STEPS})
    greedy = [
        bench.add([1 + at] * prompt_len, tenant="greedy", max_tokens=150, ignore_eos=True)
        for at in range(4 + num_queued)
    ]
    for _ in range(3):
        bench.step()

    for at in range(5):
        other = bench.add([30 + at] * 9, tenant="other", max_tokens=6, ignore_eos=True)
        assert steps_until_first_token(bench, other, 100) <= 2 * WAIT_STEPS + 2
        while other not in bench.outputs:
            bench.step()

    assert 1 <= bench.core.scheduler.num_fair_preemptions <= 5
    outputs = bench.run()
    for at, request_id in enumerate(greedy):
        prompt = [1 + at] * prompt_len
        assert list(outputs[request_id].token_ids) == expected(prompt, 150, ends=())


def test_without_the_option_it_waits() -> None:
    """The oracle of the test above: 0 preempts nobody."""
    bench = Bench(8192, 4, max_num_seqs=4, options={"fair_wait_steps": 0})
    for at in range(4):
        bench.add([1 + at], tenant="greedy", max_tokens=200, ignore_eos=True)
    bench.step()
    other = bench.add([30], tenant="other", max_tokens=2)

    assert steps_until_first_token(bench, other, 300) >= 199
    bench.run()


def test_one_tenant_alone_is_never_preempted_for_fairness() -> None:
    """However many of its requests wait, also after another tenant has come and gone."""
    bench = Bench(8192, 4, max_num_seqs=2, options={"fair_wait_steps": 1})
    bench.add([9], tenant="other", max_tokens=2)
    bench.run()
    for at in range(12):
        bench.add([1 + at], tenant="greedy", max_tokens=30, ignore_eos=True)

    bench.run()

    assert bench.core.scheduler.num_preemptions == 0


def test_tenants_beyond_the_rows_take_turns() -> None:
    """One row, three tenants with one long request each: each gets a token within two long turns."""
    bench = Bench(8192, 4, max_num_seqs=1, options={"fair_wait_steps": 1})
    turn = 32
    requests = {
        name: bench.add([1 + at], tenant=name, max_tokens=5 * turn, ignore_eos=True)
        for at, name in enumerate("abc")
    }
    while not all(bench.tokens[request_id] for request_id in requests.values()):
        bench.step()
    first_turns = sum(len(bench.tokens[request_id]) for request_id in requests.values())

    outputs = bench.run()

    assert first_turns <= 2 * (turn + 2)
    assert bench.core.scheduler.num_fair_preemptions <= 15
    for at, name in enumerate("abc"):
        assert list(outputs[requests[name]].token_ids) == expected([1 + at], 5 * turn, ends=())


def test_a_large_prompt_gets_its_pages_from_the_tenant_with_most_rows() -> None:
    """Rows are free but pages are not: requests of the other tenant make room, and end later."""
    bench = Bench(400, 4, max_num_seqs=8, options={"fair_wait_steps": WAIT_STEPS})
    greedy = [
        bench.add([1 + at] * 30, tenant="greedy", max_tokens=60, ignore_eos=True) for at in range(6)
    ]
    for _ in range(20):
        bench.step()
    large = bench.add([40] * 260, tenant="other", max_tokens=3, ignore_eos=True)

    assert steps_until_first_token(bench, large, 60) <= 2 * WAIT_STEPS + 8
    outputs = bench.run()
    for at, request_id in enumerate(greedy):
        assert list(outputs[request_id].token_ids) == expected([1 + at] * 30, 60, ends=())


def test_prompts_as_large_as_the_pool_get_no_more_than_their_share() -> None:
    """Sent one after the other, beside 16 rows of another tenant that decode: half of the tokens."""
    bench = Bench(
        2048, 16, max_num_seqs=16, max_batch_tokens=64, options={"fair_wait_steps": WAIT_STEPS}
    )
    core, owners, live, num_large = bench.core, dict[int, str](), Counter[str](), 0
    for _ in range(600):
        for tenant, most, num_tokens, max_tokens in (("many", 16, 60, 60), ("large", 1, 1800, 1)):
            while live[tenant] < most:
                start = 7 * len(owners)
                prompt = [1 + (start + at * at) % 47 for at in range(num_tokens)]
                params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
                owners[core.add_request(prompt, params, tenant=tenant)] = tenant
                live[tenant] += 1
        for event in core.step():
            if event.output is not None:
                live[owners[event.request_id]] -= 1
                num_large += owners[event.request_id] == "large"

    assert core.scheduler.num_fair_preemptions > 0
    assert 0.3 < num_large * 1800 / core.num_computed_tokens < 0.6


def test_a_tenant_that_waited_for_a_public_prefix_of_another_gets_a_row() -> None:
    """Its request was parked; when all rows are taken, that ends with the prefix, not with a row."""
    bench = Bench(
        8192, 4, max_num_seqs=2, max_batch_tokens=16, options={"fair_wait_steps": WAIT_STEPS}
    )
    public = [5] * 200
    bench.core.namespaces.declare_public(array("i", public))
    greedy = bench.add([*public, 6], tenant="greedy", max_tokens=300, ignore_eos=True)
    bench.step()
    other = bench.add([*public, 7], tenant="other", max_tokens=3, ignore_eos=True)
    bench.step()
    bench.add([1, 2], tenant="greedy", max_tokens=300, ignore_eos=True)

    # 200 tokens, at most 16 a step
    assert steps_until_first_token(bench, other, 100) <= 200 // 16 + 2 * WAIT_STEPS + 4

    outputs = bench.run()
    assert list(outputs[greedy].token_ids) == expected([*public, 6], 300, ends=())
    assert outputs[other].cache.read_tokens == len(public)


def test_a_rebuild_keeps_the_counters() -> None:
    """Preemptions so far, and live answers, even if an interrupt had cut off their update."""
    bench = Bench(8192, 4, max_num_seqs=1, options={"fair_wait_steps": 1})
    for tenant in "ab":
        bench.add([1, 2], tenant=tenant, max_tokens=99, ignore_eos=True)
    while not bench.core.stats().num_fair_preemptions:
        bench.step()
    before = bench.core.stats().num_fair_preemptions
    bench.core.lifecycle.num_live["a"] += 1

    bench.core.recovery.rebuild(RuntimeError("test"))

    assert bench.core.stats().num_fair_preemptions == before
    check_counts(bench)
    bench.run()
    assert not bench.core.lifecycle.num_live


@dataclass(frozen=True)
class Job:
    """A request: when it comes, whose it is and what it asks for."""

    step: int
    tenant: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    priority: int
    keeps: bool  # pins its prompt
    aborts_after: int | None


JOBS = st.lists(
    st.builds(
        Job,
        step=st.integers(0, 40),
        tenant=st.sampled_from("aaabcd"),
        prompt=st.integers(1, 25).map(lambda count: tuple(1 + at % 7 for at in range(count))),
        max_tokens=st.integers(1, 40),
        n=st.sampled_from([1, 1, 1, 2, 5]),
        priority=st.integers(0, 1),
        keeps=st.booleans(),
        aborts_after=st.none() | st.integers(0, 30),
    ),
    min_size=1,
    max_size=14,
)


def check_counts(bench: Bench) -> None:
    """The counters of the limits are what a recount gives."""
    queue, lifecycle = bench.core.scheduler.waiting, bench.core.lifecycle
    assert queue._num_waiting == Counter(request.tenant for request in queue)
    live = [request for request in lifecycle.requests.values() if not request.is_finished]
    assert lifecycle.num_live == Counter(request.tenant for request in live)


@settings(max_examples=examples(40), deadline=None)
@given(
    jobs=JOBS,
    wait_steps=st.sampled_from([0, 1, 3]),
    rows=st.integers(2, 6),
    pool_tokens=st.sampled_from([120, 400, 4000]),
    budget=st.sampled_from([8, 64]),
)
@example(
    jobs=[Job(0, "a", (1,), 40, 5, 0, True, None), Job(3, "b", (2,), 5, 1, 0, True, None)],
    wait_steps=1,
    rows=2,
    pool_tokens=120,
    budget=8,
)
def test_no_request_is_lost_and_no_token_changes(
    jobs: list[Job], wait_steps: int, rows: int, pool_tokens: int, budget: int
) -> None:
    """Random arrivals, branches, pins and aborts of four tenants, with every size of pool.

    Each request ends once with its own tokens. With rows and pages for all, no tenant waits long
    without a row. Preemptions are bounded by the tokens that were generated.
    """
    options = {"fair_wait_steps": wait_steps}
    bench = Bench(
        pool_tokens,
        4,
        max_num_seqs=rows,
        max_batch_tokens=budget,
        max_model_len=80,
        options=options,
    )
    core, live, aborts = bench.core, dict[int, Job](), dict[int, int]()
    left = sorted(jobs, key=lambda job: job.step)
    rowless: Counter[str] = Counter()
    num_steps = 0
    while left or core.has_unfinished:
        while left and left[0].step <= num_steps:
            job = left.pop(0)
            params = SamplingParams(
                n=job.n, max_tokens=job.max_tokens, ignore_eos=True, seed=3, temperature=0.0
            )
            request_id = core.add_request(
                job.prompt,
                params,
                tenant=job.tenant,
                priority=job.priority,
                retention=((len(job.prompt), 20.0),) if job.keeps else (),
                cache_share=0.5,
                pin_share=0.25,
            )
            bench.tokens[request_id], live[request_id] = [], job
            if job.aborts_after is not None:
                aborts[request_id] = num_steps + job.aborts_after
        for request_id in [key for key, step in aborts.items() if step <= num_steps]:
            del aborts[request_id]
            if request_id not in bench.outputs:
                bench.abort(request_id)
                del live[request_id]
        bench.step()
        check_counts(bench)
        num_steps += 1
        assert num_steps < 6000
        holders = {request.tenant for request in core.scheduler.running}
        for tenant in {request.tenant for request in core.scheduler.waiting}:
            rowless[tenant] = 0 if tenant in holders else rowless[tenant] + 1
            if wait_steps and pool_tokens == 4000 and rows >= 4:
                # a turn of each of three others, the prefill of all prompts, and admissions
                assert rowless[tenant] <= 8 * wait_steps + 25 * 14 // (budget // 8) + 8

    for request_id, job in live.items():
        output = bench.outputs[request_id]
        assert output.error is None
        for completion in output.completions:
            assert list(completion.token_ids) == expected(job.prompt, job.max_tokens, ends=())
    num_output = sum(job.max_tokens * job.n for job in jobs)
    num_answers = sum(job.n for job in jobs)
    most = num_answers + num_output // max(1, wait_steps)
    assert core.scheduler.num_fair_preemptions <= (most if wait_steps else 0)
    for pin in core.cache.pins():
        core.cache.unpin(pin)
    assert core.cache.stats().private_pages == core.cache.stats().num_leases == 0


# -- the queue -------------------------------------------------------------------------------


def test_branches_of_one_tenant_fill_its_own_queue_only() -> None:
    """Ten requests with n=128: their sender is refused, the next tenant is not."""
    bench = Bench(max_num_seqs=4, options={"max_waiting": 256})

    accepted, refused = 0, []
    for at in range(10):
        try:
            bench.add([1 + at] * 3, tenant="many", max_tokens=9, n=128)
        except OverloadedError as error:
            refused.append(error)
        else:
            accepted += 1
        bench.step()
    others = [bench.add([40 + at], tenant="one", max_tokens=2) for at in range(3)]

    assert (accepted, len(refused)) == (3, 7)
    assert all(error.retry_after_s >= 1 for error in refused)
    assert len(others) == 3
    outputs = bench.run()
    assert all(outputs[request_id].error is None for request_id in others)


def test_a_full_queue_still_takes_whoever_has_less_than_a_share() -> None:
    """Half for each of two tenants, a third for each of three; what is told is of the tenant itself."""
    bench = Bench(max_num_seqs=1, options={"max_waiting": 12})
    counts: Counter[str] = Counter()
    errors: dict[str, OverloadedError] = {}
    bench.add([9], tenant="first", max_tokens=300, ignore_eos=True)
    bench.step()
    for tenant, tries in (("first", 20), ("second", 20), ("third", 20), ("first", 3)):
        for _ in range(tries):
            try:
                bench.add([9], tenant=tenant, max_tokens=1)
            except OverloadedError as error:
                errors[tenant] = error
            else:
                counts[tenant] += 1

    assert counts == {"first": 12, "second": 6, "third": 4}
    assert {name: error.num_waiting for name, error in errors.items()} == counts
    bench.run()


def test_queued_tokens_are_shared_too() -> None:
    """A tenant's first prompt is taken whatever others have queued; its second counts its own only."""
    bench = Bench(max_num_seqs=1, options={"max_waiting_tokens": 100})
    bench.add([9], tenant="first", max_tokens=300, ignore_eos=True)
    bench.step()
    bench.add([1] * 90, tenant="first", max_tokens=1)

    bench.add([2] * 40, tenant="second", max_tokens=1)
    with pytest.raises(
        TokensWaitError, match="40 prompt tokens wait and this prompt has 20"
    ) as caught:
        bench.add([3] * 20, tenant="second", max_tokens=1)

    assert caught.value.retry_after_s == 1
    bench.run()


def test_a_tenant_is_not_charged_for_a_token_past_its_end() -> None:
    """Of a request that ends at a stop token, the step ahead has computed a token that is dropped.

    Both tenants are charged what they are without overlap, so that the order of admissions is the same.
    """
    script = [5, 6, 7, 8, 9, EOS, 11, 12]
    served = []
    for is_overlapping in (False, True):
        bench = Bench(next_token=lambda context: script[(len(context) - 3) % len(script)])
        if is_overlapping:
            bench.core.executor = LateDevice(bench.device)
        keys = [bench.add([1, 2, 3], max_tokens=8, tenant=tenant) for tenant in ("ann", "bob")]
        requests = [bench.core.live[key] for key in keys]

        outputs = bench.run()

        assert [len(outputs[key].token_ids) for key in keys] == [6, 6]
        served.append([bench.core.scheduler.waiting.num_served(request) for request in requests])
    assert served[0] == served[1]
