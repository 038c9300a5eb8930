"""`WeightPart`: the rows or columns of a weight that one rank of tensor parallelism holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import torch

from ramify.models.ops.quantized import QuantizedWeight, Weight

FACTOR_WIDTH = 256  # columns that share a factor of K-quants


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Ranges along an axis of a weight, which follow each other in the part.

    Args:
        axis: 0: of rows, outputs of a matrix, or elements of a vector; 1: of columns, inputs of a matrix.
        ranges: first index, and the one behind the last.
    """

    axis: Literal[0, 1]
    ranges: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Rows or columns of the part."""
        return sum(end - begin for begin, end in self.ranges)

    def shape_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of this part of a weight of `shape`."""
        return (*shape[: self.axis], self.size, *shape[self.axis + 1 :])


@runtime_checkable
class PartlyReadable(Protocol):
    """Weights by name, of which a part can be read alone."""

    def read_part(self, name: str, part: WeightPart) -> Weight:
        """That part of a weight, contiguous."""
        ...


def read_part(weights: Mapping[str, Weight], name: str, part: WeightPart) -> Weight:
    """That part of a weight, contiguous; reads no more of its file where `weights` can."""
    if isinstance(weights, PartlyReadable):
        return weights.read_part(name, part)
    return cut(weights[name], part)


def cut(weight: Weight, part: WeightPart) -> Weight:
    """A copy of that part, contiguous.

    Raises:
        ValueError: columns of a quantised matrix that are no whole groups.
    """
    if isinstance(weight, QuantizedWeight):
        if part.axis:
            [(begin, end)] = part.ranges
            return _columns(weight, begin, end)
        return weight.rows(torch.cat([torch.arange(*ends) for ends in part.ranges]))
    return torch.cat([weight.narrow(part.axis, a, b - a) for a, b in part.ranges], part.axis)


def _columns(weight: QuantizedWeight, begin: int, end: int) -> QuantizedWeight:
    codes = weight.codes[:, begin:end].contiguous()
    if weight.scales.shape[1] == 1:  # a scale for each row
        return replace(weight, format=weight.format.with_group(end - begin), codes=codes)
    width, unit = weight.shape[1], weight.group_size
    if weight.factors is not None:
        unit = FACTOR_WIDTH
    if begin % unit or (end % unit and end != width):
        raise ValueError(f"columns {begin} to {end} of {width} are no whole groups of {unit}")
    groups = slice(begin // weight.group_size, -(-end // weight.group_size))
    factors = weight.factors
    if factors is not None:
        factors = factors[:, :, begin // unit : -(-end // unit)].contiguous()
    return replace(
        weight,
        codes=codes,
        scales=weight.scales[:, groups].contiguous(),
        mins=None if weight.mins is None else weight.mins[:, groups].contiguous(),
        factors=factors,
    )
