"""Speculative decoding from the radix tree and from n-grams: draft lengths, ends, statistics."""

import random
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from ramify.config import EngineConfig
from ramify.engine.request import Request
from ramify.engine.speculation.drafter import (
    MAX_COOLDOWN_STEPS,
    MIN_ACCEPTANCE_RATE,
    AcceptanceRate,
    AdaptiveDrafter,
    DraftStats,
    accepts_drafts,
)
from ramify.errors import ConfigError
from ramify.outputs import FinishReason, RequestOutput
from ramify.params import SamplingParams
from tests.pure.engine_bench import VOCAB, Bench, expected

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def loop(period: int) -> Bench:
    """Build an engine whose model repeats the tokens 1 to `period` for ever."""
    return Bench(next_token=lambda context: 1 + len(context) % period, speculative="ngram")


def counts(bench: Bench) -> dict[str, DraftStats]:
    assert isinstance(bench.core.drafter, AdaptiveDrafter)
    return bench.core.drafter.counts


@pytest.mark.parametrize("source", ["tree", "auto"])
def test_a_question_that_is_asked_again_takes_few_steps(source: str) -> None:
    """A repeated prompt drafts its cached answer and needs few steps."""
    bench = Bench(speculative=source)
    first = bench.add(PROMPT, max_tokens=60, ignore_eos=True)
    bench.run()
    before = bench.core.num_steps

    again = bench.add(PROMPT, max_tokens=60, ignore_eos=True)
    bench.run()

    assert bench.core.num_steps - before < 20
    assert bench.tokens[first] == bench.tokens[again] == expected(PROMPT, 60, ends=())
    assert counts(bench)["tree"].acceptance_rate > 0.9
    metrics = bench.outputs[again].metrics
    assert metrics.num_accepted > 40
    assert metrics.num_drafted >= metrics.num_accepted
    assert source == "auto" or bench.outputs[first].metrics.num_drafted == 0
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_text_that_repeats_itself_takes_few_steps(period: int) -> None:
    """N-gram drafts of a periodic text are accepted, also past the end of the known text."""
    bench = loop(period)
    bench.add([40, 41, 42], max_tokens=100, ignore_eos=True)

    bench.run()

    assert bench.core.num_steps < 30
    assert counts(bench)["ngram"].acceptance_rate > 0.8


def test_a_request_that_is_ahead_tells_those_behind_it() -> None:
    """A request drafts from pages that an identical request ahead of it has just published."""
    bench = Bench(speculative="tree")
    bench.add(PROMPT, max_tokens=60, ignore_eos=True)
    for _ in range(40):
        bench.step()
    behind = bench.add(PROMPT, max_tokens=60, ignore_eos=True)

    bench.run()

    assert bench.outputs[behind].metrics.num_accepted > 20
    bench.assert_nothing_leaked()


def test_nothing_is_guessed_across_tenants() -> None:
    """The tree never drafts from another tenant's text."""
    bench = Bench(speculative="tree")
    bench.add(PROMPT, max_tokens=30, ignore_eos=True)
    bench.run()

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    other = bench.core.add_request(PROMPT, params, tenant="somebody else")
    bench.tokens[other] = []
    bench.run()

    assert bench.outputs[other].metrics.num_drafted == 0


def test_off_guesses_nothing() -> None:
    """By default there is no drafter."""
    assert Bench().core.drafter is None


def test_without_a_shared_cache_the_tree_knows_nothing() -> None:
    """With the prefix cache off, the tree drafts nothing."""
    bench = Bench(speculative="tree", prefix_cache=False)
    for _ in range(2):
        bench.add(PROMPT, max_tokens=20, ignore_eos=True)
        bench.run()

    assert counts(bench)["tree"] == DraftStats()


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17, 30])
def test_yb15_nothing_is_verified_past_the_end(max_tokens: int) -> None:
    """Drafts stop at the request's last token, and acceptance rates never divide by zero."""
    bench = Bench(
        pool_tokens=48,
        max_model_len=41,
        speculative="auto",
        next_token=lambda context: 7,
    )
    request_id = bench.add(PROMPT, max_tokens=max_tokens, ignore_eos=True)

    while bench.core.has_unfinished:
        bench.step()
        for request in bench.core.scheduler.running:
            assert len(request.sequence.tokens) <= request.max_len
            assert request.sequence.num_computed < request.max_len

    assert bench.tokens[request_id] == [7] * max_tokens
    assert bench.core.num_computed_tokens >= len(PROMPT) + max_tokens - 1
    assert bench.outputs[request_id].metrics.num_accepted < max_tokens
    if max_tokens == 1:
        assert {stats.acceptance_rate for stats in counts(bench).values()} == {0.0}
    bench.assert_nothing_leaked()


def test_a_context_that_is_full_ends_inside_a_guess() -> None:
    """A draft that reaches `max_model_len` ends the request with reason LENGTH."""
    bench = Bench(max_model_len=40, speculative="ngram", next_token=lambda context: 7)
    request_id = bench.add(PROMPT, max_tokens=None, ignore_eos=True)

    outputs = bench.run()

    assert len(outputs[request_id].token_ids) == 40 - len(PROMPT)
    assert outputs[request_id].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_draft", range(1, 16))
def test_ab9_a_guess_that_crosses_pages_has_all_of_them(page_size: int, num_draft: int) -> None:
    """A sequence with drafts holds ceil(length / page size) pages, right or wrong."""
    for start in range(3, 3 + page_size):
        for right in (num_draft, num_draft // 2, 0):
            bench = Bench(page_size=page_size, drafter=Always(num_draft, right))
            bench.add((PROMPT * 2)[:start], max_tokens=40, ignore_eos=True)
            bench.step()
            bench.step()

            sequence = bench.core.scheduler.running[0].sequence
            assert sequence.num_computed == start + 1 + right
            assert sequence.row is not None
            held = bench.core.table.num_pages(sequence.row)
            assert held >= -(-sequence.num_computed // page_size)
            assert held == -(-(start + 1 + num_draft) // page_size)
            assert list(bench.outputs.values()) == []


def test_ab18_guesses_are_in_no_name_of_a_page() -> None:
    """Published pages contain accepted tokens only."""
    bench = Bench(page_size=4, drafter=Always(9, 3))
    bench.core.cache.subscribe()
    request_id = bench.add(PROMPT, max_tokens=40, ignore_eos=True)

    outputs = bench.run()

    text = [*PROMPT, *outputs[request_id].token_ids]
    prefixes = [
        node for root in bench.core.cache._tree.roots.values() for node in nodes(bench, root)
    ]
    assert all(text[: len(prefix)] == prefix for prefix in prefixes)
    assert max(map(len, prefixes)) == (len(text) - 1) // 4 * 4


def nodes(bench: Bench, root: int) -> list[list[int]]:
    """Return the token ids of every resident prefix below a root."""
    tree = bench.core.cache._tree
    paths = [tree.path(node) for node in tree.nodes(root) if tree.resident[node]]
    return [array("i", b"".join(map(tree.edge, path))).tolist() for path in paths]


class Always:
    """Drafts `count` tokens, of which the first `right` are correct."""

    def __init__(self, count: int, right: int) -> None:
        self.count, self.right = count, right
        self.accepted_counts: list[int] = []

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        yield from [
            (request, self.guess(request)) for request in running if accepts_drafts(request)
        ]

    def guess(self, request: Request) -> tuple[int, ...]:
        context = request.sequence.tokens.tolist()
        room = min(self.count, request.max_len - len(context) - 1)
        rights = expected(context, room, ends=()) if room > 0 else []
        return tuple(
            token if place < self.right else (token + 1) % VOCAB
            for place, token in enumerate(rights)
        )

    def verified(self, request: Request, num_accepted: int) -> None:
        self.accepted_counts.append(num_accepted)


def test_what_was_accepted_is_told_as_it_was() -> None:
    """The drafter receives the number of accepted tokens of each step that verified a draft."""
    drafter = Always(5, 2)
    bench = Bench(drafter=drafter)
    bench.add(PROMPT, max_tokens=13, ignore_eos=True)

    bench.run()

    assert drafter.accepted_counts == [2, 2, 2, 2]


def test_guesses_behind_the_end_do_not_count() -> None:
    """A stop token inside a draft ends the request; drafts after it are not accepted."""
    script = expected(PROMPT, 12, ends=())
    stop = next(token for token in script[4:] if token not in script[:4])
    drafter = Always(9, 9)
    bench = Bench(drafter=drafter)
    request_id = bench.add(PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])

    outputs = bench.run()

    assert outputs[request_id].token_ids[-1] == stop
    assert drafter.accepted_counts == [len(outputs[request_id].token_ids) - 1]
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("n", [1, 3])
def test_texts_stops_and_log_probabilities_are_those_without_guesses(n: int) -> None:
    """Speculation changes no text, stop, token or log probability of an output."""

    def generate(speculative: str) -> list[RequestOutput]:
        bench = Bench(speculative=speculative, next_token=lambda context: (len(context) * 7) % 5)
        for params in (
            {"stop": ["HAHC"], "logprobs": 2},
            {"stop": ["B"], "max_tokens": 30},
            {"prompt_logprobs": 1, "logprobs": 0, "max_tokens": 30},
            {"max_tokens": 30, "stop_token_ids": [3]},
        ):
            for _ in range(2):
                bench.add(PROMPT, n=n, ignore_eos=True, **params)
                bench.run()
        if speculative == "auto":
            assert sum(stats.num_accepted for stats in counts(bench).values()) > 50
        bench.assert_nothing_leaked()
        return [bench.outputs[request_id] for request_id in sorted(bench.outputs)]

    for without, guessed in zip(generate("off"), generate("auto"), strict=True):
        assert guessed.completions == without.completions
        assert guessed.prompt_logprobs == without.prompt_logprobs


def test_guesses_fit_in_the_budget_of_a_step() -> None:
    """Drafts never take a step over `max_batch_tokens`."""
    bench = Bench(max_batch_tokens=12, speculative="auto", next_token=lambda context: 7)
    for number in range(5):
        bench.add([number + 1] * 30, max_tokens=40, ignore_eos=True)

    while bench.core.has_unfinished:
        before = bench.core.num_computed_tokens
        bench.step()
        assert bench.core.num_computed_tokens - before <= 12

    assert counts(bench)["ngram"].num_accepted > 20


def test_when_pages_run_out_guesses_go_first() -> None:
    """A step short of pages drops drafts before it preempts a request."""
    bench = Bench(pool_tokens=32, page_size=4, speculative="ngram", next_token=lambda context: 7)
    for number in range(2):
        bench.add([number + 1, 2, 3], max_tokens=13, ignore_eos=True)

    bench.run()

    assert bench.core.scheduler.num_preemptions == 0
    assert counts(bench)["ngram"].num_accepted > 0
    bench.assert_nothing_leaked()


def test_a_failed_step_says_nothing_about_its_guesses() -> None:
    """The drafts of a failed step do not lower the acceptance rate."""
    bench = Bench(speculative="ngram", next_token=lambda context: 7, fail_at=[8, 9, 12])
    request_id = bench.add(PROMPT, max_tokens=40, ignore_eos=True)

    outputs = bench.run()

    assert outputs[request_id].token_ids == (7,) * 40 or outputs[request_id].error is not None
    assert counts(bench)["ngram"].acceptance_rate == 1.0
    bench.assert_nothing_leaked()


# -- how many --------------------------------------------------------------------------------


def learned(outcomes: Sequence[tuple[int, int]]) -> AcceptanceRate:
    record = AcceptanceRate()
    for drafted, accepted in outcomes:
        record.verified(drafted, accepted)
    return record


def test_more_is_guessed_for_whom_it_was_right() -> None:
    """Drafts grow with the acceptance rate, up to the limit, and shrink as a step fills up."""
    good, new = learned([(15, 15)] * 6), AcceptanceRate()

    assert good.num_worthwhile(1, 15) == 15
    assert 1 < new.num_worthwhile(1, 15) < 15
    assert good.num_worthwhile(1, 3) == 3
    assert [new.num_worthwhile(rows, 15) for rows in (1, 4, 8, 16)] == sorted(
        (new.num_worthwhile(rows, 15) for rows in (1, 4, 8, 16)), reverse=True
    )
    assert good.num_worthwhile(400, 0) == 0


def test_wrong_guesses_stop_and_are_tried_again_ever_more_seldom() -> None:
    """Rejected drafts pause drafting; each retry is one token, and pauses double up to a limit."""
    record, tries = learned([(4, 0)] * 30), []
    assert record.num_accepted / record.num_verified < MIN_ACCEPTANCE_RATE

    for step in range(600):
        wanted = record.num_worthwhile(1, 15)
        if wanted:
            assert wanted == 1
            tries.append(step)
            record.verified(1, 0)

    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses[:4] == [2, 4, 8, 16]
    assert max(pauses) <= MAX_COOLDOWN_STEPS + 1
    assert len(tries) < 20


def test_a_retry_that_succeeds_ends_the_pauses() -> None:
    """Accepted retries bring the draft length back to its limit."""
    record = learned([(4, 0)] * 30)
    while not record.num_worthwhile(1, 15):
        pass
    record.verified(1, 1)
    for _ in range(20):
        record.verified(max(1, wanted := record.num_worthwhile(1, 15)), max(1, wanted))

    assert record.num_worthwhile(1, 15) == 15


def test_random_text_is_hardly_ever_guessed_at() -> None:
    """Fewer than a fifth of the tokens of random answers are drafted."""
    rng = random.Random(3)
    bench = Bench(speculative="auto", next_token=lambda context: rng.randrange(VOCAB))
    for _ in range(3):
        bench.add(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0, seed=1)
        bench.run()

    stats_by_source = counts(bench)
    assert sum(stats.num_drafted for stats in stats_by_source.values()) < 0.2 * 1200


def test_options_are_checked() -> None:
    """Invalid speculative options raise ConfigError with a way out."""
    config = EngineConfig.of(exact=False, speculative_sampling="rejection")
    assert config.speculative.speculative_sampling == "rejection"
    for options, words in (
        ({"speculative": "medusa"}, "ngram"),
        ({"speculative_sampling": "typical"}, "rejection"),
        ({"max_draft_tokens": 0}, ">= 1"),
        ({"speculative_sampling": "rejection"}, "exact=False"),
    ):
        with pytest.raises(ConfigError, match=words):
            EngineConfig.of(**options)


def test_what_the_tree_does_not_know_the_text_may() -> None:
    """In "auto", n-grams draft where the tree has no continuation."""
    bench = Bench(speculative="auto", next_token=lambda context: 7)
    bench.add(PROMPT, max_tokens=40, ignore_eos=True)
    bench.run()

    assert counts(bench)["tree"].num_drafted == 0
    assert counts(bench)["ngram"].num_accepted > 20
