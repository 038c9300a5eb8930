"""QK norm and rotary embedding on CPU, in place over the QKV rows, as an op of the kernels' op list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import QK_NORM_AFTER_ROPE, QK_NORM_HEAD, QK_NORM_WIDTH
from ramify.kernels.cpu.op_records import NORM_ROPE, NormRopeOp, op_row
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.configs.dense_variant import QkNormForm
from ramify.models.ops.cpu.linear import norm_kind, num_row_tasks
from ramify.models.ops.protocol import ForwardStep, Heads

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMS: dict[QkNormForm, int] = {
    "head": QK_NORM_HEAD,
    "width": QK_NORM_WIDTH,
    "after_rope": QK_NORM_AFTER_ROPE,
}


class QKNormRope:
    """RMS norm and rope of q and k heads, in place, in one pass over the QKV rows.

    A row is query heads, key heads, then value heads, which stay as they are.

    Args:
        cos, sin: [max_len, head_dim / 2] in the model's dtype, float32 or bfloat16.
        norms: weights for q and for k, of one dtype (see `PackedLinear`), and their eps; None: rope
            only. With the form "width" they are [num_q * head_dim] and [num_kv * head_dim], else
            [head_dim].
        form: what the norms are over, and when.
    """

    def __init__(
        self,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        *,
        norms: tuple[Tensor, Tensor, float] | None = None,
        form: QkNormForm = "head",
    ) -> None:
        from ramify.kernels.cpu import op_list

        self._run_ops, self.heads = op_list.run_ops, heads
        self._tables = cos.contiguous(), sin.contiguous()
        self._norms = () if norms is None else (norms[0].contiguous(), norms[1].contiguous())
        self.eps = 0.0 if norms is None else float(norms[2])
        self._shape = heads.num_q, heads.num_kv, heads.head_dim
        q_norm, k_norm = [norm.data_ptr() for norm in self._norms] or [0, 0]
        cos_address, sin_address = (table.data_ptr() for table in self._tables)
        self._record = NormRopeOp(
            dtype=ROW_KINDS[cos.dtype],
            num_q=heads.num_q,
            num_k=heads.num_kv,
            head_dim=heads.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            cos=cos_address,
            sin=sin_address,
            limit=len(cos),
            form=_FORMS[form],
            norm_kind=norm_kind(self._norms[0], cos.dtype) if self._norms else 0,
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Dtype, max_len and heads; layers of one model have equal kinds."""
        return self._tables[0].dtype, len(self._tables[0]), *self._shape

    def op(self, num_rows: int, row_bytes: int, num_workers: int) -> tuple[int, ...]:
        """The norm + rope op [OP_FIELDS] of `op_list.run_ops`; the caller fills in the address `NORM_ROPE.rows`."""
        num_tasks = num_row_tasks(num_rows, num_workers)
        return op_row(self._record._replace(num_tasks=num_tasks, row_stride=row_bytes))

    def __call__(self, qkv: Tensor, step: ForwardStep) -> tuple[Tensor, Tensor, Tensor]:
        """QKV rows, overwritten -> q, k, v [T, heads, head_dim], views of them."""
        rows = self.rotate(qkv, step.positions).unflatten(-1, (-1, self.heads.head_dim))
        q, k, v = rows.split(self.heads.counts, 1)
        return q, k, v

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Normalise and rotate rows [T, >= (num_q + num_kv) * head_dim] for positions [T] int64; returns rows.

        Raises:
            ConfigError: shapes or dtypes disagree.
            IndexError: a position is outside the tables; its row is left unchanged.
        """
        num_q, num_k, head_dim = self._shape
        fits = rows.dim() == 2 and rows.shape[1] >= (num_q + num_k) * head_dim
        if not fits or rows.dtype != self._tables[0].dtype or rows.stride(1) != 1:
            raise ConfigError(
                f"rows are {rows.dtype} {tuple(rows.shape)} with strides {rows.stride()}; they must "
                f"be {self._tables[0].dtype} [tokens, at least {(num_q + num_k) * head_dim}]"
            )
        self.check_positions(positions, len(rows))
        num_workers = torch.get_num_threads()
        row_bytes = rows.stride(0) * rows.element_size()
        ops = np.array([self.op(len(rows), row_bytes, num_workers)], np.int64)
        ops[0, NORM_ROPE.rows] = rows.data_ptr()
        set_num_threads(num_workers)
        indices, scratch = positions.contiguous().numpy(), thread_scratch(num_workers, 0, 1)
        self._run_ops(ops, np.array([self.eps]), indices, num_workers, *scratch)
        self.raise_if_out_of_range(ops[0])
        return rows

    def check_positions(self, positions: Tensor, num_rows: int) -> None:
        """Raise ConfigError unless positions are [num_rows] int64."""
        if positions.shape != (num_rows,) or positions.dtype != torch.int64:
            raise ConfigError(
                f"positions are {positions.dtype} {tuple(positions.shape)}; they must be int64 "
                f"[{num_rows}]"
            )

    def check_position_range(self, positions: Tensor) -> None:
        """Raise IndexError if any of the positions, at least one, is outside the tables."""
        # NumPy: torch takes longer for a few numbers.
        indices = positions.numpy()
        if indices.min() < 0 or indices.max() >= len(self._tables[0]):
            raise IndexError(f"positions must be in 0..{len(self._tables[0]) - 1}")

    def raise_if_out_of_range(self, op: NDArray[np.int64]) -> None:
        """Raise IndexError if the kernel flagged a position outside the tables in this op."""
        if op[NORM_ROPE.out_of_range]:
            raise IndexError(f"positions must be in 0..{len(self._tables[0]) - 1}")
