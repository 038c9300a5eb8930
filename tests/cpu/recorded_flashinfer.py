"""In place of the package flashinfer: its wrappers' parameters, recorded calls, attention in torch.

What is computed comes from the very arguments of `plan` and `run` alone. `SIGNATURES` are those of
flashinfer-python 0.7.4; `test_flashinfer.py` compares them with an installed package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Parameters that a call of ours may name or fill, in the package's order.
SIGNATURES: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": ("float_workspace_buffer", "kv_layout"),
        "plan": (
            "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len",
            "num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size", "head_dim_vo",
            "custom_mask", "packed_custom_mask", "causal", "pos_encoding_mode",
            "use_fp16_qk_reduction", "sm_scale", "window_left", "logits_soft_cap", "rope_scale",
            "rope_theta", "q_data_type", "kv_data_type", "use_token_head_sf",
        ),
        "run": ("q", "paged_kv_cache", "out", "kv_cache_sf"),
    },
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": ("float_workspace_buffer", "kv_layout", "use_cuda_graph", "use_tensor_cores"),
        "_plan_impl": (
            "indptr", "indices", "last_page_len", "num_qo_heads", "num_kv_heads", "head_dim",
            "page_size", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type",
            "sm_scale", "use_token_head_sf",
        ),
        "run": ("q", "paged_kv_cache", "out", "kv_cache_sf"),
    },
    "BatchAttentionWithAttentionSinkWrapper": {
        "__init__": (
            "float_workspace_buffer", "kv_layout", "q_data_type", "kv_data_type", "head_dim_qk",
            "head_dim_vo", "window_left",
        ),
        "run": ("q", "paged_kv_cache"),
    },
}  # fmt: skip


@dataclass
class Calls:
    """The calls of all wrappers of a library, in order."""

    made: list[str] = field(default_factory=list)
    planned: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_runs: int = 0


class _Wrapper:
    """Shared by the wrappers: holds the plan of a step, and attends to its pages."""

    calls: Calls
    name = ""

    def _begin(self, workspace: Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        self._plan: dict[str, Any] = {}
        self.calls.made.append(self.name)

    def _planned(self, **arguments: Any) -> None:
        for name in ("qo_indptr", "indptr", "indices", "last_page_len"):
            assert arguments[name].dtype == torch.int32
        self._plan = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        self.calls.planned.append((self.name, self._plan))

    def _attend(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None = None,
        sm_scale: float | None = None,
    ) -> Tensor:
        """Causal attention, aligned bottom-right, of each request over its pages."""
        plan = self._plan
        self.calls.num_runs += 1
        assert len(q) == int(plan["qo_indptr"][-1]) and q.is_contiguous() and out.is_contiguous()
        assert q.dtype == plan["q_data_type"] and kv[0].dtype == plan["kv_data_type"]
        assert (
            (kv[0].dtype.itemsize == 1) == bool(plan["use_token_head_sf"]) == (scales is not None)
        )
        heads, kv_heads, dim = plan["num_qo_heads"], plan["num_kv_heads"], plan["head_dim"]
        assert q.shape[1:] == (heads, dim) and kv[0].shape[1:] == (plan["page_size"], kv_heads, dim)
        scale = plan["sm_scale"] if sm_scale is None else sm_scale
        indptr, size = plan["indptr"].tolist(), plan["page_size"]
        rows = plan["qo_indptr"].tolist()
        for request, last_len in enumerate(plan["last_page_len"].tolist()):
            pages = plan["indices"][indptr[request] : indptr[request + 1]].long()
            kv_len = (len(pages) - 1) * size + last_len
            keys, values = (
                _rows(plane, None if scales is None else scales[at], pages, kv_len)
                for at, plane in enumerate(kv)
            )
            part = slice(rows[request], rows[request + 1])
            query = q[part].float().transpose(0, 1)  # [heads, rows, dim]
            keys, values = (
                x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (keys, values)
            )
            scores = query @ keys.transpose(1, 2) * scale
            if plan["logits_soft_cap"]:
                cap = plan["logits_soft_cap"]
                scores = cap * torch.tanh(scores / cap)
            ages = torch.arange(kv_len - query.shape[1], kv_len)[:, None] - torch.arange(kv_len)
            hidden = ages < 0
            if plan["window_left"] >= 0:
                hidden |= ages > plan["window_left"]
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                column = sinks[:, None, None].expand(-1, query.shape[1], 1)
                weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
            else:
                weights = scores.softmax(-1)
            out[part] = (weights @ values).transpose(0, 1).to(out.dtype)
        return out

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        out: Tensor,
        kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return self._attend(q, paged_kv_cache, out, kv_cache_sf)


def _rows(plane: Tensor, scale: Tensor | None, pages: Tensor, kv_len: int) -> Tensor:
    """[kv_len, kv_heads, dim] float32 of a plane."""
    rows = plane[pages].flatten(0, 1)[:kv_len].float()
    return rows if scale is None else rows * scale[pages].flatten(0, 1)[:kv_len, :, None]


class _Prefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        self._begin(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        assert causal
        self._planned(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            sm_scale=head_dim_qk**-0.5 if sm_scale is None else sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            use_token_head_sf=use_token_head_sf,
        )


class _Decode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        self._planned(
            qo_indptr=torch.arange(len(last_page_len) + 1, dtype=torch.int32),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            sm_scale=head_dim**-0.5 if sm_scale is None else sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            use_token_head_sf=use_token_head_sf,
        )


class _Sinks(_Prefill):
    name = "BatchAttentionWithAttentionSinkWrapper"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        *,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        self._begin(float_workspace_buffer, kv_layout)
        self._made = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left)

    def run(  # type: ignore[override]
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor
    ) -> Tensor:
        sinks, sm_scale = args
        plan = self._plan
        dim, window = plan["head_dim"], plan["window_left"]
        # The variant is compiled for what the wrapper is made with.
        assert self._made == (plan["q_data_type"], plan["kv_data_type"], dim, dim, window)
        assert not plan["logits_soft_cap"]
        return self._attend(q, paged_kv_cache, out, None, sinks, sm_scale)


class RecordedFlashInfer:
    """A library whose wrappers record their calls in `calls`."""

    def __init__(self) -> None:
        self.calls = Calls()
        for kind in (_Prefill, _Decode, _Sinks):
            setattr(self, kind.name, type(kind.__name__, (kind,), {"calls": self.calls}))
