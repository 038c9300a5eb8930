"""Quantised weight matrices: the value that every reader makes and every kernel takes, int8 per output channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ramify.kv.quantize import quantize


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix's integers are stored and grouped: what a kernel has to know of it.

    Args:
        bits: of a stored code, 4 or 8.
        group_size: consecutive elements of a row that share a scale; the last group may be shorter.
        has_min: whether a group also has an offset.
        levels: the 16 integers that a 4-bit code can be, in the order of the stored code; () for 8 bits.
    """

    bits: Literal[4, 8]
    group_size: int
    has_min: bool = False
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out_width, in_width] as integers, with a scale and maybe an offset for each group of a row.

    weight[o, i] = scales[o, g] * codes[o, i] + mins[o, g], g = i // group_size: in float32, the product
    rounded before the sum.
    """

    format: WeightFormat
    codes: Tensor  # [out_width, in_width] int8
    scales: Tensor  # [out_width, groups] float32
    mins: Tensor | None  # [out_width, groups] float32
    dtype: torch.dtype  # that it is computed in

    @classmethod
    def int8(cls, weight: Tensor) -> QuantizedWeight:
        """Round to int8 with a scale for each output channel: see `ramify.kv.quantize`."""
        codes, scales = quantize(weight, torch.int8)
        return cls(WeightFormat(8, weight.shape[1]), codes, scales[:, None], None, weight.dtype)

    @property
    def group_size(self) -> int:
        """Consecutive elements of a row that share a scale."""
        return self.format.group_size

    @property
    def shape(self) -> torch.Size:
        """(out_width, in_width)."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def numel(self) -> int:
        """Number of weights."""
        return self.codes.numel()

    def dequantize(self) -> Tensor:
        """The matrix in `dtype`."""
        weight = self.codes.float().mul_(self._spread(self.scales))
        if self.mins is not None:
            weight.add_(self._spread(self.mins))
        return weight.to(self.dtype)

    def _spread(self, groups: Tensor) -> Tensor:
        """Values of groups, for each element of a row."""
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]


Weight = Tensor | QuantizedWeight


def as_tensor(weight: Weight) -> Tensor:
    """The weight itself, or dequantised."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def concat_weights(weights: Sequence[Weight]) -> Weight:
    """Matrices of the same input, outputs one after the other; quantised if all are, in one format."""
    first = weights[0]
    if len(weights) == 1:
        return first
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    formats = {(weight.format, weight.dtype) for weight in quantized}
    if not isinstance(first, QuantizedWeight) or (len(quantized), len(formats)) != (
        len(weights),
        1,
    ):
        return torch.cat([as_tensor(weight) for weight in weights])
    mins = [weight.mins for weight in quantized if weight.mins is not None]
    return QuantizedWeight(
        first.format,
        torch.cat([weight.codes for weight in quantized]),
        torch.cat([weight.scales for weight in quantized]),
        torch.cat(mins) if first.mins is not None else None,
        first.dtype,
    )
