"""torch's scaled_dot_product_attention (SDPA), one call per request. Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.gather import RequestSlice, attention_mask, gather_rows, request_slices
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import (
    AttentionSpec,
    not_exact,
    reason_no_sinks,
    reason_not_plain_mha,
)


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """The requests of a step and their masks; the query heads of a GQA group are rows."""

    requests: list[RequestSlice]
    masks: dict[int | None, list[Tensor | None]]  # by window: [q_len * group, kv_len] bool
    contiguous_start: list[int | None]  # first slot of a request whose slots are contiguous


class SdpaBackend:
    """Gathers a request's K/V and passes the query heads of a GQA group as query rows.

    K/V are gathered into reused buffers; contiguous pages are read in place. The mask is explicit:
    SDPA's own causal mask is aligned top-left, which is wrong after a cached prefix. Bits depend on
    the key length, so decode differs from prefill.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        self._scratch: dict[str, Tensor] = {}

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """`exact=False`, no soft cap, plain MHA."""
        if spec.exact:
            return "exact=True: its bits depend on the key length"
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap}: SDPA has no soft cap"
        return reason_no_sinks(spec) or reason_not_plain_mha(spec)

    def exactness(self) -> list[Exactness]:
        """See `AttentionBackend.exactness`."""
        return not_exact(self.spec)

    def plan(self, batch: AttentionBatch) -> SdpaPlan:
        """Compute slots, positions and masks per request. Called once per step."""
        requests = request_slices(batch, self.device)
        group = self.spec.gqa_group_size
        masks: dict[int | None, list[Tensor | None]] = {}
        for window in set(self.spec.windows):
            masks[window] = [
                None
                if len(request.query_positions) == 1 and window is None
                else attention_mask(request, window).repeat_interleave(group, 0)
                for request in requests
            ]
        starts: list[int | None] = []
        for seq in range(batch.num_seqs):
            slots = batch.kv_slots(seq)
            is_contiguous = len(slots) > 0 and bool((np.diff(slots) == 1).all())
            starts.append(int(slots[0]) if is_contiguous else None)
        return SdpaPlan(requests, masks, starts)

    def run(
        self,
        plan: SdpaPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        num_tokens = plan.requests[-1].stop if plan.requests else 0
        self._inputs.validate(num_tokens, layer, q, planes, selected, sinks)
        out = torch.zeros_like(q)
        masks = plan.masks[spec.windows[layer]]
        for request, mask, start in zip(plan.requests, masks, plan.contiguous_start, strict=True):
            keys, values = (
                self._gather(name, planes[name].flatten(0, 1), request.slots, start)
                .to(q.dtype)
                .transpose(0, 1)[None]
                for name in ("k", "v")
            )
            rows = q[request.start : request.stop]
            rows = rows.unflatten(1, (spec.num_kv_heads, spec.gqa_group_size))
            rows = rows.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, q_len * group, d]
            attended = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, scale=spec.scale
            )
            out[request.start : request.stop] = (
                attended[0].unflatten(1, (-1, spec.gqa_group_size)).transpose(0, 1).flatten(1, 2)
            )
        return out

    def _gather(self, name: str, plane: Tensor, slots: Tensor, start: int | None) -> Tensor:
        """[kv_len, kv_heads, dim]: a view if contiguous, else a copy in the buffer of that name."""
        if start is not None:
            return plane[start : start + len(slots)]
        return gather_rows(self._scratch, name, plane, slots)
