"""Steps that are begun before the one in front of them has ended: tokens, pages and ends stay the same."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import Lease, PrefixCache
from ramify.cache.key import CacheKey
from ramify.config import EngineConfig
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.step import Executor, OverlappingExecutor
from ramify.engine.threaded_executor import ThreadedExecutor
from ramify.engine.weight_reload import swap_weights
from ramify.errors import ConfigError
from ramify.outputs import FinishReason, RequestOutput
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.pure.engine_bench import EOS, Bench, expected
from tests.pure.overlapping_device import LateDevice

PROMPTS = [[i, 2, 3, 4, 5, 6, 7 + i] for i in range(1, 5)]
STEMS = [[], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1, 8, 2, 8]]
TENANTS = ["", "other"]
DEVICES: list[Callable[[FakeExecutor], OverlappingExecutor]] = [LateDevice, ThreadedExecutor]


@contextmanager
def closing_lease(cache: PrefixCache, key: CacheKey) -> Iterator[Lease]:
    lease = cache.acquire(key)
    yield lease
    cache.release(lease)


def overlapping(bench: Bench, device: Executor) -> Bench:
    bench.core.executor = device
    return bench


def assert_cache_holds_answers(bench: Bench) -> int:
    """Every cached page has the K/V of tokens that were computed for an answer; returns their number.

    The last token of an answer is not among them, though a step ahead may have computed its K/V.
    """
    cache, pages = bench.core.cache, set[int]()
    answers = [
        (output, completion, tenant)
        for output in bench.outputs.values()
        for completion in output.completions
        for tenant in TENANTS
    ]
    for output, completion, tenant in answers:
        tokens = array("i", [*output.prompt_token_ids, *completion.token_ids[:-1], 2**31 - 1])
        namespace, salts = bench.core.namespaces.scope_of(tokens, tenant, "")
        assert not salts
        with closing_lease(cache, CacheKey(tokens, namespace)) as lease:
            slots = [
                page * bench.page_size + offset
                for page in lease.pages
                for offset in range(bench.page_size)
            ]
            bench.device.read(np.array(slots, np.int64))
            pages |= set(lease.pages)
    assert len(pages) == cache.stats().cached_pages
    return len(pages)


@pytest.mark.parametrize("make", DEVICES)
def test_steps_are_begun_ahead_and_answers_are_the_same(
    make: Callable[[FakeExecutor], OverlappingExecutor],
) -> None:
    """While requests decode, all steps but the first are begun before the one in front has ended."""
    bench = Bench()
    overlapping(bench, make(bench.device))
    keys = [bench.add(prompt, max_tokens=9, ignore_eos=True) for prompt in PROMPTS]

    outputs = bench.run()

    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 9, ends=())
    assert bench.core.pipeline.num_ahead == 8
    assert bench.core.num_steps == 9
    assert_cache_holds_answers(bench)
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("make", DEVICES)
def test_a_token_past_the_end_is_not_cached(
    make: Callable[[FakeExecutor], OverlappingExecutor],
) -> None:
    """A request that ends with a stop token has computed that token's K/V ahead: nobody reads it."""
    script = [5, 6, 7, 8, 9, EOS, 11, 12]
    bench = Bench(page_size=1, next_token=lambda context: script[len(context) - 3])
    overlapping(bench, make(bench.device))
    key = bench.add([1, 2, 3], max_tokens=8)

    output = bench.run()[key]

    assert list(output.token_ids) == [5, 6, 7, 8, 9, EOS]
    assert bench.core.num_computed_tokens == 3 + 5  # the last step was dropped
    assert assert_cache_holds_answers(bench) == 3 + 5
    bench.assert_nothing_leaked()


def test_the_step_behind_the_last_token_is_not_begun() -> None:
    """Where `max_tokens` ends a request, no step is begun for a token that nobody wants."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    long = bench.add(PROMPTS[0], max_tokens=6, ignore_eos=True)
    short = bench.add(PROMPTS[1], max_tokens=2, ignore_eos=True)

    outputs = bench.run()

    assert list(outputs[long].token_ids) == expected(PROMPTS[0], 6, ends=())
    assert list(outputs[short].token_ids) == expected(PROMPTS[1], 2, ends=())
    assert bench.core.num_computed_tokens == 7 + 5 + 7 + 1
    assert device.num_dropped == 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5},
        {"banned_sequences": [[1, 2]]},
        {"n": 2, "max_tokens": 1},
    ],
)
def test_a_request_that_needs_the_token_is_planned_with_it(params: dict[str, Any]) -> None:
    """Penalties, banned sequences and forks read what the step before sampled: it ends first."""
    bench = Bench()
    overlapping(bench, LateDevice(bench.device))
    bench.add(PROMPTS[0], **{"max_tokens": 5, "ignore_eos": True, **params})

    bench.run()

    assert bench.core.pipeline.num_ahead == 0


@pytest.mark.parametrize(
    "params", [{"logit_bias": {3: 1.0}}, {"allowed_token_ids": [4, 5]}, {"min_tokens": 3}]
)
def test_a_request_that_needs_no_token_runs_ahead(params: dict[str, Any]) -> None:
    """Biases, allowed tokens and `min_tokens` depend on no output token."""
    bench = Bench()
    overlapping(bench, LateDevice(bench.device))
    key = bench.add(PROMPTS[0], max_tokens=5, ignore_eos=True, **params)

    output = bench.run()[key]

    assert bench.core.pipeline.num_ahead == 4
    allowed = params.get("allowed_token_ids")
    assert allowed is None or set(output.token_ids) <= set(allowed)


@pytest.mark.parametrize(
    ("params", "others"),
    [
        ({"max_tokens": 0, "prompt_embedding": True}, [(3, [39], 5), (7, [28], 6)]),
        ({"max_tokens": 2, "n": 2}, [(3, [15, 20], 13), (7, [8], 5), (11, [21], 13)]),
    ],
)
def test_the_end_of_a_prompt_is_not_computed_ahead(
    params: dict[str, Any], others: list[tuple[int, list[int], int]]
) -> None:
    """A prompt of which a last token is left while others decode has its embedding and its children."""
    prompt = [29, 30] if params["max_tokens"] == 0 else [17, 20]
    begin = 5 if params["max_tokens"] == 0 else 9
    answers = []
    for is_overlapping in (False, True):
        bench = Bench(max_batch_tokens=2)
        if is_overlapping:
            overlapping(bench, LateDevice(bench.device))
        key = -1
        for num_steps in range(80):
            for first, tokens, max_tokens in others:
                if first == num_steps:
                    bench.add(tokens, max_tokens=max_tokens, ignore_eos=True)
            if begin == num_steps:
                key = bench.add(prompt, seed=1, ignore_eos=True, **params)
            bench.step()
        output = bench.outputs[key]
        answers.append((output.completions, output.prompt_embedding))
        bench.assert_nothing_leaked()

    assert answers[0] == answers[1]


def test_a_tenant_is_not_charged_for_a_token_past_its_end() -> None:
    """Of a request that ends at a stop token, the step ahead has computed a token that is dropped.

    Both tenants are charged what they are without overlap, so that the order of admissions is the same.
    """
    script = [5, 6, 7, 8, 9, EOS, 11, 12]
    served = []
    for is_overlapping in (False, True):
        bench = Bench(next_token=lambda context: script[(len(context) - 3) % len(script)])
        if is_overlapping:
            overlapping(bench, LateDevice(bench.device))
        keys = [bench.add([1, 2, 3], max_tokens=8, tenant=tenant) for tenant in ("ann", "bob")]
        requests = [bench.core.live[key] for key in keys]

        outputs = bench.run()

        assert [len(outputs[key].token_ids) for key in keys] == [6, 6]
        served.append([bench.core.scheduler.waiting.num_served(each) for each in requests])
    assert served[0] == served[1]


def test_min_tokens_counts_the_token_in_flight() -> None:
    """Stop tokens are forbidden in as many rows as `min_tokens` leaves, late tokens counted."""
    processor = LogitsProcessor(
        [1], SamplingParams(min_tokens=3), stop_token_ids=frozenset({0}), vocab_size=8
    )

    rows = [
        processor.for_step([4] * num_known, (), num_late=num_late).num_rows_without_stop
        for num_known, num_late in [(1, 0), (1, 1), (2, 0), (2, 1)]
    ]

    assert rows == [2, 1, 1, 0]


@pytest.mark.parametrize("options", [{"overlap": "off"}, {}])
def test_overlap_has_to_be_possible_and_wanted(options: dict[str, Any]) -> None:
    """No step is begun ahead with overlap off, nor by an executor that computes in `begin`."""
    bench = Bench(options=options)
    if options:
        overlapping(bench, LateDevice(bench.device))
    bench.add(PROMPTS[0], max_tokens=5)

    bench.run()

    assert bench.core.pipeline.num_ahead == 0


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"overlap": "on", "speculative": "tree"},
        {"overlap": "on", "cache_ram": 1},
    ],
)
def test_overlap_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    """The message names the option in the way."""
    with pytest.raises(ConfigError, match="overlap"):
        EngineConfig.of(**options)


@pytest.mark.parametrize("where", ["begin_ahead", "finish"])
def test_an_interrupt_leaves_no_step_in_flight(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while two steps are in flight rolls both back; every answer is right."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    keys = [bench.add(prompt, max_tokens=9, ignore_eos=True) for prompt in PROMPTS]
    bench.step()
    call = getattr(device, where)

    def interrupted(*arguments: Any) -> None:
        call(*arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(device, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.check()

    outputs = bench.run()

    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 9, ends=())
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("fails", [False, True])
def test_new_weights_wait_for_the_step_in_flight_and_drop_it(fails: bool) -> None:
    """The step that was begun with the old weights ends before they are replaced; no token of it counts."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    key = bench.add(PROMPTS[0], max_tokens=6, ignore_eos=True)
    bench.step()
    num_computed, num_emitted = device.num_computed, len(bench.tokens[key])

    def swap() -> bytes:
        assert device.num_computed == num_computed + 1
        if fails:
            raise RuntimeError("no weights")
        return b"new"

    if fails:
        with pytest.raises(RuntimeError, match="no weights"):
            swap_weights(bench.core, swap)
    else:
        assert swap_weights(bench.core, swap) == 1
    assert len(bench.core.live[0].output_ids) == num_emitted == 1
    output = bench.run()[key]

    assert list(output.token_ids) == expected(PROMPTS[0], 6, ends=())
    assert output.cache.recomputed_tokens == (0 if fails else len(PROMPTS[0]))
    bench.assert_nothing_leaked()


def test_another_executor_computes_what_was_in_flight_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step of the old executor is dropped, even if it fails, and its pages are written again."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    keys = [bench.add(prompt, max_tokens=9, ignore_eos=True) for prompt in PROMPTS]
    bench.step()

    def fails() -> None:
        monkeypatch.undo()
        raise RuntimeError("late")

    monkeypatch.setattr(device, "finish", fails)
    bench.core.executor = LateDevice(bench.device)

    outputs = bench.run()

    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 9, ends=())
    assert bench.core.stats().failures.failed_steps == 0
    bench.assert_nothing_leaked()


def test_new_weights_wait_for_a_step_that_was_dropped() -> None:
    """The step of a request that was aborted still computes; weights are not replaced meanwhile."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    key = bench.add(PROMPTS[0], max_tokens=6, ignore_eos=True)
    bench.step()
    bench.abort(key)

    def swap() -> bytes:
        assert device.num_computed == 2
        return b"new"

    assert swap_weights(bench.core, swap) == 0
    bench.assert_nothing_leaked()


def test_a_step_whose_requests_were_aborted_is_dropped() -> None:
    """An engine whose last request is aborted is idle; the next request finds nothing of the step."""
    bench = Bench()
    device = LateDevice(bench.device)
    overlapping(bench, device)
    key = bench.add(PROMPTS[0], max_tokens=9, ignore_eos=True)
    bench.step()

    bench.abort(key)

    assert not bench.core.has_unfinished
    other = bench.add(PROMPTS[1], max_tokens=9, ignore_eos=True)
    assert list(bench.run()[other].token_ids) == expected(PROMPTS[1], 9, ends=())
    assert device.num_dropped == 1
    bench.assert_nothing_leaked()


def test_a_waiting_request_without_pages_does_not_end_the_overlap() -> None:
    """A request that no page is free for is looked at again every few steps, not in each."""
    bench = Bench(pool_tokens=64, max_model_len=60)
    overlapping(bench, LateDevice(bench.device))
    first = bench.add(list(range(1, 21)), max_tokens=36, ignore_eos=True)
    bench.step()
    second = bench.add(list(range(10, 50)), max_tokens=2, ignore_eos=True)

    outputs = bench.run()

    assert list(outputs[first].token_ids) == expected(list(range(1, 21)), 36, ends=())
    assert list(outputs[second].token_ids) == expected(list(range(10, 50)), 2, ends=())
    assert bench.core.pipeline.num_ahead > 25
    bench.assert_nothing_leaked()


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
