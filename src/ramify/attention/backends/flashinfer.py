"""FlashInfer's BatchPrefillWithPagedKVCacheWrapper on CUDA; imported when used. Not exact."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import (
    AttentionSpec,
    not_exact,
    reason_no_cuda,
    reason_no_sinks,
    reason_not_half,
    reason_not_plain_mha,
)

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
HEAD_DIMS = (64, 128, 256)  # that FlashInfer has kernels for


class FlashInferBackend:
    """A wrapper per window over one workspace; a decode is a prefill of one token."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[int | None, Any] = {
            window: wrapper(workspace, kv_layout="NHD") for window in dict.fromkeys(spec.windows)
        }

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """`exact=False` on CUDA with flashinfer installed, half precision, plain MHA."""
        if device.type != "cuda":
            return f"device {device.type}: FlashInfer needs CUDA"
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed: pip install flashinfer-python"
        if (reason := reason_no_cuda(device)) is not None:
            return reason
        if spec.exact:
            return "exact=True: its bits depend on how keys are split among programs"
        if (reason := reason_not_half(spec)) is not None:
            return reason
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim={spec.head_dim}: it must be one of {', '.join(map(str, HEAD_DIMS))}"
        return reason_no_sinks(spec) or reason_not_plain_mha(spec)

    def exactness(self) -> list[Exactness]:
        """See `AttentionBackend.exactness`."""
        return not_exact(self.spec)

    def plan(self, batch: AttentionBatch) -> int:
        """Pass the pages of every request to each wrapper, as host arrays: no synchronisation.

        Returns the number of tokens: the wrappers hold the plan until the next call.
        """
        if batch.num_tokens == 0:
            return 0
        spec, page_size = self.spec, batch.page_size
        arrays = batch.paged_kv_arrays()
        pages = torch.from_numpy(arrays.paged_kv_indices).pin_memory()
        indices = pages.to(self.device, non_blocking=True)
        for window, wrapper in self._wrappers.items():
            wrapper.plan(
                torch.from_numpy(batch.cu_seqlens_q.copy()),
                torch.from_numpy(arrays.paged_kv_indptr),
                indices,
                torch.from_numpy(arrays.paged_kv_last_page_len),
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                page_size,
                causal=True,
                sm_scale=spec.scale,
                window_left=-1 if window is None else window - 1,
                logits_soft_cap=spec.soft_cap,
                q_data_type=spec.dtype,
                kv_data_type=spec.plane_dtype,
            )
        return batch.num_tokens

    def run(
        self,
        plan: int,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        self._inputs.validate(plan, layer, q, planes, selected, sinks)
        out = torch.zeros_like(q)
        if plan:
            wrapper = self._wrappers[self.spec.windows[layer]]
            out[:plan] = wrapper.run(q[:plan], (planes["k"], planes["v"]))
        return out
