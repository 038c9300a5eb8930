"""torch's flex_attention over gathered K/V: all requests in one call, separated by the mask."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.gather import all_kv_slots, gather_kv_f32
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import AttentionSpec, not_exact, reason_no_cuda, reason_no_sinks


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """Concatenated key slots of all requests, and a block mask per window."""

    num_tokens: int
    slots: Tensor  # [total_kv] int64
    masks: dict[int | None, Any]  # BlockMask


class FlexBackend:
    """flex_attention: compiled on first use on a GPU, eager and slow on CPU."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from torch.nn.attention import flex_attention

        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        self._attention: Callable[..., Any] = flex_attention.flex_attention
        if device.type == "cuda":
            self._attention = torch.compile(flex_attention.flex_attention, dynamic=True)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """`exact=False`, NHD, not sparse; any dtype, soft cap and MLA."""
        if spec.exact:
            return "exact=True: its bits depend on who shares the batch"
        if device.type not in {"cpu", "cuda"}:
            return f"device {device.type}: written for CUDA and CPU"
        if (reason := reason_no_cuda(device) or reason_no_sinks(spec)) is not None:
            return reason
        if spec.sparse:
            return "sparse: it reads every key"
        if spec.layout != "nhd":
            return f"layout={spec.layout}"
        return None

    def exactness(self) -> list[Exactness]:
        """See `AttentionBackend.exactness`."""
        return not_exact(self.spec)

    def plan(self, batch: AttentionBatch) -> FlexPlan:
        """Build block masks from the request and position of every query row and key."""
        from torch.nn.attention.flex_attention import create_block_mask

        lens = np.diff(batch.cu_seqlens_q)
        seqs = np.arange(batch.num_seqs)
        kv_lens = batch.seq_lens_kv.astype(np.int64)
        begin = np.repeat(np.cumsum(kv_lens) - kv_lens, kv_lens)
        q_seq, q_pos, k_seq, k_pos = (
            torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(self.device)
            for array in (
                np.repeat(seqs, lens),
                batch.positions,
                np.repeat(seqs, kv_lens),
                np.arange(len(begin)) - begin,
            )
        )
        masks: dict[int | None, Any] = {}
        for window in set(self.spec.windows) if batch.num_tokens else ():
            masks[window] = create_block_mask(
                _mask_mod(window, q_seq, q_pos, k_seq, k_pos),
                None,
                None,
                batch.num_tokens,
                batch.total_kv,
                device=str(self.device),
            )
        slots = torch.from_numpy(all_kv_slots(batch)).to(self.device)
        return FlexPlan(batch.num_tokens, slots, masks)

    def run(
        self,
        plan: FlexPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        self._inputs.validate(plan.num_tokens, layer, q, planes, selected, sinks)
        out = q.new_zeros(*q.shape[:-1], spec.v_head_dim)
        if plan.num_tokens == 0:
            return out
        keys, values = (
            dense.to(q.dtype).transpose(0, 1)[None] for dense in gather_kv_f32(planes, plan.slots)
        )
        with warnings.catch_warnings():
            if self.device.type == "cpu":  # torch warns that flex_attention is not compiled
                warnings.simplefilter("ignore", UserWarning)
            attended = self._attention(  # [1, num_heads, T, value_dim]
                q[: plan.num_tokens].transpose(0, 1)[None],
                keys,
                values,
                score_mod=None if spec.soft_cap is None else _soft_cap(spec.soft_cap),
                block_mask=plan.masks[spec.windows[layer]],
                scale=spec.scale,
                enable_gqa=spec.gqa_group_size > 1,
            )
        out[: plan.num_tokens] = attended[0].transpose(0, 1)
        return out


def _mask_mod(
    window: int | None, q_seq: Tensor, q_pos: Tensor, k_seq: Tensor, k_pos: Tensor
) -> Callable[..., Tensor]:
    """Keys of the same request, causal, of the last `window` tokens."""

    def mask_mod(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = q_pos[query] - k_pos[key]
        visible = (q_seq[query] == k_seq[key]) & (distance >= 0)
        return visible if window is None else visible & (distance < window)

    return mask_mod


def _soft_cap(cap: float) -> Callable[..., Tensor]:
    def score_mod(
        score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor
    ) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod
