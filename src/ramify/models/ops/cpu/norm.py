"""RMS norm of rows on CPU, alone or as an op of the kernels' op list."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import ADD_RESIDUAL, STORE
from ramify.kernels.cpu.op_records import NORM, NormOp, op_row
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.ops.cpu.linear import (
    MAX_CACHED_OPS,
    NO_POSITIONS,
    norm_kind,
    num_row_tasks,
    padded_floats,
)


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
        # (rows, workers) -> op without the addresses of x and the result
        self._ops_by_rows: dict[tuple[int, int], NDArray[np.int64]] = {}

    @property
    def width(self) -> int:
        """Of a row."""
        return len(self._weight)

    def op(self, num_rows: int, num_workers: int, *, add: bool = False) -> tuple[int, ...]:
        """The norm op [OP_FIELDS] of `op_list.run_ops` for contiguous rows.

        The caller fills in the addresses `NORM.x` and `NORM.out`, and `NORM.f32_copy` if it wants a float32
        copy. `add`: add the result to what is there.
        """
        row_bytes = self.width * self.dtype.itemsize
        return op_row(
            NormOp(
                num_tasks=num_row_tasks(num_rows, 4 * num_workers),
                dtype=self._kind,
                mode=ADD_RESIDUAL if add else STORE,
                x_stride=row_bytes,
                num_rows=num_rows,
                width=self.width,
                norm=self._weight.data_ptr(),
                norm_kind=self._norm_kind,
                out_stride=row_bytes,
            )
        )

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
        cached = self._ops_by_rows.get((num_rows, num_workers))
        if cached is None:
            cached = np.array([self.op(num_rows, num_workers)], np.int64)
            if len(self._ops_by_rows) >= MAX_CACHED_OPS:
                self._ops_by_rows.clear()
            self._ops_by_rows[num_rows, num_workers] = cached
        ops = cached.copy()
        ops[0, NORM.x], ops[0, NORM.out] = x.data_ptr(), out.data_ptr()
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, self.scratch_floats(num_rows, num_workers), 1)
        self._run_ops(ops, np.array([self.eps]), NO_POSITIONS, num_workers, *scratch)
        return out
