"""Tokens that are drawn around a guess have the target's distribution, whatever was guessed."""

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
    """The distribution that tokens must have, from its definition."""
    weights = np.exp(LOGITS.astype(np.float64) / params.temperature)
    order = np.argsort(-weights)[: params.top_k]
    mass = np.cumsum(weights[order])
    order = order[: int(np.searchsorted(mass, params.top_p * mass[-1])) + 1]
    return {int(one): float(weights[one] / weights[order].sum()) for one in order}


def chi2(found: dict[int, int], wanted: dict[int, float]) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; what is expected too seldom is put together."""
    total = sum(found.values())
    assert not found.keys() - wanted.keys(), "a token that cannot be drawn"
    often = [one for one, share in wanted.items() if share * total >= 10]
    cells = [(found.get(one, 0), wanted[one] * total) for one in often]
    rest = 1.0 - sum(wanted[one] for one in often)
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
    """Likely guesses, unlikely ones, and those that top-k or top-p rule out; by counting."""
    wanted, found = target(params), dict[int, int]()
    ids, weights = filter_logits(LOGITS, params)

    for position in range(NUM_DRAWS):
        token = rejection_sample(ids, weights.copy(), philox_uniform(17, position), guess)
        found[token] = found.get(token, 0) + 1

    statistic, freedom = chi2(found, wanted)
    assert statistic < CHI2_999[freedom]


@pytest.mark.parametrize("choose", [rejection_sample, sample_from_cdf])
@pytest.mark.parametrize("params", PARAMS[:4])
def test_pairs_of_tokens_have_the_targets_distribution_too(
    params: SamplingParams, choose: object
) -> None:
    """A draft of two over rows that do not depend on it: the first two tokens are independent.

    Which of them a step draws depends on what was accepted; the second one is drawn in the next
    step when the first guess was wrong.
    """
    wanted = target(params)
    draft, found, steps = (1, 3), dict[tuple[int, int], int](), 0

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
        found[pair] = found.get(pair, 0) + 1

    total = sum(found.values())
    for place in (0, 1):
        singles: dict[int, int] = {}
        for pair, count in found.items():
            singles[pair[place]] = singles.get(pair[place], 0) + count
        statistic, freedom = chi2(singles, wanted)
        assert statistic < CHI2_999[freedom]
    both = found.get((1, 3), 0) / total
    assert both == pytest.approx(wanted[1] * wanted[3], abs=4 * (0.25 / total) ** 0.5)
    assert steps < 2 * total


@pytest.mark.parametrize("params", PARAMS)
def test_equality_accepts_as_often_as_rejection(params: SamplingParams) -> None:
    """With guesses that are certain of themselves both accept with the target's probability."""
    ids, weights = filter_logits(LOGITS, params)
    share = target(params)[1]

    rates = [
        sum(choose(ids, weights.copy(), philox_uniform(5, at), 1) == 1 for at in range(NUM_DRAWS))
        / NUM_DRAWS
        for choose in (rejection_sample, sample_from_cdf)
    ]

    assert rates == [pytest.approx(share, abs=4 * (0.25 / NUM_DRAWS) ** 0.5)] * 2


def test_a_guess_with_all_of_the_mass_is_accepted() -> None:
    """And one with none of it never; nothing is divided by 0."""
    ids = np.array([4, 9])

    for number in (0.0, 0.5, np.nextafter(1.0, 0.0)):
        assert rejection_sample(ids, np.array([0.0, 2.0]), number, 9) == 9
        assert rejection_sample(ids, np.array([0.0, 2.0]), number, 4) == 9
        assert rejection_sample(ids[:1], np.array([1.0]), number, 4) == 4
        assert rejection_sample(ids, np.array([1e-300, 1.0]), number, 9) == 9


def test_greedy_requests_are_not_left_to_chance() -> None:
    """Temperature 0 takes the likeliest token, guessed or not."""
    rows = np.repeat(LOGITS[None], 3, 0)
    draw = SampleSpec(0, 0, 5, SamplingParams(), 3, None, (1, 3))

    drawn, _ = sample_batch(rows, [draw], rejection_sample)

    assert drawn[0].token_ids == (1, 1) == sample_batch(rows, [draw])[0][0].token_ids


def test_log_probabilities_come_with_every_token() -> None:
    """Of the model's own distribution, accepted or not."""
    rows = np.repeat(LOGITS[None], 3, 0)
    draw = SampleSpec(0, 0, 5, SamplingParams(temperature=1.0), 3, 2, (1, 1))

    drawn, _ = sample_batch(rows, [draw], rejection_sample)

    assert [one.token_id for one in drawn[0].logprobs] == list(drawn[0].token_ids)
    assert all(len(one.top) == 2 for one in drawn[0].logprobs)


def test_a_guess_that_a_request_of_the_same_seed_has_drawn_changes_no_distribution() -> None:
    """What drew it must not decide about it: asked again and again, tokens would drift to one."""
    params = SamplingParams(temperature=3.0)
    wanted, rows = target(params), np.repeat(LOGITS[None], 2, 0)
    guesses = dict.fromkeys(range(NUM_DRAWS // 2), (2,))

    for turn in range(3):
        found = dict[int, int]()
        for seed, guess in guesses.items():
            draw = SampleSpec(1 + turn, 0, 0, params, seed, None, guess if turn else ())
            drawn, _ = sample_batch(rows[: len(draw.draft) + 1], [draw], rejection_sample)
            token = drawn[1 + turn].token_ids[0]
            found[token] = found.get(token, 0) + 1
            guesses[seed] = (token,)

        statistic, freedom = chi2(found, wanted)
        assert statistic < CHI2_999[freedom], f"turn {turn}"
