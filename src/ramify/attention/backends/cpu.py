"""Exact attention on CPU that reads a shared prefix once: rows that read the same keys go together.

`plan` cuts a step into tasks (see `cpu_partition`), `run` runs them for a layer (see
`kernels.cpu.paged_attention`).
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
from ramify.attention.spec import AttentionSpec, unprobed_exactness
from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import BLOCK_KEYS
from ramify.kernels.cpu.threads import (
    KV_KINDS,
    ROW_KINDS,
    aligned_zeros,
    round_up_to_cache_line,
    set_num_threads,
)


class CpuBackend:
    """Numba kernels over pages, grouped by the tree."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        from ramify.kernels.cpu import attention_args, paged_attention, simd

        self.spec, self.device = spec, device
        self._kernels, self._args, self._has_bf16_dot = (
            paged_attention,
            attention_args,
            simd.HAS_BF16_DOT,
        )
        self.num_workers = max(1, torch.get_num_threads())
        columns = simd.TILE_N
        self._value_stride = -(-spec.v_head_dim // columns) * columns
        self._state_width = round_up_to_cache_line(self._value_stride + 2)
        self._counters = np.zeros(1, np.int64)
        # by layer, for the very same planes: asking a tensor costs a microsecond
        self._plane_cache: dict[tuple[int, torch.dtype], tuple[tuple[Tensor, ...], list[Any]]] = {}
        self._last_decode_plan: tuple[tuple[object, ...], CpuAttentionPlan] | None = None
        self._scratch = np.zeros((0, 0), np.float32)
        self._state = np.zeros((0, 0), np.float32)
        set_num_threads(self.num_workers)
        self._compile()

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """Any model on CPU, with Numba."""
        if device.type != "cpu":
            return f"device {device.type}: written for CPU"
        if importlib.util.find_spec("numba") is None:
            return "Numba is not installed: pip install 'ramify[cpu]'"
        if spec.layout != "nhd":
            return f"layout={spec.layout}"
        if spec.sparse and any(spec.windows):
            return "sparse with a window: it reads what was selected, all of it"
        if spec.plane_dtype not in KV_KINDS:
            return f"kv_dtype={spec.plane_dtype}: it reads {', '.join(map(str, KV_KINDS))}"
        return None

    def exactness(self) -> list[Exactness]:
        """By construction; nothing is probed."""
        return unprobed_exactness(
            self.spec, "blocks", "every sum has one order, fixed in the kernel"
        )

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> CpuAttentionPlan:
        """Who reads what together, and in which order."""
        positions = batch.positions.astype(np.int64)
        key = self._decode_plan_key(batch)
        if (
            key is not None
            and self._last_decode_plan is not None
            and key == self._last_decode_plan[0]
        ):
            plan = self._last_decode_plan[1]
            table = readonly_contiguous(batch.block_table)
            return replace(plan, positions=positions[plan.tokens], table=table)
        cut = self._partitioner(positions)
        cut.add_batch(batch)
        plan = cut.build(batch.block_table, batch.page_size)
        if key is not None:
            self._last_decode_plan = key, plan
        return plan

    def _decode_plan_key(self, batch: AttentionBatch) -> tuple[object, ...] | None:
        """All that a step of a token for each request is cut by: equal for most that follow another."""
        if batch.num_tokens != batch.num_seqs or batch.max_q_len != 1 or any(self.spec.windows):
            return None
        at = batch.positions
        blocks = at // BLOCK_KEYS, (at + 1 + BLOCK_KEYS // 2) // BLOCK_KEYS
        arrays = *blocks, batch.shared_with, batch.shared_len
        return batch.page_size, *(one.tobytes() for one in arrays)

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
    ) -> Tensor:
        """See `AttentionBackend.run`."""
        spec = self.spec
        wanted = spec.num_heads, spec.head_dim
        if q.shape[0] < plan.num_tokens or q.shape[1:] != wanted:
            raise ConfigError(
                f"q has shape {tuple(q.shape)}; it must be {(plan.num_tokens, *wanted)}, with or "
                "without more rows of padding"
            )
        if q.dtype not in ROW_KINDS:
            return self.run(plan, layer, q.float(), planes, selected=selected).to(q.dtype)
        if q.stride()[1:] != (spec.head_dim, 1):
            q = q.contiguous()
        out = torch.empty((q.shape[0], spec.num_heads, spec.v_head_dim), dtype=q.dtype)
        if selected is not None:
            plan = self._plan_selected(plan, selected)
            out.fill_(torch.nan)  # what sees nothing has no mean
        if plan.num_tokens < q.shape[0]:
            out[plan.num_tokens :] = 0
        window = spec.windows[layer] if selected is None else None
        self._launch(plan, q, self._cached_kernel_planes(layer, planes, q.dtype), out, window or 0)
        return out

    def fused_layers_args(
        self, plan: CpuAttentionPlan, planes: Mapping[str, Tensor]
    ) -> tuple[Any, ...]:
        """The last arguments of `run_fused_layers` for a step, all layers having one window.

        Args:
            planes: of the first layer, in the dtype of queries.
        """
        shape = self._launch_params(plan, self.spec.windows[0] or 0)
        return (
            shape, *self._cached_kernel_planes(0, planes, self.spec.plane_dtype), plan.tasks, plan.starts, plan.splits,
            plan.tokens, plan.positions, plan.table, self._state, self._scratch, self._counters,
        )  # fmt: skip

    def _cached_kernel_planes(
        self, layer: int, planes: Mapping[str, Tensor], dtype: torch.dtype
    ) -> list[Any]:
        """For queries of this dtype."""
        tensors = tuple(planes.values())
        known, parts = self._plane_cache.get((layer, dtype), (None, []))
        if known is None or len(known) != len(tensors) or any(map(is_not, known, tensors)):
            validate_planes(planes, self.spec)
            parts = self._kernel_planes(plane_views(planes), dtype)
            self._plane_cache[layer, dtype] = tensors, parts
        return parts

    def _launch(
        self, plan: CpuAttentionPlan, q: Tensor, planes: Sequence[Any], out: Tensor, window: int
    ) -> None:
        shape = self._launch_params(plan, window)
        kind, stride = ROW_KINDS[q.dtype], q.stride(0) * q.element_size()
        rows = self._args.QueryRows(kind, q.data_ptr(), stride, out.data_ptr())
        for tasks in plan.phases:
            self._kernels.paged_attention(
                shape, *planes, tasks, plan.splits, plan.tokens, plan.positions, plan.table,
                rows, self._state, self._scratch, self._counters,
            )  # fmt: skip

    def _launch_params(self, plan: CpuAttentionPlan, window: int) -> Any:
        """The shape of a launch, for which there is room afterwards."""
        spec = self.spec
        shape = self._args.AttentionParams(
            plan.state_head_stride, plan.page_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim,
            self._value_stride, window, self.num_workers, float(spec.soft_cap or 0.0), float(spec.scale),
        )  # fmt: skip
        self._reserve(shape, plan)
        set_num_threads(self.num_workers)
        return shape

    def _reserve(self, params: Any, plan: CpuAttentionPlan) -> None:
        """Kept between steps: a fresh allocation costs more than it is used for."""
        floats = self._kernels.attention_scratch_floats(params, plan.max_rows)
        if self._scratch.shape[1] < floats:
            self._scratch = aligned_zeros(self.num_workers, floats)
        if len(self._state) < plan.state_rows:
            self._state = aligned_zeros(plan.state_rows, self._state_width)
        if len(self._counters) <= len(plan.splits):
            self._counters = np.zeros(1 + len(plan.splits), np.int64)

    def _plan_selected(self, plan: CpuAttentionPlan, selected: Tensor) -> CpuAttentionPlan:
        """Each token as a request of its own over the keys that were selected for it.

        Its blocks are of its selection, in the order of positions: the same however it is batched.
        """
        chosen = selected.numpy()[: plan.num_tokens].astype(np.int64)
        counts = (chosen >= 0).sum(1)
        owner, position = np.zeros(plan.num_tokens, np.int64), np.zeros(plan.num_tokens, np.int64)
        for phase in plan.phases:
            for seq, first, count in phase[:, :3]:
                owner[plan.tokens[first : first + count]] = seq
        position[plan.tokens] = plan.positions
        assert (chosen <= position[:, None]).all(), "a key after its query was selected"
        pages = plan.table[owner[:, None], np.maximum(chosen, 0) // plan.page_size]
        slots = pages * plan.page_size + np.maximum(chosen, 0) % plan.page_size
        cut = self._partitioner(counts - 1)
        pieces = min(-(-cut.target_tasks // max(1, plan.num_tokens)), 2 * self.num_workers)
        for token in range(plan.num_tokens):
            blocks = (0, -(-int(counts[token]) // BLOCK_KEYS))
            cut.add_rows(0, token, (token,), blocks, pieces)
        return cut.build(slots.astype(np.int32), 1)

    def empty_plan(self) -> CpuAttentionPlan:
        """A step of no tokens, and one phase."""
        nothing = self._partitioner(np.zeros(0, np.int64)).build(np.zeros((0, 1), np.int32), 1)
        return replace(nothing, starts=np.zeros(2, np.int64), phases=[nothing.tasks])

    def _compile(self) -> None:
        """Compile now, or read what an earlier process compiled, rather than in the first step."""
        dtype = self.spec.dtype if self.spec.dtype in ROW_KINDS else torch.float32
        heads, device = self.spec.num_heads, self.device
        q = torch.zeros(0, heads, self.spec.head_dim, dtype=dtype, device=device)
        empty = torch.zeros(1, 1, 1, 8, dtype=dtype, device=device).to(self.spec.plane_dtype)
        out = torch.empty(0, heads, self.spec.v_head_dim, dtype=dtype, device=device)
        parts = self._kernel_planes(plane_views({"k": empty, "v": empty}), dtype)
        self._launch(self.empty_plan(), q, parts, out, 0)

    def _kernel_planes(self, views: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Any]:
        """Parts as the kernel takes them, for queries of this dtype: it is compiled for each kind.

        All of them are in pairs, or none.
        """
        if self._has_bf16_dot and dtype == torch.bfloat16 and all(map(_fits_vnni, views)):
            return [self._args.BF16VnniPlane(*part) for _, *part in views]
        return [self._args.KV_PLANES[kind](*part) for kind, *part in views]


def validate_planes(planes: Mapping[str, Tensor], spec: AttentionSpec) -> None:
    """The kernels are told addresses, so that whatever does not fit must be found before.

    Raises:
        ConfigError: a plane is missing, or has another shape, dtype or order in memory.
    """
    heads = spec.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "k": (heads, spec.head_dim),
        "v": (heads, spec.v_head_dim),
    }
    if spec.kind == "mla":
        shapes = {"latent": (spec.v_head_dim,), "rope": (spec.head_dim - spec.v_head_dim,)}
    for name, shape in shapes.items():
        for plane, wanted in ((name, shape), (f"{name}_scale", shape[:-1])):
            found = planes.get(plane)
            if found is None and plane.endswith("_scale"):
                continue
            if found is None:
                raise ConfigError(f"plane {plane} is missing; there are {', '.join(planes)}")
            if (
                tuple(found.shape[1:]) != (spec.page_size, *wanted)
                or not found.is_contiguous()
                or (found.dtype not in KV_KINDS if plane == name else found.dtype != torch.float32)
            ):
                raise ConfigError(
                    f"plane {plane} is {found.dtype} {tuple(found.shape)} with strides "
                    f"{found.stride()}; it must be contiguous, [pages, "
                    f"{', '.join(map(str, (spec.page_size, *wanted)))}]"
                )


def plane_views(planes: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """The planes as kind and `attention_args.KVPlane`: keys (or latents), rotary part or none, values."""
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
    return (
        KV_KINDS[plane.dtype],
        plane.data_ptr(),
        plane.shape[-1],
        plane.stride(1) * size,
        head,
        scales,
    )
