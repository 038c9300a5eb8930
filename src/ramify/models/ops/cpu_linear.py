"""Linear layers on CPU by `packed_gemm`: rows are independent by construction."""

from __future__ import annotations

import functools
import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import (
    ADD_RESIDUAL,
    OP_GEMM,
    OP_OUT,
    OP_X,
    OP_X_STRIDE,
    SILU_MUL,
    STORE,
)
from ramify.kernels.cpu.threads import ROW_KINDS, set_num_threads, thread_scratch
from ramify.kv import huge_pages

if TYPE_CHECKING:
    from numpy.typing import NDArray

# So that a worker that is interrupted does not hold up the others. With several blocks of rows a
# worker goes on in the block that it has packed, so that more tasks cost nothing.
GEMM_TASKS_PER_WORKER, GEMM_TASKS_PER_WORKER_BLOCKED = 4, 16
MAX_CACHED_OPS = 64  # numbers of rows, of one product

_NO_POSITIONS = np.zeros(0, np.int64)


def packed_gemm_supports(weight: Tensor) -> str | None:
    """None if the kernels can take this weight, else the reason."""
    if weight.device.type != "cpu":
        return f"device {weight.device.type}: written for CPU"
    if weight.dtype not in ROW_KINDS:
        return f"{weight.dtype}: written for {' and '.join(map(str, ROW_KINDS))}"
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed: pip install 'ramify[cpu]'"
    return None


def pack_weight(weight: Tensor, into: Tensor) -> None:
    """[out_width, in_width] as the kernels want it, into zeros [panels, in_width, NR].

    There and nowhere else: what is made on the way stays with the process, as large as the weights.
    """
    from ramify.kernels.cpu.gemm_microkernels import BF16_VNNI, NR
    from ramify.kernels.cpu.simd import LANES

    whole, width = len(weight) // NR, weight.shape[1]
    rest = weight[whole * NR :]
    parts = [(into[:whole], weight[: whole * NR])]
    if len(rest):
        parts.append((into[whole:], F.pad(rest, (0, 0, 0, NR - len(rest)))))
    for place, part in parts:
        count = len(place)
        if _weight_kind(weight) == BF16_VNNI:
            pairs = part.reshape(count, NR, width // 2, 2).permute(0, 2, 1, 3)
            place.view(count, width // 2, NR, 2).copy_(pairs)
        elif weight.dtype == torch.bfloat16:  # columns j and j + LANES side by side
            pairs = part.reshape(count, 2, LANES, width).permute(0, 3, 2, 1)
            place.view(count, width, LANES, 2).copy_(pairs)
        else:
            place.copy_(part.reshape(count, NR, width).permute(0, 2, 1))


def _weight_kind(weight: Tensor) -> int:
    """What `packed_gemm` take this weight and its rows for."""
    from ramify.kernels.cpu.gemm_microkernels import BF16_VNNI
    from ramify.kernels.cpu.simd import HAS_BF16_DOT

    in_pairs = HAS_BF16_DOT and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0
    return BF16_VNNI if in_pairs else ROW_KINDS[weight.dtype]


def pack_bias(bias: Tensor) -> Tensor:
    """[out_width] of any float dtype as [panels, NR] float32."""
    from ramify.kernels.cpu.gemm_microkernels import NR

    return F.pad(bias.float(), (0, -len(bias) % NR)).view(-1, NR)


class PackedLinear:
    """x @ weight.T + bias, accumulated in float32; the weight is copied.

    Where the processor multiplies bfloat16 by itself, subnormal numbers of that dtype are zeros.

    Args:
        weight: [out_width, in_width], float32 or bfloat16; if gated, the rows of gate, then those of
            up, equally many.
        bias: [out_width].
        norm: weights [in_width] and eps of an RMS norm of x that goes before.
        gated: the result is silu(gate) * up, of half the width.

    Whatever is fused is rounded to the weight's dtype where separate operations would round.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: tuple[Tensor, float] | None = None,
        gated: bool = False,
    ) -> None:
        from ramify.kernels.cpu import op_list, packed_gemm
        from ramify.kernels.cpu.gemm_microkernels import BF16_VNNI, NR

        self._kernels, self._run_ops = packed_gemm, op_list.run_ops
        self.out_width = weight.shape[0] // 2 if gated else weight.shape[0]
        self._in_width, self._dtype = weight.shape[1], weight.dtype
        self._kind = _weight_kind(weight)
        # of a row, in elements of that kind
        self._width = self._in_width // 2 if self._kind == BF16_VNNI else self._in_width
        self._mode = SILU_MUL if gated else STORE
        parts = weight.chunk(2) if gated else (weight,)
        # panels of gate and up take turns
        num_panels = -(-len(parts[0]) // NR)
        room = huge_pages.zeros((num_panels, len(parts), self._in_width, NR), weight.dtype)
        for place, part in enumerate(parts):
            pack_weight(part, room[:, place])
        self._weight, self._num_panel_groups = room.flatten(0, 1), num_panels  # gate and up are one
        self._bias = None
        if bias is not None:
            biases = [pack_bias(part) for part in (bias.chunk(2) if gated else (bias,))]
            self._bias = torch.stack(biases, 1).flatten()
        self._norm = None if norm is None else norm[0].contiguous()
        self.eps = 0.0 if norm is None else float(norm[1])  # of the norm, if there is one
        self._eps_of_norm = np.array([self.eps])
        # by rows, workers and whether it is added: what a kernel is told, but for addresses
        self._ops_by_rows: dict[tuple[int, int, bool], tuple[NDArray[np.int64], int]] = {}
        self._fixed = (
            0 if self._norm is None else self._norm.data_ptr(),
            self._weight.data_ptr(),
            len(self._weight),
            0 if self._bias is None else self._bias.data_ptr(),
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Of x and of the result."""
        return self._in_width, self.out_width

    @property
    def kind(self) -> tuple[object, ...]:
        """Dtype and widths."""
        return self._dtype, *self.widths

    @property
    def row_bytes(self) -> int:
        """Of a row of the result."""
        return self.out_width * self._dtype.itemsize

    def op(self, num_rows: int, num_workers: int, *, add: bool = False) -> tuple[int, ...]:
        """What `op_list.run_ops` is told about so many rows, one behind the other.

        Addresses of x and of the result are still to be put at `OP_X` and `OP_OUT`.
        """
        size, mode = self._dtype.itemsize, ADD_RESIDUAL if add else self._mode
        return (
            self._kind, mode, 0, self._in_width * size, num_rows, self._width,
            *self._fixed, 0, self.row_bytes, self.out_width,
            *_gemm_partition(num_rows, self._num_panel_groups, num_workers), OP_GEMM,
        )  # fmt: skip

    def scratch_floats(self, num_rows: int, num_workers: int) -> int:
        """Floats that each worker needs; see `thread_scratch`."""
        block_rows = _gemm_partition(num_rows, self._num_panel_groups, num_workers)[0]
        return self._kernels.gemm_scratch_floats(block_rows, self._width)

    def check(self, x: Tensor) -> None:
        """Raises ConfigError unless x is [rows, in_width] in the dtype of the weight, on CPU."""
        fits = x.dim() == 2 and x.shape[1] == self._in_width
        if not fits or x.dtype != self._dtype or not x.is_cpu:
            raise ConfigError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {self._dtype} "
                f"[rows, {self._in_width}] on cpu"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_width] -> [rows, out_width], in the dtype of the weight.

        Rows of x may be far apart; if their elements are, x is copied first.

        Raises:
            ConfigError: x has another width, dtype or device.
        """
        out = torch.empty((x.shape[0], self.out_width), dtype=self._dtype)
        self._run(x, out)
        return out

    def add_to(self, sums: Tensor, x: Tensor) -> Tensor:
        """Add the result to sums [rows, out_width], contiguous, in place; returns them.

        Raises:
            ConfigError: shapes or dtypes disagree, or the layer is gated.
        """
        if self._mode == SILU_MUL:
            raise ConfigError("a gated product is made anew, not added to something")
        if sums.shape != (x.shape[0], self.out_width) or sums.dtype != self._dtype:
            raise ConfigError(
                f"sums are {sums.dtype} {tuple(sums.shape)}; they must be {self._dtype} "
                f"{(x.shape[0], self.out_width)}"
            )
        if not sums.is_contiguous():
            raise ConfigError(f"sums have strides {sums.stride()}; they must be contiguous")
        self._run(x, sums, add=True)
        return sums

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
            found = self.op(num_rows, num_workers, add=add)
            cached = np.array([found], np.int64), self.scratch_floats(num_rows, num_workers)
            if len(self._ops_by_rows) >= MAX_CACHED_OPS:
                self._ops_by_rows.clear()
            self._ops_by_rows[num_rows, num_workers, add] = cached
        numbers, floats = cached[0].copy(), cached[1]
        numbers[0, OP_X], numbers[0, OP_OUT] = x.data_ptr(), out.data_ptr()
        numbers[0, OP_X_STRIDE] = x.stride(0) * self._dtype.itemsize
        set_num_threads(num_workers)
        scratch = thread_scratch(num_workers, floats, 1)
        self._run_ops(numbers, self._eps_of_norm, _NO_POSITIONS, num_workers, *scratch)


@functools.lru_cache(maxsize=4096)
def _gemm_partition(num_rows: int, num_panel_groups: int, num_workers: int) -> tuple[int, int, int]:
    """How a product is cut into tasks: the last three numbers of `packed_gemm.packed_gemm`.

    As few tiles as there can be, and of those the smallest that will do.
    """
    from ramify.kernels.cpu.gemm_microkernels import MR_TILES
    from ramify.kernels.cpu.packed_gemm import MC

    num_blocks = -(-num_rows // MC)
    per_block = -(-num_rows // num_blocks)
    per_tile = -(-per_block // -(-per_block // MR_TILES[-1]))
    tile = next(place for place, rows in enumerate(MR_TILES) if rows >= per_tile)
    block_rows = -(-per_block // MR_TILES[tile]) * MR_TILES[tile]
    tasks = num_workers * (
        GEMM_TASKS_PER_WORKER if num_blocks == 1 else GEMM_TASKS_PER_WORKER_BLOCKED
    )
    num_n_splits = min(-(-tasks // num_blocks), num_panel_groups)
    return block_rows, tile, num_n_splits
