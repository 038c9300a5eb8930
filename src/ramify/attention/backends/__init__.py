"""Attention backends, one file each; `attention.backend` has the table and imports them by name.

A backend implements `AttentionBackend`: `plan` once per step (and again for a pruned last layer),
`run` once per layer. It imports
`attention.{spec, batch, exactness, gather, inputs, staging_buffers}` and kernels, never `attention.backend`
nor another backend. A helper, `*_partition` (no torch) or `*_matmul`, is of the backend it is named after.

- `eager`: float32 reference and oracle of the tests. Supports everything; read it first.
- `cpu`, `cpu_partition`: compiled CPU kernels, exact. What `auto` takes on CPU with Numba.
- `blocked`, `blocked_matmul`: exact attention on CPU with torch alone.
- `sdpa`, `flex`: torch's scaled_dot_product_attention and flex_attention, not exact.
- `triton`, `triton_partition`: Triton kernels on CUDA, exact or not. `auto` on CUDA, unless `flashinfer`
  is installed and faster.
- `varlen`, `flashinfer`: flash attention of torch and of FlashInfer on CUDA, not exact.
"""
