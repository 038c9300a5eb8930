"""Steps that are begun before the one in front of them has ended: tokens, pages and ends stay the same."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ramify.cache import Lease, PrefixCache
from ramify.cache.key import CacheKey
from ramify.config import EngineConfig
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.step import Executor, OverlappingExecutor
from ramify.engine.threaded_executor import ThreadedExecutor
from ramify.engine.weight_reload import swap_weights
from ramify.errors import ConfigError
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import EOS, Bench, expected
from tests.pure.overlapping_device import LateDevice

PROMPTS = [[i, 2, 3, 4, 5, 6, 7 + i] for i in range(1, 5)]
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


@pytest.mark.parametrize("make", DEVICES)
def test_chunks_of_a_prompt_are_begun_ahead(
    make: Callable[[FakeExecutor], OverlappingExecutor],
) -> None:
    """Beside a decoding request too, to the step that samples the first token, and on from there."""
    bench = Bench(max_batch_tokens=5)
    overlapping(bench, make(bench.device))
    decoding = bench.add(PROMPTS[0][:4], max_tokens=12, ignore_eos=True)
    bench.step()
    prompt = list(range(1, 19))
    key = bench.add(prompt, max_tokens=3, ignore_eos=True)
    bench.step()  # ends the step in flight
    bench.step()  # begins the prompt
    num_before = bench.core.pipeline.num_ahead, bench.core.num_steps

    outputs = bench.run()

    assert list(outputs[decoding].token_ids) == expected(PROMPTS[0][:4], 12, ends=())
    assert list(outputs[key].token_ids) == expected(prompt, 3, ends=())
    num_ahead, num_steps = bench.core.pipeline.num_ahead, bench.core.num_steps
    assert num_ahead - num_before[0] == num_steps - num_before[1] - 1 > 6
    assert_cache_holds_answers(bench)
    bench.assert_nothing_leaked()


def test_decodes_leave_a_prompt_its_share_of_steps_ahead_too() -> None:
    """Beside 15 decodes in a budget of 16, a prompt gets two tokens a step, as without overlap."""
    num_steps = []
    for overlaps in (False, True):
        bench = Bench(max_batch_tokens=16)
        if overlaps:
            overlapping(bench, LateDevice(bench.device))
        for i in range(15):
            bench.add([i + 1, 2], max_tokens=90, ignore_eos=True)
        for _ in range(4):
            bench.step()
        key, begin = bench.add(list(range(1, 41)), max_tokens=1), bench.core.num_steps
        while key not in bench.outputs:
            bench.step()
        num_steps.append(bench.core.num_steps - begin)

    assert num_steps[0] < 21
    assert num_steps[1] <= num_steps[0] + 1


@pytest.mark.parametrize(
    "params", [{"prompt_logprobs": 0}, {"prompt_embedding": True, "max_tokens": 0}, {"n": 2}]
)
def test_a_prompt_that_is_read_is_computed_step_by_step(params: dict[str, Any]) -> None:
    """Its scores, its embedding or its children come from the steps that compute it."""
    bench = Bench(max_batch_tokens=4)
    overlapping(bench, LateDevice(bench.device))
    bench.add(list(range(1, 19)), **{"max_tokens": 1, "ignore_eos": True, **params})

    bench.run()

    assert bench.core.pipeline.num_ahead == 0
    bench.assert_nothing_leaked()


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


def test_a_tenant_is_not_charged_for_a_chunk_behind_a_failure() -> None:
    """A prompt whose K/V is damaged is computed again; the chunk that was begun behind it was dropped."""
    served = []
    for overlap in ("off", "auto"):
        bench = Bench(max_batch_tokens=5, options={"overlap": overlap})
        device = LateDevice(bench.device, not_finite={4})
        overlapping(bench, device)
        bench.add([1, 2, 3], max_tokens=3, ignore_eos=True, tenant="bob")
        bench.run()
        key = bench.add(list(range(1, 19)), max_tokens=2, ignore_eos=True, tenant="ann")
        request = bench.core.live[-1]

        output = bench.run()[key]

        assert list(output.token_ids) == expected(list(range(1, 19)), 2, ends=())
        assert (device.num_ahead > 3) == (overlap == "auto")
        assert bench.core.stats().failures.failed_requests == 1
        served.append(bench.core.scheduler.waiting.num_served(request))
    assert served[0] == served[1] > 0


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_tenant_is_charged_once_for_a_step_that_is_planned_again(
    is_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ahead that could not be begun, or that was dropped for another executor."""
    bench = Bench(max_batch_tokens=5)
    device = LateDevice(bench.device)
    overlapping(bench, device)
    bench.add([1, 2, 3], max_tokens=3, ignore_eos=True, tenant="bob")
    bench.run()
    key = bench.add(list(range(1, 19)), max_tokens=2, ignore_eos=True, tenant="ann")
    request = bench.core.live[-1]

    def fails(_: Any) -> None:
        monkeypatch.undo()
        raise RuntimeError("no")

    if not is_begun:
        monkeypatch.setattr(device, "begin_ahead", fails)
    bench.step()
    if is_begun:
        bench.core.executor = LateDevice(bench.device)
    output = bench.run()[key]

    assert list(output.token_ids) == expected(list(range(1, 19)), 2, ends=())
    assert bench.core.scheduler.waiting.num_served(request) == 18 + 1


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
        {"overlap": "on", "cache_host": "1MB"},
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
