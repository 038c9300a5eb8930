"""Constants of the interface between kernels and callers: storage kinds, epilogues; ops are in `op_records`.

Imports nothing, so that callers need no Numba.
"""

from __future__ import annotations

# Storage kinds of K/V planes. Activations are F32 or BF16.
F32, BF16, F16, INT8, FP8 = range(5)
ITEM_BYTES = (4, 2, 2, 1, 1)

# Kinds of packed weights: F32, BF16, and two bf16 (k, k + 1) in a 32-bit word, for bf16 dot products, for
# tiles, or for an emulation of tiles that has their bits; integers of 8 and of 4 bits with scales.
_OTHERS = range(len(ITEM_BYTES), len(ITEM_BYTES) + 5)
BF16_VNNI, BF16_TILES, BF16_TILES_EMULATED, CODES8, CODES4 = _OTHERS

# Weights of a row whose scales, if they are INT8, are multiples of one float16, and their offsets of another.
FACTOR_SPAN = 256

# The integers of 4-bit codes of IQ4_NL, and of weights that are rounded at load: closer together where a
# normal distribution has more.
NORMAL_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Elements of a row of x that share a scale, a block: BLOCK of 16 bits; of 8 bits as many as a group of
# weights, between these limits. A group lies within one block.
BLOCK, MAX_BLOCK_OF_8, MIN_BLOCK_OF_8 = 128, 64, 32

CACHE_LINE = 64  # bytes

# Keys per block of attention. Part of the arithmetic: a row merges its blocks in order.
BLOCK_KEYS = 256

# QK norm: over each head, over all heads of q (or of k) together, over each head after rope.
QK_NORM_HEAD, QK_NORM_WIDTH, QK_NORM_AFTER_ROPE = range(3)

# Epilogues of a GEMM. From SILU_MUL on they combine pairs of panels.
STORE, ADD_RESIDUAL, GELU_TANH, SIGMOID, SILU_MUL, GELU_TANH_MUL, CLAMPED_SWIGLU_MUL = range(7)
# of CLAMPED_SWIGLU_MUL: gate * sigmoid(alpha * gate) * (up + 1), both clamped to the limit
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

# A norm kind: layer norm, whose weights and then biases are float32 [2, width].
LAYER_NORM = len(ITEM_BYTES)


def is_tile_kind(weight_kind: int) -> bool:
    """Whether weights of this kind are multiplied by tiles of bfloat16, or by their emulation."""
    return weight_kind == BF16_TILES or weight_kind == BF16_TILES_EMULATED  # noqa: PLR1714 - for Numba


def round_up_to_cache_line(num_bytes: int) -> int:
    """`num_bytes` rounded up to cache lines, so that no vector straddles two."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE


def block_size(row_bits: int, group: int) -> int:
    """Elements of a row of x that share a scale, beside groups of this many weights."""
    return max(MIN_BLOCK_OF_8, group) if row_bits == 8 else BLOCK
