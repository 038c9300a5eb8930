"""Grouped experts and the compiled router: results of torch, rows independent of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.errors import ConfigError
from ramify.models.ops.functional import silu_and_mul

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.models.ops.cpu_experts import GroupedExperts, GroupedLinear, TopKRouter

NUM_EXPERTS, TOP_K, HIDDEN, INNER, ROWS = 6, 2, 60, 40, 300
DTYPES = [torch.float32, torch.bfloat16]


def matrices(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Gate and up, and down, of each expert."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / 8
    return [*gate_up.to(dtype)], [*down.to(dtype)]


def experts_of(gate_up: list[Tensor], down: list[Tensor]) -> GroupedExperts:
    return GroupedExperts(
        GroupedLinear(lambda i: (gate_up[i], None), NUM_EXPERTS, activation="silu_mul"),
        GroupedLinear(lambda i: (down[i], None), NUM_EXPERTS),
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        shared=None,
    )


def rows_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden rows, and router logits; most tokens go to the first expert."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, NUM_EXPERTS, generator=generator)
    logits[: ROWS * 3 // 4, 0] += 9
    return torch.randn(ROWS, HIDDEN, generator=generator).to(dtype), logits


@pytest.mark.parametrize("normalise", [False, True])
def test_the_router_keeps_the_best_weights_of_a_softmax(*, normalise: bool) -> None:
    """Ties go to the lowest expert; rows do not depend on the batch; NaN stays in its row."""
    router = TopKRouter(NUM_EXPERTS, TOP_K, normalise=normalise)
    _, logits = rows_of(torch.float32)
    scores = logits.softmax(-1)
    best, places = scores.topk(TOP_K)
    expected = best / best.sum(-1, keepdim=True) if normalise else best

    weights = router(logits)

    torch.testing.assert_close(weights, torch.zeros_like(scores).scatter_(1, places, expected))
    for num_rows in (1, 2, 5, 31):
        assert torch.equal(router(logits[:num_rows]), weights[:num_rows])
    assert router(torch.zeros(1, NUM_EXPERTS)).nonzero()[:, 1].tolist() == [0, 1]
    logits[1, 3] = torch.nan
    damaged = router(logits[:3])
    assert damaged[1].isnan().any()
    assert torch.equal(damaged[::2], weights[:3:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_experts_are_the_weighted_sum_of_mlps(dtype: torch.dtype) -> None:
    """Experts of several row blocks, of few rows and of none; any number of rows has the same bits."""
    gate_up, down = matrices(dtype)
    experts = experts_of(gate_up, down)
    x, logits = rows_of(dtype)
    logits[:, 4] = -1e9
    weights = TopKRouter(NUM_EXPERTS, TOP_K, normalise=True)(logits)
    expected = torch.zeros(ROWS, HIDDEN)
    for number in range(NUM_EXPERTS):
        inner = silu_and_mul(*F.linear(x, gate_up[number]).chunk(2, -1))
        expected += F.linear(inner, down[number]).float() * weights[:, number, None]

    out = experts(x, weights)

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    for num_rows in (0, 1, 2, 7, 100, 299):
        assert torch.equal(experts(x[:num_rows], weights[:num_rows]), out[:num_rows])


def test_wrong_shapes_are_refused() -> None:
    """The kernel reads by address and checks nothing."""
    experts = experts_of(*matrices(torch.float32))
    with pytest.raises(ConfigError, match=r"x is torch.float32 \(3, 61\)"):
        experts(torch.zeros(3, 61), torch.zeros(3, NUM_EXPERTS))
