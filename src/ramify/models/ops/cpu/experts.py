"""Mixtures of experts on CPU: the softmax router, and all experts of a layer as one grouped GEMM.

Tokens are sorted by expert, so that each expert that is hit reads its weights once; see `kernels.cpu.moe`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    OP_COMBINE,
    OP_FIELDS,
    OP_GATHER,
    OP_GEMM,
    OP_GROUP,
    OP_ITEMS,
    OP_KIND,
    OP_NUM_ITEMS,
    OP_NUM_TASKS,
    OP_OUT,
    OP_ROUTE,
    OP_ROUTING,
    OP_ROWS,
    OP_X,
    STORE,
)
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.kv import huge_pages
from ramify.models.ops.cpu.linear import (
    GEMM_TASKS_PER_WORKER_BLOCKED,
    NO_POSITIONS,
    epilogue,
    num_row_tasks,
    pack_matrix,
    padded_floats,
    weight_kind,
)
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.protocol import Activation

_NO_EPS = np.zeros(4)


def _op(kind: int, fields: Mapping[int, int]) -> tuple[int, ...]:
    op = [0] * OP_FIELDS
    op[OP_KIND] = kind
    for field, value in fields.items():
        op[field] = value
    return tuple(op)


class TopKRouter:
    """Softmax over all experts, of which the best `top_k` keep their weight; ties to the lowest expert.

    Args:
        normalise: divide a token's weights by their sum.
    """

    def __init__(self, num_experts: int, top_k: int, *, normalise: bool) -> None:
        from ramify.kernels.cpu import op_list
        from ramify.kernels.cpu.simd import LANES

        self._run_ops = op_list.run_ops
        self.num_experts, self._top_k, self._normalise = num_experts, top_k, normalise
        # The kernel writes -inf behind a row's logits, up to a whole vector.
        self.padded = -(-num_experts // LANES) * LANES

    def op(self, num_rows: int, num_workers: int) -> tuple[int, ...]:
        """The route op [OP_FIELDS] for rows of `padded` floats in place; the caller fills in `OP_ROWS`."""
        tasks = {OP_NUM_TASKS: num_row_tasks(num_rows, 4 * num_workers)}
        sizes = {3: num_rows, 4: self.num_experts, 5: self._top_k, 6: int(self._normalise)}
        return _op(OP_ROUTE, {2: 4 * self.padded} | sizes | tasks)

    def scratch_floats(self, _num_rows: int, _num_workers: int) -> int:
        """Scratch float32 per worker, as for `thread_scratch`."""
        return padded_floats(self.padded)

    def __call__(self, logits: Tensor) -> Tensor:
        """[T, num_experts] float32 -> weights of the same shape, zero but for `top_k` of a row."""
        num_rows, num_workers = len(logits), torch.get_num_threads()
        rows = torch.empty((num_rows, self.padded))
        weights = rows[:, : self.num_experts].copy_(logits)
        if num_rows:
            ops = np.array([self.op(num_rows, num_workers)], np.int64)
            ops[0, OP_ROWS] = rows.data_ptr()
            set_num_threads(num_workers)
            scratch = thread_scratch(num_workers, self.scratch_floats(num_rows, num_workers), 1)
            self._run_ops(ops, _NO_EPS[:1], NO_POSITIONS, num_workers, *scratch)
        return weights


class GroupedLinear:
    """A matrix for each expert, packed; rows of an expert follow each other.

    Args:
        matrix: weight [out_width, in_width], or with an activation [2 * out_width, in_width], gate
            above up, and bias of an expert; all alike.
    """

    def __init__(
        self,
        matrix: Callable[[int], tuple[Tensor, Tensor | None]],
        num_experts: int,
        *,
        activation: Activation | None = None,
    ) -> None:
        from ramify.kernels.cpu import packed_gemm
        from ramify.kernels.cpu.gemm_microkernels import BF16_VNNI, MR_TILES, NR

        self._kernels, self._largest_tile = packed_gemm, MR_TILES[-1]
        first, first_bias = matrix(0)
        self._mode, num_parts = epilogue(activation)
        self.dtype, self._kind = first.dtype, weight_kind(first)
        self.in_width, self.out_width = first.shape[1], first.shape[0] // num_parts
        self._width = self.in_width // 2 if self._kind == BF16_VNNI else self.in_width
        groups = num_experts, -(-self.out_width // NR), num_parts
        self._weight = huge_pages.zeros((*groups, self.in_width, NR), first.dtype)
        self._bias = None if first_bias is None else torch.empty((*groups, NR))
        for number in range(num_experts):
            weight, bias = matrix(number)
            biases = None if self._bias is None else self._bias[number]
            pack_matrix(weight, bias, num_parts, self._weight[number], biases)
        self._num_panels, self._num_parts = groups[1] * num_parts, num_parts

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the result."""
        return self.out_width * self.dtype.itemsize

    @property
    def row_macs(self) -> int:
        """Multiply-adds of a row."""
        return self.in_width * self.out_width * self._num_parts

    def _block_rows(self, num_rows: int) -> int:
        return int(min(self._kernels.MC, num_rows + self._largest_tile - 1))

    def op(self, num_rows: int, num_workers: int) -> tuple[int, ...]:
        """The grouped GEMM op [OP_FIELDS] for contiguous x, of at most `num_rows` rows of an expert.

        The caller fills in the addresses `OP_X`, `OP_OUT`, `OP_ITEMS`, `OP_NUM_ITEMS`, and `OP_GATHER` if x is not in
        the order of the items.
        """
        bias = 0 if self._bias is None else self._bias.data_ptr()
        return (
            self._kind, self._mode, 0, self.in_width * self.dtype.itemsize, num_rows, self._width, 0,
            self._weight.data_ptr(), self._num_panels, bias, 0, self.row_bytes, self.out_width,
            self._block_rows(num_rows), 0, GEMM_TASKS_PER_WORKER_BLOCKED * num_workers, OP_GEMM, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def scratch_floats(self, num_rows: int, _num_workers: int) -> int:
        """Scratch float32 per worker, as for `thread_scratch`."""
        return self._kernels.gemm_scratch_floats(self._block_rows(num_rows), self._width)


class GroupedExperts:
    """`Experts` in one call: group tokens by expert, gate and up, down, weighted sum.

    Args:
        top_k: a token has at most this many nonzero weights.
        shared: added to the sum.
    """

    def __init__(
        self,
        gate_up: GroupedLinear,
        down: GroupedLinear,
        *,
        num_experts: int,
        top_k: int,
        shared: Mlp | None,
    ) -> None:
        from ramify.kernels.cpu import moe, op_list

        self._offsets, self._run_ops = moe.routing_offsets, op_list.run_ops
        self.gate_up, self.down, self.shared = gate_up, down, shared
        self.num_experts, self.top_k = num_experts, top_k

    def routing_bytes(self, num_rows: int) -> int:
        """Bytes of `routing` for `num_rows` tokens."""
        return 8 * int(self._offsets(num_rows, self.num_experts, self.top_k)[-1])

    def group_op(self, num_rows: int, row_bytes: int) -> tuple[int, ...]:
        """The group op; the caller fills in `OP_ROWS`, weights `row_bytes` apart, `OP_ROUTING`, `OP_NUM_ITEMS`."""
        sizes = {2: row_bytes, 3: num_rows, 4: self.num_experts, 5: self.top_k}
        return _op(OP_GROUP, sizes | {OP_NUM_TASKS: 1})

    def gate_up_op(self, num_rows: int, num_workers: int) -> tuple[int, ...]:
        """That of `GroupedLinear`; `OP_GATHER` is an offset into `routing`."""
        op = [*self.gate_up.op(num_rows, num_workers)]
        op[OP_GATHER] = 8 * int(self._offsets(num_rows, self.num_experts, self.top_k)[0])
        return tuple(op)

    def combine_op(self, num_rows: int, num_workers: int, *, add: bool) -> tuple[int, ...]:
        """The combine op; the caller fills in `OP_X`, `OP_ROUTING` and `OP_OUT`, zeros unless `add`."""
        kind, row_bytes = ROW_KINDS[self.down.dtype], self.down.row_bytes
        sizes = {
            0: kind,
            1: ADD_RESIDUAL if add else STORE,
            3: row_bytes,
            4: num_rows,
            5: self.top_k,
        }
        sizes |= {7: self.down.out_width, 8: row_bytes, 9: self.num_experts}
        num_tasks = num_row_tasks(num_rows, 4 * num_workers)
        return _op(OP_COMBINE, sizes | {OP_NUM_TASKS: num_tasks})

    def combine_scratch(self, _num_rows: int, _num_workers: int) -> int:
        """Scratch float32 per worker of the combine op."""
        return padded_floats(self.down.out_width)

    def __call__(self, x: Tensor, weights: Tensor) -> Tensor:
        """See `Experts`.

        Raises:
            ConfigError: shapes or dtypes disagree.
        """
        num_rows, width = len(x), self.gate_up.in_width
        shapes = (num_rows, width), (num_rows, self.num_experts)
        dtypes = self.gate_up.dtype, torch.float32
        if (x.shape, weights.shape) != shapes or (x.dtype, weights.dtype) != dtypes:
            raise ConfigError(
                f"x is {x.dtype} {tuple(x.shape)} and weights {weights.dtype} {tuple(weights.shape)}; "
                f"they must be {dtypes[0]} {shapes[0]} and {dtypes[1]} {shapes[1]}"
            )
        total = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if num_rows:
            self._run(x.contiguous(), weights, total)
        return total if self.shared is None else total + self.shared(x, None)

    def _run(self, x: Tensor, weights: Tensor, total: Tensor) -> None:
        num_rows, num_workers = len(x), torch.get_num_threads()
        if weights.stride(1) != 1:
            weights = weights.contiguous()
        routing = np.empty(self.routing_bytes(num_rows) // 8 + 1, np.int64)
        num_pairs = num_rows * self.top_k
        inner = torch.empty((num_pairs, self.gate_up.out_width), dtype=x.dtype)
        results = torch.empty((num_pairs, self.down.out_width), dtype=x.dtype)
        ops = np.array(
            [
                self.group_op(num_rows, 4 * weights.stride(0)),
                self.gate_up_op(num_rows, num_workers),
                self.down.op(num_rows, num_workers),
                self.combine_op(num_rows, num_workers, add=False),
            ],
            np.int64,
        )
        address = routing.ctypes.data
        ops[0, OP_ROWS], ops[0, OP_ROUTING] = weights.data_ptr(), address
        ops[1, OP_X], ops[1, OP_OUT] = x.data_ptr(), inner.data_ptr()
        ops[1:3, OP_ITEMS] = address
        ops[:3, OP_NUM_ITEMS] = address + self.routing_bytes(num_rows)
        ops[1, OP_GATHER] += address
        ops[2, OP_X], ops[2, OP_OUT] = inner.data_ptr(), results.data_ptr()
        ops[3, OP_X], ops[3, OP_OUT], ops[3, OP_ROUTING] = (
            results.data_ptr(), total.data_ptr(), address,
        )  # fmt: skip
        floats = max(
            self.gate_up.scratch_floats(num_rows, num_workers),
            self.down.scratch_floats(num_rows, num_workers),
            self.combine_scratch(num_rows, num_workers),
        )
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, floats, len(ops))
        self._run_ops(ops, _NO_EPS, NO_POSITIONS, num_workers, *scratch)
