"""Logits and candidates against the processors of transformers, and `min_tokens`."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ramify.engine.execution.sampler import (
    Row,
    Rows,
    filter_logits,
    sample_batch,
    sample_token,
)
from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.step import SampledTokens, SampleSpec
from ramify.errors import DeadEndError
from ramify.params import SamplingParams
from tests.budget import examples

VOCAB, END = 90, 4
SEEDS = st.integers(0, 10_000)


def scores(seed: int, size: int = VOCAB, spread: float = 3.0) -> Row:
    """Random logits, all different."""
    rng = np.random.default_rng(seed)
    different = np.unique((rng.normal(size=size + 50) * spread).astype(np.float32))
    row: Row = rng.choice(different, size, replace=False)
    return row


def draw_of(
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1,),
    output: tuple[int, ...] = (),
    draft: tuple[int, ...] = (),
    stop_ids: tuple[int, ...] = (END,),
    seed: int = 0,
) -> SampleSpec:
    shaping = None
    if LogitsProcessor.is_needed(params):
        stop = frozenset(stop_ids)
        shaper = LogitsProcessor(prompt, params, stop_token_ids=stop, vocab_size=VOCAB)
        shaping = shaper.for_step(list(output), draft)
    position = len(prompt) + len(output)
    return SampleSpec(7, 0, position, params, seed, None, draft, shaping)


def shaped(row: Row, place: int = 0, **options: Any) -> Row:
    known = {name: options.pop(name) for name in ("prompt", "output", "draft") if name in options}
    shaping = draw_of(SamplingParams(**options), **known).logits
    assert shaping is not None
    return shaping.apply(row, place)


def drawn_alone(logits: Rows, draw: SampleSpec) -> SampledTokens:
    drawn, failed = sample_batch(logits, [draw])
    assert not failed
    return drawn[draw.request_id]


def kept(row: Row, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    ids, weights = filter_logits(row, params)
    return np.arange(len(row)) if ids is None else ids, weights


# -- candidates ------------------------------------------------------------------------------


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=SEEDS,
    size=st.sampled_from([2, 17, 90, 3000]),
    spread=st.sampled_from([0.05, 1.0, 4.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 5, 60]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.4, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_yb11_candidates_and_probabilities_are_those_of_transformers(
    seed: int,
    size: int,
    spread: float,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
) -> None:
    """The token that crosses the threshold is kept, in every combination of options."""
    row = scores(seed, size, spread)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.from_numpy(row).double()[None]
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        expected = warper(None, expected)
    probabilities = expected.softmax(-1)[0].numpy()

    ids, weights = kept(row, params)

    assert ids.tolist() == np.flatnonzero(probabilities).tolist()
    np.testing.assert_allclose(weights / weights.sum(), probabilities[ids], rtol=1e-9)


@given(seed=SEEDS, levels=st.integers(1, 4), top_k=st.integers(1, 12), top_p=st.floats(0.05, 1.0))
def test_equal_scores_leave_the_lower_ids(seed: int, levels: int, top_k: int, top_p: float) -> None:
    """On ties, lower ids win: top_k keeps exactly k tokens, top_p no more than it needs."""
    row = np.random.default_rng(seed).integers(levels, size=12).astype(np.float32)
    order = sorted(range(12), key=lambda at: (-row[at], at))[:top_k]
    weights = np.exp(row[order].astype(np.float64) - row.max())
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    nucleus = [at for at, mass in zip(order, before, strict=True) if mass < top_p * weights.sum()]

    ids, _ = kept(row, SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p))

    if np.abs(before - top_p * weights.sum()).min() > 1e-9:
        assert ids.tolist() == sorted(nucleus)


@pytest.mark.parametrize("options", [{"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.15}, {}])
def test_draws_follow_the_probabilities(options: dict[str, Any]) -> None:
    """Chi-square over 10,000 seeds."""
    row, count = scores(5, 12, 1.0), 10_000
    params = SamplingParams(temperature=0.8, **options)
    ids, weights = kept(row, params)
    share = weights / weights.sum()

    seen = Counter(sample_token(row, draw_of(params, seed=seed)) for seed in range(count))

    assert seen.keys() <= set(ids.tolist())
    chi_square = sum(
        (seen[at] - count * p) ** 2 / (count * p) for at, p in zip(ids, share, strict=True)
    )
    assert chi_square < {3: 16.3, 11: 31.3}.get(len(ids) - 1, 27.0)  # one in a thousand


@given(
    seed=SEEDS, top_k=st.sampled_from([None, 2]), top_p=st.floats(0.01, 1.0), min_p=st.floats(0, 1)
)
def test_yb10_temperature_zero_is_greedy_whatever_else_is_asked(
    seed: int, top_k: int | None, top_p: float, min_p: float
) -> None:
    """Penalties, biases and masks still apply; top_k, top_p and min_p do not."""
    row = scores(seed)
    options: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    best = int(row.argmax())

    assert sample_token(row, draw_of(SamplingParams(**options), seed=seed)) == best
    for change in (
        {"logit_bias": {best: -100}},
        {"allowed_token_ids": [token_id for token_id in range(VOCAB) if token_id != best]},
    ):
        second = sample_token(row, draw_of(SamplingParams(**options, **change), seed=seed))
        assert second == int(np.argsort(-row)[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eb14_no_temperature_and_no_top_p_crashes_or_switches_off(temperature: float) -> None:
    """Temperature 0 takes the best token, temperature 1 applies top_p, and top_p=0 is refused."""
    row = np.log(np.array([0.3, 0.5, 0.2])).astype(np.float32)

    tokens = {
        sample_token(row, draw_of(SamplingParams(temperature=temperature, top_p=0.6), seed=seed))
        for seed in range(200)
    }

    assert tokens == ({0, 1} if temperature else {1})
    with pytest.raises(ValueError, match=r"top_p=0.0 .* \(0, 1\]"):
        SamplingParams(top_p=0.0)


# -- scores ----------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS, penalty=st.sampled_from([0.5, 1.1, 1.7]), num_prompt=st.integers(1, 30))
def test_the_repetition_penalty_is_that_of_transformers(
    seed: int, penalty: float, num_prompt: int
) -> None:
    """The penalty equals transformers' bit for bit, for prompt, output and draft tokens."""
    rng = np.random.default_rng(seed)
    tokens = tuple(rng.integers(VOCAB, size=num_prompt + 9).tolist())
    prompt, output, draft = tokens[:num_prompt], tokens[num_prompt:-4], tokens[-4:]
    row = scores(seed)

    for position in range(5):
        actual = shaped(
            row, position, prompt=prompt, output=output, draft=draft, repetition_penalty=penalty
        )

        known = torch.tensor([[*prompt, *output, *draft[:position]]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(known, torch.from_numpy(row)[None])
        assert actual.tobytes() == expected[0].numpy().tobytes()


@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_the_output_only(
    seed: int, presence: float, frequency: float
) -> None:
    """As in the OpenAI API, prompt tokens do not count; drafts before a row count as output."""
    rng = np.random.default_rng(seed)
    prompt, output = (tuple(rng.integers(20, size=12).tolist()) for _ in range(2))
    draft, row = tuple(rng.integers(20, size=3).tolist()), scores(seed)
    options = {"presence_penalty": presence, "frequency_penalty": frequency, "min_tokens": 1}

    for position in range(4):
        actual = shaped(row, position, prompt=prompt, output=output, draft=draft, **options)

        counts = Counter([*output, *draft[:position]])
        expected = [
            score - frequency * counts[at] - presence * (counts[at] > 0)
            for at, score in enumerate(row.tolist())
        ]
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_counts_grow_with_the_output_and_are_the_same_from_scratch() -> None:
    """Counts updated step by step give the bits of counts made from the whole output."""
    rng = np.random.default_rng(2)
    prompt, output = (rng.integers(VOCAB, size=40).tolist() for _ in range(2))
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4)
    growing = LogitsProcessor(prompt, params, stop_token_ids=frozenset(), vocab_size=VOCAB)
    row = scores(1)

    for end in (0, 1, 1, 5, 6, 30, 40):
        fresh = LogitsProcessor(prompt, params, stop_token_ids=frozenset(), vocab_size=VOCAB)
        shaping = growing.for_step(output[:end], ())
        assert (
            shaping.apply(row, 0).tobytes()
            == fresh.for_step(output[:end], ()).apply(row, 0).tobytes()
        )


def test_the_order_is_bias_penalties_masks() -> None:
    """Penalties apply after the bias, and a masked token stays masked however large its bias."""
    row = np.full(VOCAB, 2.0, np.float32)

    actual = shaped(
        row,
        prompt=(3,),
        output=(3, 5),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={3: 10.0, 8: 100},
        allowed_token_ids=[3, 5, 9],
    )

    assert {at: actual[at] for at in np.flatnonzero(np.isfinite(actual))} == {
        3: (2.0 + 10.0) / 2 - 0.75,
        5: 2.0 / 2 - 0.75,
        9: 2.0,
    }
    assert row.tolist() == [2.0] * VOCAB, "the logits themselves are for the log probabilities"


def test_no_end_is_drawn_before_min_tokens() -> None:
    """`min_tokens` masks the end token in draft rows too, up to the row that reaches it."""
    row = np.zeros(VOCAB, np.float32)
    row[END] = 50.0

    end_scores = [
        shaped(row, position, min_tokens=5, output=(9, 9, 9), draft=(8, 8, 8))[END]
        for position in range(4)
    ]

    assert end_scores == [-np.inf, -np.inf, 50.0, 50.0]


def test_a_mask_that_leaves_the_end_only_allows_it() -> None:
    """An end token that alone is allowed overrides `min_tokens`; a row without logits fails."""
    row = scores(1)
    only = SamplingParams(temperature=1.0, allowed_token_ids=[END], min_tokens=3)

    assert sample_token(row, draw_of(only)) == END
    row[:] = -np.inf
    row[8] = 1.0
    _, failed = sample_batch(row[None], [draw_of(only)])
    assert "no token is left for request 7 at position 1" in failed[7]


# -- batches ---------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(seed=SEEDS)
def test_batch_mates_change_nothing(seed: int) -> None:
    """A request draws the same tokens alone and in a batch; a NaN fails only its own request."""
    rng = np.random.default_rng(seed)
    choices: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 0.6, "top_k": 5, "logit_bias": {3: 4.0}},
        {"temperature": 0.0, "frequency_penalty": 1.5, "min_tokens": 9},
        {"temperature": 2.0, "min_p": 0.1, "allowed_token_ids": list(range(0, VOCAB, 7))},
    ]
    draws, rows, starts = [], [], []
    for number in range(12):
        params = SamplingParams(**choices[rng.integers(len(choices))])
        draft = tuple(rng.integers(VOCAB, size=rng.integers(4)).tolist())
        rows.append(np.stack([scores(seed * 50 + number + at) for at in range(len(draft) + 1)]))
        if draft:  # the first guess is right
            draw = draw_of(params, output=(2, 3), draft=draft, seed=number)
            draft = (drawn_alone(rows[-1], draw).token_ids[0], *draft[1:])
        draw = draw_of(params, output=(2, 3), draft=draft, seed=number)
        starts.append(sum(map(len, rows[:-1])))
        draws.append(SampleSpec(number, starts[-1], 3, params, number, 0, draft, draw.logits))
    alone = {draw.request_id: drawn_alone(own, draw) for own, draw in zip(rows, draws, strict=True)}
    logits = np.concatenate(rows)

    together, failed = sample_batch(logits, draws)
    assert together == alone
    assert not failed

    logits[starts[4], 3] = np.nan
    rest, failed = sample_batch(logits, draws)
    assert list(failed) == [4]
    assert rest == {request_id: tokens for request_id, tokens in alone.items() if request_id != 4}


def test_a_follower_that_is_told_a_dead_end_says_so() -> None:
    """A grammar that accepts none of `allowed_token_ids` raises DeadEndError."""

    class Never:
        def advance(self, output_ids: object) -> bool:
            return False

        def token_bitmasks(self, output_ids: object, draft: object) -> list[Any]:
            return [np.array([1, *[0] * 11], np.uint8)]

    params = SamplingParams(allowed_token_ids=[5])

    with pytest.raises(DeadEndError, match="allowed_token_ids"):
        LogitsProcessor((1,), params, stop_token_ids=frozenset(), vocab_size=VOCAB, matcher=Never())
