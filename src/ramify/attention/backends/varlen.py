"""torch's varlen_attn: flash attention over ragged sequences, on CUDA. Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.gather import all_kv_slots, gather_rows
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import (
    AttentionSpec,
    not_exact,
    reason_no_cuda,
    reason_no_sinks,
    reason_not_half,
    reason_not_plain_mha,
)


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Offsets and lengths on the device, and the block table, or slots to gather without paging."""

    num_tokens: int
    max_q_len: int
    max_kv_len: int
    cu_q: Tensor  # [B + 1] int32
    cu_k: Tensor | None = None  # [B + 1] int32, of gathered keys
    slots: Tensor | None = None  # [total_kv] int64
    kv_lens: Tensor | None = None  # [B] int32, of paged keys
    block_table: Tensor | None = None  # [B, P] int32


class VarlenBackend:
    """Reads pages if the active flash attention implementation can; otherwise gathers K/V.

    FA2, which torch ships, cannot; FA3 can, after
    `torch.nn.attention.activate_flash_attention_impl("FA3")`, and FA4 on compute capability 10.
    Their causal masks are aligned bottom-right, which is right after a cached prefix.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        self._scratch: dict[str, Tensor] = {}

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """`exact=False` on CUDA, half precision, no soft cap, plain MHA."""
        if device.type != "cuda":
            return f"device {device.type}: varlen_attn needs CUDA"
        if (reason := reason_no_cuda(device)) is not None:
            return reason
        if spec.exact:
            return "exact=True: its bits depend on how a prompt is chunked"
        if (reason := reason_not_half(spec)) is not None:
            return reason
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap}: varlen_attn has no soft cap"
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"head_dim={spec.head_dim}: it must be a multiple of 8 up to 256"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "flash attention needs compute capability (8, 0)"
        return reason_no_sinks(spec) or reason_not_plain_mha(spec)

    def exactness(self) -> list[Exactness]:
        """See `AttentionBackend.exactness`."""
        return not_exact(self.spec)

    def plan(self, batch: AttentionBatch) -> VarlenPlan:
        """Upload the metadata of a step without synchronising."""
        if _reads_pages(self.device):
            keys = {"kv_lens": batch.seq_lens_kv, "block_table": batch.block_table.clip(0)}
        else:
            cu_k = np.concatenate([[0], np.cumsum(batch.seq_lens_kv)]).astype(np.int32)
            keys = {"cu_k": cu_k, "slots": all_kv_slots(batch)}
        return VarlenPlan(
            batch.num_tokens,
            batch.max_q_len,
            batch.max_kv_len,
            self._upload(batch.cu_seqlens_q),
            **{name: self._upload(array) for name, array in keys.items()},
        )

    def _upload(self, array: NDArray[np.integer]) -> Tensor:
        host = torch.from_numpy(array.copy())
        return host.pin_memory().to(self.device, non_blocking=True)

    def run(
        self,
        plan: VarlenPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        from torch.nn.attention.varlen import varlen_attn

        self._inputs.validate(plan.num_tokens, layer, q, planes, selected, sinks)
        out = torch.zeros_like(q)
        if plan.num_tokens == 0:
            return out
        spec, window = self.spec, self.spec.windows[layer]
        keys, values = planes["k"], planes["v"]
        if plan.slots is not None:
            keys, values = (
                gather_rows(self._scratch, name, planes[name].flatten(0, 1), plan.slots)
                for name in ("k", "v")
            )
        attended = varlen_attn(
            q[: plan.num_tokens],
            keys,
            values,
            plan.cu_q,
            plan.cu_k,
            plan.max_q_len,
            plan.max_kv_len,
            scale=spec.scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=spec.gqa_group_size > 1,
            seqused_k=plan.kv_lens,
            block_table=plan.block_table,
        )
        assert isinstance(attended, Tensor)
        out[: plan.num_tokens] = attended
        return out


def _reads_pages(device: torch.device) -> bool:
    """Whether the active flash attention implementation takes a block table."""
    from torch.nn.attention import current_flash_attention_impl

    active = current_flash_attention_impl()
    return active == "FA3" or (
        active == "FA4" and torch.cuda.get_device_capability(device)[0] == 10
    )
