"""Fused decoder layers: compiled code from one attention to the next, or through all layers at once.

`layer_ops` makes the ops. `FusedLayers` chooses for each step; the bits are the same:

- fused: all layers in one call, K/V write and attention included, if the step is short;
- by layer: a Python call of attention in each layer;
- pruned, on top of either: what follows attention in the last layer only for the rows that are wanted.

Why: with few rows the Python around a GEMM takes as long as the GEMM, since a pass over the weights
leaves nothing of the interpreter in the processor's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.paged import PagedAttention, PagedBackend
from ramify.errors import ConfigError
from ramify.kernels.cpu.op_records import GEMM, NORM_ROPE, OP_FIELDS
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.kv.pool import KVPool
from ramify.models.ops.cpu.layer_attention import FusedAttention, FusedAttentionArgs
from ramify.models.ops.cpu.layer_ops import ATTN_OUT, LayerOps, OpList
from ramify.models.ops.functional import mark_nonfinite_rows
from ramify.models.ops.protocol import DecoderLayer, ForwardStep

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A step is one call if it has at most this many rows or multiply-adds. At peak 6e10 is 0.3 s of two
# cores with AVX-512-BF16 (Zen 4), 0.7 s of two with AVX2. In longer steps the interpreter around a layer
# costs nothing, and other Python threads should get their turn.
FUSED_MAX_ROWS, FUSED_MAX_MACS = 64, 6e10
# Op lists cached, least recently used dropped: one for each number of rows and of threads.
MAX_OP_LISTS = 64
_ROPE = 1  # index of QK norm + rope among the ops of a layer, after the QKV GEMM


class FusedLayers:
    """A `LayerStack` as one op list; same bits as its layers called one by one.

    Args:
        layers: at least one, all of the same width, heads and dtype.

    Raises:
        ConfigError: layers differ, or their widths do not fit their heads.
    """

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer]) -> FusedLayers | None:
        """All layers fused, if every operation is a compiled CPU op and layers are alike; else None."""
        ops = [op for layer in layers if (op := LayerOps.of(layer)) is not None]
        return cls(ops) if len(ops) == len(layers) and _are_alike(ops) else None

    def __init__(self, layers: Sequence[LayerOps]) -> None:
        from ramify.kernels.cpu import fused_layers, op_list

        if not _are_alike(layers):
            kinds = sorted({str(ops.kind) for ops in layers})
            raise ConfigError(f"layers differ in their widths, heads or dtypes: {kinds}")
        first = layers[0]
        num_heads, head_dim = first.rope.heads.counts, first.rope.heads.head_dim
        hidden, heads = first.qkv.widths[0], sum(num_heads) * head_dim
        expected = (hidden, heads), (num_heads[0] * head_dim, hidden)
        for layer in layers:
            widths = layer.qkv.widths, layer.o_proj.widths
            if widths != expected:
                raise ConfigError(
                    f"linears have widths {widths}; with these heads they must have {expected}"
                )
        self._kernels, self._run_fused_layers = op_list, fused_layers.run_fused_layers
        self._layers, self._num_heads, self._head_dim = list(layers), num_heads, head_dim
        # By pool: the backend of its last step, and what attends over both inside the kernel.
        self._attention: WeakKeyDictionary[KVPool, tuple[PagedBackend, FusedAttention | None]] = (
            WeakKeyDictionary()
        )
        self._ops = OpList(layers)
        self._eps, self._starts = self._ops.eps, np.cumsum([0, *(len(ops.ops) for ops in layers)])
        # Attention comes behind each of the first, and its output is read by each of the second.
        self._attention_ops = self._starts[:-1] + _ROPE
        self._o_proj_ops = self._ops.readers(ATTN_OUT)
        # Caches of methods of another object: a cycle through self would keep the weights alive.
        cache = functools.lru_cache(MAX_OP_LISTS)
        self._op_list, self._floats = cache(self._ops.fields), cache(self._ops.scratch_floats)
        self._buffer_ends = cache(self._ops.buffer_ends)
        # Before the first kernel, which starts Numba's thread pool.
        set_num_threads(torch.get_num_threads())
        no_ops = np.zeros((0, OP_FIELDS), np.int64), self._eps[:0], np.zeros(0, np.int64)
        # Compile now, not in the first step.
        op_list.run_ops(*no_ops, 1, *thread_scratch(1, 0, 0))

    def __call__(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """Run all layers over `hidden` in place and return it; see `LayerStack`.

        Args:
            hidden: [T, hidden_size] of the layers' dtype, contiguous.

        Raises:
            ConfigError: shapes or dtypes disagree, those of attention's output included.
            IndexError: a position or a slot is out of range.
        """
        first, positions = self._layers[0], step.positions
        first.qkv.check(hidden)
        first.rope.check_positions(positions, len(hidden))
        if not hidden.is_contiguous():
            raise ConfigError(f"hidden has strides {hidden.stride()}; it must be contiguous")
        if not len(hidden):
            return hidden
        ops, _buffers = self._bind_buffers(hidden)
        is_pruned = step.output_rows is not None
        full_layer_ops = int(self._starts[-2]) if is_pruned else len(ops)
        fused_args = self._fused_args(step)
        if fused_args is not None and self._fuses_attention(fused_args, positions):
            first.rope.check_position_range(positions)
            self._run_fused(ops[:full_layer_ops], positions, fused_args, hidden.dtype)
        else:
            self._run_by_layer(ops[:full_layer_ops], step, hidden.dtype)
        if is_pruned:
            self._run_pruned_last_layer(ops, step, hidden)
        return hidden

    def warm_up(self, backend: PagedBackend, pool: KVPool) -> None:
        """See `LayerStack`: compiles the kernel of all layers if it can attend over this pool."""
        attention = self._fused_attention(backend, pool)
        if attention is None:
            return
        args = attention.empty_step(pool)
        no_ops = np.zeros((0, OP_FIELDS), np.int64)
        run_args = np.zeros(0, np.int64), 1, *thread_scratch(1, 0, 0), np.zeros(6, np.int64)
        self._run_fused_layers(
            no_ops, self._eps[:0], *run_args, args.planes, args.slots, *args.kernel_args
        )

    def _fused_attention(self, backend: PagedBackend, pool: KVPool) -> FusedAttention | None:
        """What makes the kernel's arguments for steps over this backend and pool; None if it cannot."""
        known_backend, attention = self._attention.get(pool, (None, None))
        if backend is known_backend:
            return attention
        attention = None
        sinks = [ops.sinks for ops in self._layers]
        if FusedAttention.supports(backend, pool, self._layers[0].qkv.dtype, sinks) is None:
            assert isinstance(backend, CpuBackend)
            attention = FusedAttention(backend, pool, sinks)
        self._attention[pool] = backend, attention
        return attention

    def _fused_args(self, step: ForwardStep) -> FusedAttentionArgs | None:
        """The kernel's arguments for the step's attention; None if it must be called by layer."""
        paged = step.attention
        if type(paged) is not PagedAttention:
            return None
        attention = self._fused_attention(paged.backend, paged.pool)
        if attention is None:
            return None
        return attention.step(paged.pool, paged.plan, paged.slots.numpy())

    def _bind_buffers(self, hidden: Tensor) -> tuple[NDArray[np.int64], Tensor]:
        """See `OpList.bind`."""
        num_rows = len(hidden)
        fields = self._op_list(num_rows, torch.get_num_threads())
        return self._ops.bind(fields, self._buffer_ends(num_rows), hidden)

    def _run_by_layer(self, ops: NDArray[np.int64], step: ForwardStep, dtype: torch.dtype) -> None:
        """Run whole layers, `ops` from the first on, with a Python call of attention in each."""
        positions, whole = step.positions, replace(step, output_rows=None)
        run, begin = self._run(len(positions), positions), 0
        for number, rope in enumerate(self._attention_ops.tolist()):
            if rope >= len(ops):
                break
            heads = self._heads(ops, number, len(positions), dtype)
            run(ops, begin, rope + 1)
            if number == 0:
                self._layers[0].rope.raise_if_out_of_range(ops[rope])
            attn_out = self._attention_output(whole, number, *heads)
            begin = rope + 1
            ops[self._o_proj_ops[number], GEMM.x] = attn_out.data_ptr()
        run(ops, begin, len(ops))

    def _run_pruned_last_layer(
        self, ops: NDArray[np.int64], step: ForwardStep, hidden: Tensor
    ) -> None:
        """Run the last layer: K/V of all rows, then attention and what follows of `output_rows` only."""
        positions, rows = step.positions, step.output_rows
        assert rows is not None
        number, begin = len(self._layers) - 1, int(self._starts[-2])
        behind_rope = begin + _ROPE + 1
        q, k, v = self._heads(ops, number, len(hidden), hidden.dtype)
        self._run(len(hidden), positions)(ops, begin, behind_rope)
        self._layers[0].rope.raise_if_out_of_range(ops[begin + _ROPE])
        attn_out = self._attention_output(step, number, q, k, v)
        if len(rows):
            wanted = hidden[rows]
            ops, _buffers = self._bind_buffers(wanted)
            ops[self._o_proj_ops[number], GEMM.x] = attn_out.data_ptr()
            self._run(len(wanted), positions)(ops, behind_rope, len(ops))
            hidden[rows] = wanted
        mark_nonfinite_rows(hidden, k, v)

    def _run(
        self, num_rows: int, positions: Tensor
    ) -> Callable[[NDArray[np.int64], int, int], None]:
        """A function run(ops, begin, end) that runs ops[begin:end] on this many rows."""
        num_workers, indices = torch.get_num_threads(), positions.contiguous().numpy()
        floats = self._floats(num_rows, num_workers)
        scratch = thread_scratch(num_workers, floats, len(self._eps))

        def run(ops: NDArray[np.int64], begin: int, end: int) -> None:
            # Attention, called in between, may set another number.
            set_num_threads(num_workers)
            selected = slice(begin, end)
            self._kernels.run_ops(
                ops[selected], self._eps[selected], indices, num_workers, *scratch
            )

        return run

    def _heads(
        self, ops: NDArray[np.int64], number: int, num_rows: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Allocate the QKV rows of a layer and bind them to its ops; returns views q, k, v."""
        rope = self._attention_ops[number]
        rows = torch.empty((num_rows, sum(self._num_heads), self._head_dim), dtype=dtype)
        ops[rope - 1, GEMM.out] = ops[rope, NORM_ROPE.rows] = rows.data_ptr()
        return rows.split_with_sizes(self._num_heads, 1)

    def _attention_output(
        self, step: ForwardStep, number: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Call attention and check what it returns: like q, or its `output_rows`, made contiguous."""
        attn_out = step.pruned_attention(number, q, k, v, sinks=self._layers[number].sinks)
        num_rows = len(q) if step.output_rows is None else len(step.output_rows)
        shape = (num_rows, *q.shape[1:])
        if attn_out.shape != shape or attn_out.dtype != q.dtype or not attn_out.is_cpu:
            raise ConfigError(
                f"attention returned {attn_out.dtype} {tuple(attn_out.shape)} on {attn_out.device}; it "
                f"must return {q.dtype} {shape} on cpu"
            )
        return attn_out.contiguous()

    def _fuses_attention(self, fused_args: FusedAttentionArgs, positions: Tensor) -> bool:
        """Whether the step is short enough for one call, and its arguments fit layers and threads."""
        num_rows, (num_q, _, _) = len(positions), self._num_heads
        if num_rows > FUSED_MAX_ROWS:
            num_keys = int(positions.numpy().max()) + 1
            attention_macs = 2 * len(self._layers) * num_q * self._head_dim * num_keys
            if num_rows * (self._ops.row_macs + attention_macs) > FUSED_MAX_MACS:
                return False
        kind = self._layers[0].qkv.dtype, len(self._layers), *self._num_heads, self._head_dim
        planned = fused_args.kind, fused_args.num_workers, len(fused_args.slots)
        return planned == (kind, torch.get_num_threads(), num_rows)

    def _run_fused(
        self, ops: NDArray[np.int64], positions: Tensor, fused_args: FusedAttentionArgs, dtype: torch.dtype
    ) -> None:  # fmt: skip
        """Run whole layers, K/V write and attention included, in one call of the kernel."""
        num_rows, size = len(fused_args.slots), dtype.itemsize
        num_q, num_k, num_v = (heads * self._head_dim for heads in self._num_heads)
        rows = torch.empty((num_rows, num_q + num_k + num_v), dtype=dtype)
        attn_out = torch.empty((num_rows, num_q), dtype=dtype)
        if fused_args.num_tokens < num_rows:
            attn_out[fused_args.num_tokens :] = 0
        rope = self._attention_ops[self._attention_ops < len(ops)]
        ops[rope - 1, GEMM.out] = ops[rope, NORM_ROPE.rows] = rows.data_ptr()
        ops[self._o_proj_ops[: len(rope)], GEMM.x] = attn_out.data_ptr()
        buffers = np.array(
            [ROW_KINDS[dtype], rows.data_ptr(), rows.stride(0) * size, num_q * size,
             (num_q + num_k) * size, attn_out.data_ptr()]
        )  # fmt: skip
        num_ops = len(ops) + len(self._layers) * fused_args.num_phases
        set_num_threads(fused_args.num_workers)
        floats = self._floats(num_rows, fused_args.num_workers)
        scratch = thread_scratch(fused_args.num_workers, floats, num_ops)
        run_args = positions.contiguous().numpy(), fused_args.num_workers, *scratch, buffers
        self._run_fused_layers(
            ops, self._eps, *run_args, fused_args.planes, fused_args.slots, *fused_args.kernel_args
        )


def _are_alike(layers: Sequence[LayerOps]) -> bool:
    """Whether there are layers, all of one kind."""
    return len({ops.kind for ops in layers}) == 1
