"""`PagedAttention`: the attention of one step as a decoder calls it, over a backend and a K/V pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.batch import AttentionBatch
from ramify.attention.mla import MlaAttention
from ramify.kv.pool import KVPool

# What plans a step and attends over a pool's planes: a backend, or MLA over one.
PagedBackend = AttentionBackend | MlaAttention


class PagedAttention:
    """Attention of one step, called by a decoder layer by layer: writes K/V, then attends.

    Args:
        slots: [T] int64, where the K/V of each row goes, padding rows included.
    """

    def __init__(
        self,
        backend: PagedBackend,
        pool: KVPool,
        batch: AttentionBatch,
        slots: Tensor,
    ) -> None:
        self.backend, self.pool, self.batch, self.slots = backend, pool, batch, slots
        self.plan: Any = backend.plan(batch)

    def __call__(
        self,
        layer: int,
        q: Any,
        *kv: Tensor,
        rows: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write the K/V of a layer, one tensor [T, ...] per plane, and attend to it.

        Args:
            q: query rows [T, ...], or those of `rows`.
            rows: [R] int64, ascending, the last rows of their requests.
            sinks: see `AttentionBackend.run`.
        """
        names = [plane.name for plane in self.pool.layout.planes]
        self.pool.write_kv(layer, self.slots, **dict(zip(names, kv, strict=True)))
        return self.attend(layer, q, rows=rows, sinks=sinks)

    def attend(
        self, layer: int, q: Any, *, rows: Tensor | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend to the K/V of a layer, which is written; arguments as for a call."""
        plan = self.plan
        if rows is not None:
            if not len(rows):
                return torch.empty_like(q)
            plan = self.backend.plan(select_rows(self.batch, rows.cpu().numpy()))
        planes = self.pool.planes(layer)
        if sinks is None:
            return self.backend.run(plan, layer, q, planes)
        assert not isinstance(self.backend, MlaAttention)
        return self.backend.run(plan, layer, q, planes, sinks=sinks)


def select_rows(batch: AttentionBatch, rows: NDArray[np.int64]) -> AttentionBatch:
    """The batch reduced to query rows [R], which must be the last rows of their requests."""
    owners = np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1
    seqs, counts = np.unique(owners, return_counts=True)
    return batch.select(seqs.tolist(), counts)
