"""Mutants whose bits depend on the cache, as subclasses: the bit comparison must detect each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention import mla
from ramify.attention.backends.blocked import BLOCK_KEYS, BlockedBackend, QueryLenGroup
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.backends.cpu_partition import CpuAttentionPlan
from ramify.attention.batch import AttentionBatch
from ramify.attention.spec import AttentionSpec
from ramify.kv.pool import KVPool
from ramify.kv.quantize import dequantize

Partial = tuple[Tensor, Tensor, Tensor]  # row max, row sum, unnormalised output


class UnpaddedRows(BlockedBackend):
    """Rows are not padded to `FP32_ROW_MULTIPLE`."""

    row_multiple = 1


class ShortenedLastBlock(BlockedBackend):
    """The last key block is shortened to the existing keys instead of being masked."""

    def _attend_block(self, rows: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> Partial:
        if masked is None:
            return super()._attend_block(rows, k, v, masked)
        visible = ~masked.flatten(0, -2).all(0)
        width = int(visible.nonzero().max()) + 1 if bool(visible.any()) else BLOCK_KEYS
        return super()._attend_block(
            rows, k[..., :width, :], v[..., :width, :], masked[..., :width]
        )


class CutAtNodeBoundary(BlockedBackend):
    """The block in which the cached prefix ends is computed in two parts, prefix and suffix."""

    _cut = 0  # first key of the suffix in the current block

    def _attend_blocks(self, group: QueryLenGroup, *args: Any) -> None:
        self._cut = group.first_position - args[-1][0] * BLOCK_KEYS
        super()._attend_blocks(group, *args)

    def _attend_block(self, rows: Tensor, k: Tensor, v: Tensor, masked: Tensor | None) -> Partial:
        if not 0 < self._cut < k.shape[-2]:
            return super()._attend_block(rows, k, v, masked)
        parts = []
        for keys in (slice(0, self._cut), slice(self._cut, None)):
            mask = None if masked is None else masked[..., keys]
            parts.append(super()._attend_block(rows, k[..., keys, :], v[..., keys, :], mask))
        return merge(*parts)


def merge(first: Partial, second: Partial) -> Partial:
    """Merge two partial results as the online softmax does."""
    row_max = torch.maximum(first[0], second[0])
    old, new = (first[0] - row_max).exp(), (second[0] - row_max).exp()
    return row_max, first[1] * old + second[1] * new, first[2] * old + second[2] * new


class CutTree(CpuBackend):
    """Cached and new keys are attended to separately and merged by their log-sum-exp."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        super().__init__(replace(spec, sparse=True), device)  # each part is of selected keys

    def plan(self, batch: AttentionBatch) -> CpuAttentionPlan:
        cuts = np.repeat(batch.num_cached, np.diff(batch.cu_seqlens_q))
        self._cut_at, self._last = torch.from_numpy(np.stack([cuts, batch.positions])[:, :, None])
        return super().plan(batch)

    def run(
        self,
        plan: CpuAttentionPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert selected is None
        assert sinks is None
        assert self.spec.windows[layer] is None
        cut, last = self._cut_at, self._last
        keys = torch.arange(int(last.max()) + 1, dtype=torch.int32)
        old = self._part(plan, layer, q, planes, torch.where(keys < cut, keys, -1))
        new = self._part(plan, layer, q, planes, torch.where(cut + keys <= last, cut + keys, -1))
        return mla.merge_state(*old, *new)[0].to(q.dtype)

    def _part(
        self,
        plan: CpuAttentionPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        selected: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attention over `selected` keys in float32, and its log-sum-exp."""
        out = super().run(plan, layer, q.float(), planes, selected=selected)
        stats = torch.from_numpy(
            self._state[: plan.state_head_stride * q.shape[1], self._value_stride :]
        )
        by_head = stats.unflatten(0, (q.shape[1], -1))[:, : plan.num_tokens]
        row_max, row_sum = by_head[..., :2].unbind(-1)
        has_keys = (selected >= 0).any(1)
        lse = torch.zeros(*q.shape[:2], 1)
        lse[: plan.num_tokens] = (row_max + row_sum.log()).T[..., None]
        lse[: plan.num_tokens][~has_keys] = -torch.inf
        out[: plan.num_tokens][~has_keys] = 0
        return out, lse


class FreshKeys(KVPool):
    """Attention gets the K/V of its own step as computed, not as rounded in the pool."""

    _fresh: tuple[Tensor, dict[str, Tensor]] | None = None

    def write_kv(self, layer: int, slots: Tensor, **values: Tensor) -> None:
        super().write_kv(layer, slots, **values)
        self._fresh = slots, values

    def planes(self, layer: int) -> dict[str, Tensor]:
        stored, fresh, self._fresh = super().planes(layer), self._fresh, None
        if fresh is None:
            return stored
        slots, values = fresh
        planes = {name: dequantize(stored[name], stored[f"{name}_scale"]) for name in values}
        for name, new in values.items():
            planes[name].flatten(0, 1)[slots] = new.float()
        return planes


class ForgottenCopies(KVPool):
    """A fork gets new pages without the copied K/V."""

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        pass
