"""Grouped experts and the compiled router: results of torch, rows independent of the batch."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ramify
from ramify.errors import ConfigError
from ramify.models.ops.functional import silu_and_mul

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu.abi import STORE
from ramify.kernels.cpu.op_records import COMBINE, OP_COMBINE, OP_KIND
from ramify.models.ops.cpu.experts import GroupedExperts, GroupedLinear, TopKRouter
from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.quantized import QuantizedWeight
from ramify.models.ops.weight_rounding import quantize_weight

NUM_EXPERTS, TOP_K, HIDDEN, INNER, ROWS = 6, 2, 60, 40, 300
DTYPES = [torch.float32, torch.bfloat16]


def matrices(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Gate and up, and down, of each expert."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator) / 8
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / 8
    return [*gate_up.to(dtype)], [*down.to(dtype)]


def experts_of(gate_up: list[Tensor], down: list[Tensor], top_k: int = TOP_K) -> GroupedExperts:
    return GroupedExperts(
        GroupedLinear(lambda i: (gate_up[i], None), NUM_EXPERTS, activation="silu_mul"),
        GroupedLinear(lambda i: (down[i], None), NUM_EXPERTS),
        num_experts=NUM_EXPERTS,
        top_k=top_k,
        shared=None,
    )


def rows_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden rows, and router logits; most tokens go to the first expert."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, NUM_EXPERTS, generator=generator)
    logits[: ROWS * 3 // 4, 0] += 9
    return torch.randn(ROWS, HIDDEN, generator=generator).to(dtype), logits


def test_each_matrix_is_asked_for_once() -> None:
    """It is read from a file, and rounded perhaps, whenever it is."""
    gate_up, _ = matrices(torch.float32)
    numbers = list[int]()

    def matrix(number: int) -> tuple[Tensor, None]:
        numbers.append(number)
        return gate_up[number], None

    GroupedLinear(matrix, NUM_EXPERTS, activation="silu_mul")

    assert numbers == [*range(NUM_EXPERTS)]


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


def rounded(weight: Tensor, form: str) -> QuantizedWeight:
    """In 4 bits, in 8 with one scale a row, or in 8 with scales that are multiples of factors."""
    if form != "factors":
        return (
            quantize_weight(weight, 4, 32) if form == "4 bits" else quantize_weight(weight, 8, -1)
        )
    plain = quantize_weight(weight, 8, 16)
    spans = plain.scales.unflatten(1, (-1, 16))
    factors = (spans.amax(2) / 100).half()
    wide = factors.float()[:, :, None]
    scales = ((spans / wide).round() * wide).flatten(1)
    return replace(plain, scales=scales, factors=factors[:, None])


@pytest.mark.parametrize("form", ["4 bits", "8 bits", "factors"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantised_experts_have_the_bits_of_their_linears(dtype: torch.dtype, form: str) -> None:
    """Each expert as `PackedLinear`s of its matrices; blocks with tiles and without have the same bits."""
    hidden, inner = 256, 256
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=generator).to(dtype)
    down = torch.randn(NUM_EXPERTS, hidden, inner, generator=generator).to(dtype)
    first, second = ([rounded(m, form) for m in stack] for stack in (gate_up, down))
    experts = GroupedExperts(
        GroupedLinear(lambda i: (first[i], None), NUM_EXPERTS, activation="silu_mul"),
        GroupedLinear(lambda i: (second[i], None), NUM_EXPERTS),
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        shared=None,
    )
    _, logits = rows_of(dtype)
    x = torch.randn(ROWS, hidden, generator=generator).to(dtype)
    weights = TopKRouter(NUM_EXPERTS, TOP_K, normalise=True)(logits)
    mlps = [
        (PackedLinear(first[i], activation="silu_mul"), PackedLinear(second[i]))
        for i in range(NUM_EXPERTS)
    ]

    out = experts(x, weights)

    for token in range(0, ROWS, 7):
        total, row = torch.zeros(1, hidden, dtype=dtype), x[token : token + 1]
        for number in weights[token].nonzero()[:, 0].tolist():
            result = mlps[number][1](mlps[number][0](row))
            total += (result.float() * weights[token, number]).to(dtype)
        assert torch.equal(out[token], total[0])
    for num_rows in (1, 2, 7, 100, 299):
        assert torch.equal(experts(x[:num_rows], weights[:num_rows]), out[:num_rows])


def row_by_row(x: Tensor, weights: Tensor, gate_up: list[Tensor], down: list[Tensor]) -> Tensor:
    """Each token by itself: its experts ascending, rounded after each product and each sum."""
    rows = []
    for token, token_weights in zip(x, weights, strict=True):
        total = torch.zeros(HIDDEN, dtype=x.dtype)
        for number in token_weights.nonzero()[:, 0].tolist():
            gate, up = F.linear(token[None], gate_up[number]).chunk(2, -1)
            result = F.linear(silu_and_mul(gate, up), down[number])[0]
            total += result * token_weights[number].to(x.dtype)
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, NUM_EXPERTS])
@pytest.mark.parametrize("num_rows", [1, 2, 9])
def test_few_rows_of_all_experts_are_those_of_each_row(
    num_rows: int, top_k: int, dtype: torch.dtype
) -> None:
    """A single token that goes to every expert, and to one: near torch, and equal to a batch's rows."""
    gate_up, down = matrices(dtype)
    experts = experts_of(gate_up, down, top_k)
    x, logits = rows_of(dtype)
    weights = TopKRouter(NUM_EXPERTS, top_k, normalise=True)(logits)
    assert int((weights[0] != 0).sum()) == top_k

    out = experts(x[:num_rows], weights[:num_rows])

    expected = row_by_row(x[:num_rows], weights[:num_rows], gate_up, down)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(out, experts(x, weights)[:num_rows])
    singles = [experts(x[row : row + 1], weights[row : row + 1]) for row in range(num_rows)]
    assert torch.equal(out, torch.cat(singles))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_is_stored_over_zeros(dtype: torch.dtype) -> None:
    """The combine op adds to the rows it stores in, and its one caller without `add` zeroes them."""
    experts = experts_of(*matrices(dtype), NUM_EXPERTS)
    x, logits = rows_of(dtype)
    weights = TopKRouter(NUM_EXPERTS, NUM_EXPERTS, normalise=True)(logits)
    launch, stored = experts._run_ops, []

    def watched(ops: Any, *args: Any) -> None:
        for op in ops[(ops[:, OP_KIND] == OP_COMBINE) & (ops[:, COMBINE.mode] == STORE)]:
            num_bytes = int(op[COMBINE.num_rows] * op[COMBINE.out_stride])
            stored.append(ctypes.string_at(int(op[COMBINE.out]), num_bytes) == bytes(num_bytes))
        launch(ops, *args)

    experts._run_ops = watched

    for num_rows in (1, 300):
        experts(x[:num_rows], weights[:num_rows])
    assert stored == [True, True]


def test_no_other_code_stores_the_sum() -> None:
    """A new caller of the combine op without `add` zeroes its rows, and is added here."""
    source = Path(ramify.__file__).parent
    callers = {
        file.relative_to(source).as_posix(): text.count("add=False")
        for file in source.rglob("*.py")
        if "combine_op" in (text := file.read_text(encoding="utf-8"))
    }

    assert callers == {"models/ops/cpu/experts.py": 1, "models/ops/cpu/layer_ops.py": 0}


def test_wrong_shapes_are_refused() -> None:
    """The kernel reads by address and checks nothing."""
    experts = experts_of(*matrices(torch.float32))
    with pytest.raises(ConfigError, match=r"x is torch.float32 \(3, 61\)"):
        experts(torch.zeros(3, 61), torch.zeros(3, NUM_EXPERTS))
