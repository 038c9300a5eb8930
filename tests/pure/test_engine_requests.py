"""Single requests: what is refused, what ends a request, what is reported."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ramify.cache import CacheKey
from ramify.errors import (
    EmptyPromptError,
    InvalidParamsError,
    PromptTooLongError,
    RequestError,
    RequestTooLargeError,
    TokenOutOfRangeError,
)
from ramify.outputs import CacheReport, FinishReason
from ramify.params import SamplingParams
from tests.pure.engine_bench import EOS, Bench, expected

# -- what ends a request, and what it reports ------------------------------------------------


def scripted(*answers: int) -> Callable[[Sequence[int]], int]:
    """The answers one after the other, for a prompt of length 4."""
    return lambda context: answers[len(context) - 4]


def test_the_models_own_end_ends_a_request() -> None:
    """The end token is among the ids, not in the text."""
    bench = Bench(next_token=scripted(2, 4, EOS, 6))
    key = bench.add([9] * 4)

    output = bench.run()[key]

    assert output.token_ids == (2, 4, EOS)
    assert output.text == "CE"
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason == EOS


def test_ignore_eos_goes_on_but_asked_for_stop_ids_count() -> None:
    """`ignore_eos` ignores the model's end tokens, not `stop_token_ids`."""
    bench = Bench(next_token=scripted(2, EOS, 4, 6))
    key = bench.add([9] * 4, ignore_eos=True, stop_token_ids=[4])

    output = bench.run()[key]

    assert output.token_ids == (2, EOS, 4)
    assert output.text == "CA"


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [("E", "C", 2), ("CE", "", 2), (("G", "EG"), "C", 3), ("D", "CEG", 4), ("GD", "CE", 5)],
)
def test_a_stop_text_is_cut_off(stop: Any, text: str, count: int) -> None:
    """A stop string is cut at its first match, across tokens and in text the decoder held back."""
    bench = Bench(next_token=scripted(2, 4, 6, 3, 8, 10))  # C, E, G, then D shows with I
    key = bench.add([9] * 4, stop=stop, max_tokens=4 if stop == "D" else 6)

    output = bench.run()[key]

    assert output.text == text
    assert len(output.token_ids) == count
    assert output.finish_reason is FinishReason.STOP
    assert output.completions[0].stop_reason in ((stop,) if isinstance(stop, str) else stop)


def test_what_was_held_back_is_told_at_the_end() -> None:
    """A request that ends by length shows even an incomplete last character."""
    bench = Bench(next_token=scripted(2, 4, 5))
    key = bench.add([9] * 4, max_tokens=3)

    output = bench.run()[key]

    assert output.text == "CEF"
    assert output.finish_reason is FinishReason.LENGTH


def test_the_context_ends_a_request() -> None:
    """max_tokens=None runs to the end of the context, or of the pool if that is smaller."""
    context = Bench(max_model_len=12)
    pool = Bench(8, 4, max_model_len=100)
    for bench, count in ((context, 8), (pool, 5)):
        key = bench.add([9] * 4, max_tokens=None, ignore_eos=True)
        output = bench.run()[key]
        assert len(output.token_ids) == count
        assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_draws_depend_on_seed_and_position_only(seed: int) -> None:
    """A seeded request draws the same tokens alone, in a batch, in chunks and after preemption."""
    wanted = None
    for crowd, budget, pool in ((0, 512, 4096), (6, 512, 4096), (6, 5, 60), (3, 1, 40)):
        bench = Bench(pool, 4, max_batch_tokens=budget)
        for at in range(crowd):
            bench.add([7] * 8 + [at + 1], max_tokens=9, temperature=1.0, seed=at, ignore_eos=True)
        key = bench.add([7] * 8 + [20], max_tokens=9, temperature=1.0, seed=seed, ignore_eos=True)
        tokens = bench.run()[key].token_ids
        assert wanted in (None, tokens)
        wanted = tokens


def test_metrics_follow_the_clock() -> None:
    """Queue, first token, total and rate, in the seconds of the clock that was passed in."""
    bench = Bench(max_num_seqs=1)
    first = bench.add([1, 2], max_tokens=3, ignore_eos=True)
    second = bench.add([3, 4], max_tokens=1)

    outputs = bench.run()

    first_metrics, second_metrics = outputs[first].metrics, outputs[second].metrics
    assert (first_metrics.queue_s, first_metrics.ttft_s, first_metrics.total_s) == (1.0, 1.0, 3.0)
    assert first_metrics.decode_tokens_per_s == 1.0
    assert (second_metrics.queue_s, second_metrics.ttft_s, second_metrics.decode_tokens_per_s) == (
        4.0,
        4.0,
        None,
    )


def test_a_clock_may_start_at_zero() -> None:
    """A first step at second 0.0 is a first step."""
    bench = Bench()
    key = bench.add([1, 2], max_tokens=2, ignore_eos=True)
    bench.core.step()
    bench.time = 5.0

    assert bench.core.step()[0].output is not None
    assert key == 0


def test_usage_and_report_agree() -> None:
    """cached = read + shared; a second equal prompt reads all its whole pages."""
    bench = Bench(page_size=4)
    bench.add([7] * 10, max_tokens=1)
    bench.run()
    key = bench.add([7] * 10, max_tokens=1)
    output = bench.run()[key]

    assert (output.cache.read_tokens, output.cache.computed_tokens) == (8, 2)
    assert output.usage.cached_tokens == 8
    assert output.usage.total_tokens == 11


def test_without_prefix_cache_the_report_says_why() -> None:
    """With prefix_cache=False the report has no hits and gives the reason."""
    bench = Bench(prefix_cache=False)
    for _ in range(2):
        bench.add([7] * 10, max_tokens=1)

    for output in bench.run().values():
        assert output.cache.computed_tokens == 10
        assert output.cache.reason == "prefix_cache=False"


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([], EmptyPromptError, "0 tokens but at least 1"),
        ((), EmptyPromptError, "0 tokens"),
        ([1, -1], TokenOutOfRangeError, r"token id -1 at position 1 is outside 0\.\.49"),
        ([50], TokenOutOfRangeError, r"50 at position 0 is outside 0\.\.49"),
        ([1, 2**70], TokenOutOfRangeError, "at position 1"),
        ([1, 2.0], InvalidParamsError, r"prompt\[1\]=2\.0 .* integer token id"),
        ([True, 1], InvalidParamsError, r"prompt\[0\]=True"),
        ([1, None], InvalidParamsError, r"prompt\[1\]=None"),
        ([[1, 2], [3]], InvalidParamsError, r"prompt\[0\]=\[1, 2\]"),
        (["a"], InvalidParamsError, r"prompt\[0\]='a'"),
        (b"ab", InvalidParamsError, "text or a sequence of token ids"),
        (None, InvalidParamsError, "prompt=None"),
        (3, InvalidParamsError, "prompt=3"),
        ([1] * 20, PromptTooLongError, "has 20 tokens but max_model_len is 20 .* by 1"),
        ([1] * 13, RequestTooLargeError, "kv_cache_tokens >= 20"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused(
    prompt: Any, error: type[RequestError], message: str
) -> None:
    """The error names value, limit and remedy; nothing is queued, and other requests continue."""
    bench = Bench(16, 4, max_model_len=20)
    key = bench.add([7] * 6, max_tokens=4, ignore_eos=True)
    bench.step()

    with pytest.raises(error, match=message):
        bench.core.add_request(prompt, SamplingParams(max_tokens=6))

    bench.core.cache.check()
    assert len(bench.core.live) == 1
    assert list(bench.run()[key].token_ids) == expected([7] * 6, 4, ends=())


def test_stop_texts_need_a_tokenizer() -> None:
    """A stop string without a tokenizer raises InvalidParamsError."""
    bench = Bench()
    bench.core.lifecycle.detokenizer_factory = None

    with pytest.raises(InvalidParamsError, match="no tokenizer"):
        bench.core.add_request([1], SamplingParams(stop="x"))


def test_an_idle_engine_does_nothing() -> None:
    """A step without requests is legal and costs nothing."""
    bench = Bench()

    assert bench.step() == []
    assert bench.device.num_steps == 0


def test_a_recheck_shares_nothing_that_its_request_did_not() -> None:
    """A recheck keeps the `max_shared` of its request: later tokens stay out of the cache."""
    bench = Bench(options={"verify_sample": 1.0})
    for prompt in ([1] * 16, [*[1] * 16, 2, 3, 4, 5, 6]):
        bench.core.add_request(prompt, SamplingParams(max_tokens=8), max_shared=8)
        while bench.core.has_unfinished:
            bench.core.step()
    assert bench.core.verify_next_hit()

    while bench.core.has_unfinished:
        bench.core.step()

    assert bench.core.hit_verifier.num_checked == 1
    known = CacheKey([*[1] * 16, 2, 3, 4, 5, 6], bench.core.namespaces.base)
    assert bench.core.cache.match(known).num_tokens == 8


@pytest.mark.parametrize("max_shared", [0, 3, 4, 9, 12, 40, None])
@pytest.mark.parametrize("budget", [3, 512])
def test_tokens_beyond_max_shared_are_nobody_elses(max_shared: int | None, budget: int) -> None:
    """Tokens after `max_shared` are not shared, in prompt or answer; tokens before it are."""
    bench = Bench(max_batch_tokens=budget)
    prompt = list(range(1, 21))
    core = bench.core
    first = core.add_request(
        prompt, SamplingParams(max_tokens=9, ignore_eos=True), max_shared=max_shared
    )
    bench.tokens[first] = []
    follower = bench.add([*prompt, 7], max_tokens=2, ignore_eos=True)
    outputs = bench.run()
    report = outputs[follower].cache
    limit = 20 if max_shared is None else min(max_shared, 20)
    assert report.read_tokens + report.shared_tokens == limit // 4 * 4

    context = [*prompt, *outputs[first].token_ids]
    num_cached = core.cache.match(CacheKey(context, core.namespaces.base)).num_tokens
    assert num_cached == (28 if max_shared is None else max(20, min(max_shared, 28)) // 4 * 4)
    assert list(outputs[first].token_ids) == expected(prompt, 9, ends=())
    bench.assert_nothing_leaked()


def test_the_first_event_tells_where_the_prompt_came_from() -> None:
    """The first event of a request carries its cache report; later events carry none."""
    bench = Bench()
    bench.add(list(range(1, 21)), max_tokens=2, ignore_eos=True)
    bench.run()
    bench.add([*range(1, 21), 3], max_tokens=3, ignore_eos=True)

    events = [event for _ in range(3) for event in bench.step()]

    reports = [event.cache for event in events]
    assert reports == [CacheReport(20, 0, 1), None, None]
