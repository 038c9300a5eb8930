"""RMS norm of rows on CPU, alone or as an op of the kernels' op list."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import ADD_RESIDUAL, OP_NORM, OP_OUT, OP_X, STORE
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.ops.cpu.linear import NO_POSITIONS, norm_kind, num_row_tasks, padded_floats


class RowNorm:
    """RMS norm over the last dimension, with the bits of the norm inside `PackedLinear`.

    Args:
        weight: [width]; see `PackedLinear` for its dtype.
        dtype: of the rows.
    """

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        from ramify.kernels.cpu import op_list

        self._run_ops = op_list.run_ops
        self._weight, self.dtype, self.eps = weight.contiguous(), dtype, float(eps)
        self._kind, self._norm_kind = ROW_KINDS[dtype], norm_kind(weight, dtype)

    @property
    def width(self) -> int:
        """Of a row."""
        return len(self._weight)

    def op(self, num_rows: int, num_workers: int, *, add: bool = False) -> tuple[int, ...]:
        """The norm op [OP_FIELDS] of `op_list.run_ops` for contiguous rows.

        The caller fills in the addresses `OP_X` and `OP_OUT`, and `OP_F32_COPY` if it wants a float32 copy.
        `add`: add the result to what is there.
        """
        row_bytes = self.width * self.dtype.itemsize
        num_tasks = num_row_tasks(num_rows, 4 * num_workers)
        return (
            self._kind, ADD_RESIDUAL if add else STORE, 0, row_bytes, num_rows, 0, self._weight.data_ptr(),
            self.width, row_bytes, 0, 0, num_tasks, 0, 0, 0, 0, OP_NORM, self._norm_kind, 0, 0, 0, 0,
        )  # fmt: skip

    def scratch_floats(self, _num_rows: int, _num_workers: int) -> int:
        """Scratch float32 per worker, as for `thread_scratch`."""
        return padded_floats(self.width)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same.

        Raises:
            ConfigError: x is of another width, dtype or device.
        """
        if x.shape[-1] != self.width or x.dtype != self.dtype or not x.is_cpu:
            raise ConfigError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {self.dtype} "
                f"[rows, {self.width}] on cpu"
            )
        x = x.contiguous()
        out, num_rows = torch.empty_like(x), x.numel() // self.width
        if num_rows == 0:
            return out
        num_workers = torch.get_num_threads()
        ops = np.array([self.op(num_rows, num_workers)], np.int64)
        ops[0, OP_X], ops[0, OP_OUT] = x.data_ptr(), out.data_ptr()
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, self.scratch_floats(num_rows, num_workers), 1)
        self._run_ops(ops, np.array([self.eps]), NO_POSITIONS, num_workers, *scratch)
        return out
