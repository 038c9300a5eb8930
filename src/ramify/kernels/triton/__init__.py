"""Triton kernels for CUDA, imported by what launches them inside its calls: triton may be missing.

- `paged_attention`: attention of `attention.backends.triton`.
- `index_scores`: scores of the sparse index, of `attention.paged_index`.
- `norm`, `activation`, `rope_kv`, `gemm`, `head_gemm`: operations of `models.ops.triton_ops`, with their launches.
- `expert_pairs`, `grouped_gemm`: mixtures of experts, of `models.ops.triton_experts`.
- `sampling`, `sample_batch`: the sampler and its launch.
- `rounding`, `launch`: what they share; `launch` imports no triton.
"""
