"""Replays under a finite capacity, against a cache of pages that is one ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from ramify.analysis.linting import lint_parts
from ramify.analysis.providers import CacheModel, Conditions, Prediction, load_rules, prompts_of
from ramify.analysis.records import HashedPrompt, LoggedRequest
from ramify.analysis.simulation.calls import simulate
from ramify.errors import ConfigError
from tests.pure.analysis.replay_prompts import Block, corpus_of, request_of, tokens

PAGE = 16


class DictionaryLru:
    """The oracle: pages by their whole prefix; the oldest is evicted."""

    def __init__(self, capacity: int) -> None:
        self._num_pages = capacity // PAGE
        self._pages: OrderedDict[tuple[int, ...], None] = OrderedDict()

    def serve(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> int:
        """Tokens read; a token is left to compute."""
        num_read = 0
        while num_read + PAGE < len(prompt) and prompt[: num_read + PAGE] in self._pages:
            num_read += PAGE
        whole = prompt + answer
        for end in range(len(whole) // PAGE * PAGE, 0, -PAGE):
            self._pages[whole[:end]] = None
            self._pages.move_to_end(whole[:end])
        while len(self._pages) > self._num_pages:
            self._pages.popitem(last=False)
        return num_read


def conversations(seed: int, *, num_requests: int = 150) -> list[LoggedRequest]:
    """Prompts that extend, repeat or part from earlier ones, with answers of known text."""
    draw = np.random.default_rng(seed)
    histories: list[tuple[int, ...]] = [()]
    requests = []
    for number in range(num_requests):
        history = histories[draw.integers(len(histories))]
        cut = len(history) if draw.random() < 0.7 else int(draw.integers(len(history) + 1))
        length = int(draw.integers(1, 90))
        prompt = history[:cut] + tokens(1_000_000 + 1000 * number, length)
        answer = tokens(2_000_000 + 1000 * number, int(draw.integers(40)))
        histories.append(prompt + answer)
        output = [Block(answer)] if answer else None
        requests.append(request_of([Block(prompt)], model="m", output=output, line=number + 1))
    return requests


def ids(request: LoggedRequest) -> tuple[tuple[int, ...], tuple[int, ...]]:
    prompt, answer = (
        tuple(int(word) for segment in segments for word in segment.text.split())
        for segments in (request.segments[1:], request.output)
    )
    return prompt, answer


def replayed(
    requests: list[LoggedRequest],
    capacity: int | None,
    *,
    provider: str = "vllm",
    conditions: Conditions | None = None,
) -> list[Prediction]:
    corpus = corpus_of(requests)
    model = CacheModel(corpus, provider, load_rules()).with_capacity(capacity)
    return model.replay(prompts_of(corpus), conditions or Conditions())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [16, 100, 400, 1500, 4000, 12_000])
def test_reads_at_a_capacity_are_those_of_a_dictionary(seed: int, capacity: int) -> None:
    """LRU over pages, leaf first: each request reads what a brute-force cache has."""
    requests = conversations(seed)
    oracle = DictionaryLru(capacity)
    expected = [oracle.serve(*ids(request)) for request in requests]

    predictions = replayed(requests, capacity)

    assert [item.billed.num_read for item in predictions] == expected
    infinite = [item.billed.num_read for item in replayed(requests, None)]
    assert [item.read_if_resident for item in predictions] == infinite
    assert sum(expected) < sum(infinite) or capacity == 12_000


def test_engines_with_pages_of_a_token_are_counted_in_pages_of_16() -> None:
    """SGLang's reads at a capacity are at least vLLM's, less than a page more in each request."""
    requests = conversations(7)

    fine = [item.billed.num_read for item in replayed(requests, 1500, provider="sglang")]
    coarse = [item.billed.num_read for item in replayed(requests, 1500, provider="vllm")]

    assert all(a <= b < a + 2 * PAGE for a, b in zip(coarse, fine, strict=True))
    assert fine != coarse


def test_an_evicted_page_is_ready_when_it_is_written_again() -> None:
    """After an eviction a parallel request waits for the request that computes the page again."""
    shared, other = Block(tokens(0, 160)), Block(tokens(5000, 160))
    requests = [
        request_of([shared], model="m", start=0, first=1, line=1),
        request_of([other], model="m", start=2, first=3, line=2),  # evicts the first
        request_of([shared], model="m", start=10, first=20, line=3),
        request_of([shared], model="m", start=15, first=21, line=4),
        request_of([shared], model="m", start=22, first=23, line=5),
    ]

    predictions = replayed(requests, 160)

    assert [item.billed.num_read for item in predictions] == [0, 0, 0, 0, 144]
    assert [item.read_if_ready for item in predictions] == [0, 0, 0, 144, 144]
    assert [item.read_if_resident for item in predictions] == [0, 0, 144, 144, 144]


def test_each_replica_has_a_cache_of_its_own() -> None:
    """The capacity is that of a replica; under routing by prefix the caches are one that adds up."""
    first, second = Block(tokens(0, 160)), Block(tokens(5000, 160))
    requests = [
        request_of([block], model="m", replica=name, line=line)
        for line, (block, name) in enumerate(
            [(first, "a"), (second, "b"), (first, "a"), (second, "b"), (first, "b")], 1
        )
    ]

    apart = replayed(requests, 160)
    merged = replayed(requests, 160, conditions=Conditions(ignored=frozenset({"replica"})))

    assert [item.billed.num_read for item in apart] == [0, 0, 144, 144, 0]
    assert [item.billed.num_read for item in merged] == [0, 0, 144, 144, 144]


@pytest.mark.parametrize("capacity", [2048, 8192, 65_536])
def test_hashed_reads_at_a_capacity_are_the_simulated_ones(capacity: int) -> None:
    """`lint --capacity` and `simulate --capacity` mean the same cache."""
    draw = np.random.default_rng(3)
    paths = [tuple(range(100 * root, 100 * root + 30)) for root in range(12)]
    requests = []
    for line in range(1, 400):
        path = paths[draw.integers(12)][: draw.integers(1, 31)]
        hashed = HashedPrompt(64, path, 64 * len(path) + 1)
        requests.append(LoggedRequest("t.jsonl", line, hashed=hashed, start_s=float(line)))

    predictions = replayed(requests, capacity, provider="ramify")
    result = simulate(requests, capacity=capacity, policy=())

    total = sum(item.billed.num_input for item in predictions)
    share = sum(item.billed.num_read for item in predictions) / total
    assert share == pytest.approx(result.one_pass_lru[capacity], abs=1e-12)
    assert share > 0


def test_savings_are_replayed_at_the_capacity() -> None:
    """The saving is what the mended log reads at the capacity, less what the log reads there."""
    system = tokens(0, 320)

    def log(*, is_mended: bool) -> list[LoggedRequest]:
        requests = []
        for line in range(1, 41):
            question = Block(tokens(10_000 * (1 + line % 4), 160))
            clock = f"Now: 2026-05-04 10:{line:02d}:07. "
            text = clock if not is_mended else ""
            blocks = [
                Block((), kind="system", text=f'"{text}{" ".join(f"rule {n}." for n in system)}"'),
                question,
            ]
            requests.append(request_of(blocks, model="m", line=line))
        return requests

    as_is, mended = log(is_mended=False), log(is_mended=True)
    savings = {}
    for capacity in (None, 1600):
        report = lint_parts(corpus_of(as_is), provider="vllm", capacity=capacity).report
        savings[capacity] = report.saving_all.tokens
        assert report.capacity_tokens == capacity
        reads = [
            sum(item.billed.num_read for item in replayed(requests, capacity))
            for requests in (as_is, mended)
        ]
        assert savings[capacity] == pytest.approx(reads[1] - reads[0], rel=0.02)

    assert 0 < savings[1600] < savings[None]


def test_a_capacity_that_cannot_be_is_an_error() -> None:
    """A capacity below a page, and one for a rule that has lifetimes, are refused with the way out."""
    corpus = corpus_of([replace(request_of([Block(tokens(0, 64))]), line=1)])

    with pytest.raises(ConfigError, match="less than a page of 16"):
        lint_parts(corpus, provider="vllm", capacity=8)
    with pytest.raises(ConfigError, match="--provider vllm, sglang or ramify"):
        lint_parts(corpus, provider="anthropic", capacity="1M")
    with pytest.raises(ConfigError, match="unknown unit"):
        lint_parts(corpus, provider="vllm", capacity="3 apples")


def test_a_log_without_requests_has_any_capacity() -> None:
    """It is told as a log without requests, not as one under a rule without a capacity."""
    report = lint_parts(corpus_of([]), capacity="1M").report

    assert (report.num_requests, report.capacity_tokens) == (0, 1_000_000)
