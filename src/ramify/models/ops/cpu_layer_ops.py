"""The compiled ops of a decoder layer, and the buffers that they read and write.

    QKV GEMM (RMS norm)  ->  QK norm + rope  ->  attention  ->  O GEMM (+= hidden)
    gate/up GEMM (RMS norm, activation)      ->  down GEMM (+= hidden)

With a norm behind attention or MLP, that GEMM stores its rows and an op adds their norm to hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ramify.kernels.cpu.abi import OP_FIELDS, OP_OUT, OP_ROWS, OP_X
from ramify.models.ops.cpu_linear import PackedLinear
from ramify.models.ops.cpu_norm import RowNorm
from ramify.models.ops.cpu_rope import QKNormRope
from ramify.models.ops.protocol import DecoderLayer, FusableLayer, RowOp
from ramify.models.ops.torch_ops import SplitAttention

# Buffers whose addresses the caller sets: the residual stream, QKV rows, attention's output.
HIDDEN, QKV, ATTN_OUT = "hidden", "qkv", "attn_out"


class LayerOp(NamedTuple):
    """An op of a layer: what makes its fields, and the buffer of each field that is an address."""

    # (number of rows, number of workers) -> [OP_FIELDS]; fields of buffers are offsets into them
    fields: Callable[[int, int], tuple[int, ...]]
    buffers: tuple[tuple[int, str], ...]
    scratch_floats: Callable[[int, int], int]  # per worker
    eps: float = 0.0
    row_macs: int = 0  # multiply-adds of a row


@dataclass(frozen=True, slots=True)
class LayerOps:
    """A layer as a list of ops; attention comes after the second, which is `rope`."""

    qkv: PackedLinear
    rope: QKNormRope
    o_proj: PackedLinear
    ops: tuple[LayerOp, ...]
    row_bytes: Mapping[str, int]  # of each buffer that the caller need not set

    @property
    def kind(self) -> tuple[object, ...]:
        """Dtype, width of hidden, heads and positions; layers of one model have equal kinds."""
        return self.qkv.dtype, self.qkv.widths[0], *self.rope.kind

    @classmethod
    def of(cls, layer: DecoderLayer) -> LayerOps | None:
        """The ops of a layer; None if it is not fusable, or one of its operations is not compiled."""
        parts = layer.fusable if isinstance(layer, FusableLayer) else None
        if parts is None:
            return None
        if not isinstance(parts.attention, SplitAttention) or parts.attention.sinks is not None:
            return None
        rope = parts.attention.qk_norm_rope
        qkv, o_proj, gate_up, down = parts.qkv, parts.o_proj, parts.mlp.gate_up, parts.mlp.down
        if not isinstance(qkv, PackedLinear) or not isinstance(rope, QKNormRope):
            return None
        if not isinstance(o_proj, PackedLinear):
            return None
        if not isinstance(gate_up, PackedLinear) or not isinstance(down, PackedLinear):
            return None
        norms = parts.after_attention, parts.after_mlp
        if not all(norm is None or isinstance(norm, RowNorm) for norm in norms):
            return None
        rope_op = LayerOp(
            partial(_rope_fields, rope, qkv.row_bytes), ((OP_ROWS, QKV),), _no_scratch, rope.eps
        )
        ops = (
            _gemm(qkv, HIDDEN, QKV),
            rope_op,
            *_add_gemm(o_proj, ATTN_OUT, parts.after_attention),
            _gemm(gate_up, HIDDEN, "inner"),
            *_add_gemm(down, "inner", parts.after_mlp),
        )
        row_bytes = {"inner": gate_up.row_bytes}
        if any(norm is not None for norm in norms):
            row_bytes["block_out"] = down.row_bytes
        return cls(qkv, rope, o_proj, ops, row_bytes)


def _gemm(linear: PackedLinear, x: str, out: str, *, add: bool = False) -> LayerOp:
    return LayerOp(
        partial(linear.op, add=add),
        ((OP_X, x), (OP_OUT, out)),
        linear.scratch_floats,
        linear.eps,
        linear.row_macs,
    )


def _add_gemm(linear: PackedLinear, x: str, norm: RowOp | None) -> list[LayerOp]:
    """hidden += linear(x), or norm(linear(x))."""
    if norm is None:
        return [_gemm(linear, x, HIDDEN, add=True)]
    assert isinstance(norm, RowNorm)
    buffers = (OP_X, "block_out"), (OP_OUT, HIDDEN)
    add_norm = LayerOp(partial(norm.op, add=True), buffers, norm.scratch_floats, norm.eps)
    return [_gemm(linear, x, "block_out"), add_norm]


def _rope_fields(
    rope: QKNormRope, row_bytes: int, num_rows: int, num_workers: int
) -> tuple[int, ...]:
    return rope.op(num_rows, row_bytes, num_workers)


def _no_scratch(_num_rows: int, _num_workers: int) -> int:
    return 0


class OpList:
    """The ops of all layers, with the addresses of their buffers filled in for each step.

    Args:
        layers: of one kind.
    """

    def __init__(self, layers: Sequence[LayerOps]) -> None:
        self._ops = [op for layer in layers for op in layer.ops]
        row_bytes: dict[str, int] = {}
        for layer in layers:
            for name, size in layer.row_bytes.items():
                row_bytes[name] = max(size, row_bytes.get(name, 0))
        self._row_bytes = row_bytes
        names = [HIDDEN, *row_bytes]
        bound = [
            (number * OP_FIELDS + field, names.index(buffer))
            for number, op in enumerate(self._ops)
            for field, buffer in op.buffers
            if buffer in names
        ]
        self._places, self._buffers = np.array(bound, np.int64).reshape(-1, 2).T.copy()
        self.eps = np.array([op.eps for op in self._ops])
        self.row_macs = sum(op.row_macs for op in self._ops)

    def fields(self, num_rows: int, num_workers: int) -> NDArray[np.int64]:
        """All ops for so many rows: [ops, OP_FIELDS], without addresses."""
        return np.array([op.fields(num_rows, num_workers) for op in self._ops], np.int64)

    def scratch_floats(self, num_rows: int, num_workers: int) -> int:
        """Scratch float32 per worker that suffices for every op."""
        return max(op.scratch_floats(num_rows, num_workers) for op in self._ops)

    def bind(
        self, fields: NDArray[np.int64], hidden: torch.Tensor
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """A copy of `fields` with the addresses of hidden and of new buffers of as many rows.

        Returns the buffers too: the caller must hold them until the ops have run.
        """
        ends = np.cumsum([-(-len(hidden) * size // 64) * 64 for size in self._row_bytes.values()])
        buffers = torch.empty(int(ends[-1]), dtype=torch.uint8)
        starts = np.concatenate(([0], ends[:-1])) + buffers.data_ptr()
        ops = fields.copy()
        ops.reshape(-1)[self._places] += np.concatenate(([hidden.data_ptr()], starts))[
            self._buffers
        ]
        return ops, buffers
