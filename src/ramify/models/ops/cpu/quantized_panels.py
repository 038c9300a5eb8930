"""Quantised weights packed for the GEMM: codes of 8 or 4 bits in micro-panels, scales and offsets beside them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ramify.kernels.cpu.abi import (
    BLOCK,
    CODES4,
    CODES8,
    F16,
    F32,
    FACTOR_SPAN,
    INT8,
    MAX_BLOCK_OF_8,
)
from ramify.kernels.cpu.op_records import GemmOp
from ramify.kv import huge_pages
from ramify.models.ops.blocks_of_rows import for_blocks
from ramify.models.ops.quantized import QuantizedWeight, Weight, fits_float16

PACKED_AT_ONCE = 1 << 19  # codes of a block that a thread packs
WIDTH_MULTIPLE = 8  # of a row, and of a group
_KINDS = {torch.float32: F32, torch.float16: F16, torch.int8: INT8}
# Bytes of two 4-bit codes in a word of eight: see `kernels.cpu`. Its own inverse.
_BYTE_ORDER = (0, 2, 1, 3)


def panels_support(weight: QuantizedWeight) -> str | None:
    """None if the kernels take this weight as it is, else the reason."""
    width, group = weight.shape[1], weight.group_size
    if width % WIDTH_MULTIPLE:
        return f"rows of {width} are no multiple of {WIDTH_MULTIPLE}"
    if group < width and (
        group % BLOCK if group > BLOCK else BLOCK % group or group % WIDTH_MULTIPLE
    ):
        return f"groups of {group} neither divide {BLOCK} nor are multiples of it"
    return None


class UnlikeWeightsError(ValueError):
    """Matrices that would share panels are not of one kind."""


class QuantizedPanels:
    """Matrices of one format and shape in the layout of the GEMM: `write` each, then `finish`.

    Args:
        like: one of the matrices.
        num_matrices: matrices that follow each other, such as experts.
        num_parts: 2: gate above up, whose panels alternate.
    """

    def __init__(self, like: QuantizedWeight, *, num_matrices: int = 1, num_parts: int = 1) -> None:
        from ramify.kernels.cpu.gemm_microkernels import NR
        from ramify.kernels.cpu.quantized_microkernels import HAS_PLAIN_CODES

        self.format, self.dtype, self.num_parts = like.format, like.dtype, num_parts
        self.in_width, out_width = like.shape[1], like.shape[0] // num_parts
        levels = like.format.levels
        # Without a table of levels a group has the sum of x's integers for an offset, or of x for `mins`.
        self._first = levels[0] if levels else 0
        is_plain = levels == tuple(range(self._first, self._first + 16))
        self._is_plain = HAS_PLAIN_CODES and is_plain and not (like.format.has_min and self._first)
        self._is_narrow = like.format.bits == 4
        self._has_one_scale = like.group_size >= self.in_width
        self.group = min(like.group_size, MAX_BLOCK_OF_8 if like.format.row_bits == 8 else BLOCK)
        self._repeats = 1 if self._has_one_scale else like.group_size // self.group
        num_groups = 1 if self._has_one_scale else -(-self.in_width // self.group)
        panels = num_matrices, -(-out_width // NR), num_parts
        units = self.in_width // (8 if self._is_narrow else 4)
        self._codes = huge_pages.zeros((*panels, units, NR), torch.int32)
        self._factors: Tensor | None = None
        if like.factors is not None and self._repeats == 1:
            self._factors = torch.zeros((*panels, *like.factors.shape[1:], NR), dtype=torch.float16)
        kind = torch.float32 if self._factors is None else torch.int8
        self._scales = torch.zeros((*panels, num_groups, NR), dtype=kind)
        self._mins = torch.zeros_like(self._scales) if like.format.has_min else None
        self._levels = torch.tensor((levels or (0,)) * 2, dtype=torch.int16)

    @property
    def _group_values(self) -> list[Tensor]:
        """Scales, and offsets if there are any."""
        return [self._scales] if self._mins is None else [self._scales, self._mins]

    @property
    def num_panels(self) -> int:
        """Panels of a matrix."""
        return self._codes.shape[1] * self.num_parts

    def write(self, number: int, weight: Weight) -> None:
        """See `Panels`."""
        if not isinstance(weight, QuantizedWeight) or weight.format != self.format:
            raise UnlikeWeightsError("matrices of different formats")
        for part, codes in enumerate(weight.codes.chunk(self.num_parts)):
            self._write_codes(codes, self._codes[number, :, part])
        if self._factors is not None:
            self._write_multiples(number, weight)
            return
        for values, into in ((weight.scales, self._scales), (weight.mins, self._mins)):
            if values is None or into is None:
                continue
            if self._repeats > 1:
                spread = values.repeat_interleave(self._repeats, 1)[:, : into.shape[-2]]
            else:
                spread = values
            self._assign(spread.numpy(), into[number])

    def _write_multiples(self, number: int, weight: QuantizedWeight) -> None:
        """Scales and offsets as integers, and their factors."""
        if weight.factors is None or self._factors is None:
            raise UnlikeWeightsError("matrices with and without factors of scales")
        for index, (values, into) in enumerate(
            ((weight.scales, self._scales), (weight.mins, self._mins))
        ):
            if values is None or into is None:
                continue
            factors = weight.factors[:, index].numpy()
            wide = factors.astype(np.float32).repeat(FACTOR_SPAN // self.group, 1)
            # a factor of 0 has scales of 0
            multiples = np.zeros(wide.shape, np.int8)
            with np.errstate(invalid="ignore"):  # of damaged files
                np.divide(values.numpy(), wide, out=multiples, where=wide != 0, casting="unsafe")
            self._assign(multiples, into[number])
            self._assign(factors, self._factors[number, :, :, index])

    def _assign(self, values: NDArray[Any], into: Tensor) -> None:
        """Values [out_width, n] of both parts into panels [panels, parts, n, NR]."""
        for part, rows in enumerate(np.split(values, self.num_parts)):
            into.numpy()[:, part] = _by_panel(torch.from_numpy(rows)).numpy()

    def _write_codes(self, codes: Tensor, into: Tensor) -> None:
        """Codes [out_width, in_width] into panels [panels, words, NR]; see `kernels.cpu`."""
        from ramify.kernels.cpu.gemm_microkernels import NR

        rows, panels = codes.numpy(), into.numpy()

        def write_panels(start: int, end: int) -> None:
            part = np.ascontiguousarray(rows[start * NR : end * NR])
            if self._is_narrow:
                words = self._stored(part).view(np.int32)
                # bytes of two codes each at 0 and 2 of every word, then two words in one
                words |= words >> 4
                words &= 0x00FF00FF
                words = (words[:, 1::2] << 8) | words[:, 0::2]
            else:
                words = part.view(np.int32)
            missing = (end - start) * NR - len(words)
            if missing:
                words = np.pad(words, ((0, missing), (0, 0)))
            panels[start:end] = words.reshape(end - start, NR, -1).transpose(0, 2, 1)

        for_blocks(write_panels, len(panels), max(1, PACKED_AT_ONCE // (NR * self.in_width)))

    def _stored(self, codes: NDArray[np.int8]) -> NDArray[np.uint8]:
        """4-bit codes of integers."""
        first, *_ = levels = self.format.levels
        if levels == tuple(range(first, first + 16)):
            return (codes - np.int8(first)).view(np.uint8)
        table = bytearray(256)
        for code, level in enumerate(levels):
            table[level & 255] = code
        data = bytearray(codes.tobytes().translate(table))
        return np.frombuffer(data, np.uint8).reshape(codes.shape)

    def finish(self) -> QuantizedPanels:
        """Keep scales and offsets in float16 where that loses nothing."""
        if self._factors is not None:
            return self
        values = self._group_values
        if not self._has_one_scale and all(map(fits_float16, values)):
            self._scales = self._scales.half()
            self._mins = None if self._mins is None else self._mins.half()
        return self

    @property
    def record(self) -> GemmOp:
        """The fields of a GEMM op that are about its weights."""
        from ramify.kernels.cpu.gemm_microkernels import NR

        num_groups, item_bytes = self._scales.shape[-2], self._scales.dtype.itemsize
        return GemmOp(
            weight_kind=CODES4 if self._is_narrow else CODES8,
            width=self.in_width,
            weight=self._codes.data_ptr(),
            num_panels=self.num_panels,
            group=self.group,
            scales=self._scales.data_ptr(),
            scale_kind=_KINDS[self._scales.dtype],
            scale_stride=item_bytes * NR * num_groups,
            scale_step=0 if self._has_one_scale else item_bytes * NR,
            mins=0 if self._mins is None else self._mins.data_ptr(),
            factors=0 if self._factors is None else self._factors.data_ptr(),
            levels=0 if self._is_plain else self._levels.data_ptr(),
            code_offset=self._first if self._is_plain else 0,
            code_tiles=self._tile_width(),
            row_bits=self.format.row_bits,
        )

    def _tile_width(self) -> int:
        """Elements of K of a tile of int8; 0 where there are no tiles, or none of that shape."""
        from ramify.kernels.cpu import targets
        from ramify.kernels.cpu.code_tiles import HAS_TILES, TILE_BYTES

        fits = self.in_width % TILE_BYTES == 0 and self.group >= 16
        is_usable = HAS_TILES and targets.has_tiles() and fits
        return min(self.group, TILE_BYTES) if is_usable else 0

    def rows(self, rows: Tensor) -> Tensor:
        """Rows [n, in_width] of the only matrix, dequantised to its dtype.

        Args:
            rows: [n] int64.
        """
        from ramify.kernels.cpu.gemm_microkernels import NR

        assert self.num_parts == 1
        panel, column = rows // NR, rows % NR
        words = self._codes[0, panel, 0, :, column].contiguous()
        codes = words.view(torch.int8)
        if self._is_narrow:
            pairs = words.view(torch.uint8).view(len(rows), -1, 4)[:, :, _BYTE_ORDER].flatten(1)
            stored = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)
            codes = self._levels.to(torch.int8)[stored.int()]
        groups = [values[0, panel, 0, :, column].float() for values in self._group_values]
        if self._factors is not None:
            factors = self._factors[0, panel, 0, :, :, column].float()
            factors = factors.repeat_interleave(FACTOR_SPAN // self.group, -1)
            groups = [values * factors[:, index] for index, values in enumerate(groups)]
        scales, mins = groups[0], groups[1] if len(groups) > 1 else None
        group = self.in_width if self._has_one_scale else self.group
        kind = self.format.with_group(group)
        return QuantizedWeight(kind, codes, scales, mins, self.dtype).dequantize()


def _by_panel(rows: Tensor) -> Tensor:
    """[out_width, n] -> [panels, n, NR], padded with zeros."""
    from ramify.kernels.cpu.gemm_microkernels import NR

    padded: Tensor = F.pad(rows, (0, 0, 0, -len(rows) % NR)) if len(rows) % NR else rows
    panels: Tensor = padded.unflatten(0, (-1, NR)).transpose(1, 2)
    return panels
