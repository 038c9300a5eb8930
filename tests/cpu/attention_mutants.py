"""Faults that make bits depend on the cache, each in a subclass: the comparison must find them all."""

from typing import Any

import torch
from torch import Tensor

from ramify.attention.blocked import BLOCK_KEYS, BlockedBackend, Lanes

Partial = tuple[Tensor, Tensor, Tensor]  # maximum, sum of weights, weighted sum


class UnpaddedRows(BlockedBackend):
    """Padding skipped: products get exactly the rows that there are."""

    row_multiple = 1


class ShortenedLastBlock(BlockedBackend):
    """The last key block is cut to the keys that exist instead of being masked."""

    def _reduce(self, rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Partial:
        if hidden is None:
            return super()._reduce(rows, k, v, hidden)
        seen = ~hidden.flatten(0, -2).all(0)
        width = int(seen.nonzero().max()) + 1 if bool(seen.any()) else BLOCK_KEYS
        return super()._reduce(rows, k[..., :width, :], v[..., :width, :], hidden[..., :width])


class CutAtNodeBoundary(BlockedBackend):
    """The block in which the cached prefix ends is reduced in two parts, prefix and suffix."""

    _cut = 0  # where the suffix starts within the block at hand

    def _fold_run(self, lanes: Lanes, *rest: Any) -> None:
        self._cut = lanes.first_position - rest[-1][0] * BLOCK_KEYS
        super()._fold_run(lanes, *rest)

    def _reduce(self, rows: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Partial:
        if not 0 < self._cut < k.shape[-2]:
            return super()._reduce(rows, k, v, hidden)
        parts = []
        for at in (slice(0, self._cut), slice(self._cut, None)):
            mask = None if hidden is None else hidden[..., at]
            parts.append(super()._reduce(rows, k[..., at, :], v[..., at, :], mask))
        return merge(*parts)


def merge(first: Partial, second: Partial) -> Partial:
    """Two parts of one reduction as one, as the online softmax does it."""
    peak = torch.maximum(first[0], second[0])
    old, new = (first[0] - peak).exp(), (second[0] - peak).exp()
    return peak, first[1] * old + second[1] * new, first[2] * old + second[2] * new
