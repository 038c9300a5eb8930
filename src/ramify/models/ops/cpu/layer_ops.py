"""The compiled ops of a decoder layer, and the buffers that they read and write.

    QKV GEMM (RMS norm)  ->  QK norm + rope  ->  attention  ->  O GEMM (+= hidden)
    gate/up GEMM (RMS norm, activation)      ->  down GEMM (+= hidden)

With a norm behind attention or MLP, that GEMM stores its rows and an op adds their norm to hidden. In
parallel with attention, the gate/up GEMM comes before the O GEMM. In place of an MLP:

    RMS norm  ->  router GEMM  ->  route, group  ->  gate/up and down of experts  ->  combine (+= hidden)

A shared expert is three more GEMMs before the combine op: gate/up, down, its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.cpu.abi import round_up_to_cache_line
from ramify.kernels.cpu.op_records import (
    COMBINE,
    GEMM,
    GROUP,
    NORM,
    NORM_ROPE,
    OP_FIELDS,
    ROUTE,
)
from ramify.models.ops.cpu.experts import GroupedExperts, TopKRouter
from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.cpu.norm import RowNorm
from ramify.models.ops.cpu.rope import QKNormRope
from ramify.models.ops.protocol import (
    DecoderLayer,
    FusableExperts,
    FusableLayer,
    FusableParts,
    RowOp,
)
from ramify.models.ops.torch_modules import SplitAttention

# Buffers whose addresses the caller sets: the residual stream, QKV rows, attention's output.
HIDDEN, QKV, ATTN_OUT = "hidden", "qkv", "attn_out"
# A buffer of its own in each layer, see `kernels.cpu.moe`; all others are shared.
NUM_ITEMS = "num_items"


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
    # bytes of each buffer that the caller need not set, by number of rows
    buffer_bytes: Mapping[str, Callable[[int], int]]
    sinks: Tensor | None

    @property
    def kind(self) -> tuple[object, ...]:
        """Dtype, width of hidden, heads and positions; layers of one model have equal kinds."""
        return self.qkv.dtype, self.qkv.widths[0], *self.rope.kind

    @classmethod
    def of(cls, layer: DecoderLayer) -> LayerOps | None:
        """The ops of a layer; None if it is not fusable, or one of its operations is not compiled."""
        if not isinstance(layer, FusableLayer):
            return None
        parts = layer.fusable
        if not isinstance(parts.attention, SplitAttention):
            return None
        rope = parts.attention.qk_norm_rope
        qkv, o_proj = parts.qkv, parts.o_proj
        if not isinstance(qkv, PackedLinear) or not isinstance(rope, QKNormRope):
            return None
        if not isinstance(o_proj, PackedLinear):
            return None
        norms = parts.after_attention, parts.after_mlp
        if not all(norm is None or isinstance(norm, RowNorm) for norm in norms):
            return None
        is_plain = parts.scale == 1.0 and not parts.is_parallel
        if not is_plain and (any(norms) or isinstance(parts.mlp, FusableExperts)):
            return None
        mlp = _mlp_ops(parts, qkv.widths[0])
        if mlp is None:
            return None
        mlp_ops, mlp_buffers = mlp
        num_before = int(parts.is_parallel)  # ops that read hidden before attention's is added
        rope_op = LayerOp(
            partial(_rope_fields, rope, qkv.row_bytes),
            ((NORM_ROPE.rows, QKV),),
            _no_scratch,
            rope.eps,
        )
        ops = (
            _gemm(qkv, HIDDEN, QKV),
            rope_op,
            *mlp_ops[:num_before],
            *_add_gemm(o_proj, ATTN_OUT, parts.after_attention, parts.scale),
            *mlp_ops[num_before:],
        )
        buffers = dict(mlp_buffers)
        if any(norm is not None for norm in norms):
            buffers["block_out"] = _rows_of(o_proj.row_bytes)
        return cls(qkv, rope, o_proj, ops, buffers, parts.attention.sinks)


_Mlp = tuple[list[LayerOp], dict[str, Callable[[int], int]]]


def _mlp_ops(parts: FusableParts, hidden_size: int) -> _Mlp | None:
    """Ops and buffers of an MLP or of experts; None if an operation is not compiled, or widths differ."""
    mlp, after = parts.mlp, parts.after_mlp
    if isinstance(mlp, FusableExperts):
        return None if after is not None else _expert_ops(mlp, hidden_size)
    gate_up, down = mlp.gate_up, mlp.down
    if not isinstance(gate_up, PackedLinear) or not isinstance(down, PackedLinear):
        return None
    if (gate_up.widths[0], *down.widths) != (hidden_size, gate_up.out_width, hidden_size):
        return None
    ops = [_gemm(gate_up, HIDDEN, "inner"), *_add_gemm(down, "inner", after, parts.scale)]
    return ops, {"inner": _rows_of(gate_up.row_bytes)}


def _expert_ops(mlp: FusableExperts, hidden_size: int) -> _Mlp | None:
    norm, router, route, experts = mlp.norm, mlp.router, mlp.route, mlp.experts
    if not isinstance(norm, RowNorm) or not isinstance(router, PackedLinear):
        return None
    if not isinstance(route, TopKRouter) or not isinstance(experts, GroupedExperts):
        return None
    if experts.shared is not None:
        return None
    gate_up, down, row_bytes = experts.gate_up, experts.down, 4 * route.padded
    widths = norm.width, gate_up.in_width, down.out_width, down.in_width
    if widths != (hidden_size, hidden_size, hidden_size, gate_up.out_width):
        return None
    is_wide = norm.dtype == torch.float32
    router_x = "normed" if is_wide else "normed_float32"
    shared = _shared_expert_ops(mlp, hidden_size, router_x)
    if shared is None:
        return None
    shared_ops, shared_buffers = shared
    combine_buffers = [
        (COMBINE.x, "pairs_out"),
        (COMBINE.routing, "routing"),
        (COMBINE.out, HIDDEN),
    ]
    if shared_ops:
        combine_buffers += [
            (COMBINE.shared, "shared_out"),
            (COMBINE.shared_weights, "shared_weights"),
        ]
    norm_buffers = [(NORM.x, HIDDEN), (NORM.out, "normed")]
    if not is_wide:
        norm_buffers.append((NORM.f32_copy, router_x))

    def router_fields(num_rows: int, num_workers: int) -> tuple[int, ...]:
        fields = [*router.op(num_rows, num_workers)]
        fields[GEMM.out_stride] = row_bytes
        return tuple(fields)

    # All tokens of a layer may go to the same experts.
    ops = [
        LayerOp(norm.op, tuple(norm_buffers), norm.scratch_floats, norm.eps),
        LayerOp(
            router_fields,
            ((GEMM.x, router_x), (GEMM.out, "weights")),
            router.scratch_floats,
            row_macs=router.row_macs,
        ),
        LayerOp(route.op, ((ROUTE.weights, "weights"),), route.scratch_floats),
        LayerOp(
            lambda num_rows, _: experts.group_op(num_rows, row_bytes),
            ((GROUP.weights, "weights"), (GROUP.routing, "routing"), (GROUP.num_items, NUM_ITEMS)),
            _no_scratch,
        ),
        LayerOp(
            experts.gate_up_op,
            ((GEMM.x, "normed"), (GEMM.out, "pairs_inner"), (GEMM.items, "routing"), (GEMM.gather, "routing"),
             (GEMM.num_items, NUM_ITEMS)),
            gate_up.scratch_floats,
            row_macs=experts.top_k * gate_up.row_macs,
        ),
        LayerOp(
            down.op,
            ((GEMM.x, "pairs_inner"), (GEMM.out, "pairs_out"), (GEMM.items, "routing"),
             (GEMM.num_items, NUM_ITEMS)),
            down.scratch_floats,
            row_macs=experts.top_k * down.row_macs,
        ),
        *shared_ops,
        LayerOp(
            partial(experts.combine_op, add=True), tuple(combine_buffers), experts.combine_scratch
        ),
    ]  # fmt: skip
    buffers = {
        "normed": _rows_of(norm.width * norm.dtype.itemsize),
        "weights": _rows_of(row_bytes),
        "routing": experts.routing_bytes,
        NUM_ITEMS: lambda _num_rows: 8,
        "pairs_inner": _rows_of(experts.top_k * gate_up.row_bytes),
        "pairs_out": _rows_of(experts.top_k * down.row_bytes),
        **shared_buffers,
    }
    if not is_wide:
        buffers[router_x] = _rows_of(4 * norm.width)
    return ops, buffers


def _shared_expert_ops(mlp: FusableExperts, hidden_size: int, wide_x: str) -> _Mlp | None:
    """Ops and buffers of a shared expert and its weights, none without one; None as `_mlp_ops`."""
    if mlp.shared is None:
        return [], {}
    gate_up, down, weight = mlp.shared.gate_up, mlp.shared.down, mlp.shared_weight
    if not isinstance(gate_up, PackedLinear) or not isinstance(down, PackedLinear):
        return None
    if not isinstance(weight, PackedLinear) or weight.dtype != torch.float32:
        return None
    widths = gate_up.widths[0], *down.widths, *weight.widths
    if widths != (hidden_size, gate_up.out_width, hidden_size, hidden_size, 1):
        return None
    ops = [
        _gemm(gate_up, "normed", "shared_inner"),
        _gemm(down, "shared_inner", "shared_out"),
        _gemm(weight, wide_x, "shared_weights"),
    ]
    return ops, {
        "shared_inner": _rows_of(gate_up.row_bytes),
        "shared_out": _rows_of(down.row_bytes),
        "shared_weights": _rows_of(weight.row_bytes),
    }


def _rows_of(row_bytes: int) -> Callable[[int], int]:
    return lambda num_rows: num_rows * row_bytes


def _gemm(
    linear: PackedLinear, x: str, out: str, *, add: bool = False, scale: float = 1.0
) -> LayerOp:
    return LayerOp(
        partial(linear.op, add=add, scale=scale),
        ((GEMM.x, x), (GEMM.out, out)),
        linear.scratch_floats,
        linear.eps,
        linear.row_macs,
    )


def _add_gemm(linear: PackedLinear, x: str, norm: RowOp | None, scale: float) -> list[LayerOp]:
    """hidden += scale * linear(x), or norm(linear(x))."""
    if norm is None:
        return [_gemm(linear, x, HIDDEN, add=True, scale=scale)]
    assert isinstance(norm, RowNorm)
    buffers = (NORM.x, "block_out"), (NORM.out, HIDDEN)
    add_norm = LayerOp(partial(norm.op, add=True), buffers, norm.scratch_floats, norm.eps)
    return [_gemm(linear, x, "block_out"), add_norm]


def _rope_fields(
    rope: QKNormRope, row_bytes: int, num_rows: int, num_workers: int
) -> tuple[int, ...]:
    return rope.op(num_rows, row_bytes, num_workers)


def _no_scratch(_num_rows: int, _num_workers: int) -> int:
    return 0


def _buffer(name: str, layer: int) -> tuple[str, int]:
    """The buffer that a layer has by that name."""
    return name, layer if name == NUM_ITEMS else 0


class OpList:
    """The ops of all layers, with the addresses of their buffers filled in for each step.

    Args:
        layers: of one kind.
    """

    def __init__(self, layers: Sequence[LayerOps]) -> None:
        self._ops = [op for layer in layers for op in layer.ops]
        sizes: dict[tuple[str, int], list[Callable[[int], int]]] = {}
        for number, layer in enumerate(layers):
            for name, size in layer.buffer_bytes.items():
                sizes.setdefault(_buffer(name, number), []).append(size)
        self._sizes = [*sizes.values()]
        buffer_index = {buffer: i for i, buffer in enumerate([_buffer(HIDDEN, 0), *sizes])}
        bound, begin = list[tuple[int, int]](), 0  # (index into the flat op list, buffer)
        for number, layer in enumerate(layers):
            for op in layer.ops:
                for field, buffer in op.buffers:
                    index = buffer_index.get(_buffer(buffer, number))
                    if index is not None:
                        bound.append((begin + field, index))
                begin += OP_FIELDS
        self._address_fields, self._buffers = np.array(bound, np.int64).reshape(-1, 2).T.copy()
        self.eps = np.array([op.eps for op in self._ops])
        self.row_macs = sum(op.row_macs for op in self._ops)

    def readers(self, buffer: str) -> NDArray[np.int64]:
        """Indices of the GEMMs that read this buffer as x."""
        indices = [index for index, op in enumerate(self._ops) if (GEMM.x, buffer) in op.buffers]
        return np.array(indices, np.int64)

    def fields(self, num_rows: int, num_workers: int) -> NDArray[np.int64]:
        """All ops for `num_rows` rows: [ops, OP_FIELDS], without addresses."""
        return np.array([op.fields(num_rows, num_workers) for op in self._ops], np.int64)

    def scratch_floats(self, num_rows: int, num_workers: int) -> int:
        """Scratch float32 per worker that suffices for every op."""
        return max(op.scratch_floats(num_rows, num_workers) for op in self._ops)

    def buffer_ends(self, num_rows: int) -> NDArray[np.int64]:
        """Where each buffer ends when they follow each other, in bytes: the largest of any layer."""
        largest = [max(size(num_rows) for size in sizes) for sizes in self._sizes]
        return np.cumsum([round_up_to_cache_line(size) for size in largest], dtype=np.int64)

    def bind(
        self, fields: NDArray[np.int64], ends: NDArray[np.int64], hidden: torch.Tensor
    ) -> tuple[NDArray[np.int64], torch.Tensor]:
        """A copy of `fields` with the addresses of hidden and of new buffers.

        Returns the buffers too: the caller must hold them until the ops have run.

        Args:
            fields, ends: of as many rows as hidden has.
        """
        buffers = torch.empty(int(ends[-1]), dtype=torch.uint8)
        addresses = np.empty(1 + len(ends), np.int64)
        addresses[:2] = hidden.data_ptr(), buffers.data_ptr()
        addresses[2:] = ends[:-1] + buffers.data_ptr()
        ops = fields.copy()
        ops.reshape(-1)[self._address_fields] += addresses[self._buffers]
        return ops, buffers
