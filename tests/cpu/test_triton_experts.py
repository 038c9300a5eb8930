"""Mixtures of experts by Triton's kernels in the interpreter: the loop's bits, whatever is routed where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

from ramify.attention.exactness import ProbeStore
from ramify.kernels.triton.expert_pairs import ExpertPairs, max_blocks, sort_pairs
from ramify.kernels.triton.gemm import BatchInvariantGemm, GemmTiles
from ramify.kernels.triton.grouped_gemm import GroupedGemm
from ramify.models.ops import torch_ops
from ramify.models.ops.functional import silu_and_mul
from ramify.models.ops.mlp import LoopedExperts
from ramify.models.ops.quantized import QuantizedWeight
from ramify.models.ops.sharded.rank_group import share
from ramify.models.ops.sharded.sharded_ops import ExpertShare
from ramify.models.ops.triton_experts import GroupedExperts, RoutedExperts
from ramify.models.ops.triton_ops import TritonOps
from tests.cpu.attention_cases import assert_same_bits

ROWS, NUM_EXPERTS, TOP_K = 11, 5, 2
HIDDEN, INNER = 20, 24  # of which no tile is a divisor
TILES = GemmTiles(rows=4, columns=32, block_k=16, split_k=16, group_rows=2)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROUTINGS = ("by chance", "to one expert", "two experts are empty", "a weight is zero")


def weights_of(routing: str, num_rows: int = ROWS) -> Tensor:
    """[rows, experts] float32, not 0 for at most `TOP_K` of a row."""
    noise = torch.Generator().manual_seed(5)
    scores = torch.rand(num_rows, NUM_EXPERTS, generator=noise) + 0.1
    if routing == "two experts are empty":
        scores[:, [1, 3]] = 0.0
    best = scores.topk(1 if routing == "to one expert" else TOP_K).indices
    if routing == "to one expert":
        best.fill_(3)
    weights = torch.zeros_like(scores).scatter_(1, best, scores.gather(1, best))
    if routing == "a weight is zero":
        weights[2, best[2, 0]] = 0.0
        weights[7] = 0.0
    return weights


def matrices_of(dtype: torch.dtype, *, has_bias: bool = False) -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(6)
    shapes = {"gate_up": (NUM_EXPERTS, 2 * INNER, HIDDEN), "down": (NUM_EXPERTS, HIDDEN, INNER)}
    matrices = {
        name: torch.randn(shape, generator=noise) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    if has_bias:
        for name, shape in shapes.items():
            matrices[f"{name}_bias"] = torch.randn(shape[:2], generator=noise)
    return {name: matrix.to(dtype) for name, matrix in matrices.items()}


def rows_of(dtype: torch.dtype, num_rows: int = ROWS) -> Tensor:
    return torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(7)).to(dtype)


def routed_of(matrices: dict[str, Tensor], top_k: int = TOP_K) -> RoutedExperts:
    gate_up, down = (
        GroupedGemm(matrices[name], matrices.get(f"{name}_bias"), tiles=TILES)
        for name in ("gate_up", "down")
    )
    return RoutedExperts(gate_up, down, "silu_mul", top_k)


def looped_of(matrices: dict[str, Tensor]) -> LoopedExperts:
    """The loop over experts, by the GEMM of one matrix and Triton's activation."""
    from ramify.kernels.triton.activation import gated_activation

    def expert(number: int) -> Any:
        first, second = (
            BatchInvariantGemm(
                matrices[name][number],
                matrices[f"{name}_bias"][number] if f"{name}_bias" in matrices else None,
                tiles=TILES,
            )
            for name in ("gate_up", "down")
        )
        return lambda x, _: second(gated_activation(first(x), "silu_mul"))

    return LoopedExperts(tuple(map(expert, range(NUM_EXPERTS))), None)


def listed(pairs: ExpertPairs) -> dict[int, list[int]]:
    """The pairs of each expert, by the blocks."""
    by_expert: dict[int, list[int]] = {}
    blocks = zip(pairs.block_experts.tolist(), pairs.pairs.tolist(), strict=True)
    for expert, block in blocks:
        if expert >= 0:
            by_expert.setdefault(expert, []).extend(block)
    return by_expert


@pytest.mark.parametrize("routing", ROUTINGS)
def test_pairs_are_sorted_into_blocks_of_an_expert(routing: str) -> None:
    """In the order of rows, the last block of an expert filled up; blocks of no expert come last."""
    weights = weights_of(routing)

    pairs = sort_pairs(weights, TOP_K, 4)

    for row in range(ROWS):
        experts = weights[row].nonzero()[:, 0].tolist()
        missing = TOP_K - len(experts)
        assert pairs.experts[row].tolist() == [*experts, *[-1] * missing]
        assert_same_bits(pairs.weights[row, : len(experts)], weights[row, experts])
    expected: dict[int, list[int]] = {}
    for pair, expert in enumerate(pairs.experts.flatten().tolist()):
        if expert >= 0:
            expected.setdefault(expert, []).append(pair)
    for own in expected.values():
        own.extend([ROWS * TOP_K] * (-len(own) % 4))
    assert listed(pairs) == expected
    experts_of_blocks = pairs.block_experts.tolist()
    num_used = sum(len(own) // 4 for own in expected.values())
    assert experts_of_blocks[:num_used] == sorted(experts_of_blocks[:num_used])
    assert set(experts_of_blocks[num_used:]) <= {-1}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_pairs_are_sorted_alike_however_many_are_read_at_a_time(routing: str) -> None:
    """All at once, or a few in each of several turns, as of more than a thousand pairs."""
    weights = weights_of(routing)

    whole, parts = (sort_pairs(weights, TOP_K, 4, scan_block=size) for size in (1024, 2))

    assert listed(parts) == listed(whole)
    assert torch.equal(parts.block_experts, whole.block_experts)


def test_blocks_are_bounded_by_rows_and_experts() -> None:
    """As many as the worst distribution fills, and never more than a block for each pair."""
    assert max_blocks(1 * 8, 256, 64) == 8
    assert max_blocks(64 * 8, 256, 64) == (512 + 256 * 63) // 64
    assert max_blocks(0, 4, 16) == 0
    for counts in ((33, 0, 0, 0), (1, 1, 1, 30), (17, 16, 0, 0), (9, 8, 8, 8)):
        assert sum(-(-count // 16) for count in counts) <= max_blocks(33, 4, 16)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_have_the_bits_of_the_loop(dtype: torch.dtype, routing: str) -> None:
    """Tails of all tiles, empty experts, all rows to one: the loop over the GEMM of one matrix."""
    matrices, weights, x = matrices_of(dtype, has_bias=True), weights_of(routing), rows_of(dtype)

    out = routed_of(matrices)(x, weights)

    assert_same_bits(out, looped_of(matrices)(x, weights))
    expected = torch.zeros(ROWS, HIDDEN, dtype=torch.float64)
    for number in range(NUM_EXPERTS):
        inner = F.linear(x, matrices["gate_up"][number], matrices["gate_up_bias"][number])
        inner = silu_and_mul(*inner.chunk(2, -1))
        product = F.linear(inner, matrices["down"][number], matrices["down_bias"][number])
        expected += product.double() * weights[:, number, None]
    error = (out.double() - expected).abs() / (1 + expected.abs())
    assert float(error.max()) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_experts_has_its_bits_in_any_batch(dtype: torch.dtype) -> None:
    """Alone, in a chunk, in another order: the place of a pair in a block changes nothing."""
    routed, weights, x = routed_of(matrices_of(dtype)), weights_of("by chance"), rows_of(dtype)
    expected = routed(x, weights)

    for rows in (slice(0, 1), slice(3, 8)):
        assert_same_bits(routed(x[rows], weights[rows]), expected[rows])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert_same_bits(routed(x[order], weights[order]), expected[order])
    assert routed(x[:0], weights[:0]).shape == (0, HIDDEN)


def test_a_damaged_row_damages_no_other() -> None:
    """A row whose weights or values are NaN is NaN; no other is."""
    weights, x = weights_of("by chance"), rows_of(torch.float32)
    routed = routed_of(matrices_of(torch.float32))
    expected = routed(x, weights)
    x[4, 3], weights[6, weights[6] != 0] = torch.nan, torch.nan

    out = routed(x, weights)

    rest = [row for row in range(ROWS) if row not in (4, 6)]
    assert out[[4, 6]].isnan().all()
    assert_same_bits(out[rest], expected[rest])


# -- bound to a checkpoint's weights --------------------------------------------------------------


def checkpoint_of(dtype: torch.dtype, *, has_shared: bool = True) -> dict[str, Any]:
    matrices, tensors = matrices_of(dtype), dict[str, Any]()
    for number in range(NUM_EXPERTS):
        gate, up = matrices["gate_up"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": matrices["down"][number]}
        tensors |= {f"experts.{number}.{name}.weight": part for name, part in parts.items()}
        if number == 0 and has_shared:
            tensors |= {f"shared.{name}.weight": part / 2 for name, part in parts.items()}
    return tensors


def ops_of(tensors: dict[str, Any], **options: Any) -> TritonOps:
    return TritonOps(tensors, dtype=torch.float32, max_len=16, store=ProbeStore(None), **options)


def bind(ops: Any, num_experts: int = NUM_EXPERTS, shared: str | None = "shared.") -> Any:
    return ops.experts("experts.", num_experts=num_experts, top_k=TOP_K, shared=shared)


@pytest.mark.parametrize("exact", [True, False])
def test_operations_bind_grouped_experts(*, exact: bool) -> None:
    """Exact or not; with a shared expert; a graph can hold them, and the report says what runs."""
    ops, x, weights = ops_of(checkpoint_of(torch.float32), exact=exact), *rows_and_weights()

    experts = bind(ops)

    assert isinstance(experts, GroupedExperts) and ops.reason_not_captured is None
    plain = torch_ops.TorchOps(
        checkpoint_of(torch.float32), dtype=torch.float32, max_len=16, store=ProbeStore(None)
    )
    torch.testing.assert_close(experts(x, weights), bind(plain)(x, weights), rtol=1e-5, atol=1e-5)
    [verdict] = [entry for entry in ops.exactness() if entry.operation == "experts"]
    assert verdict.strategy == "triton" and verdict.shape == (NUM_EXPERTS, 2 * INNER, HIDDEN)


def rows_and_weights() -> tuple[Tensor, Tensor]:
    return rows_of(torch.float32), weights_of("by chance")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("quantised", "int8 codes: the grouped GEMM takes floats"),
        ("another width", "expert 3 has (44, 20) torch.float32, expert 0 (48, 20) torch.float32"),
        ("a bias", "some experts have a bias, others none"),
    ],
)
def test_other_matrices_are_looped_over_with_a_reason(kind: str, reason: str) -> None:
    """Quantised matrices and those that are not alike; the report says why, and no graph holds them."""
    tensors = checkpoint_of(torch.float32)
    for name in ("gate_proj", "up_proj", "down_proj"):
        key = f"experts.3.{name}.weight"
        if kind == "quantised":
            tensors[key] = QuantizedWeight.int8(tensors[key])
        elif kind == "another width":
            tensors[key] = tensors[key][:, :22] if name == "down_proj" else tensors[key][:22]
        else:
            tensors[f"experts.3.{name}.bias"] = torch.ones(len(tensors[key]))
    ops, (x, weights) = ops_of(tensors), rows_and_weights()

    experts = bind(ops)

    assert isinstance(experts, LoopedExperts)
    [verdict] = [entry for entry in ops.exactness() if entry.operation == "experts"]
    assert verdict.strategy == "loop"
    assert verdict.reason == f"the host reads the routing: {reason}"
    assert verdict.reason in str(ops.reason_not_captured)
    assert experts(x, weights).isfinite().all()


class Alone:
    """In place of a group of ranks: the parts are added up by the test."""

    def add_up(self, part: Tensor) -> Tensor:
        return part


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_add_up_to_all_experts(size: int) -> None:
    """Experts of other ranks contribute nothing, and a rank may have none of a row's."""
    x, weights = rows_and_weights()
    tensors, parts = checkpoint_of(torch.float32, has_shared=False), list[Tensor]()
    expected = bind(ops_of(tensors), shared=None)(x, weights)

    for rank in range(size):
        begin, end = share(NUM_EXPERTS, rank, size)
        own = {
            f"experts.{number - begin}.{name}.weight": tensors[f"experts.{number}.{name}.weight"]
            for number in range(begin, end)
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        experts = ops_of(own).experts(
            "experts.", num_experts=end - begin, top_k=min(TOP_K, end - begin), shared=None
        )
        assert isinstance(experts, GroupedExperts)
        group: Any = Alone()
        parts.append(ExpertShare(experts, begin, end, group)(x, weights))

    torch.testing.assert_close(sum(parts[1:], parts[0]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_variant", [False, True])
def test_experts_are_probed_on_a_device(is_variant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts whose rows depend on their number are called row by row, and no row changes."""
    monkeypatch.setattr(TritonOps, "probes_kernels", True)
    monkeypatch.setattr(TritonOps, "probe_counts", (1, 5))
    monkeypatch.setattr(
        torch_ops, "sample_rows", lambda *shape, dtype: torch.randn(14, *shape).to(dtype)
    )
    if is_variant:
        compute = RoutedExperts.__call__
        monkeypatch.setattr(
            RoutedExperts,
            "__call__",
            lambda self, *args: compute(self, *args) * (1 + 2**-20 * len(args[0])),
        )
    ops, (x, weights) = ops_of(checkpoint_of(torch.float32)), rows_and_weights()

    experts = bind(ops, shared=None)

    [verdict] = [entry for entry in ops.exactness() if entry.operation == "experts"]
    assert (verdict.strategy == "triton") != is_variant
    assert_same_bits(experts(x, weights)[2:5], experts(x[2:5], weights[2:5]))
