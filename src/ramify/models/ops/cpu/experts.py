"""Mixtures of experts on CPU: the softmax router, and all experts of a layer as one grouped GEMM.

Tokens are sorted by expert, so that each expert that is hit reads its weights once; see `kernels.cpu.moe`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import ADD_RESIDUAL, STORE
from ramify.kernels.cpu.op_records import (
    COMBINE,
    GEMM,
    GROUP,
    ROUTE,
    CombineOp,
    GroupOp,
    RouteOp,
    op_row,
)
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.ops.cpu.linear import (
    GEMM_TASKS_PER_WORKER_BLOCKED,
    NO_POSITIONS,
    epilogue,
    num_row_tasks,
    padded_floats,
)
from ramify.models.ops.cpu.panels import new_panels, pack_bias
from ramify.models.ops.cpu.quantized_panels import UnlikeWeightsError
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.protocol import Activation
from ramify.models.ops.quantized import Weight

_NO_EPS = np.zeros(4)


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
        """The route op [OP_FIELDS] for rows of `padded` floats in place; the caller fills in `ROUTE.weights`."""
        return op_row(
            RouteOp(
                num_tasks=num_row_tasks(num_rows, 4 * num_workers),
                weights_stride=4 * self.padded,
                num_rows=num_rows,
                num_experts=self.num_experts,
                top_k=self._top_k,
                normalise=int(self._normalise),
            )
        )

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
            ops[0, ROUTE.weights] = rows.data_ptr()
            set_num_threads(num_workers)
            scratch = thread_scratch(num_workers, self.scratch_floats(num_rows, num_workers), 1)
            self._run_ops(ops, _NO_EPS[:1], NO_POSITIONS, num_workers, *scratch)
        return weights


class GroupedLinear:
    """A matrix for each expert, packed; rows of an expert follow each other.

    Args:
        matrix: weight [out_width, in_width], see `PackedLinear`, or with an activation [2 * out_width, in_width], gate
            above up, and bias of an expert; all alike.
    """

    def __init__(
        self,
        matrix: Callable[[int], tuple[Weight, Tensor | None]],
        num_experts: int,
        *,
        activation: Activation | None = None,
    ) -> None:
        from ramify.kernels.cpu import packed_gemm
        from ramify.kernels.cpu.gemm_microkernels import MR_TILES

        self._kernels, self._largest_tile = packed_gemm, MR_TILES[-1]
        first, first_bias = matrix(0)
        self._mode, num_parts = epilogue(activation)
        self.dtype = first.dtype
        self.in_width, self.out_width = first.shape[1], first.shape[0] // num_parts
        self._num_parts = num_parts
        self._panels = new_panels(first, num_matrices=num_experts, num_parts=num_parts)
        biases = list[Tensor]()
        for number in range(num_experts):
            weight, bias = matrix(number) if number else (first, first_bias)
            self._panels.write(number, weight)
            if bias is not None:
                biases.append(pack_bias(bias, num_parts))
        if len(biases) not in (0, num_experts):
            raise UnlikeWeightsError("a bias of some experts only")
        self._panels.finish()
        self._bias = torch.stack(biases) if biases else None
        self._record = self._panels.record._replace(
            dtype=ROW_KINDS[self.dtype],
            mode=self._mode,
            x_stride=self.in_width * self.dtype.itemsize,
            bias=0 if self._bias is None else self._bias.data_ptr(),
            out_stride=self.row_bytes,
            num_columns=self.out_width,
        )

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

        The caller fills in the addresses `x`, `out`, `items`, `num_items`, and `gather` if x is not in the
        order of the items.
        """
        return op_row(
            self._record._replace(
                num_rows=num_rows,
                block_rows=self._block_rows(num_rows),
                num_n_splits=GEMM_TASKS_PER_WORKER_BLOCKED * num_workers,
            )
        )

    def scratch_floats(self, num_rows: int, _num_workers: int) -> int:
        """Scratch float32 per worker, as for `thread_scratch`."""
        return self._kernels.gemm_scratch_floats(self._block_rows(num_rows), self._record)


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
        """The group op; the caller fills in `weights`, `row_bytes` apart, `routing` and `num_items`."""
        return op_row(
            GroupOp(
                weights_stride=row_bytes,
                num_rows=num_rows,
                num_experts=self.num_experts,
                top_k=self.top_k,
            )
        )

    def gate_up_op(self, num_rows: int, num_workers: int) -> tuple[int, ...]:
        """That of `GroupedLinear`; `gather` is an offset into `routing`."""
        op = [*self.gate_up.op(num_rows, num_workers)]
        op[GEMM.gather] = 8 * int(self._offsets(num_rows, self.num_experts, self.top_k)[0])
        return tuple(op)

    def combine_op(self, num_rows: int, num_workers: int, *, add: bool) -> tuple[int, ...]:
        """The combine op; the caller fills in `x`, `routing` and `out`, zeros unless `add`."""
        return op_row(
            CombineOp(
                num_tasks=num_row_tasks(num_rows, 4 * num_workers),
                dtype=ROW_KINDS[self.down.dtype],
                mode=ADD_RESIDUAL if add else STORE,
                x_stride=self.down.row_bytes,
                num_rows=num_rows,
                num_experts=self.num_experts,
                top_k=self.top_k,
                width=self.down.out_width,
                out_stride=self.down.row_bytes,
            )
        )

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
        num_items = address + self.routing_bytes(num_rows)
        ops[0, GROUP.weights], ops[0, GROUP.routing] = weights.data_ptr(), address
        ops[0, GROUP.num_items] = ops[1:3, GEMM.num_items] = num_items
        ops[1, GEMM.x], ops[1, GEMM.out] = x.data_ptr(), inner.data_ptr()
        ops[1:3, GEMM.items] = address
        ops[1, GEMM.gather] += address
        ops[2, GEMM.x], ops[2, GEMM.out] = inner.data_ptr(), results.data_ptr()
        ops[3, COMBINE.x], ops[3, COMBINE.out] = results.data_ptr(), total.data_ptr()
        ops[3, COMBINE.routing] = address
        floats = max(
            self.gate_up.scratch_floats(num_rows, num_workers),
            self.down.scratch_floats(num_rows, num_workers),
            self.combine_scratch(num_rows, num_workers),
        )
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, floats, len(ops))
        self._run_ops(ops, _NO_EPS, NO_POSITIONS, num_workers, *scratch)
