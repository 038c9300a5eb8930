"""Constants that kernels share with the code that calls them. Imports nothing, so that hosts need no Numba."""

from __future__ import annotations

# Storage kinds of K/V planes. Rows, weights and results are F32 or BF16.
F32, BF16, F16, INT8, FP8 = range(5)
ITEM_BYTES = (4, 2, 2, 1, 1)

CACHE_LINE = 64  # bytes

# Keys per block of the attention kernel: part of the arithmetic, as a row's blocks merge in order.
BLOCK_KEYS = 256

# An op of an op list is int64[OP_FIELDS]. Fields that hosts fill in or read:
OP_KIND = 16
OP_FIELDS = 17
OP_GEMM, OP_NORM_ROPE = range(2)
# of a GEMM op, see `packed_gemm.GemmArgs`
OP_X, OP_X_STRIDE, OP_OUT = 2, 3, 10
# of a norm + rope op, see `norm_rope.norm_rope`
OP_ROWS, OP_NUM_TASKS, OP_OUT_OF_RANGE = 1, 11, 12

# Epilogues of a GEMM
STORE, ADD_RESIDUAL, SILU_MUL = range(3)
