"""Quantised weight matrices: the type, int8 per output channel, and what a linear does with either kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ramify.kv.quantize import dequantize, quantize


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [out_width, in_width] as integer codes, with a scale for each group of a row.

    Groups of a row are `group_size` consecutive elements: weight = code * scale of its group.
    """

    format: Literal["int8"]
    codes: Tensor  # [out_width, in_width]
    scales: Tensor  # [out_width, in_width / group_size] float32
    group_size: int
    dtype: torch.dtype  # that it is computed in

    @classmethod
    def int8(cls, weight: Tensor) -> QuantizedWeight:
        """Round to int8 with a scale for each output channel: see `ramify.kv.quantize`."""
        codes, scales = quantize(weight, torch.int8)
        return cls("int8", codes, scales[:, None], weight.shape[1], weight.dtype)

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
        groups = self.codes.unflatten(1, (-1, self.group_size))
        return dequantize(groups, self.scales).flatten(1).to(self.dtype)


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
    formats = {(weight.format, weight.group_size, weight.dtype) for weight in quantized}
    if not isinstance(first, QuantizedWeight) or (len(quantized), len(formats)) != (
        len(weights),
        1,
    ):
        return torch.cat([as_tensor(weight) for weight in weights])
    codes = torch.cat([weight.codes for weight in quantized])
    scales = torch.cat([weight.scales for weight in quantized])
    return QuantizedWeight(first.format, codes, scales, first.group_size, first.dtype)
