"""Compiled kernels: `cpu` by Numba and LLVM, `triton` for CUDA. Nothing else imports these compilers.

Attention backends and `models.ops` import kernels on use, so that Ramify runs without the compilers.
A kernel imports neither: it gets addresses, strides and tables from above.
"""
