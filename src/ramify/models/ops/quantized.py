"""Quantised weight matrices: the value that every reader makes and every kernel takes, int8 per output channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
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
        row_bits: of the integers that kernels round rows of x to, 8 or 16.
    """

    bits: Literal[4, 8]
    group_size: int
    has_min: bool = False
    levels: tuple[int, ...] = ()
    row_bits: Literal[8, 16] = 16

    def __post_init__(self) -> None:
        if len(self.levels) != (16 if self.bits == 4 else 0):
            raise ValueError(
                f"{len(self.levels)} levels of {self.bits} bits; 4 bits have 16, 8 bits none"
            )

    def with_group(self, group_size: int) -> WeightFormat:
        """The same with another size of groups."""
        return replace(self, group_size=group_size)


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
    # [out_width, 1 or 2, in_width / 256] float16, of K-quants: each scale of 256 weights is an int8 times the
    # first, each offset an int8 times the second
    factors: Tensor | None = None

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

    def rows(self, index: Tensor) -> QuantizedWeight:
        """The rows of these numbers, in this order, which keep their scales and offsets."""
        mins, factors = (None if v is None else _rows(v, index) for v in (self.mins, self.factors))
        return replace(
            self,
            codes=_rows(self.codes, index),
            scales=_rows(self.scales, index),
            mins=mins,
            factors=factors,
        )

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


# In numpy, which starts no threads: see `blocks_of_rows`.
def _rows(values: Tensor, index: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy()[index.numpy()])


def _cat(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts], axis))


def fits_float16(values: Tensor) -> bool:
    """Whether all are numbers of float16."""
    numbers = values.numpy()
    with np.errstate(over="ignore"):
        return np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)


def as_tensor(weight: Weight) -> Tensor:
    """The weight itself, or dequantised."""
    return weight.dequantize() if isinstance(weight, QuantizedWeight) else weight


def concat_weights(weights: Sequence[Weight]) -> Weight:
    """Matrices of the same input, outputs one after the other; quantised if all are.

    Different formats become the narrowest that holds all of them.
    """
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    dtypes = {weight.dtype for weight in weights}
    if len(quantized) < len(weights) or len(dtypes) > 1:
        return torch.cat([as_tensor(weight) for weight in weights])
    width = quantized[0].shape[1]
    kind = _common_format([weight.format for weight in quantized], width)
    num_groups = -(-width // kind.group_size)
    scales, mins = list[Tensor](), list[Tensor]()
    for weight in quantized:
        repeats = -(-weight.group_size // kind.group_size)
        own = weight.scales if weight.mins is None else weight.mins
        for values, into in ((weight.scales, scales), (own, mins)):
            spread = values if repeats == 1 else values.repeat_interleave(repeats, 1)
            into.append(spread[:, :num_groups])
        if weight.mins is None:
            mins[-1] = torch.zeros_like(mins[-1])
    return QuantizedWeight(
        kind,
        _cat([weight.codes for weight in quantized]),
        _cat(scales),
        _cat(mins) if kind.has_min else None,
        quantized[0].dtype,
        _concat_factors(quantized, has_min=kind.has_min),
    )


def _concat_factors(weights: Sequence[QuantizedWeight], *, has_min: bool) -> Tensor | None:
    """Factors of matrices one after the other; None if one has none."""
    rows = list[Tensor]()
    for weight in weights:
        if weight.factors is None:
            return None
        missing = has_min and weight.mins is None
        zeros = torch.zeros_like(weight.factors)
        rows.append(_cat([weight.factors, zeros], 1) if missing else weight.factors)
    return _cat(rows)


def _common_format(formats: Sequence[WeightFormat], width: int) -> WeightFormat:
    """The narrowest format that holds matrices of all of these, with rows of `width`."""
    sizes = {min(kind.group_size, width) for kind in formats}
    group_size = sizes.pop() if len(sizes) == 1 else math.gcd(*sizes)
    levels = {kind.levels for kind in formats}
    is_narrow = len(levels) == 1 and formats[0].bits == 4
    return WeightFormat(
        4 if is_narrow else 8,
        group_size,
        has_min=any(kind.has_min for kind in formats),
        levels=formats[0].levels if is_narrow else (),
        row_bits=max(kind.row_bits for kind in formats),
    )
