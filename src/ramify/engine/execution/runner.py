"""One forward pass: a plan's arrays become tensors, K/V is written, attention reads it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.batch import AttentionBatch
from ramify.attention.mla import MlaAttention
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.dense import DenseDecoder
from ramify.models.loader import Decoder
from ramify.models.ops.cpu_layer_attention import FusedAttention, FusedAttentionArgs


class PagedAttention:
    """Attention of a step as a decoder calls it, layer by layer: K/V is written, then read."""

    def __init__(self, runner: ModelRunner, step: StepPlan, slots: Tensor) -> None:
        self._runner, self._batch, self._slots = runner, step.batch, slots
        self._plan: Any = runner.backend.plan(step.batch)
        self.fused_args = runner.inline_step(self._plan, slots)
        self.output_rows = runner.output_rows(step)

    def __call__(self, layer: int, q: Any, *new: Tensor) -> Tensor:
        """Write a layer's K/V, and attend to it."""
        runner, pool = self._runner, self._runner.pool
        names = [plane.name for plane in pool.layout.planes]
        pool.write_kv(layer, self._slots, **dict(zip(names, new, strict=True)))
        if self.output_rows is not None and isinstance(q, Tensor) and len(q) < len(self._slots):
            if not len(q):
                return torch.empty_like(q)
            self._plan = runner.backend.plan(select_rows(self._batch, self.output_rows.numpy()))
        return runner.backend.run(self._plan, layer, q, pool.planes(layer))


class ModelRunner:
    """A model, its pool and its attention backend.

    Rows are padded to whole multiples of `row_multiple`, by default what the model wants to be
    exact; the padding rows write their K/V to the pool's padding page.
    """

    # Rows of a step that end with the last layer's K/V, at least: fewer take as long to leave out as
    # to compute (59 M and 0.35 B parameters, 2 cores).
    min_pruned_rows = 64

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        backend: AttentionBackend | MlaAttention,
        *,
        row_multiple: int | None = None,
    ) -> None:
        self.model, self.pool, self.backend = model, pool, backend
        self.row_multiple = model.row_multiple if row_multiple is None else row_multiple
        self._inline = self._inlined()

    def inline_step(self, plan: object, slots: Tensor) -> FusedAttentionArgs | None:
        """What lets the model run the layers of a step without a call of `attend` for each."""
        inline = self._inline
        if inline is None:
            return None
        if inline.backend is not self.backend or inline.pool is not self.pool:
            return None
        return inline.step(plan, slots.numpy())

    def output_rows(self, step: StepPlan) -> Tensor | None:
        """Rows [R] int64, ascending, that are to go through all of the last layer; None for all.

        Where rows are padded all go: a few of them would have to be padded again.
        """
        most = step.batch.num_tokens - self.min_pruned_rows
        if step.all_rows or self.row_multiple > 1 or len(step.samples) > most:
            return None
        rows = {one.row + place for one in step.samples for place in range(len(one.draft) + 1)}
        return None if len(rows) > most else torch.tensor(sorted(rows), dtype=torch.int64)

    def _inlined(self) -> FusedAttention | None:
        """What makes such steps, if the model can run them."""
        model, backend, pool = self.model, self.backend, self.pool
        if not isinstance(model, DenseDecoder) or not isinstance(backend, CpuBackend):
            return None
        if FusedAttention.supports(backend, pool, model.dtype) is not None:
            return None
        inline = FusedAttention(backend, pool)
        return inline if model.warm_up(inline.empty_step()) else None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """Hidden rows [T, hidden] of the step; its K/V is in the pool afterwards.

        Rows that nothing is drawn from may be those before the last layer, unless the step is
        `all_rows`. What is not finite in one of them, or in the K/V that it left, shows; what would be
        behind that K/V is not computed, and nobody reads it.
        """
        batch = plan.batch
        # copies: torch warns of arrays that must not be written
        token_ids, positions = plan.token_ids.copy(), batch.positions.astype(np.int64)
        slots = batch.slot_mapping.copy()
        num_padding = -batch.num_tokens % self.row_multiple
        if num_padding:
            page_size = self.pool.page_size
            spare = self.pool.padding_page * page_size + np.arange(num_padding) % page_size
            token_ids, positions = (np.pad(one, (0, num_padding)) for one in (token_ids, positions))
            slots = np.concatenate([slots, spare])
        tensors = [torch.from_numpy(one) for one in (token_ids, positions, slots)]
        attend = PagedAttention(self, plan, tensors[2])
        hidden = self.model.forward(tensors[0], tensors[1], attend)
        return hidden[: batch.num_tokens] if num_padding else hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), vocab_size] float32 of some rows of `forward`'s result."""
        if len(rows) != len(hidden) or [*rows] != [*range(len(hidden))]:
            hidden = hidden[torch.as_tensor([*rows], dtype=torch.int64)]
        return self.model.logits(hidden)

    @torch.inference_mode()
    def nonfinite_rows(self, hidden: Tensor) -> list[int]:
        """Rows of `forward`'s result that are not finite, ascending."""
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):  # inf or NaN: so is the sum
            return []
        found: list[int] = torch.nonzero(~torch.isfinite(hidden).all(-1))[:, 0].tolist()
        return found


def select_rows(batch: AttentionBatch, rows: NDArray[np.int64]) -> AttentionBatch:
    """The batch with these query rows alone, the last ones of some requests."""
    owners = np.searchsorted(batch.cu_seqlens_q, rows, side="right") - 1
    seqs, counts = np.unique(owners, return_counts=True)
    return batch.select(seqs.tolist(), counts)
