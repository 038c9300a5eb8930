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


class PagedAttention:
    """Attention of one step, called by a decoder layer by layer: writes K/V, then attends.

    Args:
        slots: [T] int64, where the K/V of each row goes, padding rows included.
        output_rows: [R] int64, the rows that the last layer may compute alone; None: all.
    """

    def __init__(
        self,
        backend: AttentionBackend | MlaAttention,
        pool: KVPool,
        batch: AttentionBatch,
        slots: Tensor,
        *,
        output_rows: Tensor | None = None,
    ) -> None:
        self._backend, self._pool, self._batch, self._slots = backend, pool, batch, slots
        self.output_rows = output_rows
        self.plan: Any = backend.plan(batch)
        # arguments for fused layers, which then do not call this object for each layer
        self.fused_args: Any = None

    def __call__(self, layer: int, q: Any, *new: Tensor) -> Tensor:
        """Write the K/V of a layer (`new`, one tensor per plane), and attend to it.

        Args:
            q: query rows [T, ...]; in the last layer perhaps only those of `output_rows`.
        """
        names = [plane.name for plane in self._pool.layout.planes]
        self._pool.write_kv(layer, self._slots, **dict(zip(names, new, strict=True)))
        if self.output_rows is not None and isinstance(q, Tensor) and len(q) < len(self._slots):
            if not len(q):
                return torch.empty_like(q)
            self.plan = self._backend.plan(select_rows(self._batch, self.output_rows.numpy()))
        return self._backend.run(self.plan, layer, q, self._pool.planes(layer))


def select_rows(batch: AttentionBatch, rows: NDArray[np.int64]) -> AttentionBatch:
    """The batch reduced to query rows [R], which must be the last rows of their requests."""
    owners = np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1
    seqs, counts = np.unique(owners, return_counts=True)
    return batch.select(seqs.tolist(), counts)
