"""What a dense decoder computes from one attention to the next, in one call of compiled code.

In short steps attention too, if it is told how (`cpu_layer_attention`): all layers are one call.

For few rows the Python around a product takes as long as a small product: a pass over the weights
leaves nothing of the interpreter in the processor's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import OP_FIELDS, OP_OUT, OP_ROWS, OP_X
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.ops.cpu_linear import PackedLinear
from ramify.models.ops.cpu_rope import QKNormRope
from ramify.models.ops.functional import mark_nonfinite_rows
from ramify.models.ops.protocol import Attention

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ramify.models.ops.cpu_layer_attention import FusedAttentionArgs

# What one call computes at most: so many rows, or so many products of two numbers. By their peaks that
# is 0.3 s of two cores that multiply bfloat16 (Zen 4), 0.7 s of two with AVX2. Where a layer takes
# longer the interpreter around it costs nothing, and it should get its turn.
FUSED_MAX_ROWS, FUSED_MAX_MACS = 64, 6e10
MAX_OP_LISTS = 64  # kept, one for each number of rows and of threads: those used last


class LayerOps(NamedTuple):
    """The operations of a layer, in order; attention comes after the second."""

    qkv: PackedLinear
    rope: QKNormRope
    o_proj: PackedLinear
    gate_up: PackedLinear  # gate and up
    down: PackedLinear

    @classmethod
    def of(cls, *operations: object) -> LayerOps | None:
        """Those of a layer in this order, or None if one of them is no kernel of ours."""
        qkv, turn, *others = operations
        products = [one for one in (qkv, *others) if isinstance(one, PackedLinear)]
        if len(products) < len(operations) - 1 or not isinstance(turn, QKNormRope):
            return None
        return cls(products[0], turn, *products[1:])


_QKV, _ROPE, _O_PROJ, _GATE_UP, _DOWN = range(5)
_OPS_PER_LAYER = len(LayerOps._fields)


class FusedLayers:
    """All layers of a dense decoder; the bits are those of their operations one by one.

    Args:
        layers: at least one, all of the same widths and dtype.
        num_heads: of queries, of keys, of values.
        head_dim: of each of them.

    Raises:
        ConfigError: layers differ, or the widths of one do not fit.
    """

    def __init__(
        self, layers: Sequence[LayerOps], *, num_heads: tuple[int, int, int], head_dim: int
    ) -> None:
        from ramify.kernels.cpu import fused_layers, op_list

        kinds = {tuple(link.kind for link in links) for links in layers}
        if len(kinds) != 1 or len({kind[0] for each in kinds for kind in each}) != 1:
            raise ConfigError(f"layers differ in their widths or dtypes: {sorted(map(str, kinds))}")
        first, heads = layers[0], sum(num_heads) * head_dim
        hidden, attn_out, inner = first.qkv.widths[0], num_heads[0] * head_dim, first.down.widths[0]
        expected = (hidden, heads), (attn_out, hidden), (hidden, inner), (inner, hidden)
        found = tuple(link.widths for link in first if isinstance(link, PackedLinear))
        if found != expected:
            raise ConfigError(
                f"products have widths {found}; with these heads they must have {expected}"
            )
        self._kernels, self._run_fused_layers = op_list, fused_layers.run_fused_layers
        self._layers, self._num_heads, self._head_dim = list(layers), num_heads, head_dim
        self._eps = np.array([link.eps for links in layers for link in links])
        self._num_weights = len(layers) * sum(
            link.widths[0] * link.widths[1] * (1 + (link is first.gate_up))
            for link in first
            if isinstance(link, PackedLinear)
        )
        # not of methods: they would keep themselves, and the weights, until cycles are collected
        kept = functools.lru_cache(MAX_OP_LISTS)
        self._op_list = kept(partial(_op_list, self._layers))
        self._floats = kept(partial(_scratch_floats, first))
        set_num_threads(torch.get_num_threads())  # Numba's pool starts with its first kernel
        nothing = np.zeros((0, OP_FIELDS), np.int64), self._eps[:0], np.zeros(0, np.int64)
        # compiled now, not in the first step
        op_list.run_ops(*nothing, 1, *thread_scratch(1, 0, 0))

    def run(self, hidden: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """See `DenseDecoder.forward`.

        Args:
            hidden: [T, hidden_size] of the layers' dtype, contiguous, T at least 1; it is written
                to, and becomes the result.

        Raises:
            ConfigError: shapes or dtypes disagree, or `attend` returned something that does not fit.
            IndexError: a position is outside the tables.
        """
        first = self._layers[0]
        first.qkv.check(hidden)
        first.rope.check_positions(positions, len(hidden))
        if not hidden.is_contiguous():
            raise ConfigError(f"hidden has strides {hidden.stride()}; it must be contiguous")
        program, _inner = self._bind_buffers(hidden)
        rows: Tensor | None = getattr(attend, "output_rows", None)
        full_layer_ops = len(program) if rows is None else len(program) - _OPS_PER_LAYER
        fused_args: FusedAttentionArgs | None = getattr(attend, "fused_args", None)
        if fused_args is not None and self._fuses_attention(fused_args, positions):
            first.rope.check_position_range(positions)
            self._run_fused(program[:full_layer_ops], positions, fused_args, hidden.dtype)
        else:
            self._run_by_layer(program[:full_layer_ops], positions, attend, hidden.dtype)
        if rows is not None:
            self._run_pruned_last_layer(program, positions, attend, hidden, rows)
        return hidden

    def warm_up(self, fused_args: FusedAttentionArgs) -> None:
        """Compile now what runs steps like this one of no tokens, rather than in the first step."""
        program = np.zeros((0, OP_FIELDS), np.int64)
        rest = np.zeros(0, np.int64), 1, *thread_scratch(1, 0, 0), np.zeros(6, np.int64)
        self._run_fused_layers(
            program,
            self._eps[:0],
            *rest,
            fused_args.planes,
            fused_args.slots,
            *fused_args.kernel_args,
        )

    def _bind_buffers(self, hidden: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """All operations on these rows, and what lies between those of an MLP: keep it for so long."""
        num_rows, first = len(hidden), self._layers[0]
        program = self._op_list(num_rows, torch.get_num_threads()).copy()
        inner = torch.empty((num_rows, first.gate_up.out_width), dtype=hidden.dtype)
        for link, source in ((_QKV, hidden), (_GATE_UP, hidden), (_DOWN, inner)):
            program[link::_OPS_PER_LAYER, OP_X] = source.data_ptr()
        for link, into in ((_O_PROJ, hidden), (_GATE_UP, inner), (_DOWN, hidden)):
            program[link::_OPS_PER_LAYER, OP_OUT] = into.data_ptr()
        return program, inner

    def _run_by_layer(
        self, ops: NDArray[np.int64], positions: Tensor, attend: Attention, dtype: torch.dtype
    ) -> None:
        """Whole layers, the first ones of the chain."""
        run, begin = self._run(len(positions), positions), 0
        for number in range(len(ops) // _OPS_PER_LAYER):
            end = _OPS_PER_LAYER * number + _O_PROJ
            heads = self._heads(ops, number, len(positions), dtype)
            run(ops, begin, end)
            if number == 0:
                self._layers[0].rope.raise_if_out_of_range(ops[_ROPE])
            attn_out = self._attention_output(attend, number, *heads)
            ops[end, OP_X] = attn_out.data_ptr()
            begin = end
        run(ops, begin, len(ops))

    def _run_pruned_last_layer(
        self, ops: NDArray[np.int64], positions: Tensor, attend: Attention, hidden: Tensor, rows: Tensor
    ) -> None:  # fmt: skip
        """The last layer, of which only these rows are wanted behind K/V."""
        number = len(self._layers) - 1
        begin = _OPS_PER_LAYER * number
        q, k, v = self._heads(ops, number, len(hidden), hidden.dtype)
        self._run(len(hidden), positions)(ops, begin, begin + _O_PROJ)
        self._layers[0].rope.raise_if_out_of_range(ops[begin + _ROPE])
        attn_out = self._attention_output(attend, number, q[rows], k, v)
        if len(rows):
            some = hidden[rows]
            ops, _inner = self._bind_buffers(some)
            ops[begin + _O_PROJ, OP_X] = attn_out.data_ptr()
            self._run(len(some), positions)(ops, begin + _O_PROJ, len(ops))
            hidden[rows] = some
        mark_nonfinite_rows(hidden, k, v)

    def _run(
        self, num_rows: int, positions: Tensor
    ) -> Callable[[NDArray[np.int64], int, int], None]:
        """What runs the operations [from, to) of a program on so many rows."""
        num_workers, at = torch.get_num_threads(), positions.contiguous().numpy()
        floats = self._floats(num_rows, num_workers)
        scratch = thread_scratch(num_workers, floats, _OPS_PER_LAYER * len(self._layers))

        def run(program: NDArray[np.int64], begin: int, end: int) -> None:
            set_num_threads(num_workers)  # attention has its own number
            some = slice(begin, end)
            self._kernels.run_ops(program[some], self._eps[some], at, num_workers, *scratch)

        return run

    def _heads(
        self, ops: NDArray[np.int64], number: int, num_rows: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Where the first operations of a layer will put q, k and v."""
        at = _OPS_PER_LAYER * number
        rows = torch.empty((num_rows, sum(self._num_heads), self._head_dim), dtype=dtype)
        ops[at + _QKV, OP_OUT] = ops[at + _ROPE, OP_ROWS] = rows.data_ptr()
        return rows.split_with_sizes(self._num_heads, 1)

    def _attention_output(
        self, attend: Attention, number: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """What attention makes of these, contiguous."""
        attn_out = attend(number, q, k, v)
        if attn_out.shape != q.shape or attn_out.dtype != q.dtype or not attn_out.is_cpu:
            raise ConfigError(
                f"attend returned {attn_out.dtype} {tuple(attn_out.shape)} on {attn_out.device}; it must "
                f"return {q.dtype} {tuple(q.shape)} on cpu"
            )
        return attn_out.contiguous()

    def _fuses_attention(self, fused_args: FusedAttentionArgs, positions: Tensor) -> bool:
        num_rows, (num_q, _, _) = len(positions), self._num_heads
        if num_rows > FUSED_MAX_ROWS:
            num_keys = int(positions.numpy().max()) + 1
            seen = 2 * len(self._layers) * num_q * self._head_dim * num_keys
            if num_rows * (self._num_weights + seen) > FUSED_MAX_MACS:
                return False
        dtype = self._layers[0].qkv.kind[0]
        kind = dtype, len(self._layers), *self._num_heads, self._head_dim
        found = fused_args.kind, fused_args.num_workers, len(fused_args.slots)
        return found == (kind, torch.get_num_threads(), num_rows)

    def _run_fused(
        self, ops: NDArray[np.int64], positions: Tensor, fused_args: FusedAttentionArgs, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """Layers with their attention: the Python around each takes as long as a small one."""
        num_rows, size = len(fused_args.slots), dtype.itemsize
        num_q, num_k, num_v = (heads * self._head_dim for heads in self._num_heads)
        rows = torch.empty((num_rows, num_q + num_k + num_v), dtype=dtype)
        attn_out = torch.empty((num_rows, num_q), dtype=dtype)
        if fused_args.num_tokens < num_rows:
            attn_out[fused_args.num_tokens :] = 0
        ops[_QKV::_OPS_PER_LAYER, OP_OUT] = ops[_ROPE::_OPS_PER_LAYER, OP_ROWS] = rows.data_ptr()
        ops[_O_PROJ::_OPS_PER_LAYER, OP_X] = attn_out.data_ptr()
        numbers = np.array(
            [ROW_KINDS[dtype], rows.data_ptr(), rows.stride(0) * size, num_q * size,
             (num_q + num_k) * size, attn_out.data_ptr()]
        )  # fmt: skip
        operations = len(ops) + len(self._layers) * fused_args.num_phases
        set_num_threads(fused_args.num_workers)
        floats = self._floats(num_rows, fused_args.num_workers)
        scratch = thread_scratch(fused_args.num_workers, floats, operations)
        rest = positions.contiguous().numpy(), fused_args.num_workers, *scratch, numbers
        self._run_fused_layers(
            ops, self._eps, *rest, fused_args.planes, fused_args.slots, *fused_args.kernel_args
        )


def _scratch_floats(layer_ops: LayerOps, num_rows: int, num_workers: int) -> int:
    """What each worker needs for any product of a layer."""
    products = [link for link in layer_ops if isinstance(link, PackedLinear)]
    return max(link.scratch_floats(num_rows, num_workers) for link in products)


def _op_list(layers: Sequence[LayerOps], num_rows: int, num_workers: int) -> NDArray[np.int64]:
    """The numbers of all operations, but for addresses: [operations, WIDTH]."""
    found = np.zeros((_OPS_PER_LAYER * len(layers), OP_FIELDS), np.int64)
    for at, link in enumerate(link for links in layers for link in links):
        if isinstance(link, QKNormRope):
            numbers = link.op(num_rows, layers[0].qkv.row_bytes, num_workers)
        else:
            numbers = link.op(num_rows, num_workers, add=at % _OPS_PER_LAYER in (_O_PROJ, _DOWN))
        found[at] = numbers
    return found
