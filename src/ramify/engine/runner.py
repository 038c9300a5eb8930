"""One forward pass: a plan's arrays become tensors, K/V is written, attention reads it back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention.backend import AttentionBackend
from ramify.attention.inline import Inline, InlineAttention
from ramify.attention.mla import MlaAttention
from ramify.attention.tree import TreeBackend
from ramify.engine.step import StepPlan
from ramify.kv.pool import KVPool
from ramify.models.dense import DenseDecoder
from ramify.models.loader import Decoder


class _Attend:
    """Attention of a step as a decoder calls it, layer by layer: K/V is written, then read."""

    def __init__(self, runner: ModelRunner, plan: Any, slots: Tensor) -> None:
        self._runner, self._plan, self._slots = runner, plan, slots
        self.inline = runner.inline_step(plan, slots)

    def __call__(self, layer: int, q: Any, *new: Tensor) -> Tensor:
        runner, pool = self._runner, self._runner.pool
        names = [plane.name for plane in pool.layout.planes]
        pool.write_kv(layer, self._slots, **dict(zip(names, new, strict=True)))
        return runner.backend.run(self._plan, layer, q, pool.planes(layer))


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
        self._inline = self._inlined()

    def inline_step(self, plan: object, slots: Tensor) -> Inline | None:
        """What lets the model run the layers of a step without a call of `attend` for each."""
        inline = self._inline
        if inline is None:
            return None
        if inline.backend is not self.backend or inline.pool is not self.pool:
            return None
        return inline.step(plan, slots.numpy())

    def _inlined(self) -> InlineAttention | None:
        """What makes such steps, if the model can run them."""
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
        attend = _Attend(self, self.backend.plan(batch), tensors[2])
        hidden = self.model.forward(tensors[0], tensors[1], attend)
        return hidden[: batch.num_tokens] if num_padding else hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor, rows: Sequence[int]) -> Tensor:
        """Logits [len(rows), vocab_size] float32 of some rows of `forward`'s result."""
        if len(rows) != len(hidden) or [*rows] != [*range(len(hidden))]:
            hidden = hidden[torch.as_tensor([*rows], dtype=torch.int64)]
        return self.model.logits(hidden)

    @torch.inference_mode()
    def broken_rows(self, hidden: Tensor) -> list[int]:
        """Rows of `forward`'s result that are not finite, ascending."""
        if math.isfinite(hidden.sum(dtype=torch.float32).item()):  # inf or NaN: so is the sum
            return []
        found: list[int] = torch.nonzero(~torch.isfinite(hidden).all(-1))[:, 0].tolist()
        return found
