"""Mixtures of experts as ops: top-k router, grouping of tokens by expert, weighted sum of the results.

    packed GEMM (float32)   router logits of each token
    route                   logits -> weights of the top_k experts, 0 for the others
    group                   weights -> `routing`: pairs of token and expert, sorted by expert
    packed GEMM, grouped    gate and up of each pair, then down
    combine                 sum over a token's experts, ascending, of weight * result

`routing` is int64 of `routing_offsets`: items of the grouped GEMMs; tokens in sorted order; then for
each token its pairs' places in that order (-1: fewer than top_k) and weights (float32 each).

The number of items has an address of its own, which no other op list entry may write in the same call:
a worker that comes late to a grouped GEMM, when others are layers ahead, learns there that it is done.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ramify.kernels.cpu.abi import ADD_RESIDUAL, F32
from ramify.kernels.cpu.elementwise import add_scaled_row
from ramify.kernels.cpu.gemm_microkernels import MR_TILES
from ramify.kernels.cpu.jit import data_address, jit
from ramify.kernels.cpu.norm_rope import task_rows
from ramify.kernels.cpu.op_records import COMBINE, GROUP, OP_COMBINE, OP_KIND, OP_ROUTE, ROUTE
from ramify.kernels.cpu.packed_gemm import MC
from ramify.kernels.cpu.simd import LANES, load_element, load_i64, store_f32, store_i64
from ramify.kernels.cpu.vector_math import exp_minus_max, row_max

_LARGEST_TILE = MR_TILES[-1]
_CHOSEN = np.float32(-2.0)  # in place of the score of an expert that was chosen; scores are >= 0


def routing_offsets(num_rows: int, num_experts: int, top_k: int) -> Any:
    """Where parts of `routing` begin, in int64: tokens, places, weights, scratch, end."""
    num_pairs = num_rows * top_k
    tokens = 4 * (min(num_experts, num_pairs) + num_pairs // MC)
    scratch = tokens + 3 * num_pairs
    return tokens, tokens + num_pairs, tokens + 2 * num_pairs, scratch, scratch + num_experts


_routing_offsets = jit(routing_offsets)


@jit
def _route_row(row: int, num_experts: int, top_k: int, normalise: int, choice: int) -> None:
    """Replace router logits at `row` by expert weights: softmax, of all but the best `top_k` zero.

    Ties go to the lowest expert. A row that is not finite gives NaN to the first experts.

    Args:
        row: padded to a multiple of LANES floats.
        normalise: 1: weights of a token sum up to 1.
        choice: address of a buffer of `num_experts` floats.
    """
    padded = -(-num_experts // LANES) * LANES
    for e in range(num_experts, padded):
        store_f32(row + 4 * e, np.float32(-np.inf))
    total = exp_minus_max(row, padded, row_max(row, padded))
    for e in range(num_experts):
        score = load_element(row + 4 * e, F32) / total
        store_f32(row + 4 * e, score)
        store_f32(choice + 4 * e, score)
    for n in range(top_k):
        best, best_score = n, np.float32(-1.0)
        for e in range(num_experts):
            score = load_element(choice + 4 * e, F32)
            if score > best_score:
                best, best_score = e, score
        store_f32(choice + 4 * best, _CHOSEN)
    total = np.float32(0.0)
    for e in range(num_experts):
        if load_element(choice + 4 * e, F32) == _CHOSEN:
            total += load_element(row + 4 * e, F32)
        else:
            store_f32(row + 4 * e, np.float32(0.0))
    if normalise:
        for e in range(num_experts):
            weight = load_element(row + 4 * e, F32)
            if weight != np.float32(0.0):
                store_f32(row + 4 * e, weight / total)


@jit
def _group(op: Any) -> None:
    """Fill `routing` from weights, the experts ascending, within an expert the tokens.

    Args:
        op: [OP_FIELDS] int64: a `GroupOp`.
    """
    weights, stride, num_rows = op[GROUP.weights], op[GROUP.weights_stride], op[GROUP.num_rows]
    num_experts, top_k, routing = op[GROUP.num_experts], op[GROUP.top_k], op[GROUP.routing]
    tokens, places, pair_weights, counts, _ = _routing_offsets(num_rows, num_experts, top_k)
    tokens, places, counts = routing + 8 * tokens, routing + 8 * places, routing + 8 * counts
    pair_weights = routing + 8 * pair_weights
    for e in range(num_experts):
        store_i64(counts + 8 * e, 0)
    for t in range(num_rows):
        pair, end = t * top_k, (t + 1) * top_k
        for e in range(num_experts):
            weight = load_element(weights + stride * t + 4 * e, F32)
            if weight != np.float32(0.0) and pair < end:
                store_i64(places + 8 * pair, e)
                store_f32(pair_weights + 8 * pair, weight)
                store_i64(counts + 8 * e, load_i64(counts + 8 * e) + 1)
                pair += 1
        for unused in range(pair, end):
            store_i64(places + 8 * unused, -1)
    first, num_items = 0, 0
    for e in range(num_experts):
        count = load_i64(counts + 8 * e)
        store_i64(counts + 8 * e, first)  # from here on where the next token goes
        if count:
            # As in `models.ops.cpu.linear`: equal blocks, the smallest tile that needs no more tiles.
            num_blocks = -(-count // MC)
            per_block = -(-count // num_blocks)
            per_tile = -(-per_block // -(-per_block // _LARGEST_TILE))
            tile = 0
            while MR_TILES[tile] < per_tile:
                tile += 1
            block_rows = -(-per_block // MR_TILES[tile]) * MR_TILES[tile]
            for begin in range(0, count, block_rows):
                item = routing + 8 * 4 * num_items
                store_i64(item, e)
                store_i64(item + 8, first + begin)
                store_i64(item + 16, min(block_rows, count - begin))
                store_i64(item + 24, tile)
                num_items += 1
        first += count
    store_i64(op[GROUP.num_items], num_items)
    for t in range(num_rows):
        for pair in range(t * top_k, (t + 1) * top_k):
            e = load_i64(places + 8 * pair)
            if e >= 0:
                place = load_i64(counts + 8 * e)
                store_i64(counts + 8 * e, place + 1)
                store_i64(places + 8 * pair, place)
                store_i64(tokens + 8 * place, t)


@jit
def _combine_row(op: Any, token: int, total: int) -> None:
    """Sum over the experts of a token of weight * result, rounded after each product and sum.

    Args:
        op: [OP_FIELDS] int64: a `CombineOp`.
        total: address of a row of scratch.
    """
    kind, mode, num_rows = op[COMBINE.dtype], op[COMBINE.mode], op[COMBINE.num_rows]
    num_experts, top_k = op[COMBINE.num_experts], op[COMBINE.top_k]
    routing, width, out_stride = op[COMBINE.routing], op[COMBINE.width], op[COMBINE.out_stride]
    _, places, pair_weights, _, _ = _routing_offsets(num_rows, num_experts, top_k)
    out = op[COMBINE.out] + out_stride * token
    into = total if mode == ADD_RESIDUAL else out
    # Scratch has no row behind: whole words. The rows of the sum, to store in, the caller has zeroed.
    num_words = width if kind == F32 else (width + 1) // 2
    for i in range(num_words if mode == ADD_RESIDUAL else 0):
        store_f32(into + 4 * i, np.float32(0.0))
    for pair in range(token * top_k, (token + 1) * top_k):
        place = load_i64(routing + 8 * (places + pair))
        if place >= 0:
            result = op[COMBINE.x] + op[COMBINE.x_stride] * place
            weight = load_element(routing + 8 * (pair_weights + pair), F32)
            add_scaled_row(into, result, width, weight, kind)
    if op[COMBINE.shared]:
        shared = op[COMBINE.shared] + op[COMBINE.x_stride] * token
        weight = load_element(op[COMBINE.shared_weights] + 4 * token, F32)
        add_scaled_row(into, shared, width, weight, kind)
    if mode == ADD_RESIDUAL:
        add_scaled_row(out, into, width, np.float32(1.0), kind)


@jit
def moe_op(op: Any, scratch: Any, task: int) -> None:
    """Run a task of a route, group or combine op; `scratch` is a row of the worker."""
    kind, buffer = op[OP_KIND], data_address(scratch)
    if kind == OP_ROUTE:
        weights, stride, num_rows = op[ROUTE.weights], op[ROUTE.weights_stride], op[ROUTE.num_rows]
        num_experts, top_k, normalise = op[ROUTE.num_experts], op[ROUTE.top_k], op[ROUTE.normalise]
        begin, end = task_rows(op, num_rows, task)
        for t in range(begin, end):
            _route_row(weights + stride * t, num_experts, top_k, normalise, buffer)
    elif kind == OP_COMBINE:
        num_rows = op[COMBINE.num_rows]
        begin, end = task_rows(op, num_rows, task)
        for t in range(begin, end):
            _combine_row(op, t, buffer)
    else:
        _group(op)
