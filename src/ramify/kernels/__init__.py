"""Compiled kernels: `cpu` by Numba and LLVM, `triton` for CUDA. Nothing else imports these compilers.

Attention backends and `models.ops` import compiled modules on use, so that Ramify runs without the
compilers; `cpu.abi`, `cpu.op_records` and `cpu.threads` need none. Kernels import no backend and no model: they get
addresses, strides and tables from above.
"""
