"""`ModelRunner`: one forward pass of a step over the paged K/V."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ramify.attention.paged import PagedAttention, PagedBackend
from ramify.engine.execution.device import current
from ramify.engine.execution.host_copies import to_device
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import CausalDecoder
from ramify.models.ops.protocol import ForwardStep


class ModelRunner:
    """A model, its K/V pool and its attention backend.

    Steps are padded to a multiple of `row_multiple` rows, by default the model's own, without which
    its bits are not exact. Padding rows write their K/V to the pool's padding page. Model and pool are
    on one device.
    """

    # Least number of rows to leave out after the last layer's K/V: leaving out fewer takes as long
    # as computing them (59 M and 0.35 B parameters, 2 cores).
    min_pruned_rows = 64

    def __init__(
        self,
        model: CausalDecoder,
        pool: KVPool,
        backend: PagedBackend,
        *,
        row_multiple: int | None = None,
    ) -> None:
        self.model, self.pool, self.backend = model, pool, backend
        self.row_multiple = model.row_multiple if row_multiple is None else row_multiple
        model.warm_up(backend, pool)

    def output_rows(self, step: StepPlan) -> Tensor | None:
        """Rows [R] int64, ascending, that the whole last layer computes; None for all rows.

        All rows where `row_multiple` pads them, because a selection would need padding again, and
        off the CPU, which a selection would wait for.
        """
        max_rows = step.batch.num_tokens - self.min_pruned_rows
        may_prune = self.row_multiple == 1 and self.pool.device.type == "cpu"
        if step.all_rows or not may_prune or len(step.samples) > max_rows:
            return None
        rows = {spec.row + offset for spec in step.samples for offset in range(len(spec.draft) + 1)}
        return None if len(rows) > max_rows else torch.tensor(sorted(rows), dtype=torch.int64)

    @torch.inference_mode()
    def forward(self, plan: StepPlan, late_ids: Tensor | None = None) -> Tensor:
        """Hidden rows [T, hidden] of the step; writes its K/V to the pool.

        Args:
            late_ids: [L] int64 on the device, the token ids of `plan.late_tokens`, which has L.

        Unless `plan.all_rows`, rows outside `output_rows` may be those before the last layer. Such a
        row is not finite if its hidden state, or its K/V of the last layer, is not.
        """
        with current(self.pool.device):
            return self._forward(plan, late_ids)

    def _forward(self, plan: StepPlan, late_ids: Tensor | None) -> Tensor:
        batch = plan.batch
        # Copies, because torch warns of read-only arrays.
        token_ids, positions = plan.token_ids.copy(), batch.positions.astype(np.int64)
        slots = batch.slot_mapping.copy()
        num_padding = -batch.num_tokens % self.row_multiple
        if num_padding:
            page_size = self.pool.page_size
            spare = self.pool.padding_page * page_size + np.arange(num_padding) % page_size
            token_ids, positions = (np.pad(x, (0, num_padding)) for x in (token_ids, positions))
            slots = np.concatenate([slots, spare])
        tensors = map(torch.from_numpy, (token_ids, positions, slots))
        on_device = tensors if self.pool.device.type == "cpu" else self._upload(*tensors)
        ids, at, written = on_device
        if late_ids is not None:
            ids.index_copy_(0, self._indices([late.row for late in plan.late_tokens]), late_ids)
        attention = PagedAttention(self.backend, self.pool, batch, written)
        step = ForwardStep(at, attention, self.output_rows(plan))
        hidden = self.model.forward(ids, step)
        return hidden[: batch.num_tokens] if num_padding else hidden

    def _upload(self, *rows: Tensor) -> Iterable[Tensor]:
        """Tensors of one length on the device, by one copy."""
        together, device = torch.stack(rows), self.pool.device
        if device.type == "cuda":
            # torch keeps the pinned memory until the copy is done.
            together = together.pin_memory()
        return together.to(device, non_blocking=True)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), vocab_size] float32 of these rows of `hidden`, the result of `forward`."""
        if len(rows) != len(hidden) or [*rows] != [*range(len(hidden))]:
            hidden = hidden[self._indices(rows)]
        with current(self.pool.device):
            return self.model.logits(hidden)

    @torch.inference_mode()
    def embeddings(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Final norm of these rows of `hidden`: [len(rows), hidden_size] float32."""
        with current(self.pool.device):
            return self.model.embeddings(hidden[self._indices(rows)])

    def _indices(self, rows: Sequence[int]) -> Tensor:
        return to_device(np.array([*rows], np.int64), self.pool.device)

    @torch.inference_mode()
    def nonfinite_rows(self, hidden: Tensor) -> list[int]:
        """Indices, ascending, of the rows of `hidden` that have an inf or NaN."""
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):  # an inf or NaN shows in the sum
            return []
        rows: list[int] = torch.nonzero(~torch.isfinite(hidden).all(-1))[:, 0].tolist()
        return rows

    def zero_pages(self, pages: Sequence[int]) -> None:
        """See `KVPool.zero_pages`."""
        self.pool.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy all K/V of the first page of each pair to the second."""
        self.pool.copy_pages([page for page, _ in pairs], [page for _, page in pairs])
