"""In place of the package flashinfer: its wrappers' parameters, recorded calls, attention in torch.

What is computed comes from the very arguments of `plan` and `run` alone, whose names are those of
`flashinfer_signatures`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.cpu.flashinfer_signatures import SIGNATURES
from tests.cpu.recorded_graphs import recorded_call


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

    def _begin(
        self, workspace: Tensor, kv_layout: str, buffers: dict[str, Tensor] | None = None
    ) -> None:
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD"
        self._plan: dict[str, Any] = {}
        self._buffers = buffers or {}
        self.calls.made.append(self.name)

    def _planned(self, **arguments: Any) -> None:
        """Keep the plan of a step; in the buffers of a wrapper for graphs, of the same shapes in all plans."""
        for name, value in arguments.items():
            assert not isinstance(value, Tensor) or value.dtype == torch.int32, name
        self._plan = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        for name, buffer in self._buffers.items():
            count = len(self._plan[name])
            assert count <= len(buffer) if name == "indices" else count == len(buffer), name
            self._plan[name] = buffer
            buffer[:count].copy_(arguments[name])
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
        arguments = q, *kv, out, *(scales or ()), sinks, sm_scale
        return self._as_kernel(
            arguments, lambda: self._compute(q, kv, out, scales, sinks, sm_scale)
        )

    def _as_kernel(self, arguments: tuple[Any, ...], compute: Callable[[], Tensor]) -> Tensor:
        self.calls.num_runs += 1
        return recorded_call(self.name, (*arguments, *self._plan.values()), compute)

    def _compute(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        out: Tensor,
        scales: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None,
        sm_scale: float | None,
    ) -> Tensor:
        plan = self._plan
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
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        of_graphs = {
            "indptr": paged_kv_indptr_buffer,
            "indices": paged_kv_indices_buffer,
            "last_page_len": paged_kv_last_page_len_buffer,
        }
        buffers = {name: x for name, x in of_graphs.items() if x is not None}
        assert len(buffers) == (3 if use_cuda_graph else 0)
        assert backend == ("fa2" if use_cuda_graph else "auto")
        self._begin(float_workspace_buffer, kv_layout, buffers)
        self.use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            assert paged_kv_last_page_len_buffer is not None
            count = len(paged_kv_last_page_len_buffer) + 1
            self._buffers["qo_indptr"] = torch.zeros(count, dtype=torch.int32)

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


@dataclass(frozen=True)
class _Metadata:
    """`MLAPlanMetadata` of 0.7.4."""

    arrays: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def csr(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor
    ) -> _Metadata:
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


class _Latent(_Wrapper):
    """Shared by both versions: absorbed attention over latents and ropes."""

    name = "BatchMLAPagedAttentionWrapper"

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        of_graphs = {
            "qo_indptr": qo_indptr,
            "indptr": kv_indptr,
            "indices": kv_indices,
            "kv_lens": kv_len_arr,
        }
        buffers = {name: x for name, x in of_graphs.items() if x is not None}
        assert len(buffers) == (4 if use_cuda_graph else 0)
        self._begin(float_workspace_buffer, "NHD", buffers)
        assert backend == "fa2"  # a CPU is no Hopper

    def _plan_arrays(self, arrays: tuple[Tensor, Tensor, Tensor, Tensor], **options: Any) -> None:
        rows, indptr, indices, kv_lens = arrays
        assert options["causal"] and options["q_data_type"] == options["kv_data_type"]
        size = options["page_size"]
        counts = (indptr[1:] - indptr[:-1]).tolist()
        assert counts == [-(-length // size) for length in kv_lens.tolist()]
        self._planned(
            qo_indptr=rows,
            indptr=indptr,
            indices=indices,
            kv_lens=kv_lens,
            **options,
        )

    def _attend_latents(
        self, query: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], out: Tensor
    ) -> Tensor:
        compute = partial(self._compute_latents, query, kv, out)
        return self._as_kernel((*query, *kv, out), compute)

    def _compute_latents(
        self, query: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], out: Tensor
    ) -> Tensor:
        plan = self._plan
        dims, heads = (plan["head_dim_ckv"], plan["head_dim_kpe"]), plan["num_heads"]
        for rows_of_q, plane, dim in zip(query, kv, dims, strict=True):
            assert rows_of_q.shape[1:] == (heads, dim)
            assert rows_of_q.dtype == plan["q_data_type"]
            assert plane.shape[1:] == (plan["page_size"], dim)
            assert plane.dtype == plan["kv_data_type"]
        assert out.shape == query[0].shape and out.is_contiguous()
        q, rows = torch.cat(query, -1).float(), plan["qo_indptr"].tolist()
        indptr = plan["indptr"].tolist()
        for request, kv_len in enumerate(plan["kv_lens"].tolist()):
            pages = plan["indices"][indptr[request] : indptr[request + 1]].long()
            latents, ropes = (plane[pages].flatten(0, 1)[:kv_len].float() for plane in kv)
            part = slice(rows[request], rows[request + 1])
            scores = torch.einsum("thd,nd->htn", q[part], torch.cat((latents, ropes), -1))
            positions = torch.arange(kv_len - scores.shape[1], kv_len)
            hidden = torch.arange(kv_len) > positions[:, None]
            weights = (scores * plan["sm_scale"]).masked_fill(hidden, -torch.inf).softmax(-1)
            out[part] = (weights @ latents).transpose(0, 1).to(out.dtype)
        return out


class _OldLatent(_Latent):
    """As in 0.2.10: metadata and planes are arguments of their own."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._plan_arrays(
            (qo_indptr, kv_indptr, kv_indices, kv_len_arr), num_heads=num_heads,
            head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe, page_size=page_size,
            causal=causal, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip

    def run(  # type: ignore[override]
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor
    ) -> Tensor:
        return self._attend_latents((q_nope, q_pe), (ckv_cache, kpe_cache), out)


class _NewLatent(_Latent):
    """As in 0.7.4: metadata in an object, and queries and planes in pairs."""

    def plan(
        self, *, metadata: _Metadata, query_layout: str, kv_cache_layout: str, **options: Any
    ) -> None:
        assert query_layout == kv_cache_layout == "split"
        assert options.keys() < {*SIGNATURES[self.name]["plan"]}
        self._plan_arrays(metadata.arrays, **options)

    def run(  # type: ignore[override]
        self, *, query: tuple[Tensor, Tensor], kv_cache: tuple[Tensor, Tensor], out: Tensor
    ) -> Tensor:
        return self._attend_latents(query, kv_cache, out)


class RecordedFlashInfer:
    """A library whose wrappers record their calls in `calls`.

    Args:
        is_old: in the version of `OLD_SIGNATURES`.
    """

    def __init__(self, *, is_old: bool = False) -> None:
        self.calls = Calls()
        self.mla = SimpleNamespace() if is_old else SimpleNamespace(MLAPlanMetadata=_Metadata)
        for kind in (_Prefill, _Decode, _Sinks, _OldLatent if is_old else _NewLatent):
            setattr(self, kind.name, type(kind.__name__, (kind,), {"calls": self.calls}))
