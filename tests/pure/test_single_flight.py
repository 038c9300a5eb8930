"""A shared prefix is computed once, whichever request leads, fails, ends or is preempted."""

import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramify.outputs import FinishReason
from tests.budget import examples
from tests.pure.engine_bench import Bench, expected
from tests.pure.test_engine_branches import Guesser

STEM = [1 + index * 7 % 40 for index in range(8192)]


def suffixes(count: int) -> int:
    """Most tokens that `count` followers compute alone: the page in which they diverge, and a tail."""
    return count * (16 + 16)


@pytest.mark.parametrize("budget", [512, 2048, 16_384])
@pytest.mark.parametrize("order", ["together", "trickle", "backwards"])
def test_64_requests_on_8k_shared_tokens_compute_them_once(budget: int, order: str) -> None:
    """All at once, one per step, and with the shortest suffix last."""
    bench = Bench(200_000, 16, max_batch_tokens=budget, max_model_len=9000)
    tails = [[41 + index % 8] * (1 + index // 8) for index in range(64)]
    if order == "backwards":
        tails.reverse()
    for tail in tails:
        bench.add(STEM + tail, max_tokens=1, ignore_eos=True)
        if order == "trickle":
            bench.core.step()

    while bench.core.has_unfinished:
        bench.core.step()

    assert 8192 <= bench.device.num_computed_tokens <= 8192 + suffixes(64)
    bench.check()


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("ends", ["abort", "fails"])
def test_a_follower_takes_over_at_each_chunk(num_steps: int, ends: str) -> None:
    """The leader ends after `num_steps` chunks: they stay cached and are not computed again."""
    fail_at = {num_steps} if ends == "fails" else set[int]()
    bench = Bench(20_000, 16, max_batch_tokens=128, fail_at=fail_at)
    keys = [
        bench.add([*STEM[:600], 41 + index], max_tokens=2, ignore_eos=True) for index in range(8)
    ]
    for _ in range(num_steps):
        bench.step()

    if ends == "abort":
        bench.abort(keys[0])
    outputs = bench.run()

    slack = 128 if ends == "abort" and num_steps else 0  # partial page of the last chunk
    assert bench.device.num_computed_tokens <= 600 + suffixes(8) + slack
    for index, key in enumerate(keys):
        if outputs[key].finish_reason is not FinishReason.ABORT:
            assert list(outputs[key].token_ids) == expected([*STEM[:600], 41 + index], 2, ends=())
    bench.assert_nothing_leaked()


def test_every_leader_in_turn_is_aborted() -> None:
    """Each computes one chunk and ends; together they compute the prompt once."""
    bench = Bench(20_000, 16, max_batch_tokens=64)
    keys = [
        bench.add([*STEM[:640], 38 + index], max_tokens=1, ignore_eos=True) for index in range(12)
    ]
    live = list(keys)
    while len(live) > 2:
        bench.step()
        leading = [request.id for request in bench.core.scheduler.running if request.id in live]
        assert len(leading) == 1
        bench.abort(leading[0])
        live.remove(leading[0])

    outputs = bench.run()

    assert bench.device.num_computed_tokens <= 640 + 2 * 32 + 10
    for key in live:
        answer = expected([*STEM[:640], 38 + key], 1, ends=())
        assert list(outputs[key].token_ids) == answer


def test_a_preempted_leader_loses_nothing_and_its_followers_go_on() -> None:
    """Pages run out in the middle of the shared prompt: its published pages hit again."""
    bench = Bench(700, 4, max_batch_tokens=64, max_num_seqs=8)
    first = bench.add([45] * 30, max_tokens=300, ignore_eos=True)
    bench.step()
    keys = [
        bench.add([*STEM[:300], 41 + index], max_tokens=60, ignore_eos=True) for index in range(6)
    ]

    outputs = bench.run()

    assert bench.core.scheduler.num_preemptions > 0
    assert outputs[first].metrics.preemptions == 0
    for index, key in enumerate(keys):
        assert list(outputs[key].token_ids) == expected([*STEM[:300], 41 + index], 60, ends=())
    repeated = sum(output.cache.recomputed_tokens for output in outputs.values())
    ideal = 30 + 299 + 300 + 6 * (1 + 3 + 59)
    assert bench.device.num_computed_tokens <= ideal + repeated + 6 * 4


def test_namespaces_do_not_follow_one_another() -> None:
    """The same prompt under two salts is computed for each, at the same time."""
    bench = Bench(4096, 4, max_batch_tokens=32)
    for tenant in ("a", "b", "a", "b"):
        bench.add(STEM[:200], tenant=tenant, max_tokens=1, ignore_eos=True)

    bench.run()

    assert 2 * 200 <= bench.device.num_computed_tokens <= 2 * 200 + 2 * 4


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_under_any_arrivals_and_aborts_a_document_costs_itself_once(data: st.DataObject) -> None:
    """Questions about two documents in a pool that holds all: each page is computed once.

    Allowed on top: each request's own tokens, and the partial page of each aborted request.
    """
    page_size = data.draw(st.sampled_from([1, 4, 16]))
    budget = data.draw(st.sampled_from([7, 33, 128, 600]))
    documents = [STEM[: data.draw(st.integers(20, 300))], STEM[300 : 300 + 150]]
    jobs = data.draw(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 1), st.sampled_from([None, None, 0, 1, 3])),
            min_size=1,
            max_size=14,
        )
    )
    bench = Bench(40_000, page_size, max_batch_tokens=budget, max_num_seqs=16)
    todo = sorted(enumerate(jobs), key=lambda job: job[1][0])
    aborts: dict[int, int] = {}
    prompts: dict[int, list[int]] = {}
    step = num_aborted = 0
    while todo or bench.core.has_unfinished:
        while todo and todo[0][1][0] <= step:
            index, (_, which, abort_after) = todo.pop(0)
            prompt = [*documents[which], 41 + index % 9, index]
            key = bench.add(prompt, max_tokens=2, ignore_eos=True)
            prompts[key] = prompt
            if abort_after is not None:
                aborts[key] = step + abort_after
        for key, when in aborts.items():
            if when == step and key not in bench.outputs:
                bench.abort(key)
                num_aborted += 1
        bench.step()
        step += 1

    used = {which for _, which, _ in jobs}
    own = len(jobs) * (page_size + 2 + 2) + num_aborted * page_size
    assert bench.device.num_computed_tokens <= sum(len(documents[index]) for index in used) + own
    for key, prompt in prompts.items():
        tokens = list(bench.outputs[key].token_ids)
        assert tokens == expected(prompt, 2, ends=())[: len(tokens)]
    bench.assert_nothing_leaked()


# -- all combined ----------------------------------------------------------------------------

JOBS = st.tuples(
    st.integers(0, 12),  # the step in which it arrives
    st.sampled_from([0, 5, 16, 30]),  # tokens of the stem
    st.integers(1, 5),  # own tokens
    st.integers(1, 9),  # max_tokens
    st.sampled_from([None, None, None, 0, 1, 3, 6]),  # aborted after this many steps
    st.integers(-1, 1),  # priority
    st.sampled_from(["", "", "a", "b"]),  # tenant
    st.sampled_from([1, 1, 1, 3]),  # answers
)


@settings(max_examples=examples(150), deadline=None)
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=10),
    page_size=st.sampled_from([1, 3, 4]),
    spare_pages=st.integers(0, 14),
    rows=st.sampled_from([1, 2, 3, 8]),
    budget=st.sampled_from([1, 2, 5, 9, 30]),
    fail_at=st.sets(st.integers(0, 25), max_size=1),
    hold=st.sampled_from([0, 0, 3]),
    drafting=st.booleans(),
)
@example(  # pages for one of two prompts: they preempted each other in every step
    jobs=[
        (9, 0, 3, 9, None, -1, "a", 1),
        (3, 30, 3, 7, None, -1, "b", 1),
        (12, 0, 1, 9, None, -1, "", 1),
        (11, 0, 4, 1, None, -1, "b", 1),
        (12, 0, 4, 1, None, 1, "", 1),
        (0, 0, 4, 3, None, 0, "", 1),
        (11, 30, 2, 4, None, -1, "", 1),
        (0, 0, 5, 3, None, 1, "", 1),
        (3, 30, 3, 7, None, -1, "b", 1),
        (12, 30, 4, 7, 0, 0, "", 1),
    ],
    page_size=3,
    spare_pages=3,
    rows=8,
    budget=1,
    fail_at={12},
    hold=3,
    drafting=False,
)
def test_every_request_ends_once_with_its_own_answer(
    jobs: list[tuple[int, int, int, int, int | None, int, str, int]],
    page_size: int,
    spare_pages: int,
    rows: int,
    budget: int,
    fail_at: set[int],
    hold: int,
    drafting: bool,
) -> None:
    """Any arrivals, priorities, tenants, aborts, pools and budgets, a failing step, and drafts.

    No step exceeds its budget, no engine stands still, no page leaks.
    """
    longest = max(stem + own + count - 1 for _, stem, own, count, _, _, _, _ in jobs)
    bench = Bench(
        (-(-longest // page_size) + spare_pages) * page_size,
        page_size,
        rows,
        budget,
        fail_at=fail_at,
        options={"coalesce_steps": hold},
        drafter=Guesser(0.6, 4, random.Random(len(jobs))) if drafting else None,
    )
    todo = sorted(enumerate(jobs), key=lambda job: job[1][0])
    prompts: dict[int, tuple[list[int], int]] = {}
    aborts: dict[int, int] = {}
    step = 0
    while todo or bench.core.has_unfinished:
        while todo and todo[0][1][0] <= step:
            index, (_, stem, own, max_tokens, abort_after, priority, tenant, n) = todo.pop(0)
            prompt = STEM[:stem] + [41 + index % 3] * own
            params: dict[str, Any] = {"max_tokens": max_tokens, "n": n, "ignore_eos": True}
            key = bench.add(prompt, priority=priority, tenant=tenant, **params)
            prompts[key] = prompt, max_tokens
            if abort_after is not None:
                aborts[key] = step + abort_after
        for key, when in aborts.items():
            if when == step and key not in bench.outputs:
                bench.abort(key)
        before = bench.core.num_computed_tokens
        bench.step()
        assert bench.core.num_computed_tokens - before <= budget
        step += 1
        assert step < 3000, "the engine makes no progress"

    assert bench.outputs.keys() == prompts.keys()
    for key, (prompt, max_tokens) in prompts.items():
        answer = expected(prompt, max_tokens, ends=())
        for completion in bench.outputs[key].completions:
            tokens = list(completion.token_ids)
            assert completion.finish_reason is not FinishReason.ERROR
            if completion.finish_reason is FinishReason.ABORT:
                assert tokens == answer[: len(tokens)]
            else:
                assert tokens == answer
    queue = bench.core.scheduler.waiting
    assert queue.num_uncached == 0
    assert not queue._parked
    assert not bench.core.scheduler._requeued
    bench.assert_nothing_leaked()
