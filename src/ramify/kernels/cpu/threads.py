"""Host side of kernel calls: Numba on torch's OpenMP threads, scratch per thread, aligned buffers."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.kernels.cpu.abi import BF16, CACHE_LINE, F16, F32, FP8, INT8

KV_KINDS = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
}
ROW_KINDS = {torch.float32: F32, torch.bfloat16: BF16}


def aligned_zeros(num_rows: int, floats: int) -> NDArray[np.float32]:
    """Zeros [num_rows, floats] float32, aligned to a cache line.

    NumPy's own arrays start 16 to 48 bytes past a line's start, so that vectors straddle two lines.
    """
    buffer = np.zeros(num_rows * floats + CACHE_LINE // 4, np.float32)
    start = -buffer.ctypes.data % CACHE_LINE // 4
    return buffer[start : start + num_rows * floats].reshape(num_rows, floats)


def set_num_threads(count: int) -> None:
    """Set how many threads Numba's kernels of this thread use; torch's OpenMP pool where possible."""
    if getattr(_current, "count", None) == count:
        return
    import numba

    if numba.config.THREADING_LAYER == "default":
        # torch's OpenMP pool: threads of two pools would wait for each other's cores.
        numba.config.THREADING_LAYER = "omp"
    torch_threads = torch.get_num_threads()
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    # Numba starts its threads in torch's pool, which changes torch's number.
    if torch.get_num_threads() != torch_threads:
        torch.set_num_threads(torch_threads)
    _current.count = count


# Numba has a number per thread. It is cached here: asking Numba takes longer than a norm.
_current = threading.local()


def thread_scratch(
    num_workers: int, floats: int, num_ops: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Scratch [>= num_workers, >= floats] and counters [>= num_ops, 2] for `op_list.run_ops`.

    They belong to the calling thread and are reused: allocating costs more than a small GEMM.
    """
    scratch = _scratch.floats
    if scratch.shape[0] < num_workers or scratch.shape[1] < floats:
        scratch = _scratch.floats = aligned_zeros(num_workers, floats)
    if len(_scratch.counters) < num_ops:
        _scratch.counters = np.zeros((num_ops, 2), np.int64)
    return scratch, _scratch.counters


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.counters: NDArray[np.int64] = np.zeros((1, 2), np.int64)
        self.floats: NDArray[np.float32] = np.zeros((0, 0), np.float32)


_scratch = _Scratch()
