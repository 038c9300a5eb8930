"""Exact paged attention on CPU by compiled kernels; a shared prefix is read once for all requests.

`plan` partitions a step into tasks (`cpu_partition`); `run` runs them for a layer
(`kernels.cpu.paged_attention`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_not
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ramify.attention.backends.cpu_partition import (
    CpuAttentionPlan,
    TaskPartitioner,
    readonly_contiguous,
)
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness
from ramify.attention.inputs import validate_planes, validate_rows, validate_sinks
from ramify.attention.spec import AttentionSpec, unprobed_exactness
from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import BLOCK_KEYS, round_up_to_cache_line
from ramify.kernels.cpu.threads import KV_KINDS, ROW_KINDS, aligned_zeros, set_num_threads


class CpuBackend:
    """The compiled kernels as an `AttentionBackend`: plan, plane views, scratch, launch."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from ramify.kernels.cpu import attention_args, attention_tiles, paged_attention, simd
        from ramify.kernels.cpu.tile_choice import bf16_tile_kind

        self.spec, self.device = spec, device
        self._kernels, self._args = paged_attention, attention_args
        self._has_bf16_dot = simd.HAS_BF16_DOT
        # A score is a sum of whole tiles.
        is_whole = spec.head_dim % attention_tiles.STEP == 0
        self._tiles = (bf16_tile_kind() or 0) if is_whole else 0
        self.num_workers = max(1, torch.get_num_threads())
        self._value_stride = -(-spec.v_head_dim // simd.TILE_N) * simd.TILE_N
        self._state_width = round_up_to_cache_line(4 * (self._value_stride + 2)) // 4
        self._counters = np.zeros(1, np.int64)
        # Kernel planes by layer and query dtype, as long as the tensors are the same: reading a
        # tensor's address or strides takes a microsecond.
        self._plane_cache: dict[tuple[int, torch.dtype], tuple[tuple[Tensor, ...], list[Any]]] = {}
        self._last_decode_plan: tuple[tuple[object, ...], CpuAttentionPlan] | None = None
        self._scratch = np.zeros((0, 0), np.float32)
        self._state = np.zeros((0, 0), np.float32)
        set_num_threads(self.num_workers)
        self._compile()

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Any NHD model on CPU, with Numba."""
        if device.type != "cpu":
            return f"device {device.type}: written for CPU"
        if importlib.util.find_spec("numba") is None:
            return "Numba is not installed: pip install 'ramify[cpu]'"
        if spec.layout != "nhd":
            return f"layout={spec.layout}"
        if spec.sparse and any(spec.windows):
            return "sparse with a window: it reads every selected key"
        if spec.plane_dtype not in KV_KINDS:
            return f"kv_dtype={spec.plane_dtype}: it reads {', '.join(map(str, KV_KINDS))}"
        return None

    def exactness(self) -> list[Exactness]:
        """Exact by construction; nothing is probed."""
        return unprobed_exactness(
            self.spec, "blocks", "every sum has one order, fixed in the kernel"
        )

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> CpuAttentionPlan:
        """Partition a step into tasks. Called once per step."""
        positions = batch.positions.astype(np.int64)
        key = self._decode_plan_key(batch)
        last = self._last_decode_plan
        if key is not None and last is not None and key == last[0]:
            plan = last[1]
            table = readonly_contiguous(batch.block_table)
            return replace(plan, positions=positions[plan.tokens], table=table)
        partitioner = self._partitioner(positions)
        partitioner.add_batch(batch)
        plan = partitioner.build(batch.block_table, batch.page_size)
        if key is not None:
            self._last_decode_plan = key, plan
        return plan

    def _decode_plan_key(self, batch: AttentionBatch) -> tuple[object, ...] | None:
        """All that the tasks of a decode step depend on; most consecutive steps have equal keys."""
        if batch.num_tokens != batch.num_seqs or batch.max_q_len != 1 or all(self.spec.windows):
            return None
        positions = batch.positions
        blocks = positions // BLOCK_KEYS, (positions + 1 + BLOCK_KEYS // 2) // BLOCK_KEYS
        arrays = *blocks, batch.shared_with, batch.shared_len
        return batch.page_size, *(array.tobytes() for array in arrays)

    def _partitioner(self, positions: NDArray[np.int64]) -> TaskPartitioner:
        return TaskPartitioner(
            positions,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            windows=self.spec.windows,
            num_workers=self.num_workers,
            state_width=self._state_width,
        )

    # -- once per layer ----------------------------------------------------------------------

    def run(
        self,
        plan: CpuAttentionPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        validate_rows(plan.num_tokens, layer, q, selected, spec)
        validate_sinks(sinks, spec)
        _require_reachable(("q", q), ("sinks", sinks))
        if q.dtype not in ROW_KINDS:
            wide = self.run(plan, layer, q.float(), planes, selected=selected, sinks=sinks)
            return wide.to(q.dtype)
        if q.stride()[1:] != (spec.head_dim, 1):
            q = q.contiguous()
        out = torch.empty((q.shape[0], spec.num_heads, spec.v_head_dim), dtype=q.dtype)
        if selected is not None:
            plan = self._plan_selected(plan, selected)
            out.fill_(torch.nan)  # the kernel writes no row that has no key
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :] = 0
        window = spec.windows[layer] if selected is None else None
        kernel_planes = self._cached_kernel_planes(layer, planes, q.dtype)
        self._launch(plan, q, kernel_planes, out, window or 0, sinks)
        return out

    def fused_layers_args(
        self, plan: CpuAttentionPlan, planes: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """Attention arguments of `run_fused_layers` for a step, without the window: each layer has its own.

        Args:
            planes: of the first layer, in the dtype of queries.
        """
        params = self._launch_params(plan, 0)
        return (
            params, *self._cached_kernel_planes(0, planes, self.spec.plane_dtype), plan.tasks, plan.starts, plan.splits,
            plan.tokens, plan.positions, plan.table, self._state, self._scratch, self._counters,
        )  # fmt: skip

    def _cached_kernel_planes(
        self, layer: int, planes: Mapping[str, Tensor], dtype: torch.dtype
    ) -> list[Any]:
        """`_kernel_planes` of a layer, validated, for queries of this dtype."""
        tensors = tuple(planes.values())
        cached, views = self._plane_cache.get((layer, dtype), (None, []))
        if cached is None or len(cached) != len(tensors) or any(map(is_not, cached, tensors)):
            validate_compiled_planes(planes, self.spec)
            views = self._kernel_planes(plane_views(planes), dtype)
            self._plane_cache[layer, dtype] = tensors, views
        return views

    def _launch(
        self,
        plan: CpuAttentionPlan,
        q: Tensor,
        planes: Sequence[Any],
        out: Tensor,
        window: int,
        sinks: Tensor | None = None,
    ) -> None:
        params = self._launch_params(plan, window, 0 if sinks is None else sinks.data_ptr())
        kind, stride = ROW_KINDS[q.dtype], q.stride(0) * q.element_size()
        rows = self._args.QueryRows(kind, q.data_ptr(), stride, out.data_ptr())
        for tasks in plan.phases:
            self._kernels.paged_attention(
                params, *planes, tasks, plan.splits, plan.tokens, plan.positions, plan.table,
                rows, self._state, self._scratch, self._counters,
            )  # fmt: skip

    def _launch_params(self, plan: CpuAttentionPlan, window: int, sinks: int = 0) -> Any:
        """Launch parameters of the kernel; reserves state and scratch for them."""
        spec = self.spec
        params = self._args.AttentionParams(
            plan.state_head_stride, plan.page_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim,
            self._value_stride, window, self.num_workers, float(spec.soft_cap or 0.0), float(spec.scale), sinks,
            self._tiles,
        )  # fmt: skip
        self._reserve(params, plan)
        set_num_threads(self.num_workers)
        return params

    def _reserve(self, params: Any, plan: CpuAttentionPlan) -> None:
        """Grow state and scratch. They live across steps: allocation costs more than their use."""
        floats = self._kernels.attention_scratch_floats(params, plan.max_rows)
        if self._scratch.shape[1] < floats:
            self._scratch = aligned_zeros(self.num_workers, floats)
        if len(self._state) < plan.state_rows:
            self._state = aligned_zeros(plan.state_rows, self._state_width)
        if len(self._counters) <= len(plan.splits):
            self._counters = np.zeros(1 + len(plan.splits), np.int64)

    def _plan_selected(self, plan: CpuAttentionPlan, selected: Tensor) -> CpuAttentionPlan:
        """Plan sparse attention: each token is a request of its own over its selected keys.

        The private table has page size 1. Blocks are cut from a token's selection in order of
        position, so that they do not depend on the batch.
        """
        keys = selected.numpy()[: plan.num_tokens].astype(np.int64)
        counts = (keys >= 0).sum(1)
        owner, position = np.zeros(plan.num_tokens, np.int64), np.zeros(plan.num_tokens, np.int64)
        for phase in plan.phases:
            for seq, first, count in phase[:, :3]:
                owner[plan.tokens[first : first + count]] = seq
        position[plan.tokens] = plan.positions
        assert (keys <= position[:, None]).all(), "a key after its query was selected"
        pages = plan.table[owner[:, None], np.maximum(keys, 0) // plan.page_size]
        slots = pages * plan.page_size + np.maximum(keys, 0) % plan.page_size
        partitioner = self._partitioner(counts - 1)
        num_tasks = -(-partitioner.target_tasks // max(1, plan.num_tokens))
        num_tasks = min(num_tasks, 2 * self.num_workers)
        for token in range(plan.num_tokens):
            blocks = (0, -(-int(counts[token]) // BLOCK_KEYS))
            partitioner.add_rows(0, token, (token,), blocks, num_tasks)
        return partitioner.build(slots.astype(np.int32), 1)

    def empty_plan(self) -> CpuAttentionPlan:
        """The plan of a step without tokens; one phase without tasks."""
        plan = self._partitioner(np.zeros(0, np.int64)).build(np.zeros((0, 1), np.int32), 1)
        return replace(plan, starts=np.zeros(2, np.int64), phases=[plan.tasks])

    def _compile(self) -> None:
        """Compile the kernel now, or load it from the disk cache, rather than in the first step."""
        dtype = self.spec.dtype if self.spec.dtype in ROW_KINDS else torch.float32
        heads, device = self.spec.num_heads, self.device
        q = torch.zeros(0, heads, self.spec.head_dim, dtype=dtype, device=device)
        empty = torch.zeros(1, 1, 1, 8, dtype=dtype, device=device).to(self.spec.plane_dtype)
        out = torch.empty(0, heads, self.spec.v_head_dim, dtype=dtype, device=device)
        views = self._kernel_planes(plane_views({"k": empty, "v": empty}), dtype)
        self._launch(self.empty_plan(), q, views, out, 0)

    def _kernel_planes(self, views: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Any]:
        """Plane structs of the kernel, which is compiled per struct type.

        All planes take part in VNNI dot products, or none.
        """
        if self._has_bf16_dot and dtype == torch.bfloat16 and all(map(_fits_vnni, views)):
            return [self._args.BF16VnniPlane(*fields) for _, *fields in views]
        return [self._args.KV_PLANES[kind](*fields) for kind, *fields in views]


def validate_compiled_planes(planes: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """`validate_planes`, and that the kernels have their dtypes and can reach them.

    Raises:
        ConfigError: a plane is missing, or has a wrong shape, dtype, memory order or device.
    """
    validate_planes(planes, spec)
    _require_reachable(*((f"plane {name}", plane) for name, plane in planes.items()))
    for name, plane in planes.items():
        if plane.dtype not in KV_KINDS:
            raise ConfigError(
                f"plane {name} is {plane.dtype}; it must be one of {', '.join(map(str, KV_KINDS))}"
            )


def _require_reachable(*tensors: tuple[str, Tensor | None]) -> None:
    """Raise ConfigError for a tensor on another device: kernels read by address."""
    for name, tensor in tensors:
        if tensor is not None and not tensor.is_cpu:
            raise ConfigError(f"{name} is on {tensor.device}; it must be on cpu")


def plane_views(planes: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """(kind, *fields of `attention_args.KVPlane`) of: keys or latents; rope or none; values."""
    if "latent" in planes:
        latent = _plane_view(planes, "latent")
        return [latent, _plane_view(planes, "rope"), latent]
    keys = _plane_view(planes, "k")
    return [keys, (keys[0], *(0,) * 5), _plane_view(planes, "v")]


def _fits_vnni(view: tuple[int, ...]) -> bool:
    kind, _, width, *_, scales = view
    return kind == KV_KINDS[torch.bfloat16] and width % 8 == 0 and not scales


def _plane_view(planes: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    plane, scale = planes[name], planes.get(f"{name}_scale")
    size = plane.element_size()
    head = plane.stride(2) * size if plane.dim() == 4 else 0
    scales = 0 if scale is None else scale.data_ptr()
    width, token = plane.shape[-1], plane.stride(1) * size
    return KV_KINDS[plane.dtype], plane.data_ptr(), width, token, head, scales
