"""Triton paged attention for extend, decode, grouped decode, split-KV, MLA and sparse steps.

The unit of arithmetic is a query row and a block of `BLOCK_N` keys at a fixed absolute position. A
row merges the blocks of a split (`SPLIT_BLOCKS` blocks, at a fixed position too) in ascending order
by online softmax (Milakov and Gimelshein, 2018), then its splits in ascending order. A program takes
a tile of query rows, over all of their splits or over one; then `merge_split_kv` merges (split-KV as
in flash-decoding, Dao et al. 2023, but with fixed lengths). The rows of a tile are a chunk of one
request, or decode tokens of several requests that share the keys: all kinds of steps are the same
compiled arithmetic over differently filled tiles.

A block of which a row attends to no key leaves the row's state unchanged, so that skipping it changes
no bit (but the sign of a zero, which is dropped at the end).
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

# of an item: first index in `tokens`, number of tokens, row of the block table, first split, end of
# splits, whether it is partial
ITEM_FIELDS = tl.constexpr(8)
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
# the maximum over no key: finite, so that differences of maxima are finite
MASKED_MAX = tl.constexpr(-1e30)
_INT32_MAX = tl.constexpr(2147483647)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_dot_operand(x, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Round `x` to TYPE, as an operand of `tl.dot`."""
    if INTERPRETED:  # the interpreter would multiply the bits of bfloat16 as integers
        return x.to(tl.float32).to(TYPE).to(tl.float32)
    return x.to(TYPE)


@triton.jit
def _dot(a, b, INTERPRETED: tl.constexpr):
    """[m, k] @ [k, n] in float32; the bits of a row do not depend on the others."""
    if INTERPRETED:  # NumPy's BLAS is not batch-invariant
        return tl.sum(a[:, :, None] * b[None, :, :], 1)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_kv(
    plane, scale, slots, heads, head, in_range, dim, DIM: tl.constexpr, FP8: tl.constexpr,
    TYPE: tl.constexpr, INTERPRETED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Keys or values [keys, dim] as dot operand, and their scales [keys]; 0 where masked."""
    indices = slots * heads + head
    mask = in_range[:, None] & (dim < DIM)[None, :]
    rows = tl.load(plane + indices[:, None] * DIM + dim[None, :], mask=mask, other=0)
    if FP8 == 4:  # float8 comes as bytes: it has no zero to fill masked lanes with
        rows = rows.to(tl.float8e4nv, bitcast=True)
    if FP8 == 5:
        rows = rows.to(tl.float8e5, bitcast=True)
    if SCALED:
        scales = tl.load(scale + indices, mask=in_range, other=0.0)
    else:
        scales = in_range.to(tl.float32)
    return _to_dot_operand(rows, TYPE, INTERPRETED), scales


@triton.jit
def _merge_state(m_i, l_i, new_m, new_l):
    """Merge a split: max and sum of weights of a row, and the factors of its old and new sums."""
    merged_m = tl.maximum(m_i, new_m)
    old_scale = tl.exp2(m_i - merged_m)
    new_scale = tl.exp2(new_m - merged_m)
    return merged_m, l_i * old_scale + new_l * new_scale, old_scale, new_scale


@triton.jit
def _join_sink(m_i, l_i, sink):
    """Add a sink, a logit without a value, to a row: the factor of its sums, and its sum of weights."""
    merged_m = tl.maximum(m_i, sink * _LOG2E)
    scale = tl.exp2(m_i - merged_m)
    return scale, l_i * scale + tl.exp2(sink * _LOG2E - merged_m)


@triton.jit
def _attend_blocks(
    query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
    pages, selection, num_selected, kv_head, position, first, last, from_block, to_block,
    KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_ROPE: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DROPE: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, ROPE_FP8: tl.constexpr,
    TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, ROPE_SCALED: tl.constexpr,
    LATENT: tl.constexpr, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax of every row over blocks [from_block, to_block).

    Returns row max m_i, sum of weights l_i and weighted sum of values acc. Scores are in units of
    log2: a weight is 2 ** (score - m_i).
    """
    dim_k = tl.arange(0, BLOCK_DK)
    dim_v = tl.arange(0, BLOCK_DV)
    dim_rope = tl.arange(0, BLOCK_DROPE)
    m_i = tl.full([BLOCK_M], MASKED_MAX, tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for block in range(from_block, to_block):
        index = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if SPARSE:
            key = tl.load(selection + index, mask=index < num_selected, other=-1)
        else:
            key = index
        in_range = (key >= 0) & (key <= last)
        if WINDOW > 0:
            in_range = in_range & (key > first - WINDOW)
        page = tl.load(pages + key // PAGE, mask=in_range, other=0)
        slots = page.to(tl.int64) * PAGE + key % PAGE
        keys, key_scale = _load_kv(
            k, k_scale, slots, KV_HEADS, kv_head, in_range, dim_k,
            DIM_K, K_FP8, TYPE, INTERPRETED, K_SCALED,
        )  # fmt: skip
        scores = _dot(query, tl.trans(keys), INTERPRETED)
        if K_SCALED:
            scores = scores * key_scale[None, :]
        if LATENT:
            rope_keys, rope_key_scale = _load_kv(
                rope, rope_scale, slots, 1, 0, in_range, dim_rope,
                DIM_ROPE, ROPE_FP8, TYPE, INTERPRETED, ROPE_SCALED,
            )  # fmt: skip
            rope_scores = _dot(query_rope, tl.trans(rope_keys), INTERPRETED)
            if ROPE_SCALED:
                rope_scores = rope_scores * rope_key_scale[None, :]
            scores = scores + rope_scores
        if SOFT_CAP > 0:
            exp_2x = tl.exp2(scores * (scale * (2 * _LOG2E / SOFT_CAP)))
            scores = (1.0 - 2.0 / (exp_2x + 1.0)) * (SOFT_CAP * _LOG2E)
        else:
            scores = scores * (scale * _LOG2E)
        visible = in_range[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))
        old_scale = tl.exp2(m_i - m_new)
        weights = tl.exp2(scores - m_new[:, None])
        l_i = l_i * old_scale + tl.sum(weights, 1)
        if LATENT:
            if K_SCALED:
                weights = weights * key_scale[None, :]
            block_acc = _dot(_to_dot_operand(weights, TYPE, INTERPRETED), keys, INTERPRETED)
        else:
            values, value_scale = _load_kv(
                v, v_scale, slots, KV_HEADS, kv_head, in_range, dim_v,
                DIM_V, V_FP8, TYPE, INTERPRETED, V_SCALED,
            )  # fmt: skip
            if V_SCALED:
                weights = weights * value_scale[None, :]
            block_acc = _dot(_to_dot_operand(weights, TYPE, INTERPRETED), values, INTERPRETED)
        acc = acc * old_scale[:, None] + block_acc
        m_i = m_new
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["table_width", "num_selected"])
def paged_attention(
    q, k, v, rope, k_scale, v_scale, rope_scale, sinks, out, partial_acc, partial_ml,
    items, tokens, positions, split_offsets, block_table, selected, table_width, num_selected,
    scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEADS_TILE: tl.constexpr,
    DIM_K: tl.constexpr, DIM_ROPE: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DROPE: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, ROPE_FP8: tl.constexpr,
    TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, ROPE_SCALED: tl.constexpr,
    LATENT: tl.constexpr, SPARSE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_BLOCKS: tl.constexpr,
    MERGE_PER_SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of query rows over all of its splits, or over one.

    Grid: (items, KV_HEADS * tiles of HEADS_TILE query heads). Row r of a tile is token
    `r // HEADS_TILE` of the item and head `r % HEADS_TILE` of the tile of heads.

    Args:
        q: [T, KV_HEADS * GROUP, DIM_K + DIM_ROPE].
        k, v: [slots, KV_HEADS, DIM_K] and [slots, KV_HEADS, DIM_V]; with LATENT k is the latent,
            which is the value too, and `rope` [slots, DIM_ROPE] is the rest of the key.
        sinks: with SINKS [KV_HEADS * GROUP] float32: exp(sink) joins a row's sum of weights.
        out: [T, KV_HEADS * GROUP, DIM_V]; written by items that cover all splits.
        partial_acc, partial_ml: float32 [partials, heads, DIM_V] and [partials, heads, 2].
        items: [programs, ITEM_FIELDS] int32; an item without tokens does nothing.
        tokens, positions, split_offsets: int32; split_offsets [T]: index of a token's first partial.
        selected: with SPARSE [T, num_selected] int32, ascending, then -1; an item has one token
            then, and blocks are blocks of its selection.
        MERGE_PER_SPLIT: merge the splits of an item one by one, as `merge_split_kv` does; if False,
            merge all blocks in one pass: half the registers, other bits.
    """
    item = items + tl.program_id(0) * ITEM_FIELDS
    start = tl.load(item)
    count = tl.load(item + 1)
    if count == 0:
        return
    row_of_table = tl.load(item + 2)
    split_begin = tl.load(item + 3)
    split_end = tl.load(item + 4)
    partial = tl.load(item + 5)

    head_tiles: tl.constexpr = (GROUP + HEADS_TILE - 1) // HEADS_TILE
    kv_head = tl.program_id(1) // head_tiles
    rows = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % head_tiles * HEADS_TILE + rows % HEADS_TILE
    has_token = rows // HEADS_TILE < count
    token = tl.load(tokens + start + rows // HEADS_TILE, mask=has_token, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=has_token, other=-1)
    row_mask = has_token & (in_group < GROUP)
    q_row = token * (KV_HEADS * GROUP) + kv_head * GROUP + in_group
    last = tl.max(position, 0)
    first = tl.min(tl.where(has_token, position, _INT32_MAX), 0)

    dim_k = tl.arange(0, BLOCK_DK)
    dim_rope = tl.arange(0, BLOCK_DROPE)
    query = tl.load(
        q + q_row[:, None] * (DIM_K + DIM_ROPE) + dim_k[None, :],
        mask=row_mask[:, None] & (dim_k < DIM_K)[None, :], other=0.0,
    )  # fmt: skip
    query = _to_dot_operand(query, TYPE, INTERPRETED)
    query_rope = query
    if LATENT:
        query_rope = tl.load(
            q + q_row[:, None] * (DIM_K + DIM_ROPE) + DIM_K + dim_rope[None, :],
            mask=row_mask[:, None] & (dim_rope < DIM_ROPE)[None, :], other=0.0,
        )  # fmt: skip
        query_rope = _to_dot_operand(query_rope, TYPE, INTERPRETED)

    num_keys = last + 1
    pages = block_table + row_of_table * table_width
    selection = selected
    begin_block = 0
    if SPARSE:
        num_keys = tl.minimum(num_keys, num_selected)
        selection = selected + tl.load(tokens + start).to(tl.int64) * num_selected
        split_end = tl.cdiv(num_keys, BLOCK_N * SPLIT_BLOCKS)
    elif WINDOW > 0:
        begin_block = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N
        split_begin = tl.maximum(split_begin, begin_block // SPLIT_BLOCKS)
    end_block = tl.cdiv(num_keys, BLOCK_N)

    if MERGE_PER_SPLIT:
        m_i = tl.full([BLOCK_M], MASKED_MAX, tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for split in range(split_begin, split_end):
            split_m, split_l, split_acc = _attend_blocks(
                query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
                pages, selection, num_selected, kv_head, position, first, last,
                tl.maximum(split * SPLIT_BLOCKS, begin_block),
                tl.minimum((split + 1) * SPLIT_BLOCKS, end_block),
                KV_HEADS, DIM_K, DIM_ROPE, DIM_V, BLOCK_DK, BLOCK_DROPE, BLOCK_DV,
                PAGE, WINDOW, SOFT_CAP, K_FP8, V_FP8, ROPE_FP8, TYPE, INTERPRETED,
                K_SCALED, V_SCALED, ROPE_SCALED, LATENT, SPARSE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            m_i, l_i, old_scale, new_scale = _merge_state(m_i, l_i, split_m, split_l)
            acc = acc * old_scale[:, None] + split_acc * new_scale[:, None]
    else:
        m_i, l_i, acc = _attend_blocks(
            query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
            pages, selection, num_selected, kv_head, position, first, last,
            tl.maximum(split_begin * SPLIT_BLOCKS, begin_block),
            tl.minimum(split_end * SPLIT_BLOCKS, end_block),
            KV_HEADS, DIM_K, DIM_ROPE, DIM_V, BLOCK_DK, BLOCK_DROPE, BLOCK_DV,
            PAGE, WINDOW, SOFT_CAP, K_FP8, V_FP8, ROPE_FP8, TYPE, INTERPRETED,
            K_SCALED, V_SCALED, ROPE_SCALED, LATENT, SPARSE, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    dim_v = tl.arange(0, BLOCK_DV)
    mask = row_mask[:, None] & (dim_v < DIM_V)[None, :]
    if partial != 0:
        # splits before the window store nothing: nothing reads them
        if split_begin < split_end:
            partial_index = tl.load(split_offsets + token, mask=has_token, other=0) + split_begin
            row = partial_index.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + in_group
            tl.store(partial_acc + row[:, None] * DIM_V + dim_v[None, :], acc, mask=mask)
            tl.store(partial_ml + row * 2, m_i, mask=row_mask)
            tl.store(partial_ml + row * 2 + 1, l_i, mask=row_mask)
    else:
        if SINKS:
            sink = tl.load(sinks + kv_head * GROUP + in_group, mask=row_mask, other=0.0)
            sink_scale, l_i = _join_sink(m_i, l_i, sink)
            acc = acc * sink_scale[:, None]
        # a row that attends to no key gets zeros; and -0.0 becomes 0.0
        output = acc / tl.where(l_i > 0, l_i, 1.0)[:, None] + 0.0
        out_at = out + q_row[:, None] * DIM_V + dim_v[None, :]
        tl.store(out_at, output.to(out.dtype.element_ty), mask=mask)


@triton.jit
def merge_split_kv(
    partial_acc, partial_ml, sinks, out, split_tokens, positions, split_offsets,
    HEADS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a row of `out` in ascending order, as `paged_attention` with MERGE_PER_SPLIT.

    Grid: (length of `split_tokens`, HEADS). An entry is a token's index + 1; 0 does nothing.
    """
    token = tl.load(split_tokens + tl.program_id(0)).to(tl.int64) - 1
    if token < 0:
        return
    head = tl.program_id(1)
    position = tl.load(positions + token)
    first_partial = tl.load(split_offsets + token).to(tl.int64)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    dim = tl.arange(0, BLOCK_DV)
    m_i = tl.max(tl.full([BLOCK_DV], MASKED_MAX, tl.float32), 0)
    l_i = tl.max(tl.zeros([BLOCK_DV], tl.float32), 0)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for split in range(begin, position // SPLIT + 1):
        row = (first_partial + split) * HEADS + head
        split_acc = tl.load(partial_acc + row * DIM_V + dim, mask=dim < DIM_V, other=0.0)
        split_m = tl.load(partial_ml + row * 2)
        split_l = tl.load(partial_ml + row * 2 + 1)
        m_i, l_i, old_scale, new_scale = _merge_state(m_i, l_i, split_m, split_l)
        acc = acc * old_scale + split_acc * new_scale
    if SINKS:
        sink_scale, l_i = _join_sink(m_i, l_i, tl.load(sinks + head))
        acc = acc * sink_scale
    output = acc / tl.where(l_i > 0, l_i, 1.0) + 0.0
    out_at = out + (token * HEADS + head) * DIM_V + dim
    tl.store(out_at, output.to(out.dtype.element_ty), mask=dim < DIM_V)
