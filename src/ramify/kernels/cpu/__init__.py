"""CPU kernels that Numba and LLVM compile."""
