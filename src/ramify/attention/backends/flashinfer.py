"""FlashInfer's wrappers over paged K/V on CUDA, by their `plan` and `run`; imported when used. Not exact."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backends.flashinfer_buffers import GraphBuffers
from ramify.attention.backends.flashinfer_mla import LatentWrapper, reason_not_latent
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import AttentionSpec, not_exact, reason_no_cuda

WORKSPACE_BYTES = 128 << 20  # what FlashInfer's documentation recommends
HEAD_DIMS = (64, 128, 256)  # that FlashInfer has kernels for
TENSOR_CORE_GROUP = 4  # query heads of a K/V head from which decodes are products of matrices
# Plans that may be in use: a wrapper copies its plan from a host buffer of its own when the device
# comes to it, and a step is planned while the one before runs.
NUM_STAGES = 2


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """A step; the wrappers hold it until the next plan but one, those of captured steps until the next."""

    num_tokens: int
    wrappers: dict[int | None, Any]  # by window

    @property
    def signature(self) -> Hashable:
        """What a CUDA graph of a decode step depends on, with `graph_pages`."""
        return self.num_tokens


class _Stage:
    """Wrappers of a step by window, for prefills and for decodes, and when their plan has been copied.

    Args:
        buffers: of the wrappers of captured steps.
    """

    def __init__(self, buffers: GraphBuffers | None = None) -> None:
        self.buffers = buffers
        self.prefill: dict[int | None, Any] = {}
        self.decode: dict[int | None, Any] = {}
        self.copied: torch.cuda.Event | None = None


class FlashInferBackend:
    """A wrapper for each window; steps of decodes alone have FlashInfer's decode wrappers; latents have one.

    Float8 planes are read with their scales, one for each token and head.

    Args:
        graph_pages: most pages of a request, for decode steps that graphs capture: each number of requests
            has wrappers of its own, which keep their metadata in buffers that stay. See
            `reason_not_captured`.
        library: in place of the package `flashinfer`, for tests.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        *,
        graph_pages: int | None = None,
        library: Any | None = None,
    ) -> None:
        self.spec, self.device = spec, device
        self._library = import_module("flashinfer") if library is None else library
        self._inputs = RunInputs(spec)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._stages = [_Stage() for _ in range(NUM_STAGES)]
        self._num_plans = 0
        self._graph_pages = graph_pages
        self._captured: dict[int, _Stage] = {}  # by number of requests
        self._is_scaled = spec.plane_dtype.itemsize == 1

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """`exact=False` on CUDA with flashinfer installed; half precision, K/V in float8 or the same half."""
        if device.type != "cuda":
            return f"device {device.type}: FlashInfer needs CUDA"
        if find_spec("flashinfer") is None:
            return "flashinfer is not installed: pip install flashinfer-python"
        if (reason := reason_no_cuda(device)) is not None:
            return reason
        if (reason := reason_not_servable(spec)) is not None:
            return reason
        return reason_not_importable() or reason_too_old(spec, import_module("flashinfer"))

    def exactness(self) -> list[Exactness]:
        """See `AttentionBackend.exactness`."""
        return not_exact(self.spec)

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> FlashInferPlan:
        """Pass the pages of every request to a wrapper of each window; the device is not waited for."""
        if batch.num_tokens == 0:
            return FlashInferPlan(0, {})
        stage = self._stage_of(batch)
        if stage.copied is not None:
            stage.copied.synchronize()
        # Wrappers with sinks, and of latents, take decodes as prefills of one token.
        is_decode = batch.max_q_len == 1 and not self.spec.sinks and self.spec.kind == "mha"
        wrappers = stage.decode if is_decode else stage.prefill
        arrays = batch.paged_kv_arrays()
        pages = self._pinned(arrays.paged_kv_indices)
        if self.spec.kind == "mha":  # the wrapper of latents reads them on the host
            pages = pages.to(self.device, non_blocking=True)
        indptr, last_page_len = (
            self._pinned(array) for array in (arrays.paged_kv_indptr, arrays.paged_kv_last_page_len)
        )
        for window in dict.fromkeys(self.spec.windows):
            if window not in wrappers:
                wrappers[window] = self._wrapper(window, stage.buffers, is_decode=is_decode)
            options, rows = self._plan_options(window), self._pinned(batch.cu_seqlens_q)
            if self.spec.kind == "mla":
                kv_lens = self._pinned(batch.seq_lens_kv)
                wrappers[window].plan(rows, indptr, pages, kv_lens)
            elif is_decode:
                wrappers[window].plan(indptr, pages, last_page_len, *self._sizes(), **options)
            else:
                wrappers[window].plan(
                    rows, indptr, pages, last_page_len, *self._sizes(), causal=True, **options
                )
        if self.device.type == "cuda":
            stage.copied = torch.cuda.Event()
            stage.copied.record()
        return FlashInferPlan(batch.num_tokens, dict(wrappers))

    def captured(self, max_pages: int) -> FlashInferBackend:
        """A backend for decode steps that graphs capture, of requests of at most `max_pages` pages."""
        return FlashInferBackend(
            self.spec, self.device, graph_pages=max_pages, library=self._library
        )

    def _stage_of(self, batch: AttentionBatch) -> _Stage:
        """The wrappers to plan a step with."""
        if self._graph_pages is None or batch.max_q_len > 1:
            self._num_plans += 1
            return self._stages[self._num_plans % NUM_STAGES]
        # On the device the next plan is copied after the replay of this one.
        if batch.num_seqs not in self._captured:
            buffers = GraphBuffers.of(batch.num_seqs, self._graph_pages, self.device)
            self._captured[batch.num_seqs] = _Stage(buffers)
        return self._captured[batch.num_seqs]

    def _wrapper(self, window: int | None, buffers: GraphBuffers | None, *, is_decode: bool) -> Any:
        spec, library = self.spec, self._library
        if spec.kind == "mla":
            return LatentWrapper(spec, library, self._workspace, buffers)
        if spec.sinks:
            return library.BatchAttentionWithAttentionSinkWrapper(
                self._workspace,
                kv_layout="NHD",
                q_data_type=spec.dtype,
                kv_data_type=spec.plane_dtype,
                head_dim_qk=spec.head_dim,
                head_dim_vo=spec.head_dim,
                window_left=_window_left(window),
            )
        if is_decode:
            return library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                kv_layout="NHD",
                use_tensor_cores=self._is_scaled or spec.gqa_group_size >= TENSOR_CORE_GROUP,
                **({} if buffers is None else buffers.of_decode()),
            )
        return library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="NHD")

    def _sizes(self) -> tuple[int, int, int, int]:
        spec = self.spec
        return spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size

    def _plan_options(self, window: int | None) -> dict[str, Any]:
        spec = self.spec
        options: dict[str, Any] = {
            "sm_scale": spec.scale,
            "window_left": _window_left(window),
            "logits_soft_cap": spec.soft_cap,
            "q_data_type": spec.dtype,
            "kv_data_type": spec.plane_dtype,
        }
        return options | {"use_token_head_sf": True} if self._is_scaled else options

    def _pinned(self, array: NDArray[np.int32]) -> Tensor:
        """The array in host memory that is copied without waiting; torch keeps it until the copy is done."""
        tensor = torch.from_numpy(array.copy())
        return tensor.pin_memory() if self.device.type == "cuda" else tensor

    # -- once per layer ----------------------------------------------------------------------

    def run(
        self,
        plan: FlashInferPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        count = plan.num_tokens
        self._inputs.validate(count, layer, q, planes, selected, sinks)
        out = q.new_empty(*q.shape[:-1], self.spec.v_head_dim)
        out[count:].zero_()
        if not count:
            return out
        wrapper, rows = plan.wrappers[self.spec.windows[layer]], q[:count].contiguous()
        if isinstance(wrapper, LatentWrapper):
            wrapper.run(rows, planes, out[:count])
            return out
        kv = planes["k"], planes["v"]
        if sinks is not None:
            wrapper.run(rows, kv, sinks, self.spec.scale, out=out[:count])
        elif self._is_scaled:
            scales = planes["k_scale"], planes["v_scale"]
            wrapper.run(rows, kv, out=out[:count], kv_cache_sf=scales)
        else:
            wrapper.run(rows, kv, out=out[:count])
        return out


def reason_not_captured(spec: AttentionSpec) -> str | None:
    """None, or why no graph can hold its decode steps."""
    return "attention sinks: their wrapper has no buffers that stay" if spec.sinks else None


def reason_not_importable() -> str | None:
    """None, or what the import of flashinfer raises: it compares the versions of its parts."""
    try:
        import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"flashinfer cannot be imported: {lines[0]}"
    return None


def reason_too_old(spec: AttentionSpec, library: Any) -> str | None:
    """None, or what this flashinfer does not have yet: latents, scales of tokens, or attention sinks."""
    if spec.kind == "mla":
        if hasattr(library, "BatchMLAPagedAttentionWrapper"):
            return None
        return "latents: this flashinfer has no wrapper for them; upgrade it"
    if spec.sinks and not hasattr(library, "BatchAttentionWithAttentionSinkWrapper"):
        return "attention sinks: this flashinfer has no wrapper for them; upgrade it"
    plan = library.BatchPrefillWithPagedKVCacheWrapper.plan
    if spec.plane_dtype.itemsize > 1 or "use_token_head_sf" in inspect.signature(plan).parameters:
        return None
    return f"kv_dtype={spec.plane_dtype}: this flashinfer reads no scales of tokens; upgrade it"


def reason_not_servable(spec: AttentionSpec) -> str | None:
    """None, or why FlashInfer's wrappers cannot compute this attention on any device."""
    if spec.exact:
        return "exact=True: its bits depend on how keys are split among programs"
    if spec.sparse:
        return "sparse: it reads every key"
    if spec.layout != "nhd":
        return f"layout={spec.layout}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={spec.dtype}: queries are in half precision"
    if spec.kind == "mla":
        return reason_not_latent(spec)
    if spec.plane_dtype not in (spec.dtype, torch.float8_e4m3fn):
        return f"kv_dtype={spec.plane_dtype}: K/V are float8_e4m3fn or the half of the queries"
    if spec.v_head_dim != spec.head_dim:
        return f"value_dim={spec.v_head_dim} beside head_dim={spec.head_dim}"
    if spec.head_dim not in HEAD_DIMS:
        return f"head_dim={spec.head_dim}: it must be one of {', '.join(map(str, HEAD_DIMS))}"
    if spec.sinks and (spec.plane_dtype != spec.dtype or spec.soft_cap is not None):
        return f"attention sinks with soft_cap={spec.soft_cap} and K/V in {spec.plane_dtype}"
    return None


def _window_left(window: int | None) -> int:
    """Keys before a query's own that it sees; -1: all."""
    return -1 if window is None else window - 1
