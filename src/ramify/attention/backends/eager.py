"""The reference backend: dense attention in float32, one request at a time. Supports every model and device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import FP32_ROW_MULTIPLE, Exactness
from ramify.attention.gather import RequestSlice, attention_mask, gather_kv_f32, request_slices
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import AttentionSpec, unprobed_exactness

KEY_STEP = 256  # keys of a query row are padded to a multiple of it


class EagerBackend:
    """softmax(q kᵀ · scale) v in float32 over a dense copy of each request's K/V.

    Keys of a query row end at the multiple of `KEY_STEP` after its own position and are masked;
    rows are padded to a multiple of `FP32_ROW_MULTIPLE`. So its bits depend neither on chunking
    nor on the batch.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """None: it supports every model on every device."""
        return None

    def exactness(self) -> list[Exactness]:
        """Exact by padding; nothing is probed."""
        return unprobed_exactness(
            self.spec, "padded", f"rows in multiples of {FP32_ROW_MULTIPLE}, keys of {KEY_STEP}"
        )

    def plan(self, batch: AttentionBatch) -> list[RequestSlice]:
        """Split requests into query rows with the same padded number of keys."""
        return [
            part
            for request in request_slices(batch, self.device)
            for part in _split_by_padded_kv_len(request)
        ]

    def run(
        self,
        plan: list[RequestSlice],
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        num_tokens = plan[-1].stop if plan else 0
        self._inputs.validate(num_tokens, layer, q, planes, selected, sinks)
        out = q.new_zeros(*q.shape[:-1], spec.v_head_dim)
        for request in plan:
            num_rows = request.stop - request.start
            keys, values = (
                dense.repeat_interleave(spec.gqa_group_size, 1)
                for dense in gather_kv_f32(planes, request.slots)
            )
            mask = attention_mask(request, spec.windows[layer], selected)
            values = values.masked_fill(~mask.any(0)[:, None, None], 0.0)  # may be NaN
            rows = q.new_zeros(
                -(-num_rows // FP32_ROW_MULTIPLE) * FP32_ROW_MULTIPLE, *q.shape[1:]
            ).float()
            rows[:num_rows] = q[request.start : request.stop]
            rows, keys, values = (x.transpose(0, 1).contiguous() for x in (rows, keys, values))
            scores = torch.matmul(rows, keys.transpose(1, 2)) * spec.scale
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores[:, :num_rows].masked_fill_(~mask, -torch.inf)
            scores[:, num_rows:] = 0.0
            weights = _softmax(scores, sinks)
            attended = torch.matmul(weights, values)[:, :num_rows]
            # 0 times a non-finite value that the row does not see is NaN: redo it without those
            for row in (~attended.isfinite().all(-1).all(0)).nonzero()[:, 0].tolist():
                visible = values.masked_fill(~mask[row, :, None], 0.0)
                attended[:, row] = torch.matmul(weights, visible)[:, row]
            out[request.start : request.stop] = attended.transpose(0, 1).to(q.dtype)
        return out


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys of scores [heads, rows, keys], and over the sink of the head if there is one."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1].contiguous()


def _split_by_padded_kv_len(request: RequestSlice) -> list[RequestSlice]:
    ends = (request.query_positions // KEY_STEP + 1) * KEY_STEP  # ascending
    parts = []
    start = request.start
    for end, count in zip(*torch.unique_consecutive(ends, return_counts=True), strict=True):
        stop = start + int(count)
        slots = request.slots.new_zeros(int(end))
        slots[: len(request.slots)] = request.slots[: int(end)]
        positions = request.query_positions[start - request.start : stop - request.start]
        keys = torch.arange(int(end), device=slots.device)
        parts.append(RequestSlice(start, stop, slots, positions, keys))
        start = stop
    return parts
