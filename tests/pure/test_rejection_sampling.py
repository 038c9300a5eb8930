"""Rejection sampling draws from the target distribution whatever token the draft proposes."""

import numpy as np
import pytest

from ramify.engine.execution.sampler import (
    Row,
    filter_logits,
    philox_uniform,
    rejection_sample,
    sample_batch,
    sample_from_cdf,
)
from ramify.engine.step import SampleSpec
from ramify.params import SamplingParams

NUM_DRAWS = 20_000
LOGITS: Row = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 2.0, -8.0, 1.5], np.float32)
CHI2_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def target(params: SamplingParams) -> dict[int, float]:
    """Probability by token id after temperature, top-k and top-p, from the definition."""
    weights = np.exp(LOGITS.astype(np.float64) / params.temperature)
    order = np.argsort(-weights)[: params.top_k]
    mass = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    return {int(token): float(weights[token] / weights[order].sum()) for token in order}


def chi2(counts: dict[int, int], wanted: dict[int, float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; merges cells that expect fewer than 10."""
    total = sum(counts.values())
    assert not counts.keys() - wanted.keys(), "a token that cannot be drawn"
    often = [token for token, share in wanted.items() if share * total >= 10]
    cells = [(counts.get(token, 0), wanted[token] * total) for token in often]
    rest = 1.0 - sum(wanted[token] for token in often)
    if rest * total >= 1:
        cells.append((total - sum(count for count, _ in cells), rest * total))
    return sum((seen - due) ** 2 / due for seen, due in cells), len(cells) - 1


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=2.0, top_k=4),
    SamplingParams(temperature=1.5, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
]


@pytest.mark.parametrize("guess", [None, 1, 3, 6, 7, 4])
@pytest.mark.parametrize("params", PARAMS)
def test_the_distribution_is_the_targets(params: SamplingParams, guess: int | None) -> None:
    """A chi-squared test passes for draft tokens that are likely, unlikely or filtered out."""
    wanted, counts = target(params), dict[int, int]()
    ids, weights = filter_logits(LOGITS, params)

    for position in range(NUM_DRAWS):
        token = rejection_sample(ids, weights.copy(), philox_uniform(17, position), guess)
        counts[token] = counts.get(token, 0) + 1

    statistic, freedom = chi2(counts, wanted)
    assert statistic < CHI2_999[freedom]


@pytest.mark.parametrize("choose", [rejection_sample, sample_from_cdf])
@pytest.mark.parametrize("params", PARAMS[:4])
def test_pairs_of_tokens_have_the_targets_distribution_too(
    params: SamplingParams, choose: object
) -> None:
    """Pairs of tokens drawn with drafts of two have the product of the target distributions.

    When the first draft token is rejected, the next step draws the second token of the pair.
    """
    wanted = target(params)
    draft, counts, steps = (1, 3), dict[tuple[int, int], int](), 0

    for seed in range(NUM_DRAWS // 4):
        tokens: list[int] = []
        while len(tokens) < 2:
            guesses = draft[len(tokens) :]
            draw = SampleSpec(0, 0, len(tokens), params, seed, None, guesses)
            rows = np.repeat(LOGITS[None], len(guesses) + 1, 0)
            drawn, failed = sample_batch(rows, [draw], choose)  # type: ignore[arg-type]
            assert not failed
            tokens += drawn[0].token_ids
            steps += 1
        pair = (tokens[0], tokens[1])
        counts[pair] = counts.get(pair, 0) + 1

    total = sum(counts.values())
    for position in (0, 1):
        singles: dict[int, int] = {}
        for pair, count in counts.items():
            singles[pair[position]] = singles.get(pair[position], 0) + count
        statistic, freedom = chi2(singles, wanted)
        assert statistic < CHI2_999[freedom]
    both = counts.get((1, 3), 0) / total
    assert both == pytest.approx(wanted[1] * wanted[3], abs=4 * (0.25 / total) ** 0.5)
    assert steps < 2 * total


@pytest.mark.parametrize("params", PARAMS)
def test_equality_accepts_as_often_as_rejection(params: SamplingParams) -> None:
    """`rejection_sample` and `sample_from_cdf` accept a draft token with its target probability."""
    ids, weights = filter_logits(LOGITS, params)
    share = target(params)[1]

    rates = [
        sum(choose(ids, weights.copy(), philox_uniform(5, at), 1) == 1 for at in range(NUM_DRAWS))
        / NUM_DRAWS
        for choose in (rejection_sample, sample_from_cdf)
    ]

    assert rates == [pytest.approx(share, abs=4 * (0.25 / NUM_DRAWS) ** 0.5)] * 2


def test_a_guess_with_all_of_the_mass_is_accepted() -> None:
    """A draft token of probability 1 is always accepted, one of probability 0 never."""
    ids = np.array([4, 9])

    for number in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        assert rejection_sample(ids, np.array([0.0, 2.0]), number, 9) == 9
        assert rejection_sample(ids, np.array([0.0, 2.0]), number, 4) == 9
        assert rejection_sample(ids[:1], np.array([1.0]), number, 4) == 4
        assert rejection_sample(ids, np.array([1e-300, 1.0]), number, 9) == 9


def test_greedy_requests_are_not_left_to_chance() -> None:
    """Temperature 0 draws the likeliest token, whether or not the draft proposes it."""
    rows = np.repeat(LOGITS[None], 3, 0)
    draw = SampleSpec(0, 0, 5, SamplingParams(), 3, None, (1, 3))

    drawn, _ = sample_batch(rows, [draw], rejection_sample)

    assert drawn[0].token_ids == (1, 1) == sample_batch(rows, [draw])[0][0].token_ids


def test_log_probabilities_come_with_every_token() -> None:
    """Every drawn token has its log probability and two top entries, accepted or not."""
    rows = np.repeat(LOGITS[None], 3, 0)
    draw = SampleSpec(0, 0, 5, SamplingParams(temperature=1.0), 3, 2, (1, 1))

    drawn, _ = sample_batch(rows, [draw], rejection_sample)

    assert [logprob.token_id for logprob in drawn[0].logprobs] == list(drawn[0].token_ids)
    assert all(len(logprob.top) == 2 for logprob in drawn[0].logprobs)


def test_a_guess_that_a_request_of_the_same_seed_has_drawn_changes_no_distribution() -> None:
    """Drafts drawn earlier with the same seed leave the target distribution unchanged."""
    params = SamplingParams(temperature=3.0)
    wanted, rows = target(params), np.repeat(LOGITS[None], 2, 0)
    guesses = dict.fromkeys(range(NUM_DRAWS // 2), (2,))

    for turn in range(3):
        counts = dict[int, int]()
        for seed, guess in guesses.items():
            draw = SampleSpec(1 + turn, 0, 0, params, seed, None, guess if turn else ())
            drawn, _ = sample_batch(rows[: len(draw.draft) + 1], [draw], rejection_sample)
            token = drawn[1 + turn].token_ids[0]
            counts[token] = counts.get(token, 0) + 1
            guesses[seed] = (token,)

        statistic, freedom = chi2(counts, wanted)
        assert statistic < CHI2_999[freedom], f"turn {turn}"
