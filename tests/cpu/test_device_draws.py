"""Tokens drawn on the device of the logits are those that the host draws from them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.execution.device_draws import DrawOptions, draw_tokens, philox_uniforms
from ramify.engine.execution.sampler import (
    filter_logits,
    philox_uniform,
    rejection_sample,
    sample_from_cdf,
)
from ramify.params import SamplingParams
from tests.budget import examples

WIDTHS = [1, 7, 64, 301]


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40)),
        min_size=1,
        max_size=9,
    )
)
def test_random_numbers_are_those_of_the_host(keys: list[tuple[int, int, int]]) -> None:
    """The same bits for every seed, position and stream."""
    columns = [torch.tensor(column) for column in zip(*keys, strict=True)]

    numbers = philox_uniforms(*columns)

    assert numbers.tolist() == [philox_uniform(*key) for key in keys]


def column(values: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)[:, None]


@settings(max_examples=examples(300), deadline=None)
@given(
    width=st.sampled_from(WIDTHS),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.01, 0.7, 1.0, 3.0]),
            st.sampled_from([None, 1, 2, 50]),
            st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
            st.sampled_from([0.0, 0.05, 0.6, 1.0]),
            st.floats(0, 1, exclude_max=True),
            st.integers(-1, 6),
        ),
        min_size=1,
        max_size=5,
    ),
    num_levels=st.sampled_from([2, 5, 1000]),  # few: many equal logits
    num_forbidden=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_tokens_are_those_of_the_host(
    width: int,
    rows: list[tuple[float, int | None, float, float, float, int]],
    num_levels: int,
    num_forbidden: int,
    seed: int,
) -> None:
    """Every combination of options, ties at the borders and forbidden tokens included."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, num_levels, (len(rows), width)).astype(np.float32) / 7
    if width > num_forbidden:
        logits[:, rng.permutation(width)[:num_forbidden]] = -np.inf
    temperatures, top_ks, top_ps, min_ps, numbers, drafts = map(list, zip(*rows, strict=True))
    options = DrawOptions(
        column(temperatures),
        torch.tensor(numbers, dtype=torch.float64),
        column([width if k is None else min(k, width) for k in top_ks], torch.int64),
        column(top_ps),
        column(min_ps),
    )
    drafts = [draft if draft < width else -1 for draft in drafts]

    drawn = draw_tokens(torch.from_numpy(logits), options).tolist()
    verified = draw_tokens(torch.from_numpy(logits), options, torch.tensor(drafts)).tolist()

    for row, draft in enumerate(drafts):
        temperature, top_k, top_p, min_p, number, _ = rows[row]
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        ids, weights = filter_logits(logits[row], params)
        assert drawn[row] == sample_from_cdf(ids, weights.copy(), number, None)
        wanted = None if draft < 0 else draft
        assert verified[row] == rejection_sample(ids, weights.copy(), number, wanted)


def test_options_that_no_row_has_are_left_out() -> None:
    """Without columns of top-k, top-p and min-p nothing is sorted, and the tokens are the same."""
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((64, 500), np.float32))
    numbers = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ones = torch.ones(64, 1, dtype=torch.float64)

    plain = draw_tokens(logits, DrawOptions(ones, numbers))
    full = draw_tokens(
        logits,
        DrawOptions(ones, numbers, torch.full((64, 1), 500), ones, torch.zeros_like(ones)),
    )

    assert torch.equal(plain, full)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_draw_tokens_with_weight(number: float) -> None:
    """No number draws a forbidden token."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])

    token = draw_tokens(
        logits,
        DrawOptions(torch.ones(1, 1, dtype=torch.float64), torch.tensor([number]).double()),
    )

    assert token.tolist() == [1 if number == 0.0 else 2]
