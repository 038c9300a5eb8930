"""Random requests in pools of little more than a window and a step: every answer is right, all end."""

import random
from array import array
from contextlib import suppress

import pytest

from ramify.config import live_pages
from ramify.errors import PinError, RequestTooLargeError
from tests.pure.engine_bench import VOCAB, Bench, expected

Expectation = tuple[list[int], int, int]  # prompt, answers' length, number of answers


def small_bench(draw: random.Random) -> Bench:
    """An engine whose pool has 0 to 11 pages more than a request needs at once."""
    page_size, window = draw.choice([1, 2, 3, 4, 8]), draw.randrange(2, 40)
    step_tokens = draw.randrange(2, 40)
    num_pages = live_pages(1 << 20, page_size, window, step_tokens) + draw.randrange(12)
    return Bench(
        pool_tokens=num_pages * page_size,
        page_size=page_size,
        max_num_seqs=draw.randrange(1, 6),
        max_batch_tokens=step_tokens,
        window=window,
        prefix_cache=draw.random() < 0.8,
        speculative=draw.choice(["off", "ngram", "tree"]),
        options={"fair_wait_steps": draw.choice([0, 3, 8])},
    )


def disturb(bench: Bench, draw: random.Random, prompt: list[int]) -> None:
    """Run a few steps; sometimes evict, or pin what is cached of a prompt."""
    for _ in range(draw.randrange(6)):
        if bench.core.has_unfinished:
            bench.step()
    if draw.random() < 0.1:
        bench.core.cache.evict(3)
    if draw.random() < 0.1:
        key, config = bench.core.namespaces.key(array("i", prompt)), bench.core.config
        room = config.num_live_pages(config.max_model_len)
        with suppress(PinError):  # nothing of it is cached, or there is no room
            bench.core.cache.pin(key, "operator", room_pages=room)


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_those_of_an_engine_without_cache(seed: int) -> None:
    """Shared stems, several answers, priorities, tenants, drafts, aborts, pins: 8 engines each."""
    draw, num_released = random.Random(seed), 0
    for _ in range(8):
        bench = small_bench(draw)
        stem = [draw.randrange(1, VOCAB) for _ in range(draw.choice([3, 9, 200]))] * 70
        expectations: dict[int, Expectation] = {}
        for _ in range(draw.randrange(1, 9)):
            prompt = stem[: draw.randrange(1, 200)]
            prompt = prompt + [draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 30))]
            max_tokens, count = draw.randrange(1, 30), draw.choice([1, 1, 1, 2, 3])
            request_id = bench.add(
                prompt,
                priority=draw.choice([0, 0, 1]),
                tenant=draw.choice(["", "a", "b"]),
                max_tokens=max_tokens,
                ignore_eos=True,
                n=count,
            )
            expectations[request_id] = prompt, max_tokens, count
            disturb(bench, draw, prompt)
            if draw.random() < 0.1 and request_id not in bench.outputs:
                bench.abort(request_id)
                del expectations[request_id]
        while bench.core.has_unfinished:
            bench.step()
        for request_id, (prompt, max_tokens, count) in expectations.items():
            answers = [
                list(completion.token_ids) for completion in bench.outputs[request_id].completions
            ]
            assert answers == [expected(prompt, max_tokens, ends=())] * count
        num_released += bench.core.cache.stats().evictions["window"]
    assert num_released > 0


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    """A window and a step need more pages than the pool has."""
    bench = Bench(pool_tokens=64, window=60, max_batch_tokens=16)
    with pytest.raises(RequestTooLargeError, match="the pool has 16 pages"):
        bench.add([1] * 100, max_tokens=5)


@pytest.mark.parametrize(("window", "step", "pool"), [(20, 16, 32), (7, 5, 12), (40, 8, 48)])
def test_a_refused_request_is_served_by_the_pool_that_the_error_asks_for(
    window: int, step: int, pool: int
) -> None:
    """It asks for the pages of window and step, not for those of the prompt; one page less fails.

    The step that it offers instead serves the request in the pool that there is.
    """
    prompt = [1 + at % 7 for at in range(400)]
    with pytest.raises(RequestTooLargeError) as refused:
        Bench(pool, max_batch_tokens=step, window=window).add(prompt, max_tokens=5)
    error = refused.value
    assert error.num_pages == -(-(window + step) // 4) + 1
    assert f"kv_cache_tokens >= {4 * error.num_pages}" in str(error)
    with pytest.raises(RequestTooLargeError):
        Bench(4 * error.num_pages - 4, max_batch_tokens=step, window=window).add(prompt)

    benches = [Bench(4 * error.num_pages, max_batch_tokens=step, window=window)]
    if error.max_step:
        assert f"max_batch_tokens <= {error.max_step}" in str(error)
        benches.append(Bench(pool, max_batch_tokens=error.max_step, window=window))

    for bench in benches:
        request_id = bench.add(prompt, max_tokens=5, ignore_eos=True)
        assert list(bench.run()[request_id].token_ids) == expected(prompt, 5, ends=())
