"""Where FlashInfer's wrappers for CUDA graphs keep the metadata of a step: tensors whose addresses stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GraphBuffers:
    """Buffers of the wrappers for decode steps of B requests; `plan` copies into them."""

    rows: Tensor  # [B + 1] int32, offsets of the query rows
    indptr: Tensor  # [B + 1] int32, offsets of the pages of each request
    pages: Tensor  # [B * most pages of a request] int32
    lens: Tensor  # [B] int32: tokens in the last page, or of latents all tokens

    @classmethod
    def of(cls, num_requests: int, max_pages: int, device: torch.device) -> GraphBuffers:
        """Empty ones on the device."""
        counts = num_requests + 1, num_requests + 1, num_requests * max_pages, num_requests
        return cls(*(torch.zeros(count, dtype=torch.int32, device=device) for count in counts))

    def of_decode(self) -> dict[str, Any]:
        """Arguments of `BatchDecodeWithPagedKVCacheWrapper`; other backends of it do not keep their plan."""
        return {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": self.indptr,
            "paged_kv_indices_buffer": self.pages,
            "paged_kv_last_page_len_buffer": self.lens,
            "backend": "fa2",
        }

    def of_latents(self) -> dict[str, Any]:
        """Arguments of `BatchMLAPagedAttentionWrapper`."""
        return {
            "use_cuda_graph": True,
            "qo_indptr": self.rows,
            "kv_indptr": self.indptr,
            "kv_indices": self.pages,
            "kv_len_arr": self.lens,
        }
