"""Triton kernels: `paged_attention`, imported by `attention.backends.triton` inside its calls."""
