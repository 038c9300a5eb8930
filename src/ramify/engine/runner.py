"""One forward pass: a plan's arrays become tensors, K/V is written, attention reads it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.inline import InlineAttention
from ramify.attention.mla import MlaAttention
from ramify.attention.tree import TreeBackend
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.dense import DenseDecoder
from ramify.models.loader import Decoder


class ModelRunner:
    """A model, its pool and its attention backend.

    Rows are padded to whole multiples of `row_multiple`, by default what the model wants to be
    exact; the padding rows write their K/V to the pool's padding page.
    """

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
        self._planes = [plane.name for plane in pool.layout.planes]
        self._inline = self._inlined()

    def _inlined(self) -> InlineAttention | None:
        """What lets the model run its layers without a call of Python for each, if it can."""
        model, backend, pool = self.model, self.backend, self.pool
        if not isinstance(model, DenseDecoder) or not isinstance(backend, TreeBackend):
            return None
        if InlineAttention.why_not(backend, pool, model.dtype) is not None:
            return None
        inline = InlineAttention(backend, pool)
        return inline if model.takes_inline(inline.nothing()) else None

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """Hidden rows [T, hidden] of the step; its K/V is in the pool afterwards."""
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
        attention = self.backend.plan(batch)

        def attend(layer: int, q: Any, *new: Tensor) -> Tensor:
            self.pool.write_kv(layer, tensors[2], **dict(zip(self._planes, new, strict=True)))
            return self.backend.run(attention, layer, q, self.pool.planes(layer))

        if self._inline is not None:
            attend.inline = self._inline.step(attention, slots)  # type: ignore[attr-defined]
        hidden = self.model.forward(tensors[0], tensors[1], attend)
        return hidden[: batch.num_tokens]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), vocab_size] float32 of some rows of `forward`'s result."""
        return self.model.logits(hidden[torch.as_tensor(list(rows), dtype=torch.int64)])

    @torch.inference_mode()
    def broken_rows(self, hidden: Tensor) -> list[int]:
        """Rows of `forward`'s result that are not finite, ascending."""
        if torch.isfinite(hidden.sum(-1, dtype=torch.float32)).all():  # inf and NaN stay so
            return []
        found: list[int] = torch.nonzero(~torch.isfinite(hidden).all(-1))[:, 0].tolist()
        return found
