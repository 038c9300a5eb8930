"""torch's scaled_dot_product_attention, one call per request. Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ramify.attention.backend import AttentionSpec, told, why_not_plain
from ramify.attention.batch import AttentionBatch
from ramify.attention.eager import Span, spans_of, visible
from ramify.attention.exact import Exactness


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """Requests, and for each window the mask of each request, group folded into rows."""

    spans: list[Span]
    masks: dict[int | None, list[Tensor | None]]  # [q_len * group, kv_len] bool


class SdpaBackend:
    """Gathers a request's K/V and folds the query heads of a group into query rows.

    The mask is explicit: SDPA's own causal mask is aligned top-left, which is wrong when a
    prefix is cached. Bits depend on the key length, so that decode differs from prefill.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """No exactness, no soft cap, plain K/V."""
        if spec.exact:
            return "exact=True: its bits depend on the key length"
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap}: SDPA has no soft cap"
        return why_not_plain(spec)

    def exactness(self) -> list[Exactness]:
        """None."""
        return told(self.spec, "together", "exact=False")

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Slots, positions and masks per request."""
        spans = spans_of(batch, self.device)
        group = self.spec.group
        masks: dict[int | None, list[Tensor | None]] = {}
        for window in set(self.spec.windows):
            masks[window] = [
                None
                if len(span.query_positions) == 1 and window is None
                else visible(span, window).repeat_interleave(group, 0)
                for span in spans
            ]
        return SdpaPlan(spans, masks)

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
        for span, mask in zip(plan.spans, plan.masks[spec.windows[layer]], strict=True):
            keys, values = (
                planes[name].flatten(0, 1)[span.slots].to(q.dtype).transpose(0, 1)[None]
                for name in ("k", "v")
            )
            rows = q[span.start : span.stop].unflatten(1, (spec.num_kv_heads, spec.group))
            folded = rows.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, q_len * group, d]
            mixed = scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=spec.scale
            )
            out[span.start : span.stop] = (
                mixed[0].unflatten(1, (-1, spec.group)).transpose(0, 1).flatten(1, 2)
            )
        return out
