"""The engine without a model: random workloads, sharing, order, preemption, failures, aborts."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.request import RECOMPUTED_FOR_LOGPROBS
from ramify.errors import StepFailedError
from ramify.outputs import FinishReason
from tests.budget import examples
from tests.pure.engine_bench import Bench, expected

# -- random workloads ------------------------------------------------------------------------

PREFIXES: tuple[list[int], ...] = (
    [7] * 12,
    [7] * 8 + [9] * 7,
    [7] * 8 + [9] * 3,
    [3, 1, 4, 1, 5, 9, 2, 6],
    [],
)
JOBS = st.tuples(
    st.integers(0, 8),  # steps before it comes
    st.sampled_from(PREFIXES),
    st.lists(st.integers(1, 3), min_size=1, max_size=6),
    st.integers(1, 9),  # max_tokens
    st.sampled_from([None, None, None, 0, 1, 4]),  # aborted so many steps later
    st.sampled_from([False, False, False, True]),  # asks for prompt_logprobs
)


@settings(max_examples=examples(250))
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=9),
    page_size=st.sampled_from([1, 2, 3, 4, 8]),
    spare_pages=st.integers(0, 12),
    max_num_seqs=st.sampled_from([1, 2, 3, 8]),
    max_batch_tokens=st.sampled_from([1, 2, 3, 5, 8, 30]),
    prefix_cache=st.sampled_from([True, True, True, False]),
    fail_at=st.sets(st.integers(0, 25), max_size=3),
)
def test_answers_are_those_of_an_engine_without_cache(
    jobs: list[tuple[int, list[int], list[int], int, int | None, bool]],
    page_size: int,
    spare_pages: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    prefix_cache: bool,
    fail_at: set[int],
) -> None:
    """Answers equal the uncached ones under sharing, waiting, preemption, failures and aborts.

    The pool holds the longest request and a few pages more; steps fail now and then.
    """
    longest = max(len(head) + len(tail) + count - 1 for _, head, tail, count, _, _ in jobs)
    num_pages = -(-longest // page_size) + spare_pages
    bench = Bench(
        num_pages * page_size,
        page_size,
        max_num_seqs,
        max_batch_tokens,
        prefix_cache=prefix_cache,
        fail_at=fail_at,
    )
    todo = sorted(enumerate(jobs), key=lambda pair: pair[1][0])
    wanted: dict[int, tuple[list[int], int]] = {}
    aborts: dict[int, int] = {}
    step = 0
    while todo or bench.core.has_unfinished:
        while todo and todo[0][1][0] <= step:
            _, (_, head, tail, max_tokens, abort_after, scored) = todo.pop(0)
            prompt = [*head, *tail]
            key = bench.add(prompt, max_tokens=max_tokens, prompt_logprobs=0 if scored else None)
            wanted[key] = prompt, max_tokens
            if abort_after is not None:
                aborts[key] = step + abort_after
        for key, at in aborts.items():
            if at == step and key not in bench.outputs:
                bench.abort(key)
        bench.step()
        step += 1
        assert step < 2000, "the engine makes no progress"

    assert bench.outputs.keys() == wanted.keys()
    for key, (prompt, max_tokens) in wanted.items():
        output, answer = bench.outputs[key], expected(prompt, max_tokens)
        got = list(output.token_ids)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert got == answer[: len(got)]
        else:
            assert got == answer
        if output.finish_reason is FinishReason.ERROR:
            assert len(fail_at) > 1
            assert isinstance(output.error, StepFailedError)
        scores = output.prompt_logprobs
        if scores is not None and output.token_ids:
            assert scores[0] is None
            assert [score.token_id for score in scores[1:] if score is not None] == prompt[1:]
    bench.assert_nothing_leaked()


@settings(max_examples=examples(40))
@given(
    heads=st.lists(st.sampled_from(PREFIXES), min_size=2, max_size=8),
    budget=st.integers(1, 40),
    size=st.integers(1, 8),
)
def test_prompt_scores_are_those_of_a_request_alone(
    heads: list[list[int]], budget: int, size: int
) -> None:
    """Scores and draws do not depend on chunks, on the cache or on batch mates."""
    prompts = [[*head, 1 + at % 3, 2] for at, head in enumerate(heads)]
    many = Bench(page_size=size, max_batch_tokens=budget)
    params: dict[str, Any] = {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1}
    keys = [many.add(prompt, **params) for prompt in prompts]
    outputs = many.run()

    for key, prompt in zip(keys, prompts, strict=True):
        alone = Bench(page_size=size)
        alone.add(prompt, **params)
        wanted = alone.run()[0]
        assert outputs[key].prompt_logprobs == wanted.prompt_logprobs
        assert outputs[key].logprobs == wanted.logprobs
        assert outputs[key].token_ids == wanted.token_ids


# -- a prefix is computed once ---------------------------------------------------------------


@pytest.mark.parametrize("budget", [128, 512, 2048, 100_000])
@pytest.mark.parametrize("page_size", [1, 16])
def test_64_identical_cold_prompts_compute_their_prompt_once(budget: int, page_size: int) -> None:
    """64 equal prompts of 1,000 tokens are computed once, plus at most a page per request."""
    bench = Bench(70_000, page_size, max_batch_tokens=budget)
    for _ in range(64):
        bench.add([1 + place % 40 for place in range(1000)], max_tokens=1)

    outputs = bench.run()

    assert bench.device.num_computed_tokens <= 1000 + 64 * page_size
    assert sum(output.cache.computed_tokens for output in outputs.values()) <= 1000 + 64 * page_size
    assert all(output.cache.prompt_tokens == 1000 for output in outputs.values())
    assert len({output.token_ids for output in outputs.values()}) == 1
    assert [output.cache.recomputed_tokens for output in outputs.values()] == [0] * 64


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_leader_aborted_after_its_second_chunk_costs_one_chunk_at_most(page_size: int) -> None:
    """Followers go on from the last chunk that the aborted leader published."""
    bench = Bench(70_000, page_size, max_batch_tokens=128)
    keys = [bench.add([1 + place % 40 for place in range(1000)], max_tokens=1) for _ in range(64)]
    for _ in range(2):
        bench.step()
    assert bench.core.num_computed_tokens == 256

    bench.abort(keys[0])
    outputs = bench.run()

    assert bench.device.num_computed_tokens <= 1000 + 64 * page_size + 128
    assert outputs[keys[0]].finish_reason is FinishReason.ABORT
    assert {outputs[key].token_ids for key in keys[1:]} == {outputs[keys[1]].token_ids}


def test_a_leader_that_fails_costs_what_it_computed_in_that_step() -> None:
    """After a failed step, followers continue from what was published before it."""
    bench = Bench(70_000, 16, max_batch_tokens=128, fail_at={3})
    for _ in range(8):
        bench.add([1 + place % 40 for place in range(1000)], max_tokens=1)

    outputs = bench.run()

    assert bench.device.num_computed_tokens <= 1000 + 8 * 16
    assert {output.finish_reason for output in outputs.values()} <= {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }


def test_prompts_that_part_late_share_what_is_common() -> None:
    """32 questions about a document compute the document once, then each question."""
    bench = Bench(20_000, 16, max_batch_tokens=100)
    document = [1 + place * 7 % 40 for place in range(400)]
    for at in range(32):
        bench.add([*document, 1 + at, 2, 3, 4], max_tokens=2, ignore_eos=True)

    outputs = bench.run()

    assert bench.device.num_computed_tokens <= 404 + 31 * 20 + 32
    for at in range(1, 32):
        assert outputs[at].cache.read_tokens + outputs[at].cache.shared_tokens == 400


def test_a_request_that_must_not_read_lets_others_share_behind_it() -> None:
    """A follower waits for a request that recomputes a cached prefix for its prompt logprobs."""
    bench = Bench(4096, 4, max_batch_tokens=512)
    bench.add([5] * 20, max_tokens=1)
    bench.run()
    scored = bench.add([5] * 10 + [6] * 90, max_tokens=1, prompt_logprobs=0)
    reader = bench.add([5] * 10 + [6] * 90, max_tokens=1)

    outputs = bench.run()

    assert outputs[scored].cache.computed_tokens == 100
    assert outputs[scored].cache.reason == RECOMPUTED_FOR_LOGPROBS
    assert outputs[reader].cache.computed_tokens <= 4
    assert bench.device.num_computed_tokens <= 20 + 100 + 4


# -- order, fairness, preemption -------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 8, 64])
def test_long_decodes_starve_nobody(budget: int) -> None:
    """Prompts behind long decodes get their first token within a bound on the number of steps.

    Three decodes run on and on; ten prompts of 20 tokens come. Each step has budget - (running
    decodes) tokens for prompts, so that all of them have their first token within the bound.
    """
    bench = Bench(4096, 4, max_num_seqs=64, max_batch_tokens=budget)
    for at in range(3):
        bench.add([20 + at], max_tokens=400, ignore_eos=True)
    bench.step()
    late = [bench.add([1 + at] * 20, max_tokens=1) for at in range(10)]

    steps = 0
    while not all(key in bench.outputs for key in late):
        bench.step()
        steps += 1
        assert steps <= 10 * -(-20 // (budget - 3)) + 10

    assert all(len(bench.tokens[key]) >= steps for key in range(3))
    for key in range(3):
        bench.abort(key)
    bench.run()


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_a_budget_below_the_number_of_requests_is_shared_in_turn(budget: int) -> None:
    """With fewer budget tokens than 8 requests, each gets a token at least every 9 steps."""
    bench = Bench(4096, 4, max_num_seqs=8, max_batch_tokens=budget)
    for at in range(8):
        bench.add([1 + at], max_tokens=30, ignore_eos=True)

    last = dict.fromkeys(range(8), 0)
    for step in range(1, 2000):
        if not bench.core.has_unfinished:
            break
        for event in bench.step():
            last[event.request_id] = step
        for request in bench.core.scheduler.running:
            assert step - last[request.id] <= 8 + 1
    bench.run()


def test_a_long_prompt_does_not_stop_decodes() -> None:
    """Every decode emits a token in every step while a long prompt is computed in chunks."""
    bench = Bench(4096, 4, max_batch_tokens=16)
    keys = [bench.add([30 + at], max_tokens=60, ignore_eos=True) for at in range(3)]
    bench.step()
    bench.step()
    bench.add([1 + place % 7 for place in range(300)], max_tokens=1)

    for _ in range(20):
        seen = {event.request_id for event in bench.step()}
        assert seen >= set(keys)
    bench.run()


def test_preemption_repeats_work_and_changes_no_answer() -> None:
    """Preempted requests keep their answers, and their reports count the recomputed tokens."""
    bench = Bench(48, 4, max_batch_tokens=64)
    prompts = [[1 + at, 2, 3, 4, 5, 6, 7, 8] for at in range(4)]
    keys = [bench.add(prompt, max_tokens=15, ignore_eos=True) for prompt in prompts]

    outputs = bench.run()

    preempted = [output for output in outputs.values() if output.metrics.preemptions]
    assert preempted
    assert bench.core.scheduler.num_preemptions == sum(
        output.metrics.preemptions for output in outputs.values()
    )
    for key, prompt in zip(keys, prompts, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 15, ends=())
    assert outputs[0].metrics.preemptions == 0, "the oldest request is never a victim"
    ideal = sum(len(prompt) + 14 for prompt in prompts)
    repeated = sum(output.cache.recomputed_tokens for output in outputs.values())
    assert bench.device.num_computed_tokens == ideal + repeated
    assert repeated > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_pool_of_exactly_one_request_serves_them_one_by_one(
    page_size: int, max_tokens: int
) -> None:
    """A pool without a page for the last output token serves requests in sequence."""
    pool = -(-(10 + max_tokens - 1) // page_size) * page_size
    bench = Bench(pool, page_size)
    prompts = [[at + 1] * 10 for at in range(3)]
    for prompt in prompts:
        bench.add(prompt, max_tokens=max_tokens, ignore_eos=True)

    outputs = bench.run()

    for key, prompt in enumerate(prompts):
        assert list(outputs[key].token_ids) == expected(prompt, max_tokens, ends=())


def test_a_pool_of_one_page() -> None:
    """An engine with a single page works."""
    bench = Bench(1, 1, max_num_seqs=1, max_batch_tokens=1)
    keys = [bench.add([at], max_tokens=1) for at in (1, 2, 3)]

    outputs = bench.run()

    assert [list(outputs[key].token_ids) for key in keys] == [expected([at], 1) for at in (1, 2, 3)]
