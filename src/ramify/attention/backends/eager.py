"""The reference: plain float32 attention, one request at a time. Supports everything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness
from ramify.attention.gather import RequestSlice, attention_mask, gather_kv_f32, request_slices
from ramify.attention.spec import AttentionSpec, unprobed_exactness

KEY_STEP = 256


class EagerBackend:
    """Scores, softmax and weighted sum in float32 over a dense copy of each request's K/V.

    A query row reduces over as many keys as its own position asks for, rounded up to whole
    `KEY_STEP`s and masked, and rows are padded to `FP32_ROW_MULTIPLE`s, so that its bits depend
    neither on chunking nor on who shares the batch.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Everything, slowly."""
        return None

    def exactness(self) -> list[Exactness]:
        """Not probed."""
        return unprobed_exactness(
            self.spec, "padded", f"rows in multiples of {FP32_ROW_MULTIPLE}, keys of {KEY_STEP}"
        )

    def plan(self, batch: AttentionBatch) -> list[RequestSlice]:
        """Runs of query rows that reduce over the same number of keys."""
        return [
            part
            for span in request_slices(batch, self.device)
            for part in _split_by_padded_kv_len(span)
        ]

    def run(
        self,
        plan: list[RequestSlice],
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        out = q.new_zeros(*q.shape[:-1], spec.v_head_dim)
        for span in plan:
            num_rows = span.stop - span.start
            keys, values = (
                dense.repeat_interleave(spec.gqa_group_size, 1)
                for dense in gather_kv_f32(planes, span.slots)
            )
            seen = attention_mask(span, spec.windows[layer], selected)
            values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)  # may be NaN
            rows = q.new_zeros(
                -(-num_rows // FP32_ROW_MULTIPLE) * FP32_ROW_MULTIPLE, *q.shape[1:]
            ).float()
            rows[:num_rows] = q[span.start : span.stop]
            rows, keys, values = (x.transpose(0, 1).contiguous() for x in (rows, keys, values))
            scores = torch.matmul(rows, keys.transpose(1, 2)) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores[:, :num_rows].masked_fill_(~seen, -torch.inf)
            scores[:, num_rows:] = 0.0
            weights = scores.softmax(-1)
            mixed = torch.matmul(weights, values)[:, :num_rows]
            # 0 times what a row does not see may be NaN: such a row over its own keys alone
            for row in (~mixed.isfinite().all(-1).all(0)).nonzero()[:, 0].tolist():
                own = values.masked_fill(~seen[row, :, None], 0.0)
                mixed[:, row] = torch.matmul(weights, own)[:, row]
            out[span.start : span.stop] = mixed.transpose(0, 1).to(q.dtype)
        return out


def _split_by_padded_kv_len(request: RequestSlice) -> list[RequestSlice]:
    ends = (request.query_positions // KEY_STEP + 1) * KEY_STEP  # ascending
    parts = []
    start = request.start
    for end, count in zip(*torch.unique_consecutive(ends, return_counts=True), strict=True):
        stop = start + int(count)
        slots = request.slots.new_zeros(int(end))
        slots[: len(request.slots)] = request.slots[: int(end)]
        places = torch.arange(int(end), device=slots.device)
        parts.append(
            RequestSlice(
                start,
                stop,
                slots,
                request.query_positions[start - request.start : stop - request.start],
                places,
            )
        )
        start = stop
    return parts
