"""Token-expert pairs of a mixture of experts, sorted by expert into blocks on the device, and their weighted sum.

Pair `t * top_k + j` is row t with expert number j of those that it is routed to, in ascending order. A
block holds pairs of one expert. Nothing is read back: shapes and launches depend on the number of rows.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ramify.kernels.triton.launch import aligned, padded
from ramify.kernels.triton.rounding import round_to

SCAN_BLOCK = 1024
SUM_BLOCK = 1024


@triton.jit(do_not_specialize=["stride"])
def list_pairs(
    weights, experts, pair_weights, stride,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TOP_K: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """List the experts of a row in ascending order, then -1, and their weights. Grid: (rows,).

    Args:
        weights: [rows, NUM_EXPERTS] of that stride; 0 where a row is not routed to an expert.
        experts: [rows, TOP_K] int32; pair_weights: [rows, TOP_K].
    """
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    weight = tl.load(weights + row * stride + expert, mask=expert < NUM_EXPERTS, other=0.0)
    is_routed = weight != 0.0  # NaN is
    column = tl.cumsum(is_routed.to(tl.int32), 0) - 1
    is_listed = is_routed & (column < TOP_K)
    tl.store(experts + row * TOP_K + column, expert, mask=is_listed)
    tl.store(pair_weights + row * TOP_K + column, weight, mask=is_listed)
    rest = tl.arange(0, BLOCK_K)
    is_unused = (rest >= tl.sum(is_routed.to(tl.int32), 0)) & (rest < TOP_K)
    tl.store(experts + row * TOP_K + rest, tl.full([BLOCK_K], -1, tl.int32), mask=is_unused)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs(experts, counts, num_pairs, BLOCK: tl.constexpr):
    """counts[e] = how many pairs expert e has. Grid: (experts,)."""
    expert = tl.program_id(0)
    count = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_pairs, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        of_pair = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        count += (of_pair == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def place_pairs(
    experts, counts, pairs, block_experts, num_pairs, num_blocks,
    NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the pairs of an expert to its blocks, in order. Grid: (NUM_EXPERTS + 1,).

    The last program writes -1 for blocks that no expert has.

    Args:
        counts: [NUM_EXPERTS] int32, of `count_pairs`.
        pairs: [num_blocks * BLOCK_ROWS] int32; num_pairs behind the last pair of an expert.
        block_experts: [num_blocks] int32.
    """
    expert = tl.program_id(0)
    other = tl.arange(0, BLOCK_E)
    count = tl.load(counts + other, mask=other < NUM_EXPERTS, other=0)
    needed = (count + BLOCK_ROWS - 1) // BLOCK_ROWS
    first = tl.sum(tl.where(other < expert, needed, 0), 0)
    is_last = expert == NUM_EXPERTS
    end = tl.where(is_last, num_blocks, first + tl.sum(tl.where(other == expert, needed, 0), 0))
    owner = tl.where(is_last, -1, expert)
    num_scanned = tl.where(is_last, 0, num_pairs)
    for begin in range(first, end, BLOCK):
        block = begin + tl.arange(0, BLOCK)
        tl.store(block_experts + block, tl.zeros([BLOCK], tl.int32) + owner, mask=block < end)
    offset = first * BLOCK_ROWS
    for begin in range(0, num_scanned, BLOCK):
        pair = begin + tl.arange(0, BLOCK)
        is_own = tl.load(experts + pair, mask=pair < num_scanned, other=-1) == expert
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(pairs + offset + rank - 1, pair, mask=is_own)
        offset += tl.sum(is_own.to(tl.int32), 0)
    rest = offset + tl.arange(0, BLOCK_ROWS)
    rest_end = tl.where(is_last, 0, end * BLOCK_ROWS)
    tl.store(pairs + rest, tl.zeros([BLOCK_ROWS], tl.int32) + num_pairs, mask=rest < rest_end)


@triton.jit
def sum_pairs_of_rows(
    products, experts, pair_weights, out,
    N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sum over a row's experts, in ascending order, of weight * product. Grid: (rows, blocks of N).

    Weighted products and sums are rounded to the dtype of `out`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(TOP_K):
        pair = row * TOP_K + number
        is_unused = tl.load(experts + pair) < 0
        weight = tl.where(is_unused, 0.0, tl.load(pair_weights + pair))
        end = tl.where(is_unused, 0, N)
        product = tl.load(products + pair * N + column, mask=column < end, other=0.0)
        weighted = round_to(product.to(tl.float32) * weight, out)
        total = round_to(total + weighted, out)
    tl.store(out + row * N + column, total.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class ExpertPairs:
    """Pairs of rows and experts in blocks of `block_rows`, on the device."""

    experts: Tensor  # [rows, top_k] int32, ascending, then -1
    weights: Tensor  # [rows, top_k] float32; undefined where there is no expert
    pairs: Tensor  # [blocks, block_rows] int32; rows * top_k where there is no pair
    block_experts: Tensor  # [blocks] int32; -1: the block has no pairs, and `pairs` is undefined

    @property
    def num_pairs(self) -> int:
        """Of all rows, those without an expert included."""
        return self.experts.numel()


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Most blocks that so many pairs fill, however they are distributed."""
    num_used = min(num_pairs, num_experts)
    return (num_pairs + num_used * (block_rows - 1)) // block_rows


def sort_pairs(
    weights: Tensor, top_k: int, block_rows: int, *, scan_block: int = SCAN_BLOCK
) -> ExpertPairs:
    """Sort the pairs of all rows by expert, in the order of rows, into blocks of one expert each.

    Args:
        weights: [rows, experts] float32, not 0 for at most `top_k` of a row.
        block_rows: a power of two.
        scan_block: pairs that a program reads at a time, a power of two.
    """
    num_rows, num_experts = weights.shape
    num_pairs = num_rows * top_k
    num_blocks = max_blocks(num_pairs, num_experts, block_rows)
    if weights.stride(1) != 1:
        weights = weights.contiguous()

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=weights.device)

    sorted_pairs = ExpertPairs(
        experts=integers(num_rows, top_k),
        weights=weights.new_empty(num_rows, top_k),
        pairs=integers(num_blocks, block_rows),
        block_experts=integers(num_blocks),
    )
    if not num_rows:
        return sorted_pairs
    experts, counts, block_e = sorted_pairs.experts, integers(num_experts), padded(num_experts)
    list_pairs[(num_rows,)](
        weights, experts, sorted_pairs.weights, weights.stride(0),
        NUM_EXPERTS=num_experts, BLOCK_E=block_e, TOP_K=top_k, BLOCK_K=padded(top_k), num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    count_pairs[(num_experts,)](
        experts, counts, num_pairs, BLOCK=scan_block, num_warps=4, enable_fp_fusion=False
    )
    place_pairs[(num_experts + 1,)](
        experts, counts, sorted_pairs.pairs, sorted_pairs.block_experts, num_pairs, num_blocks,
        NUM_EXPERTS=num_experts, BLOCK_E=block_e, BLOCK_ROWS=block_rows, BLOCK=scan_block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return sorted_pairs


def sum_pairs(products: Tensor, pairs: ExpertPairs) -> Tensor:
    """Sum of weight * product over the experts of each row, in ascending order.

    Args:
        products: [pairs, n]; rows of pairs without an expert are not read.

    Returns:
        [rows, n] in the dtype of the products, to which each weighted product and each sum is rounded.
    """
    (num_rows, top_k), n = pairs.experts.shape, products.shape[1]
    out = products.new_empty(num_rows, n)
    if num_rows:
        sum_pairs_of_rows[num_rows, triton.cdiv(n, SUM_BLOCK)](
            aligned(products), pairs.experts, pairs.weights, out,
            N=n, TOP_K=top_k, BLOCK=SUM_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
