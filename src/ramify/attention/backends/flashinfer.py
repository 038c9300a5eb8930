"""FlashInfer's wrappers over paged K/V on CUDA, by their `plan` and `run`; imported when used. Not exact."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    """A step; the wrappers hold it until the next plan but one."""

    num_tokens: int
    wrappers: dict[int | None, Any]  # by window


class _Stage:
    """Wrappers of a step by window, for prefills and for decodes, and when their plan has been copied."""

    def __init__(self) -> None:
        self.prefill: dict[int | None, Any] = {}
        self.decode: dict[int | None, Any] = {}
        self.copied: torch.cuda.Event | None = None


class FlashInferBackend:
    """A wrapper for each window; steps of decodes alone have FlashInfer's decode wrappers.

    Float8 planes are read with their scales, one for each token and head.

    Args:
        library: in place of the package `flashinfer`, for tests.
    """

    def __init__(
        self, spec: AttentionSpec, device: torch.device, *, library: Any | None = None
    ) -> None:
        self.spec, self.device = spec, device
        self._library = import_module("flashinfer") if library is None else library
        self._inputs = RunInputs(spec)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._stages = [_Stage() for _ in range(NUM_STAGES)]
        self._num_plans = 0
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
        stage = self._stages[self._num_plans % NUM_STAGES]
        self._num_plans += 1
        if stage.copied is not None:
            stage.copied.synchronize()
        # Wrappers with sinks take decodes as prefills of one token.
        is_decode = batch.max_q_len == 1 and not self.spec.sinks
        wrappers = stage.decode if is_decode else stage.prefill
        arrays = batch.paged_kv_arrays()
        pages = self._pinned(arrays.paged_kv_indices).to(self.device, non_blocking=True)
        indptr, last_page_len = (
            self._pinned(array) for array in (arrays.paged_kv_indptr, arrays.paged_kv_last_page_len)
        )
        for window in dict.fromkeys(self.spec.windows):
            if window not in wrappers:
                wrappers[window] = self._wrapper(window, is_decode=is_decode)
            options = self._plan_options(window)
            if is_decode:
                wrappers[window].plan(indptr, pages, last_page_len, *self._sizes(), **options)
            else:
                rows = self._pinned(batch.cu_seqlens_q)
                wrappers[window].plan(
                    rows, indptr, pages, last_page_len, *self._sizes(), causal=True, **options
                )
        if self.device.type == "cuda":
            stage.copied = torch.cuda.Event()
            stage.copied.record()
        return FlashInferPlan(batch.num_tokens, dict(wrappers))

    def _wrapper(self, window: int | None, *, is_decode: bool) -> Any:
        spec, library = self.spec, self._library
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
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out[count:] = 0
        if not count:
            return out
        wrapper, kv = plan.wrappers[self.spec.windows[layer]], (planes["k"], planes["v"])
        rows = q[:count].contiguous()
        if sinks is not None:
            wrapper.run(rows, kv, sinks, self.spec.scale, out=out[:count])
        elif self._is_scaled:
            scales = planes["k_scale"], planes["v_scale"]
            wrapper.run(rows, kv, out=out[:count], kv_cache_sf=scales)
        else:
            wrapper.run(rows, kv, out=out[:count])
        return out


def reason_not_importable() -> str | None:
    """None, or what the import of flashinfer raises: it compares the versions of its parts."""
    try:
        import_module("flashinfer")
    except (ImportError, RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"flashinfer cannot be imported: {lines[0]}"
    return None


def reason_too_old(spec: AttentionSpec, library: Any) -> str | None:
    """None, or what this flashinfer does not have yet: scales of tokens, or attention sinks."""
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
    if spec.kind != "mha":
        return f"kind={spec.kind}: no K and V planes"
    if spec.sparse:
        return "sparse: it reads every key"
    if spec.layout != "nhd":
        return f"layout={spec.layout}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype={spec.dtype}: queries are in half precision"
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
