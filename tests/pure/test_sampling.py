"""Sampling, from logits to a token, compared with distributions computed by hand."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.execution.sampler import (
    Row,
    log_softmax,
    philox_uniform,
    sample_token,
    token_logprob,
)
from ramify.engine.step import SampleSpec
from ramify.params import SamplingParams


def draw(
    logits: Row,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 0,
) -> int:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    return sample_token(logits, SampleSpec(0, 0, position, params, seed, None))


def row(*probabilities: float) -> Row:
    logits: Row = np.log(np.array(probabilities)).astype(np.float32)
    return logits


def kept(logits: Row, *, count: int = 400, **options: float | None) -> set[int]:
    """Return the tokens that `count` draws with different seeds give."""
    return {draw(logits, seed=seed, **options) for seed in range(count)}  # type: ignore[arg-type]


ROWS = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


@given(values=ROWS, top_k=st.sampled_from([None, 1, 3]), top_p=st.sampled_from([0.01, 0.5, 1.0]))
def test_temperature_zero_takes_the_likeliest(
    values: list[float], top_k: int | None, top_p: float
) -> None:
    """Temperature 0 takes the largest logit, lowest id on ties, whatever top_k, top_p and seed."""
    logits = np.array(values, np.float32)

    token = draw(logits, temperature=0.0, top_k=top_k, top_p=top_p, seed=len(values))

    assert token == values.index(max(values))


@given(values=ROWS, seed=st.integers(0, 2**63 - 1), temperature=st.sampled_from([0.1, 1.0, 3.0]))
def test_top_k_of_one_and_a_tiny_nucleus_are_greedy(
    values: list[float], seed: int, temperature: float
) -> None:
    """top_k=1 and a tiny top_p leave the likeliest token, the lowest id on ties."""
    logits = np.array(values, np.float32)
    greedy = values.index(max(values))

    assert draw(logits, temperature=temperature, top_k=1, seed=seed) == greedy
    assert draw(logits, temperature=temperature, top_p=1e-9, seed=seed) == greedy


@pytest.mark.parametrize(
    ("top_p", "tokens"),
    [(0.3, {0}), (0.45, {0}), (0.6, {0, 1}), (0.75, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2})],
)
def test_the_nucleus_keeps_the_token_that_crosses(top_p: float, tokens: set[int]) -> None:
    """The nucleus includes the token that reaches top_p: of .5, .3, .2, top_p=.6 keeps two."""
    assert kept(row(0.5, 0.3, 0.2), top_p=top_p) == tokens


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    """top_p applies after top_k: of .5 and .3 the first has 5/8, enough for .6 but not for .7."""
    logits = row(0.5, 0.3, 0.2)

    assert kept(logits, top_k=2, top_p=0.6) == {0}
    assert kept(logits, top_k=2, top_p=0.7) == {0, 1}


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    """top_k keeps exactly k tokens; ties go to the lower id."""
    logits = np.array([1, 2, 2, 2, 0], np.float32)

    assert kept(logits, top_k=2) == {1, 2}
    assert kept(logits, top_k=3) == {1, 2, 3}
    assert kept(logits, top_k=4) == {0, 1, 2, 3}
    assert kept(logits, top_k=99) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_follow_the_distribution(temperature: float, by: str) -> None:
    """10,000 draws over seeds, or over positions, pass a chi-square test."""
    weights = np.array([0.35, 0.25, 0.2, 0.1, 0.06, 0.04]) ** (1 / temperature)
    share = weights / weights.sum()
    logits, count = row(0.35, 0.25, 0.2, 0.1, 0.06, 0.04), 10_000

    seen = Counter(
        draw(logits, temperature=temperature, **{"seed": 11, "position": 3, by: number})
        for number in range(count)
    )

    chi_square = sum((seen[at] - count * p) ** 2 / (count * p) for at, p in enumerate(share))
    assert chi_square < 20.5  # 5 degrees of freedom, one in a thousand


@given(values=ROWS, seed=st.integers(0, 2**63 - 1), top_p=st.floats(0.05, 1.0))
def test_a_draw_is_inversion_of_the_distribution(
    values: list[float], seed: int, top_p: float
) -> None:
    """`draw` gives the token of a plain inversion loop over the nucleus by token id."""
    logits = np.array(values, np.float32)
    ranked = sorted(range(len(values)), key=lambda at: (-logits[at], at))
    weights = [math.exp(float(logits[at]) - float(logits.max())) for at in ranked]
    nucleus, mass = [], 0.0
    for at, weight in zip(ranked, weights, strict=True):
        nucleus.append((at, weight))
        mass += weight
        if top_p < 1.0 and mass >= top_p * sum(weights):
            break
    nucleus.sort()
    target, low = philox_uniform(seed, 9) * mass, 0.0
    near = [low := low + weight for _, weight in nucleus]
    place = next(at for at, end in enumerate(near) if end > target or at == len(near) - 1)

    token = draw(logits, seed=seed, position=9, top_p=top_p)

    borders = [abs(end - target) for end in near] + [
        abs(sum(weights[:at]) - top_p * sum(weights)) for at in range(len(weights) + 1)
    ]
    assert token == nucleus[place][0] or min(borders) < 1e-9 * mass


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    """A tiny temperature is greedy without overflow or NaN; warnings are errors here."""
    logits = np.array([-1e30, 3.0, 80.0, 79.9], np.float32)

    assert kept(logits, temperature=temperature, count=20) == {2}


def test_a_huge_temperature_is_uniform() -> None:
    """At a huge temperature every token is drawn, without overflow."""
    assert kept(np.array([-80, 0, 80], np.float32), temperature=1e300) == {0, 1, 2}


def test_a_forbidden_token_is_never_drawn() -> None:
    """A logit of minus infinity is never drawn."""
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0], np.float32)

    assert kept(logits, temperature=5.0) == {1, 3}
    assert draw(logits, temperature=0.0) == 1


def test_the_number_depends_on_seed_and_position_only() -> None:
    """The random number depends only on seed and position, and differs for every pair."""
    first = [philox_uniform(seed, position) for seed in range(40) for position in range(40)]

    np.random.default_rng(0).random(100)
    again = [philox_uniform(seed, position) for seed in range(40) for position in range(40)]

    assert first == again
    assert len(set(first)) == 1600
    assert all(0.0 <= number < 1.0 for number in first)
    assert abs(sum(first) / 1600 - 0.5) < 0.03
    assert philox_uniform(2**63 - 1, 2**31 - 1) != philox_uniform(2**63 - 1, 2**31 - 2)


@given(values=ROWS, num_top=st.integers(0, 50))
def test_logprobs_are_natural_and_sorted(values: list[float], num_top: int) -> None:
    """Log probabilities sum to 1; `top` has min(n, vocabulary) entries, ties by the lower id."""
    logits = np.array(values, np.float32)
    scores = log_softmax(logits)
    ranked = sorted(range(len(values)), key=lambda at: (-scores[at], at))

    actual = token_logprob(logits, len(values) - 1, num_top)

    assert math.isclose(float(np.exp(scores).sum()), 1.0, rel_tol=1e-12)
    assert type(actual.logprob) is float
    assert actual.logprob == scores[-1]
    assert list(actual.top) == ranked[:num_top]
    assert all(actual.top[at] == scores[at] for at in actual.top)
