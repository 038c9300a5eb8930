"""Constants of the interface between kernels and callers: fields of ops, storage kinds, epilogues.

Imports nothing, so that callers need no Numba.
"""

from __future__ import annotations

# Storage kinds of K/V planes. Activations and weights are F32 or BF16.
F32, BF16, F16, INT8, FP8 = range(5)
ITEM_BYTES = (4, 2, 2, 1, 1)

CACHE_LINE = 64  # bytes

# Keys per block of attention. Part of the arithmetic: a row merges its blocks in order.
BLOCK_KEYS = 256

# An op is int64[OP_FIELDS]. Fields that callers set or read:
OP_KIND = 16
OP_FIELDS = 22
OP_GEMM, OP_NORM_ROPE, OP_NORM, OP_ROUTE, OP_GROUP, OP_COMBINE = range(6)
# of a GEMM, see `packed_gemm`
OP_X, OP_X_STRIDE, OP_OUT, OP_OUT_STRIDE, OP_ITEMS, OP_GATHER = 2, 3, 10, 11, 18, 19
# address of the number of items, also of the op that groups; see `moe`
OP_NUM_ITEMS = 20
# of a GEMM with ADD_RESIDUAL: the scale of its result, as the bits of a float32
OP_SCALE = 21
OP_NORM_KIND = 17  # of every op with a norm: storage kind of its weights
# of qk-norm + rope, see `norm_rope.norm_rope`
OP_ROWS, OP_NUM_TASKS, OP_OUT_OF_RANGE, OP_QK_NORM = 1, 11, 12, 13
# of a norm of rows, see `norm_rope.norm_rows`, and of the ops of `moe`
OP_F32_COPY, OP_ROUTING = 5, 6
# of the combine op: rows of a shared expert and their float32 weights
OP_SHARED, OP_SHARED_WEIGHTS = 12, 13

# QK norm: over each head, over all heads of q (or of k) together, over each head after rope.
QK_NORM_HEAD, QK_NORM_WIDTH, QK_NORM_AFTER_ROPE = range(3)

# Epilogues of a GEMM. From SILU_MUL on they combine pairs of panels.
STORE, ADD_RESIDUAL, GELU_TANH, SIGMOID, SILU_MUL, GELU_TANH_MUL, CLAMPED_SWIGLU_MUL = range(7)
# of CLAMPED_SWIGLU_MUL: gate * sigmoid(alpha * gate) * (up + 1), both clamped to the limit
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

# A norm kind: layer norm, whose weights and then biases are float32 [2, width].
LAYER_NORM = len(ITEM_BYTES)


def round_up_to_cache_line(num_bytes: int) -> int:
    """`num_bytes` rounded up to cache lines, so that no vector straddles two."""
    return -(-num_bytes // CACHE_LINE) * CACHE_LINE
