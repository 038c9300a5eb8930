"""The softmax of a row of scores, in float32 and for pairs, beside float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

import numba

from ramify.kernels.cpu.simd import HAS_BF16_DOT, TILE_N
from ramify.kernels.cpu.threads import aligned_zeros
from ramify.kernels.cpu.vector_math import exp_minus_max, exp_minus_max_vnni, exp_scalar, row_max

# Callable from Python, unlike functions inside kernels.
callable_jit = numba.njit(error_model="numpy")
KINDS = [
    "float32",
    pytest.param("pairs", marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="no pairs")),
]


@callable_jit
def of_floats(row, count):
    top = row_max(row, count)
    return top, exp_minus_max(row, count, top)


@callable_jit
def of_pairs(row, count):
    top = row_max(row, count)
    return top, exp_minus_max_vnni(row, count, top)


@callable_jit
def of_one(x):
    return exp_scalar(x)


def softmax(scores: np.ndarray, kind: str) -> tuple[np.ndarray, float, float]:
    """Weights as float32, their maximum and their sum."""
    row = aligned_zeros(1, len(scores))[0]
    row[:] = scores
    if kind == "float32":
        return row, *of_floats(row.ctypes.data, len(row))
    peak, total = of_pairs(row.ctypes.data, len(row))
    stored = torch.from_numpy(row[: len(row) // 2].view(np.int16)).view(torch.bfloat16)
    return stored.float().numpy(), peak, total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_weights_are_exponentials(kind: str, spread: float) -> None:
    draw = np.random.default_rng(int(100 * spread))
    for count in (TILE_N, 5 * TILE_N, 256):
        scores = (draw.standard_normal(count) * spread).astype(np.float32)
        weights, peak, total = softmax(scores, kind)
        exact = np.exp((scores - scores.max()).astype(np.float64))  # rounded as the row is
        assert peak == scores.max()
        assert weights[scores.argmax()] == 1
        assert total == pytest.approx(weights.sum(dtype=np.float64), rel=1e-6)
        if kind == "float32":
            assert np.allclose(weights, exact, rtol=3e-7, atol=1e-37)
            continue
        exact[exact < 2**-126] = 0  # as pairs hold none
        nearest = torch.from_numpy(exact).bfloat16().double().numpy()
        assert np.allclose(weights, exact, rtol=2**-7.99, atol=1e-37)
        assert (weights == nearest).mean() > 0.99  # the others lie in the middle of two


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_seen_weighs_nothing(kind: str) -> None:
    scores = np.random.default_rng(1).standard_normal(64).astype(np.float32)
    weights, peak, total = softmax(scores, kind)
    longer = np.concatenate([scores, np.full(192, -np.inf, np.float32)])
    again, *rest = softmax(longer, kind)
    assert np.array_equal(again[:64], weights)
    assert not again[64:].any()
    assert rest == [peak, total]
    later = np.concatenate([np.full(3 * TILE_N, -np.inf, np.float32), scores])
    again, *rest = softmax(later, kind)  # a window has begun
    assert not again[: 3 * TILE_N].any()
    assert np.array_equal(again[3 * TILE_N :], weights)
    assert rest == [peak, total]


def test_one_exponential_has_the_bits_of_a_row_of_them() -> None:
    """Running sums are folded with the one, weights are the others."""
    draw = np.random.default_rng(2)
    row = np.concatenate([[0.0, -87.0, -87.5, -1e30], -draw.exponential(20.0, 252)])
    row = row.astype(np.float32)
    weights, _, _ = softmax(row, "float32")
    assert np.array_equal([of_one(x) for x in row], weights)


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str) -> None:
    scores = np.full(TILE_N, -1e30, np.float32)
    scores[:6] = 3.0, 3.0 - 88.0, 3.0 - 104.0, 3.0 - 1000.0, -np.inf, -3.4e38
    weights, peak, total = softmax(scores, kind)
    assert (peak, total) == (3.0, 1.0)
    assert weights[0] == 1
    assert not weights[1:].any()
    scores[7] = np.nan
    weights, _, total = softmax(scores, kind)
    assert np.isnan(weights).tolist() == [at == 7 for at in range(TILE_N)]
    assert np.isnan(total)
    scores[7] = np.inf
    weights, peak, _ = softmax(scores, kind)
    assert peak == np.inf
    assert np.isnan(weights[7])
