"""Linear layers on CPU by the packed GEMM kernel: pack weights, describe the GEMM as an op, run it alone."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    CLAMPED_SWIGLU_MUL,
    GELU_TANH,
    GELU_TANH_MUL,
    LAYER_NORM,
    SIGMOID,
    SILU_MUL,
    STORE,
    is_tile_kind,
    round_up_to_cache_line,
)
from ramify.kernels.cpu.op_records import GEMM, op_row
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.models.ops.cpu.panels import new_panels, pack_bias
from ramify.models.ops.protocol import Activation, ForwardStep
from ramify.models.ops.quantized import Weight

if TYPE_CHECKING:
    from numpy.typing import NDArray

# More tasks than workers, so that an interrupted worker does not hold up the others. With several row
# blocks a worker stays in the block that it has packed, so more tasks cost nothing.
GEMM_TASKS_PER_WORKER, GEMM_TASKS_PER_WORKER_BLOCKED = 4, 16
MAX_CACHED_OPS = 64  # per linear or norm: one op for each number of rows, workers and mode
# Activations that the GEMM has as an epilogue; from SILU_MUL on gated.
ACTIVATION_MODES: dict[Activation, int] = {
    "gelu_tanh": GELU_TANH,
    "sigmoid": SIGMOID,
    "silu_mul": SILU_MUL,
    "gelu_tanh_mul": GELU_TANH_MUL,
    "clamped_swiglu_mul": CLAMPED_SWIGLU_MUL,
}

ROWS_PER_TASK = 4  # at least, of ops that take about a microsecond a row
NO_POSITIONS = np.zeros(0, np.int64)  # of `op_list.run_ops` without a rope op


def packed_gemm_supports(dtype: torch.dtype, device: torch.device) -> str | None:
    """None if the packed GEMM computes this dtype on this device, else the reason."""
    if device.type != "cpu":
        return f"device {device.type}: written for CPU"
    if dtype not in ROW_KINDS:
        return f"{dtype}: written for {' and '.join(map(str, ROW_KINDS))}"
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed: pip install 'ramify[cpu]'"
    return None


def num_row_tasks(num_rows: int, max_tasks: int) -> int:
    """Tasks of an op whose rows take about a microsecond each."""
    return min(-(-num_rows // ROWS_PER_TASK), max_tasks)


def padded_floats(count: int) -> int:
    """`count` float32 rounded up to whole cache lines."""
    return round_up_to_cache_line(4 * count) // 4


def epilogue(activation: Activation | None) -> tuple[int, int]:
    """A GEMM's mode for an activation, and how many parts of its result that combines."""
    mode = STORE if activation is None else ACTIVATION_MODES[activation]
    return mode, 2 if mode >= SILU_MUL else 1


def norm_kind(norm: Tensor, dtype: torch.dtype) -> int:
    """Storage kind of an RMS norm's weights [width] for rows of `dtype`; of a layer norm's LAYER_NORM.

    Raises:
        ConfigError: it is neither that of the rows nor float32; a layer norm's [2, width] not float32.
    """
    is_layer_norm = norm.dim() == 2
    if norm.dtype != torch.float32 and (is_layer_norm or norm.dtype != dtype):
        allowed = torch.float32 if is_layer_norm else f"{dtype} or {torch.float32}"
        raise ConfigError(f"a norm in {norm.dtype} for rows in {dtype}; use {allowed}")
    return LAYER_NORM if is_layer_norm else ROW_KINDS[norm.dtype]


def float_bits(value: float) -> int:
    """The bits of a float32, as a field of an op."""
    return int(np.float32(value).view(np.int32))


class PackedLinear:
    """Packed GEMM with optional fused norm, bias and activation; rows are independent by construction.

        x @ weight.T + bias           plain
        norm(x) @ weight.T + bias     norm
        silu(gate) * up               gated activation; gate, up = halves of the above

    Args:
        weight: [out_width, in_width], float32, bfloat16 or quantised (see `panels_support`), copied into
            packed form; with a gated activation [2 * out_width, in_width], gate above up.
        bias: one element per row of `weight`.
        norm: weight [in_width] and eps of an RMS norm of x. In bfloat16 a weight in float32 is
            multiplied with before the norm is rounded, one in bfloat16 afterwards. Of a layer norm:
            weight and bias in float32, [2, in_width].
        activation: of the epilogue, a key of `ACTIVATION_MODES`.

    Accumulates in float32; rounds to the weight's dtype wherever separate operations would. The
    bfloat16 dot-product instructions (VNNI) flush subnormal bfloat16 numbers to zero.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        activation: Activation | None = None,
    ) -> None:
        from ramify.kernels.cpu import op_list, packed_gemm
        from ramify.kernels.cpu.gemm_microkernels import NR

        self._kernels, self._run_ops = packed_gemm, op_list.run_ops
        self._mode, self._num_parts = epilogue(activation)
        num_parts = self._num_parts
        self.out_width = weight.shape[0] // num_parts
        self._in_width, self.dtype = weight.shape[1], weight.dtype
        # Panels of gate and up alternate, so that a group of two gives NR columns of the result.
        self._num_panel_groups = -(-self.out_width // NR)
        self._panels = new_panels(weight, num_parts=num_parts)
        self._panels.write(0, weight)
        self._panels.finish()
        self._bias = None if bias is None else pack_bias(bias, num_parts)
        self._norm = None if norm is None else norm[0].contiguous()
        self._norm_kind = 0 if self._norm is None else norm_kind(self._norm, self.dtype)
        self.eps = 0.0 if norm is None else float(norm[1])
        self._eps_of_norm = np.array([self.eps])
        # (rows, workers, add) -> op without the addresses of x and the result, scratch floats
        self._ops_by_rows: dict[tuple[int, int, bool], tuple[NDArray[np.int64], int]] = {}
        self._record = self._panels.record._replace(
            dtype=ROW_KINDS[self.dtype],
            mode=self._mode,
            x_stride=self._in_width * self.dtype.itemsize,
            norm=0 if self._norm is None else self._norm.data_ptr(),
            norm_kind=self._norm_kind,
            bias=0 if self._bias is None else self._bias.data_ptr(),
            out_stride=self.row_bytes,
            num_columns=self.out_width,
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Width of x and of the result."""
        return self._in_width, self.out_width

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the result."""
        return self.out_width * self.dtype.itemsize

    @property
    def row_macs(self) -> int:
        """Multiply-adds of a row."""
        return self._in_width * self.out_width * self._num_parts

    def op(
        self, num_rows: int, num_workers: int, *, add: bool = False, scale: float = 1.0
    ) -> tuple[int, ...]:
        """The GEMM op [OP_FIELDS] of `op_list.run_ops` for contiguous x [num_rows, in_width].

        The caller fills in the addresses `GEMM.x` and `GEMM.out`. `add`: add `scale` times the result to
        what is there.
        """
        block_rows, tile, num_n_splits = self._partition(num_rows, num_workers)
        return op_row(
            self._record._replace(
                mode=ADD_RESIDUAL if add else self._mode,
                num_rows=num_rows,
                block_rows=block_rows,
                tile=tile,
                num_n_splits=num_n_splits,
                scale=float_bits(scale),
            )
        )

    def scratch_floats(self, num_rows: int, num_workers: int) -> int:
        """Scratch float32 per worker, as for `thread_scratch`."""
        block_rows = self._partition(num_rows, num_workers)[0]
        return self._kernels.gemm_scratch_floats(block_rows, self._record)

    def _partition(self, num_rows: int, num_workers: int) -> tuple[int, int, int]:
        """Partition of a GEMM into tasks: rows per block, index into MR_TILES, splits of the N dimension."""
        if is_tile_kind(self._record.weight_kind):
            from ramify.kernels.cpu.tile_gemm import max_block_rows

            max_rows = max_block_rows(self._in_width)
            return _tile_partition(num_rows, max_rows, self._num_panel_groups, num_workers)
        return _gemm_partition(num_rows, self._num_panel_groups, num_workers)

    def weight_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, in_width] of the weight as they were before it was packed, or dequantised.

        Args:
            rows: [n] int64, each below `out_width`; not of a gated activation.
        """
        return self._panels.rows(rows)

    def check(self, x: Tensor) -> None:
        """Raise ConfigError unless x is [rows, in_width] in the dtype of the weight, on CPU."""
        fits = x.dim() == 2 and x.shape[1] == self._in_width
        if not fits or x.dtype != self.dtype or not x.is_cpu:
            raise ConfigError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {self.dtype} "
                f"[rows, {self._in_width}] on cpu"
            )

    def __call__(
        self,
        x: Tensor,
        step: ForwardStep | None = None,  # noqa: ARG002 - for adapters
        *,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[rows, in_width] -> [rows, out_width], in the dtype of the weight; see `Linear`.

        Any row stride will do; x with another element stride than 1 is copied.

        Raises:
            ConfigError: shapes, dtypes or devices disagree, or `residual` is not contiguous.
        """
        shape = (x.shape[0], self.out_width)
        if residual is None:
            out = torch.empty(shape, dtype=self.dtype)
            self._run(x, out)
            return out
        if self._mode != STORE:  # its epilogue cannot add
            return residual.add_(self(x))
        if residual.shape != shape or residual.dtype != self.dtype:
            raise ConfigError(
                f"residual is {residual.dtype} {tuple(residual.shape)}; it must be {self.dtype} {shape}"
            )
        if not residual.is_contiguous():
            raise ConfigError(f"residual has strides {residual.stride()}; it must be contiguous")
        self._run(x, residual, add=True)
        return residual

    def _run(self, x: Tensor, out: Tensor, *, add: bool = False) -> None:
        self.check(x)
        num_rows = x.shape[0]
        if num_rows == 0 or self.out_width == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        num_workers = torch.get_num_threads()
        cached = self._ops_by_rows.get((num_rows, num_workers, add))
        if cached is None:
            op = self.op(num_rows, num_workers, add=add)
            cached = np.array([op], np.int64), self.scratch_floats(num_rows, num_workers)
            if len(self._ops_by_rows) >= MAX_CACHED_OPS:
                self._ops_by_rows.clear()
            self._ops_by_rows[num_rows, num_workers, add] = cached
        ops, floats = cached[0].copy(), cached[1]
        ops[0, GEMM.x], ops[0, GEMM.out] = x.data_ptr(), out.data_ptr()
        ops[0, GEMM.x_stride] = x.stride(0) * self.dtype.itemsize
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, floats, 1)
        self._run_ops(ops, self._eps_of_norm, NO_POSITIONS, num_workers, *scratch)


@functools.lru_cache(maxsize=4096)
def _gemm_partition(num_rows: int, num_panel_groups: int, num_workers: int) -> tuple[int, int, int]:
    """Partition of a GEMM into tasks: rows per block, index into MR_TILES, splits of the N dimension.

    As few row tiles as possible, and the smallest MR that needs no more of them.
    """
    from ramify.kernels.cpu.gemm_microkernels import MR_TILES
    from ramify.kernels.cpu.packed_gemm import MC

    num_blocks = -(-num_rows // MC)
    per_block = -(-num_rows // num_blocks)
    per_tile = -(-per_block // -(-per_block // MR_TILES[-1]))
    tile = next(index for index, rows in enumerate(MR_TILES) if rows >= per_tile)
    block_rows = -(-per_block // MR_TILES[tile]) * MR_TILES[tile]
    return block_rows, tile, _num_n_splits(num_blocks, num_panel_groups, num_workers)


@functools.lru_cache(maxsize=4096)
def _tile_partition(
    num_rows: int, max_rows: int, num_panel_groups: int, num_workers: int
) -> tuple[int, int, int]:
    """`_gemm_partition` for tiles of bfloat16, in blocks of at most `max_rows`; no index into MR_TILES."""
    num_blocks = -(-num_rows // max_rows)
    num_n_splits = _num_n_splits(num_blocks, num_panel_groups, num_workers)
    return -(-num_rows // num_blocks), 0, num_n_splits


def _num_n_splits(num_blocks: int, num_panel_groups: int, num_workers: int) -> int:
    per_worker = GEMM_TASKS_PER_WORKER if num_blocks == 1 else GEMM_TASKS_PER_WORKER_BLOCKED
    return min(-(-num_workers * per_worker // num_blocks), num_panel_groups)
