"""Compiled code below attention and models: `cpu` (Numba, LLVM) and `triton`. Nothing else imports those compilers."""
