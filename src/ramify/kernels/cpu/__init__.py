"""CPU kernels, compiled by Numba and LLVM: packed GEMM, norm + rope, paged attention, fused layers.

Callers: `attention.backends.cpu` and `models.ops.cpu`. Read first: `abi`, `op_records`, `op_list`, `packed_gemm`,
`paged_attention`, `fused_layers`; then what they call. `simd`, `vector_math`, `elementwise` and the microkernels
emit LLVM IR, as do parts of `kv_pack`, `norm_rope`, `task_queue` and `attention_args`; the rest is Python
that Numba compiles. `abi` has the constants that kernels and callers share, `op_records` the fields of
ops, `jit` compiles, `workers` runs a function on all threads, `threads` is for the host. Wheels carry
object code of the table `entry_points` for each of `targets`: `build_objects`, `object_code`.

A step
    engine.execution.runner -> FusedLayers -> run_fused_layers, one parallel region for all layers. Per layer:
        packed_gemm       RMS norm -> q, k, v
        norm_rope         qk-norm, rotary embedding; K/V write
        paged_attention   its phases: shared prefixes, then the rest of each request
        packed_gemm       o_proj, + residual
        packed_gemm       RMS norm -> gate, up -> silu(gate) * up
        packed_gemm       down_proj, + residual
    Larger steps call run_ops and paged_attention layer by layer. Bits do not depend on the choice.
    Workers share the tasks of an op (`task_queue`) and meet at a barrier behind it. It waits for the
    tasks, not for the workers: one that comes late finds them done, and must not count them from memory
    that later ops write.
    Norms behind blocks are ops of their own (`norm_rope.norm_rows`); experts are those of `moe`. In a
    parallel block the GEMM of gate, up comes before that of o_proj. Norms may be layer norms.

Buffers (NR = 2 SIMD vectors of columns; TILE_N likewise; a word is 32 bits)
    weight, float32      panel[n // NR, k, n % NR] = W[n, k]
    weight, bf16         word[n // NR, k, j] = (W[n, k], W[n + LANES, k]), j = n % NR < LANES
    weight, bf16 VNNI    word[n // NR, k // 2, n % NR] = (W[n, k], W[n, k + 1])
    weight, bf16 tiles   likewise, with zeros up to a multiple of 32 k
    weight, 8-bit codes  word[n // NR, k // 4, n % NR] = bytes of k to k + 3
    weight, 4-bit codes  word[n // NR, k // 8, n % NR] = nibbles of k + 0, 1, 4, 5, 2, 3, 6, 7
    scales, mins         [n // NR, group, n % NR], float32, float16, or int8 times factors
    factors              float16 [n // NR, scales or mins, k // 256, n % NR]
    gated MLP            panels of gate and up alternate
    packed rows          A[k, r] per tile of MR rows; VNNI: word[k // 2, r]
    packed rows, tiles   bf16 [row tile, k // 32, row, k % 32], with zeros likewise
    packed rows, codes   words of int16: for each four k (k, k + 2) and (k + 1, k + 3); a float32 scale for
                         each block of k; sums by group of weights: see `quantized_gemm`. By tiles of int8: planes
                         of high and of low bytes [row tile, k // 64, plane, row, k % 64]. Of 8 bits for
                         VNNI: words of bytes x + 128, four k each; beside 4-bit codes of k + 0, 4, 2, 6
                         and 1, 5, 3, 7
    packed keys          [key // TILE_N, d, key % TILE_N]; VNNI: word of (d, d + 1)
    packed values        [d // TILE_N, key, d % TILE_N]; VNNI: word of (key, key + 1)
    state                [head * state_head_stride + token] = (sum of w * v [value_stride], max, sum of w)
    op                   int64[OP_FIELDS]: a record of `op_records` (docs/op-records.md)
    task                 int64[10]: table row; first token, count; K/V heads from, to; heads of a
                         group from, to; blocks from, to; split or -1
    split                int64[5]: blocks from, to; first state row; number of tasks; 1 if its rows
                         have merged no block before

Rules that keep the bits (the same for a row in whatever batch)
    - Every sum is one chain of operations, fixed in the IR: LLVM reorders nothing. Move bodies, do not
      rewrite them: bias first, then one sum per KC strip; reductions by lane, then across lanes.
    - A process that may use tiles of bf16 (AMX) multiplies all rows of weights in bf16 by them: their sums are
      not those of VNNI. `tile_microkernels` has their order and an emulation, `tile_choice` the variable that
      chooses it, or switches tiles off.
    - Attention over K/V in bf16 likewise, if a key is a multiple of 32 elements: packed blocks by tiles,
      few rows in place by FMA with the same sums (`attention_tiles`, `decode_microkernels_tiles`).
    - Without tiles `tile_choice` takes dot products where they are faster than FMA on widened elements.
    - Sums of tiles end in + 0.0: -0 and trailing zero products vanish. `maximum` is compare + select,
      which fixes the result for NaN. A first block is copied into `state`, not merged.
    - Codes: sums of a group are exact integers; one chain of FMA over groups, in ascending order.
    - Norm, rope and epilogues round to the model's dtype after each product (`round_to`). exp is exactly
      0 below -87 (VNNI: where bf16 would be subnormal). Only HAS_BF16_DOT flushes subnormals.
    - Scores are scaled in q (float32) or after the dot product (VNNI).

Rules of Numba
    - Constants are module-level ints and floats, imported by name; `abi.NAME` is not one in a kernel. A
      field of a named tuple (`GEMM.x`) is one after LLVM has folded it: an index, no literal.
      `prefer_literal` intrinsics take a literal or such a constant, never a local or an IntEnum.
    - Compile time and wheels grow with entry points (`compile_cached`) times kinds of K/V planes: add none.
    - Array types (dtype, order, read-only) are part of a signature. All signatures are in the table of
      `entry_points`; another one compiles in the user's first call.
    - A function inside kernels is no machine code of its own: Python cannot call it.
    - No helper with array arguments in an inner loop: reference counts are atomic. Pass addresses.

Debugging: NUMBA_NUM_THREADS=1 runs all workers on one thread, one after the other; the `eager` backend
is the oracle of attention; `ramify verify` compares cold, warm, chunked, batched and preempted prompts bit by bit.

Sources: Goto and van de Geijn, Anatomy of high-performance matrix multiplication, 2008, and BLIS
(MR, NR, KC, MC); oneDNN (VNNI packing, prologues, epilogues); Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018; FlashAttention (Dao et al. 2022) and flash-decoding (split-KV, 2023);
ggml (an op list with a barrier after each op).
"""
