"""Linear layers on CPU by `panel_kernels`: rows are independent by construction."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ramify.attention.tree import use_threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

KINDS = {torch.float32: 0, torch.bfloat16: 1}  # as `attention.simd` numbers them
TASKS_PER_WORKER = 4  # so that a worker that is interrupted does not hold up the others


def why_not_panels(weight: Tensor) -> str | None:
    """None if the kernels can take this weight, else the reason."""
    if weight.device.type != "cpu":
        return f"device {weight.device.type}: written for CPU"
    if weight.dtype not in KINDS:
        return f"{weight.dtype}: written for {' and '.join(map(str, KINDS))}"
    if importlib.util.find_spec("numba") is None:
        return "Numba is not installed: pip install 'ramify[cpu]'"
    return None


def pack(weight: Tensor) -> Tensor:
    """[out_width, in_width] laid out for the kernels, out_width filled up to whole panels."""
    from ramify.attention.simd import LANES
    from ramify.models.panel_tiles import PANEL

    width = weight.shape[1]
    missing = -weight.shape[0] % PANEL
    if missing:
        weight = torch.cat([weight, weight.new_zeros(missing, width)])
    if weight.dtype == torch.bfloat16:  # columns j and j + LANES side by side
        return weight.view(-1, 2, LANES, width).permute(0, 3, 2, 1).contiguous()
    return weight.view(-1, PANEL, width).permute(0, 2, 1).contiguous()


def pack_bias(bias: Tensor) -> Tensor:
    """[out_width] of any float dtype as [panels * PANEL] float32."""
    from ramify.models.panel_tiles import PANEL

    return torch.nn.functional.pad(bias.float(), (0, -len(bias) % PANEL)).contiguous()


class Panels:
    """x @ weight.T + bias, accumulated in float32; the weight is copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Lay out a weight [out_width, in_width], float32 or bfloat16, and its bias [out_width]."""
        from ramify.models import panel_kernels

        self._kernels = panel_kernels
        self._out_width, self._kind = weight.shape[0], KINDS[weight.dtype]
        self._weight = pack(weight)
        self._bias = None if bias is None else pack_bias(bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_width] -> [rows, out_width], in the dtype of the weight.

        Rows of x may be far apart; if their elements are, x is copied first.
        """
        kernels = self._kernels
        num_rows, width = x.shape
        out = x.new_empty((num_rows, self._out_width))
        if out.numel() == 0:
            return out
        if x.stride(1) != 1:
            x = x.contiguous()
        size = x.element_size()
        bias = 0 if self._bias is None else self._bias.data_ptr()
        product = kernels.Product(
            self._kind, x.data_ptr(), x.stride(0) * size, num_rows, width,
            self._weight.data_ptr(), bias, out.data_ptr(), self._out_width * size, self._out_width,
        )  # fmt: skip
        num_workers = max(1, torch.get_num_threads())
        num_blocks = -(-num_rows // kernels.BLOCK_ROWS)
        tile = _tile_for(-(-num_rows // num_blocks), kernels.TILES)
        rows = kernels.TILES[tile]
        block_rows = -(-num_rows // (num_blocks * rows)) * rows
        pieces = -(-TASKS_PER_WORKER * num_workers // num_blocks)
        cut = kernels.Cut(block_rows, tile, min(pieces, len(self._weight)), num_workers)
        use_threads(num_workers)
        scratch = _scratch.of(num_workers, kernels.scratch_floats(block_rows, width))
        kernels.multiply(product, cut, scratch, _scratch.counter)
        return out


def _tile_for(num_rows: int, tiles: tuple[int, ...]) -> int:
    """The place of the tile that computes so many rows with the fewest tiles, then rows."""
    num_tiles = -(-num_rows // tiles[-1])
    least = -(-num_rows // num_tiles)
    return next(place for place, rows in enumerate(tiles) if rows >= least)


class _Scratch(threading.local):
    """Kept between calls: a fresh allocation costs more than a small product."""

    def __init__(self) -> None:
        self.counter: NDArray[np.int64] = np.zeros(1, np.int64)
        self._floats: NDArray[np.float32] = np.zeros((0, 0), np.float32)

    def of(self, num_workers: int, floats: int) -> NDArray[np.float32]:
        if self._floats.shape[0] < num_workers or self._floats.shape[1] < floats:
            self._floats = np.zeros((num_workers, floats), np.float32)
        return self._floats


_scratch = _Scratch()
