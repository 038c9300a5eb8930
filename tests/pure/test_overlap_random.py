"""Requests that come, end, are aborted and fail at random: overlap changes no answer and no cached page."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.step import OverlappingExecutor
from ramify.outputs import FinishReason, RequestOutput
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.pure.engine_bench import Bench
from tests.pure.overlapping_device import LateDevice
from tests.pure.test_overlap import DEVICES, TENANTS, assert_cache_holds_answers, overlapping

STEMS = [[], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2, 8]]
REQUEST = st.fixed_dictionaries(
    {
        "stem": st.sampled_from(STEMS),
        "tail": st.lists(st.integers(1, 9), min_size=1, max_size=20),
        "begin": st.integers(0, 30),  # number of the step before which it comes
        "abort": st.sampled_from([None, None, None, 0, 1, 2, 5, 11]),  # output tokens before
        "params": st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 30),
                "ignore_eos": st.booleans(),
                "n": st.sampled_from([1, 1, 1, 1, 2]),
                "seed": st.sampled_from([1, 2]),
                "temperature": st.sampled_from([0.0, 1.0]),
                "stop": st.sampled_from([[], [], ["B"], ["CA", "LL"], ["ABCDEFG"]]),
                "stop_token_ids": st.sampled_from([[], [], [7, 8, 9]]),
                "logprobs": st.sampled_from([None, None, 2]),
                "prompt_logprobs": st.sampled_from([None, None, None, 0]),
                "banned_sequences": st.sampled_from([[], [], [[5]], [[6, 7], [8]]]),
                "min_tokens": st.sampled_from([0, 0, 1]),
            }
        ),
        "tenant": st.sampled_from(["", *TENANTS]),
    }
)


def run_requests(bench: Bench, requests: list[dict[str, Any]]) -> list[RequestOutput]:
    """The outputs of requests that come and are aborted at their times."""
    keys: dict[int, int] = {}
    num_steps = 0
    while len(keys) < len(requests) or bench.core.has_unfinished:
        for index, request in enumerate(requests):
            if index not in keys and request["begin"] <= num_steps:
                prompt = [*request["stem"], *request["tail"]]
                keys[index] = bench.add(prompt, tenant=request["tenant"], **request["params"])
        bench.step()
        num_steps += 1
        assert num_steps < 5000, "the engine makes no progress"
        for index, key in keys.items():
            limit = requests[index]["abort"]
            if limit is not None and key not in bench.outputs and len(bench.tokens[key]) >= limit:
                bench.abort(key)
        bench.core.context.check(bench.core.live)
    return [bench.outputs[keys[index]] for index in range(len(requests))]


def assert_same_answers(got: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for output, other in zip(got, wanted, strict=True):
        assert output.error is None
        for answer, reference in zip(output.completions, other.completions, strict=True):
            if FinishReason.ABORT in (answer.finish_reason, reference.finish_reason):
                # after how many tokens depends on the other requests
                num = min(len(answer.token_ids), len(reference.token_ids))
                assert answer.token_ids[:num] == reference.token_ids[:num]
            else:
                assert answer == reference
            assert answer.finish_reason is FinishReason.ABORT or (
                output.prompt_logprobs == other.prompt_logprobs
            )


@settings(max_examples=examples(120), deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=8),
    pool_tokens=st.sampled_from([64, 96, 2048]),
    page_size=st.sampled_from([1, 4, 16]),
    max_num_seqs=st.sampled_from([2, 64]),
    max_batch_tokens=st.sampled_from([3, 17, 512]),
    window=st.sampled_from([None, None, 5]),
    make=st.sampled_from(DEVICES),
)
def test_random_ends_and_preemptions_change_nothing(
    requests: list[dict[str, Any]],
    make: Callable[[FakeExecutor], OverlappingExecutor],
    pool_tokens: int,
    **sizes: Any,
) -> None:
    """Answers equal those without overlap; so do the cached pages, where none had to be evicted."""
    alone = Bench(2048, max_model_len=60, window=sizes["window"], page_size=sizes["page_size"])
    wanted = run_requests(alone, requests)
    bench = Bench(pool_tokens, max_model_len=60, **sizes)
    overlapping(bench, make(bench.device))

    got = run_requests(bench, requests)

    assert_same_answers(got, wanted)
    if sizes["window"] is None and all(request["params"]["n"] == 1 for request in requests):
        num_cached = assert_cache_holds_answers(bench)
        if pool_tokens == 2048 and all(request["abort"] is None for request in requests):
            assert num_cached == alone.core.cache.stats().cached_pages
    bench.assert_nothing_leaked()


@settings(max_examples=examples(120), deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=6),
    pool_tokens=st.sampled_from([96, 2048]),
    page_size=st.sampled_from([1, 4, 16]),
    fails=st.sets(st.integers(0, 40), max_size=2),
    not_begun=st.sets(st.integers(0, 20), max_size=2),
    not_finite=st.sets(st.integers(0, 40), max_size=2),
)
def test_random_faults_change_nothing(
    requests: list[dict[str, Any]],
    pool_tokens: int,
    page_size: int,
    fails: set[int],
    not_begun: set[int],
    not_finite: set[int],
) -> None:
    """Steps that raise, requests whose K/V is damaged, steps that are not begun: answers are right."""
    alone = Bench(2048, max_model_len=60, page_size=page_size)
    wanted = run_requests(alone, requests)
    bench = Bench(pool_tokens, max_model_len=60, page_size=page_size, fail_at=fails)
    device = LateDevice(bench.device, not_begun=not_begun, not_finite=not_finite)
    overlapping(bench, device)

    got = run_requests(bench, requests)

    failed = [index for index, output in enumerate(got) if output.error is not None]
    assert len(failed) <= 1 or len(fails | not_finite) > 2
    for index in range(len(requests)):
        if index not in failed:
            assert_same_answers([got[index]], [wanted[index]])
    bench.assert_nothing_leaked()
