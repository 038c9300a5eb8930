"""Sampling in one kernel: a program reads the logits of a row and draws its token.

In the order of `engine.execution.sampler`: logit bias, penalties, token bitmask, temperature, top-k,
top-p, min-p; then a draw by the inverse of the cumulative distribution in ascending order of ids. A
row reads its own logits and parameters only, block by block in a fixed order, so that its token
depends on no other row. The smallest logit that top-k and top-p keep is searched by bisection over
the bits of floats: each pass over the row, which the L2 cache holds by then, counts or sums what is
at least as large.
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.random import philox_impl

from ramify.kernels.triton.rounding import is_nan

OK, NOT_FINITE, NOTHING_LEFT = 0, 1, 2  # statuses of a row
_INT32_MIN = tl.constexpr(-(1 << 31))
_INT32_MAX = tl.constexpr((1 << 31) - 1)
_LOWEST = tl.constexpr(-1e30)  # below every maximum that is used; finite


@triton.jit
def philox_uniform(seed, position):
    """A float64 in [0, 1): that of `engine.execution.sampler.philox_uniform` without a stream.

    Philox4x64-10, key (seed, position), counter (1, 0, 0, 0); 53 bits of the first word.
    """
    seed_word, position_word = seed.to(tl.uint64), position.to(tl.uint64)
    zero = seed_word ^ seed_word
    word, _, _, _ = philox_impl(zero + 1, zero, zero, zero, seed_word, position_word)
    return (word >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def order_key(x):
    """int32 that rises with float32 `x`; -0.0 and 0.0 have one key. Not for NaN."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _load_row(
    raw, edited, mask, is_edited, is_masked, start, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Ids of a block of a row and their logits; -inf for ids that the bitmask forbids."""
    ids = start + tl.arange(0, BLOCK)
    in_vocab = ids < VOCAB
    if is_edited:
        x = tl.load(edited + ids, mask=in_vocab, other=float("-inf"))
    else:
        x = tl.load(raw + ids, mask=in_vocab, other=float("-inf"))
    if is_masked:
        word = tl.load(mask + ids // 32, mask=in_vocab, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return ids, x


@triton.jit
def _weights(ids, x, keys, largest, inverse, cut_key, cut_id):
    """exp((x - largest) / temperature) of the ids before the cut, else 0.

    Kept are keys above `cut_key`, and of those equal to it the ids up to `cut_id`.
    """
    kept = (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
    # an infinite temperature would make 0 * inf of a forbidden id
    kept = kept & (x > float("-inf"))
    return tl.where(kept, tl.exp((x - largest) * inverse), 0.0)


@triton.jit
def _largest_logit(
    raw, edited, mask, is_edited, is_masked, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Largest logit, the lowest id that has it, the sum of exp(x - largest), whether any is NaN."""
    largest = tl.full([], float("-inf"), tl.float32)
    base = tl.full([], _LOWEST, tl.float32)
    likeliest = tl.full([], 0, tl.int32)
    total = tl.full([], 0.0, tl.float32)
    has_nan = tl.full([], 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids, x = _load_row(raw, edited, mask, is_edited, is_masked, start, VOCAB, BLOCK)
        has_nan = tl.maximum(has_nan, tl.max(is_nan(x).to(tl.int32), 0))
        x = tl.where(is_nan(x), float("-inf"), x)
        top = tl.max(x, 0)
        first = tl.min(tl.where(x == top, ids, VOCAB), 0)
        likeliest = tl.where(top > largest, first, likeliest)
        largest = tl.maximum(largest, top)
        new_base = tl.maximum(base, tl.minimum(top, -_LOWEST))
        total = total * tl.exp(base - new_base) + tl.sum(tl.exp(x - new_base), 0)
        base = new_base
    return largest, likeliest, total, has_nan


@triton.jit
def _edit_logits(
    raw, edited, bias_ids, bias, bias_begin, bias_end, seen_ids, seen_counts, seen_begin, seen_end,
    repetition, presence, frequency,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Copy a row, then add its biases, then its penalties; the ids of each are distinct."""
    for start in range(0, VOCAB, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(raw + ids, mask=ids < VOCAB, other=0.0)
        tl.store(edited + ids, x, mask=ids < VOCAB)
    tl.debug_barrier()
    for start in range(bias_begin, bias_end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        valid = entry < bias_end
        ids = tl.load(bias_ids + entry, mask=valid, other=0)
        x = tl.load(edited + ids, mask=valid, other=0.0)
        tl.store(edited + ids, x + tl.load(bias + entry, mask=valid, other=0.0), mask=valid)
    tl.debug_barrier()
    for start in range(seen_begin, seen_end, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        valid = entry < seen_end
        ids = tl.load(seen_ids + entry, mask=valid, other=0)
        count = tl.load(seen_counts + entry, mask=valid, other=0)
        x = tl.load(edited + ids, mask=valid, other=0.0)
        x = tl.where(x < 0.0, x * repetition, tl.div_rn(x, tl.broadcast_to(repetition, (ENTRIES,))))
        penalty = tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32)
        tl.store(edited + ids, x - penalty, mask=valid)
    tl.debug_barrier()


@triton.jit
def _smallest_kept(
    raw, edited, mask, is_edited, is_masked, largest, inverse, cut_key, cut_id, needed,
    IS_MASS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest key such that the kept ids with keys at least as large are `needed` or more.

    Measured by their number, or with IS_MASS by the sum of their weights. Second, what those with
    larger keys measure.
    """
    low = tl.full([], _INT32_MIN, tl.int64)
    high = order_key(largest).to(tl.int64)
    above = tl.full([], 0.0, tl.float64)
    while low < high:
        middle = low + (high - low + 1) // 2
        measure = tl.full([], 0.0, tl.float64)
        least = tl.full([], _INT32_MAX, tl.int32)
        most = tl.full([], _INT32_MIN, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            ids, x = _load_row(raw, edited, mask, is_edited, is_masked, start, VOCAB, BLOCK)
            keys = order_key(x)
            kept = (keys > cut_key) | ((keys == cut_key) & (ids <= cut_id))
            kept = kept & (ids < VOCAB)
            is_high = kept & (keys >= middle.to(tl.int32))
            if IS_MASS:
                weights = _weights(ids, x, keys, largest, inverse, cut_key, cut_id)
                measure += tl.sum(tl.where(is_high, weights, 0.0), 0).to(tl.float64)
            else:
                measure += tl.sum(is_high.to(tl.int32), 0).to(tl.float64)
            least = tl.minimum(least, tl.min(tl.where(is_high, keys, _INT32_MAX), 0))
            is_low = kept & (keys < middle.to(tl.int32))
            most = tl.maximum(most, tl.max(tl.where(is_low, keys, _INT32_MIN), 0))
        is_enough = measure >= needed
        # from one key that occurs to the next: there are fewer of them than bit patterns
        low = tl.where(is_enough, least.to(tl.int64), low)
        high = tl.where(is_enough, high, tl.maximum(low, most.to(tl.int64)))
        above = tl.where(is_enough, above, measure)
    return low.to(tl.int32), above


@triton.jit
def _id_of_tie(
    raw, edited, mask, is_edited, is_masked, key, number, last,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id of the `number`th of the ids up to `last` with this key; `last` if they are fewer."""
    num_before = tl.full([], 0, tl.int32)
    result = last
    for start in range(0, VOCAB, BLOCK):
        ids, x = _load_row(raw, edited, mask, is_edited, is_masked, start, VOCAB, BLOCK)
        is_tie = ((order_key(x) == key) & (ids < VOCAB)).to(tl.int32)
        rank = num_before + tl.cumsum(is_tie, 0)
        chosen = tl.where((is_tie > 0) & (rank == number), ids, VOCAB)
        result = tl.minimum(result, tl.min(chosen, 0))
        num_before += tl.sum(is_tie, 0)
    return result


@triton.jit
def _draw(
    raw, edited, mask, is_edited, is_masked, largest, inverse, cut_key, cut_id, min_p, uniform,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest id whose cumulative weight exceeds `uniform` times the total."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, VOCAB, BLOCK):
        ids, x = _load_row(raw, edited, mask, is_edited, is_masked, start, VOCAB, BLOCK)
        weights = _weights(ids, x, order_key(x), largest, inverse, cut_key, cut_id)
        total += tl.sum(tl.where(weights >= min_p, weights, 0.0), 0).to(tl.float64)
    target = uniform * total
    mass = tl.full([], 0.0, tl.float64)
    base = mass
    block = tl.full([], -1, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        ids, x = _load_row(raw, edited, mask, is_edited, is_masked, start, VOCAB, BLOCK)
        weights = _weights(ids, x, order_key(x), largest, inverse, cut_key, cut_id)
        block_mass = tl.sum(tl.where(weights >= min_p, weights, 0.0), 0).to(tl.float64)
        crosses = (block < 0) & (mass + block_mass > target)
        base = tl.where(crosses, mass, base)
        block = tl.where(crosses, start, block)
        mass += block_mass
    ids, x = _load_row(raw, edited, mask, is_edited, is_masked, tl.maximum(block, 0), VOCAB, BLOCK)
    weights = _weights(ids, x, order_key(x), largest, inverse, cut_key, cut_id)
    weights = tl.where(weights >= min_p, weights, 0.0)
    reached = base + tl.cumsum(weights, 0).to(tl.float64) > target
    drawn = tl.min(tl.where(reached & (weights > 0.0), ids, VOCAB), 0)
    # sums in another order may fall short of the target by their rounding
    last = tl.max(tl.where(weights > 0.0, ids, 0), 0)
    return tl.where(drawn < VOCAB, drawn, last)


@triton.jit
def sample_rows(
    logits, edited, masks, floats, ints, seeds,
    bias_starts, bias_ids, bias, seen_starts, seen_ids, seen_counts,
    tokens, statuses, logprobs, log_sums,
    VOCAB: tl.constexpr, MASK_WORDS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Draw a token for each row. Grid: (rows,).

    Args:
        logits: [rows, VOCAB] float32; not changed.
        edited: like logits, scratch of rows with biases or penalties.
        masks: [n, MASK_WORDS] int32, bit `id % 32` of word `id // 32` allows an id.
        floats: [rows, 6] float32: temperature (0, or from 1e-30 to 1e30), top_p, min_p, repetition, presence, frequency.
        ints: [rows, 3] int32: top_k (at least VOCAB: all), row of `masks` (-1: none), position.
        seeds: [rows] int64.
        bias_starts, seen_starts: [rows + 1] int32, ranges of the entries after them.
        tokens, statuses: [rows] int32; a status is `OK`, `NOT_FINITE` (of logits), or `NOTHING_LEFT`.
        logprobs, log_sums: [rows] float32: log probability of the token in `logits` themselves, and
            the logarithm of the sum of their exponentials.
    """
    row = tl.program_id(0)
    raw = logits + row.to(tl.int64) * VOCAB
    changed = edited + row.to(tl.int64) * VOCAB
    temperature = tl.load(floats + row * 6)
    top_p = tl.load(floats + row * 6 + 1)
    min_p = tl.load(floats + row * 6 + 2)
    top_k = tl.load(ints + row * 3)
    mask_row = tl.load(ints + row * 3 + 1)
    position = tl.load(ints + row * 3 + 2)
    is_masked = mask_row >= 0
    mask = masks + tl.maximum(mask_row, 0).to(tl.int64) * MASK_WORDS
    bias_begin, bias_end = tl.load(bias_starts + row), tl.load(bias_starts + row + 1)
    seen_begin, seen_end = tl.load(seen_starts + row), tl.load(seen_starts + row + 1)
    is_edited = (bias_end > bias_begin) | (seen_end > seen_begin)

    largest, likeliest, total, has_nan = _largest_logit(
        raw, changed, mask, False, False, VOCAB, BLOCK
    )
    is_finite = (has_nan == 0) & (largest > float("-inf")) & (largest < float("inf"))
    log_sum = largest + tl.log(total)
    status = tl.where(is_finite, 0, 1)
    if is_edited:
        _edit_logits(
            raw, changed, bias_ids, bias, bias_begin, bias_end,
            seen_ids, seen_counts, seen_begin, seen_end,
            tl.load(floats + row * 6 + 3), tl.load(floats + row * 6 + 4), tl.load(floats + row * 6 + 5),
            VOCAB, BLOCK, ENTRIES,
        )  # fmt: skip
    if is_edited | is_masked:
        largest, likeliest, total, has_nan = _largest_logit(
            raw, changed, mask, is_edited, is_masked, VOCAB, BLOCK
        )
        is_left = (has_nan == 0) & (largest > float("-inf")) & (largest < float("inf"))
        status = tl.where((status == 0) & (is_left == 0), 2, status)
    token = likeliest
    if (temperature > 0.0) & (status == 0):
        inverse = 1.0 / temperature
        cut_key = tl.full([], _INT32_MIN, tl.int32)
        cut_id = tl.full([], VOCAB, tl.int32)
        if top_k < VOCAB:
            cut_key, above = _smallest_kept(
                raw, changed, mask, is_edited, is_masked, largest, inverse, cut_key, cut_id,
                top_k.to(tl.float64), False, VOCAB, BLOCK,
            )  # fmt: skip
            cut_id = _id_of_tie(
                raw, changed, mask, is_edited, is_masked, cut_key, top_k - above.to(tl.int32),
                cut_id, VOCAB, BLOCK,
            )  # fmt: skip
        if top_p < 1.0:
            mass = tl.full([], 0.0, tl.float64)
            for start in range(0, VOCAB, BLOCK):
                ids, x = _load_row(raw, changed, mask, is_edited, is_masked, start, VOCAB, BLOCK)
                weights = _weights(ids, x, order_key(x), largest, inverse, cut_key, cut_id)
                mass += tl.sum(weights, 0).to(tl.float64)
            needed = top_p.to(tl.float64) * mass
            key, above = _smallest_kept(
                raw, changed, mask, is_edited, is_masked, largest, inverse, cut_key, cut_id,
                needed, True, VOCAB, BLOCK,
            )  # fmt: skip
            bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
            weight = tl.exp((bits.to(tl.float32, bitcast=True) - largest) * inverse).to(tl.float64)
            number = tl.ceil((needed - above) / tl.maximum(weight, 1e-300))
            number = tl.minimum(tl.maximum(number, 1.0), VOCAB).to(tl.int32)
            last = tl.where(key == cut_key, cut_id, VOCAB)
            cut_id = _id_of_tie(
                raw, changed, mask, is_edited, is_masked, key, number, last, VOCAB, BLOCK
            )
            cut_key = key
        token = _draw(
            raw, changed, mask, is_edited, is_masked, largest, inverse, cut_key, cut_id, min_p,
            philox_uniform(tl.load(seeds + row), position), VOCAB, BLOCK,
        )  # fmt: skip
    tl.store(tokens + row, token)
    tl.store(statuses + row, status)
    tl.store(logprobs + row, tl.load(raw + token) - log_sum)
    tl.store(log_sums + row, log_sum)


@triton.jit(do_not_specialize=["num_top"])
def top_logprobs(
    logits, rows, log_sums, ids_out, logprobs_out, num_top,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The `num_top` likeliest ids of some rows, of equals the lower first. Grid: (rows,).

    Args:
        logits: [n, VOCAB] float32, finite maxima.
        rows: [R] int32, of `logits`.
        log_sums: [n] float32, of `sample_rows`.
        ids_out, logprobs_out: [R, num_top] int32 and float32.
    """
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    log_sum = tl.load(log_sums + row)
    last_key = tl.full([], _INT32_MAX, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for index in range(num_top):
        best = tl.full([], _INT32_MIN, tl.int32)
        best_id = tl.full([], VOCAB - 1, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=float("-inf"))
            keys = order_key(x)
            comes_after = (keys < last_key) | ((keys == last_key) & (ids > last_id))
            keys = tl.where(comes_after & (ids < VOCAB), keys, _INT32_MIN)
            top = tl.max(keys, 0)
            first = tl.min(tl.where(keys == top, ids, VOCAB), 0)
            best_id = tl.where(top > best, first, best_id)
            best = tl.maximum(best, top)
        at = tl.program_id(0) * num_top + index
        tl.store(ids_out + at, best_id)
        tl.store(logprobs_out + at, tl.load(logits + row * VOCAB + best_id) - log_sum)
        last_key = best
        last_id = best_id
