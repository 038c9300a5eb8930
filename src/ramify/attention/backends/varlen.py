"""torch's varlen_attn (flash attention over ragged sequences). Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.spec import AttentionSpec, reason_not_plain_mha, unprobed_exactness


@dataclass(frozen=True, slots=True)
class VarlenPlan:
    """Offsets and lengths on the device; a block table where the kernel pages, slots otherwise."""

    num_tokens: int
    max_q_len: int
    max_kv_len: int
    cu_q: Tensor  # [B + 1] int32
    cu_k: Tensor | None  # [B + 1] int32, of gathered keys
    slots: Tensor | None  # [total_kv] int64
    kv_lens: Tensor | None  # [B] int32, of paged keys
    block_table: Tensor | None  # [B, P] int32


class VarlenBackend:
    """Reads pages where the active implementation can, gathers K/V where it cannot.

    Flash attention 2, which torch brings along, knows no pages; 3 takes pages of any length once
    `torch.nn.attention.activate_flash_attention_impl("FA3")` was called, and 4 does on compute
    capability 10. Both masks are aligned bottom-right, so that a cached prefix is seen.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self._scratch: dict[str, Tensor] = {}

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """CUDA, half precision, plain K/V, no soft cap, no exactness."""
        if device.type != "cuda":
            return f"device {device.type}: varlen_attn needs CUDA"
        if not torch.cuda.is_available():
            return "device cuda: this torch finds no CUDA device"
        if spec.exact:
            return "exact=True: its bits depend on how a prompt is chunked"
        if spec.dtype not in (torch.bfloat16, torch.float16) or spec.plane_dtype != spec.dtype:
            return f"dtype={spec.dtype} with K/V in {spec.plane_dtype}: both must be the same half"
        if spec.soft_cap is not None:
            return f"soft_cap={spec.soft_cap}: varlen_attn has no soft cap"
        if spec.head_dim > 256 or spec.head_dim % 8:
            return f"head_dim={spec.head_dim}: multiples of 8 up to 256"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "flash attention needs compute capability (8, 0)"
        return reason_not_plain_mha(spec)

    def exactness(self) -> list[Exactness]:
        """None."""
        return unprobed_exactness(self.spec, "batched", "exact=False")

    def plan(self, batch: AttentionBatch) -> VarlenPlan:
        """Metadata on the device, uploaded without waiting."""
        where: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
        if _reads_pages(self.device):
            where = (
                None,
                None,
                self._upload(batch.seq_lens_kv),
                self._upload(batch.block_table.clip(0)),
            )
        else:
            slots = [batch.kv_slots(seq) for seq in range(batch.num_seqs)]
            flat = np.concatenate(slots) if slots else np.zeros(0, np.int64)
            cu_k = np.concatenate([[0], np.cumsum(batch.seq_lens_kv)]).astype(np.int32)
            where = (self._upload(cu_k), self._upload(flat), None, None)
        return VarlenPlan(
            batch.num_tokens,
            batch.max_q_len,
            batch.max_kv_len,
            self._upload(batch.cu_seqlens_q),
            *where,
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
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        from torch.nn.attention.varlen import varlen_attn

        assert selected is None
        out = torch.zeros_like(q)
        if plan.num_tokens == 0:
            return out
        spec, window = self.spec, self.spec.windows[layer]
        keys, values = planes["k"], planes["v"]
        if plan.slots is not None:
            keys, values = (self._gather(name, planes[name], plan.slots) for name in ("k", "v"))
        mixed = varlen_attn(
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
        assert isinstance(mixed, Tensor)
        out[: plan.num_tokens] = mixed
        return out

    def _gather(self, name: str, plane: Tensor, slots: Tensor) -> Tensor:
        """[total_kv, kv_heads, head_dim] in a buffer that is kept."""
        rows = plane.flatten(0, 1)
        kept = self._scratch.get(name)
        if kept is None or len(kept) < len(slots):
            kept = self._scratch[name] = rows.new_empty(len(slots), *rows.shape[1:])
        return torch.index_select(rows, 0, slots, out=kept[: len(slots)])


def _reads_pages(device: torch.device) -> bool:
    from torch.nn.attention import current_flash_attention_impl

    active = current_flash_attention_impl()
    return active == "FA3" or (
        active == "FA4" and torch.cuda.get_device_capability(device)[0] == 10
    )
