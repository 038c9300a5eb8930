"""Weights packed for the GEMM: micro-panels of float32 and bfloat16, and which kind of panels a weight has."""

from __future__ import annotations

from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.cpu.abi import BF16, F32
from ramify.kernels.cpu.op_records import GemmOp
from ramify.kernels.cpu.threads import ROW_KINDS
from ramify.kv import huge_pages
from ramify.models.ops.blocks_of_rows import for_blocks
from ramify.models.ops.cpu.quantized_panels import QuantizedPanels, UnlikeWeightsError
from ramify.models.ops.quantized import QuantizedWeight, Weight

PACKED_AT_ONCE = 1 << 18  # elements of a block that a thread packs


class Panels(Protocol):
    """Matrices of one kind and shape, packed: `write` each, then `finish`."""

    def write(self, number: int, weight: Weight) -> None:
        """Pack matrix `number`: [out_width, in_width], or two parts of it, gate above up.

        Raises:
            UnlikeWeightsError: it is of another kind than the first.
        """
        ...

    def finish(self) -> Self:
        """Call once all are written."""
        ...

    @property
    def record(self) -> GemmOp:
        """The fields of a GEMM op that are about its weights."""
        ...

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [n, in_width] of the only matrix, by their numbers [n] int64; it has one part."""
        ...


def new_panels(like: Weight, *, num_matrices: int = 1, num_parts: int = 1) -> Panels:
    """Panels for matrices like this one.

    Args:
        num_matrices: that follow each other, such as experts.
        num_parts: 2: gate above up, whose panels alternate.
    """
    if isinstance(like, QuantizedWeight):
        return QuantizedPanels(like, num_matrices=num_matrices, num_parts=num_parts)
    return FloatPanels(like, num_matrices=num_matrices, num_parts=num_parts)


class FloatPanels:
    """Panels of float32 or bfloat16; arguments as `new_panels`.

    float32        panel[p, k, j] = weight[p * NR + j, k]
    bfloat16       word[p, k, j] = (weight[p * NR + j, k], weight[p * NR + LANES + j, k])
    bfloat16 VNNI  word[p, k / 2, j] = (weight[p * NR + j, k], weight[p * NR + j, k + 1])
    tiles          likewise, with zeros up to whole tiles of K
    """

    def __init__(self, like: Tensor, *, num_matrices: int = 1, num_parts: int = 1) -> None:
        from ramify.kernels.cpu.gemm_microkernels import NR
        from ramify.kernels.cpu.tile_choice import bf16_weight_kind
        from ramify.kernels.cpu.tile_gemm import packed_depth

        self._in_width, self._num_parts = like.shape[1], num_parts
        self._kind, width = ROW_KINDS[like.dtype], self._in_width
        if self._kind == BF16:
            self._kind = bf16_weight_kind(width)
        if self._kind not in (F32, BF16):
            width = 2 * packed_depth(width, self._kind)
        num_groups = -(-(like.shape[0] // num_parts) // NR)
        shape = num_matrices, num_groups, num_parts, width, NR
        self._panels = huge_pages.zeros(shape, like.dtype)

    def write(self, number: int, weight: Weight) -> None:
        """See `Panels`."""
        if not isinstance(weight, Tensor):
            raise UnlikeWeightsError("a quantised matrix among float ones")
        for part, rows in enumerate(weight.chunk(self._num_parts)):
            self._write(rows, self._panels[number, :, part])

    def _write(self, weight: Tensor, into: Tensor) -> None:
        """Straight into `into`: temporaries as large as the weights would stay resident."""
        from ramify.kernels.cpu.gemm_microkernels import NR
        from ramify.kernels.cpu.simd import LANES

        rows, panels = _as_integers(weight), _as_integers(into)
        width, even = weight.shape[1], weight.shape[1] // 2

        def write_panels(start: int, end: int) -> None:
            part = rows[start * NR : end * NR]
            if len(part) < (end - start) * NR:
                part = np.pad(part, ((0, (end - start) * NR - len(part)), (0, 0)))
            part, target = part.reshape(end - start, NR, width), panels[start:end]
            if self._kind not in (F32, BF16):
                words = target.view(np.int32).reshape(end - start, -1, NR)
                pairs = np.ascontiguousarray(part[:, :, : 2 * even]).view(np.int32)
                words[:, :even] = pairs.transpose(0, 2, 1)
                if width % 2:
                    target.reshape(end - start, -1, NR, 2)[:, even, :, 0] = part[:, :, -1]
            elif weight.dtype == torch.bfloat16:
                lanes = part.reshape(end - start, 2, LANES, width)
                target.reshape(end - start, width, LANES, 2)[:] = lanes.transpose(0, 3, 2, 1)
            else:
                target[:] = part.transpose(0, 2, 1)

        for_blocks(write_panels, len(panels), max(1, PACKED_AT_ONCE // (NR * max(1, width))))

    def finish(self) -> Self:
        """See `Panels`."""
        return self

    @property
    def record(self) -> GemmOp:
        """See `Panels`."""
        return GemmOp(
            weight_kind=self._kind,
            width=self._in_width,
            weight=self._panels.data_ptr(),
            num_panels=self._panels.shape[1] * self._num_parts,
        )

    def rows(self, rows: Tensor) -> Tensor:
        """See `Panels`."""
        from ramify.kernels.cpu.gemm_microkernels import NR
        from ramify.kernels.cpu.simd import LANES

        assert self._num_parts == 1
        panel, column, panels = rows // NR, rows % NR, self._panels.flatten(0, 2)
        if self._kind not in (F32, BF16):
            words = panels.view(len(panels), panels.shape[1] // 2, NR, 2)
            return words[panel, :, column].flatten(1)[:, : self._in_width].contiguous()
        if panels.dtype == torch.bfloat16:
            words = panels.view(-1, self._in_width, LANES, 2)
            return words[panel, :, column % LANES, column // LANES]
        return panels[panel, :, column]


def _as_integers(values: Tensor) -> NDArray[Any]:
    """The bits of a tensor in numpy, which has no bfloat16; the same memory."""
    kind = torch.int16 if values.element_size() == 2 else torch.int32
    return values.detach().view(kind).numpy()


def pack_bias(bias: Tensor, num_parts: int = 1) -> Tensor:
    """Zero-pad bias [num_parts * out_width] of any float dtype to [ceil(out_width / NR), num_parts, NR] float32."""
    from ramify.kernels.cpu.gemm_microkernels import NR

    parts = bias.float().view(num_parts, -1)
    return (
        F.pad(parts, (0, -parts.shape[1] % NR)).view(num_parts, -1, NR).transpose(0, 1).contiguous()
    )
