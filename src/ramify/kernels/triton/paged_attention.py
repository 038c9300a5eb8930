"""One Triton kernel for every kind of step, and the one that merges split keys.

The unit of arithmetic is a query row against a block of `BLOCK_N` keys at a fixed absolute
position. A row folds the blocks of a split (`SPLIT_BLOCKS` blocks, at a fixed position too) from
left to right, the online softmax of Milakov and Gimelshein (2018), and then its splits from left to
right. A program takes a tile of query rows over either all of their splits, folding them itself,
or over one split, leaving that fold to `merge_split_kv` (split KV as in flash-decoding, Dao et al.
2023, but at fixed lengths). The rows of a tile may be one request's chunk or decode tokens of
several requests that share the keys: a first chunk, decode, split decode and grouped decode are
the same compiled arithmetic over differently filled tiles.

A block in which a row sees nothing leaves its state as it was, so that skipping it changes no bit
(but the sign of a zero, which is dropped at the end).
"""
# triton has no types, and may be missing
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl

# of an item: first entry of `tokens`, tokens, row of the block table, first split, end, partial
ITEM_FIELDS = tl.constexpr(8)
TYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
MASKED_MAX = tl.constexpr(
    -1e30
)  # a maximum over nothing: finite, so differences of maxima are finite
_INT32_MAX = tl.constexpr(2147483647)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_dot_operand(x, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """What a matrix product takes: `x` rounded to TYPE."""
    if INTERPRETED:  # which would multiply the bits of bfloat16 as integers
        return x.to(tl.float32).to(TYPE).to(tl.float32)
    return x.to(TYPE)


@triton.jit
def _dot(a, b, INTERPRETED: tl.constexpr):
    """[m, k] by [k, n] in float32, every row by itself."""
    if INTERPRETED:  # whose BLAS gives a row other bits in another place
        return tl.sum(a[:, :, None] * b[None, :, :], 1)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _load_kv(
    plane, scale, slots, heads, head, seen, dim, DIM: tl.constexpr, FP8: tl.constexpr,
    TYPE: tl.constexpr, INTERPRETED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Rows of a plane [keys, dim] as factors and their scales [keys]; lanes not read are zeros."""
    places = slots * heads + head
    mask = seen[:, None] & (dim < DIM)[None, :]
    rows = tl.load(plane + places[:, None] * DIM + dim[None, :], mask=mask, other=0)
    if FP8 == 4:  # float8 comes as bytes: it has no zero to fill masked lanes with
        rows = rows.to(tl.float8e4nv, bitcast=True)
    if FP8 == 5:
        rows = rows.to(tl.float8e5, bitcast=True)
    if SCALED:
        scales = tl.load(scale + places, mask=seen, other=0.0)
    else:
        scales = seen.to(tl.float32)
    return _to_dot_operand(rows, TYPE, INTERPRETED), scales


@triton.jit
def _merge_state(m_i, l_i, new_m, new_l):
    """After one more split: a row's maximum, its sum of weights, and what both sides shrink by."""
    top = tl.maximum(m_i, new_m)
    old = tl.exp2(m_i - top)
    new = tl.exp2(new_m - top)
    return top, l_i * old + new_l * new, old, new


@triton.jit
def _attend_blocks(
    query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
    pages, chosen, num_selected, kv_head, position, first, last, from_block, to_block,
    KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_ROPE: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_DK: tl.constexpr, BLOCK_DROPE: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    K_FP8: tl.constexpr, V_FP8: tl.constexpr, ROPE_FP8: tl.constexpr,
    TYPE: tl.constexpr, INTERPRETED: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, ROPE_SCALED: tl.constexpr,
    LATENT: tl.constexpr, SPARSE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of weights and weighted sum of the values, of every row over these blocks.

    In units of log2: weights are powers of two of the scores less the maximum.
    """
    dim_k = tl.arange(0, BLOCK_DK)
    dim_v = tl.arange(0, BLOCK_DV)
    dim_rope = tl.arange(0, BLOCK_DROPE)
    peak = tl.full([BLOCK_M], MASKED_MAX, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for block in range(from_block, to_block):
        place = block * BLOCK_N + tl.arange(0, BLOCK_N)
        if SPARSE:
            key = tl.load(chosen + place, mask=place < num_selected, other=-1)
        else:
            key = place
        seen = (key >= 0) & (key <= last)
        if WINDOW > 0:
            seen = seen & (key > first - WINDOW)
        page = tl.load(pages + key // PAGE, mask=seen, other=0)
        slots = page.to(tl.int64) * PAGE + key % PAGE
        keys, key_scale = _load_kv(
            k, k_scale, slots, KV_HEADS, kv_head, seen, dim_k,
            DIM_K, K_FP8, TYPE, INTERPRETED, K_SCALED,
        )  # fmt: skip
        scores = _dot(query, tl.trans(keys), INTERPRETED)
        if K_SCALED:
            scores = scores * key_scale[None, :]
        if LATENT:
            ropes, own_scale = _load_kv(
                rope, rope_scale, slots, 1, 0, seen, dim_rope,
                DIM_ROPE, ROPE_FP8, TYPE, INTERPRETED, ROPE_SCALED,
            )  # fmt: skip
            turned = _dot(query_rope, tl.trans(ropes), INTERPRETED)
            if ROPE_SCALED:
                turned = turned * own_scale[None, :]
            scores = scores + turned
        if SOFT_CAP > 0:
            doubled = tl.exp2(scores * (scale * (2 * _LOG2E / SOFT_CAP)))
            scores = (1.0 - 2.0 / (doubled + 1.0)) * (SOFT_CAP * _LOG2E)
        else:
            scores = scores * (scale * _LOG2E)
        visible = seen[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        old = tl.exp2(peak - top)
        weights = tl.exp2(scores - top[:, None])
        weight = weight * old + tl.sum(weights, 1)
        if LATENT:
            if K_SCALED:
                weights = weights * key_scale[None, :]
            added = _dot(_to_dot_operand(weights, TYPE, INTERPRETED), keys, INTERPRETED)
        else:
            values, value_scale = _load_kv(
                v, v_scale, slots, KV_HEADS, kv_head, seen, dim_v,
                DIM_V, V_FP8, TYPE, INTERPRETED, V_SCALED,
            )  # fmt: skip
            if V_SCALED:
                weights = weights * value_scale[None, :]
            added = _dot(_to_dot_operand(weights, TYPE, INTERPRETED), values, INTERPRETED)
        total = total * old[:, None] + added
        peak = top
    return peak, weight, total


@triton.jit(do_not_specialize=["table_width", "num_selected"])
def paged_attention(
    q, k, v, rope, k_scale, v_scale, rope_scale, out, partial_acc, partial_ml,
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
    MERGE_PER_SPLIT: tl.constexpr,
):  # fmt: skip
    """A tile of query rows over all of its splits, or over one.

    Grid: (items, KV_HEADS * tiles of HEADS_TILE query heads). Row r of a tile is token
    `r // HEADS_TILE` of the item and head `r % HEADS_TILE` of the tile of heads.

    Args:
        q: [T, KV_HEADS * GROUP, DIM_K + DIM_ROPE].
        k, v: [slots, KV_HEADS, DIM_K] and [slots, KV_HEADS, DIM_V]; with LATENT k is the latent,
            which is the value too, and `rope` [slots, DIM_ROPE] is the rest of the key.
        out: like q with DIM_V; written where an item covers all splits.
        partial_acc, partial_ml: float32 [partial slots, heads, DIM_V] and [partial slots, heads, 2].
        items: [programs, ITEM_FIELDS] int32; one with no tokens does nothing.
        tokens, positions, split_offsets: int32; `split_offsets` [T] is a token's first partial slot.
        selected: with SPARSE [T, num_selected] int32, ascending, -1 after the last; an item has
            one token then, and blocks are blocks of its selection.
        MERGE_PER_SPLIT: fold the splits of an item one by one, as `merge_split_kv` would; otherwise all of
            its blocks at once: half the registers, other bits.
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
    live = has_token & (in_group < GROUP)
    q_row = token * (KV_HEADS * GROUP) + kv_head * GROUP + in_group
    last = tl.max(position, 0)
    first = tl.min(tl.where(has_token, position, _INT32_MAX), 0)

    dim_k = tl.arange(0, BLOCK_DK)
    dim_rope = tl.arange(0, BLOCK_DROPE)
    query = tl.load(
        q + q_row[:, None] * (DIM_K + DIM_ROPE) + dim_k[None, :],
        mask=live[:, None] & (dim_k < DIM_K)[None, :], other=0.0,
    )  # fmt: skip
    query = _to_dot_operand(query, TYPE, INTERPRETED)
    query_rope = query
    if LATENT:
        query_rope = tl.load(
            q + q_row[:, None] * (DIM_K + DIM_ROPE) + DIM_K + dim_rope[None, :],
            mask=live[:, None] & (dim_rope < DIM_ROPE)[None, :], other=0.0,
        )  # fmt: skip
        query_rope = _to_dot_operand(query_rope, TYPE, INTERPRETED)

    num_keys = last + 1
    pages = block_table + row_of_table * table_width
    chosen = selected
    begin_block = 0
    if SPARSE:
        num_keys = tl.minimum(num_keys, num_selected)
        chosen = selected + tl.load(tokens + start).to(tl.int64) * num_selected
        split_end = tl.cdiv(num_keys, BLOCK_N * SPLIT_BLOCKS)
    elif WINDOW > 0:
        begin_block = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N
        split_begin = tl.maximum(split_begin, begin_block // SPLIT_BLOCKS)
    end_block = tl.cdiv(num_keys, BLOCK_N)

    if MERGE_PER_SPLIT:
        all_peak = tl.full([BLOCK_M], MASKED_MAX, tl.float32)
        all_weight = tl.zeros([BLOCK_M], tl.float32)
        all_total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        for split in range(split_begin, split_end):
            peak, weight, total = _attend_blocks(
                query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
                pages, chosen, num_selected, kv_head, position, first, last,
                tl.maximum(split * SPLIT_BLOCKS, begin_block),
                tl.minimum((split + 1) * SPLIT_BLOCKS, end_block),
                KV_HEADS, DIM_K, DIM_ROPE, DIM_V, BLOCK_DK, BLOCK_DROPE, BLOCK_DV,
                PAGE, WINDOW, SOFT_CAP, K_FP8, V_FP8, ROPE_FP8, TYPE, INTERPRETED,
                K_SCALED, V_SCALED, ROPE_SCALED, LATENT, SPARSE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            all_peak, all_weight, old, new = _merge_state(all_peak, all_weight, peak, weight)
            all_total = all_total * old[:, None] + total * new[:, None]
    else:
        all_peak, all_weight, all_total = _attend_blocks(
            query, query_rope, k, v, rope, k_scale, v_scale, rope_scale, scale,
            pages, chosen, num_selected, kv_head, position, first, last,
            tl.maximum(split_begin * SPLIT_BLOCKS, begin_block),
            tl.minimum(split_end * SPLIT_BLOCKS, end_block),
            KV_HEADS, DIM_K, DIM_ROPE, DIM_V, BLOCK_DK, BLOCK_DROPE, BLOCK_DV,
            PAGE, WINDOW, SOFT_CAP, K_FP8, V_FP8, ROPE_FP8, TYPE, INTERPRETED,
            K_SCALED, V_SCALED, ROPE_SCALED, LATENT, SPARSE, BLOCK_M, BLOCK_N,
        )  # fmt: skip

    dim_v = tl.arange(0, BLOCK_DV)
    lanes = live[:, None] & (dim_v < DIM_V)[None, :]
    if partial != 0:
        # the splits before a window store nothing: nobody reads them
        if split_begin < split_end:
            slot = tl.load(split_offsets + token, mask=has_token, other=0) + split_begin
            row = slot.to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + in_group
            tl.store(partial_acc + row[:, None] * DIM_V + dim_v[None, :], all_total, mask=lanes)
            tl.store(partial_ml + row * 2, all_peak, mask=live)
            tl.store(partial_ml + row * 2 + 1, all_weight, mask=live)
    else:
        # a row that sees nothing gets zeros; and -0.0 becomes 0.0
        mixed = all_total / tl.where(all_weight > 0, all_weight, 1.0)[:, None] + 0.0
        place_out = out + q_row[:, None] * DIM_V + dim_v[None, :]
        tl.store(place_out, mixed.to(out.dtype.element_ty), mask=lanes)


@triton.jit
def merge_split_kv(
    partial_acc, partial_ml, out, split_tokens, positions, split_offsets,
    HEADS: tl.constexpr, DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Fold the splits of a row of `out`, left to right, as `paged_attention` does with splits of its own.

    Grid: (entries of `split_tokens`, HEADS). An entry is a token and 1, and 0 does nothing.
    """
    token = tl.load(split_tokens + tl.program_id(0)).to(tl.int64) - 1
    if token < 0:
        return
    head = tl.program_id(1)
    position = tl.load(positions + token)
    first_slot = tl.load(split_offsets + token).to(tl.int64)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // SPLIT
    dim = tl.arange(0, BLOCK_DV)
    all_peak = tl.max(tl.full([BLOCK_DV], MASKED_MAX, tl.float32), 0)
    all_weight = tl.max(tl.zeros([BLOCK_DV], tl.float32), 0)
    all_total = tl.zeros([BLOCK_DV], tl.float32)
    for split in range(begin, position // SPLIT + 1):
        row = (first_slot + split) * HEADS + head
        total = tl.load(partial_acc + row * DIM_V + dim, mask=dim < DIM_V, other=0.0)
        peak = tl.load(partial_ml + row * 2)
        weight = tl.load(partial_ml + row * 2 + 1)
        all_peak, all_weight, old, new = _merge_state(all_peak, all_weight, peak, weight)
        all_total = all_total * old + total * new
    mixed = all_total / tl.where(all_weight > 0, all_weight, 1.0) + 0.0
    place_out = out + (token * HEADS + head) * DIM_V + dim
    tl.store(place_out, mixed.to(out.dtype.element_ty), mask=dim < DIM_V)
