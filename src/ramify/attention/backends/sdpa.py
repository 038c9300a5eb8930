"""torch's scaled_dot_product_attention, one call per request. Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.gather import RequestSlice, attention_mask, request_slices
from ramify.attention.spec import AttentionSpec, reason_not_plain_mha, unprobed_exactness


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Requests, and for each window the mask of each request, group folded into rows."""

    requests: list[RequestSlice]
    masks: dict[int | None, list[Tensor | None]]  # [q_len * group, kv_len] bool
    contiguous_start: list[int | None]  # the first slot, where a request's slots follow each other


class SdpaBackend:
    """Gathers a request's K/V and folds the query heads of a group into query rows.

    K/V go into buffers that are kept, a fresh result costs several times the copy; where the pages
    follow each other they are read where they lie. The mask is explicit: SDPA's own causal mask is
    aligned top-left, which is wrong when a prefix is cached. Bits depend on the key length, so that
    decode differs from prefill.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._scratch: dict[str, Tensor] = {}

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """No exactness, no soft cap, plain K/V."""
        if spec.exact:
            return "exact=True: its bits depend on the key length"
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap}: SDPA has no soft cap"
        return reason_not_plain_mha(spec)

    def exactness(self) -> list[Exactness]:
        """None."""
        return unprobed_exactness(self.spec, "batched", "exact=False")

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Slots, positions and masks per request."""
        spans = request_slices(batch, self.device)
        group = self.spec.gqa_group_size
        masks: dict[int | None, list[Tensor | None]] = {}
        for window in set(self.spec.windows):
            masks[window] = [
                None
                if len(span.query_positions) == 1 and window is None
                else attention_mask(span, window).repeat_interleave(group, 0)
                for span in spans
            ]
        runs: list[int | None] = []
        for seq in range(batch.num_seqs):
            slots = batch.kv_slots(seq)
            follow = len(slots) > 0 and bool((np.diff(slots) == 1).all())
            runs.append(int(slots[0]) if follow else None)
        return SdpaPlan(spans, masks, runs)

    def run(
        self,
        plan: SdpaPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        assert selected is None
        spec = self.spec
        out = torch.zeros_like(q)
        masks = plan.masks[spec.windows[layer]]
        for span, mask, first in zip(plan.requests, masks, plan.contiguous_start, strict=True):
            keys, values = (
                self._gather(name, planes[name].flatten(0, 1), span.slots, first)
                .to(q.dtype)
                .transpose(0, 1)[None]
                for name in ("k", "v")
            )
            rows = q[span.start : span.stop].unflatten(1, (spec.num_kv_heads, spec.gqa_group_size))
            folded = rows.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, q_len * group, d]
            mixed = scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=spec.scale
            )
            out[span.start : span.stop] = (
                mixed[0].unflatten(1, (-1, spec.gqa_group_size)).transpose(0, 1).flatten(1, 2)
            )
        return out

    def _gather(self, name: str, plane: Tensor, slots: Tensor, first: int | None) -> Tensor:
        """[kv_len, kv_heads, dim]: a view, or a copy in the buffer of that name."""
        if first is not None:
            return plane[first : first + len(slots)]
        kept = self._scratch.get(name)
        if kept is None or len(kept) < len(slots) or kept.dtype != plane.dtype:
            kept = self._scratch[name] = plane.new_empty(len(slots), *plane.shape[1:])
        return torch.index_select(plane, 0, slots, out=kept[: len(slots)])
