"""Ramify's Triton kernels: paged attention with split-KV, GQA, MLA and sparse keys, on a GPU.

With `exact=True` every launch uses tiles of one shape and no fused multiply-add, so that the bits
of a row do not depend on which rows share its program: see `kernels.triton.paged_attention`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ramify.attention.backends.triton_partition import GpuPartition, PartitionConfig, partition_step
from ramify.attention.batch import AttentionBatch
from ramify.attention.exactness import Exactness, dtype_name
from ramify.attention.inputs import RunInputs
from ramify.attention.spec import (
    AttentionSpec,
    not_exact,
    reason_no_cuda,
    unprobed_exactness,
)
from ramify.attention.staging_buffers import StagingBuffers, next_power_of_two
from ramify.errors import ConfigError

MAX_HEAD_DIM = 256
MAX_LATENT = 512
FLOAT8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
PLANE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, *FLOAT8)
HOPPER = (9, 0)
WAVES = 4  # with fewer programs per multiprocessor, keys are split


@dataclass(frozen=True, slots=True)
class TileShapes:
    """Shapes of the kernel's tiles: query rows × keys, and keys of a split.

    The defaults are computed from registers and shared memory; they have not been measured yet.
    """

    decode_rows: int  # of decodes and drafts
    prefill_rows: int
    block_keys: int
    split_keys: int
    decode_warps: int
    prefill_warps: int

    @classmethod
    def of(cls, spec: AttentionSpec, capability: tuple[int, int] = HOPPER) -> TileShapes:
        """The default shapes. One for both kinds if exact: other instructions give other bits.

        Args:
            capability: of the device. Before Hopper, operands of a product lie in registers.
        """
        wide = max(spec.v_head_dim, spec.head_dim) > 128
        if spec.kind == "mla":
            is_wide = _compute_dtype(spec) == torch.float32
            rows = 16 if spec.exact or is_wide else 32
            return cls(16, rows, 16 if is_wide else 32, 512, 8, 8)
        if _compute_dtype(spec) == torch.float32:
            return cls(16, 16, 32, 512, 8, 8)
        keys, is_old = 32 if wide else 64, capability < HOPPER
        if spec.exact:
            rows = 32 if wide or is_old else 64
            return cls(rows, rows, keys, 512, 8, 8)
        return cls(16, 64 if wide or is_old else 128, keys, 512, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """A step on the device. The next `plan` of the same backend overwrites its buffers.

    A CUDA graph of `run` is valid for every later step with the same `signature`; replay it after
    `plan`.
    """

    arrays: dict[str, Tensor]
    prefill_programs: int  # programs are rounded up; those without an item do nothing
    decode_programs: int
    merge_programs: int
    partial_acc: Tensor
    partial_ml: Tensor
    signature: tuple[int, ...]
    num_tokens: int


class TritonBackend:
    """Partitions a step into items on the host, uploads them in one copy, launches ≤ 3 kernels.

    Args:
        spec, device: see `AttentionBackend`.
        tiles: None: `TileShapes.of(spec)`.
        saturating_programs: how many fill the device; with fewer, keys are split.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        *,
        tiles: TileShapes | None = None,
        saturating_programs: int | None = None,
    ) -> None:
        self.spec, self.device = spec, device
        self._inputs = RunInputs(spec)
        self._interpreted = device.type == "cpu"
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else HOPPER
        self.tiles = tiles or TileShapes.of(spec, capability)
        decode_rows, prefill_rows = self.tiles.decode_rows, self.tiles.prefill_rows
        head_tiles = -(-spec.gqa_group_size // min(spec.gqa_group_size, decode_rows))
        if saturating_programs is None:
            sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
            saturating_programs = WAVES * sms
        decode_tokens = max(1, decode_rows // spec.gqa_group_size)
        self._partition_config = PartitionConfig(
            split=self.tiles.split_keys,
            decode_tokens=decode_tokens,
            prefill_tokens=max(1, prefill_rows // spec.gqa_group_size),
            decode_limit=decode_tokens if decode_rows == prefill_rows else 4 * decode_tokens,
            programs_per_item=spec.num_kv_heads * head_tiles,
            saturating_programs=saturating_programs,
            per_token=spec.sparse,
        )
        self._arrays = StagingBuffers(device)
        self._scratch_generation = 0
        self._partial_acc = torch.empty(0, device=device)
        self._partial_ml = torch.empty(0, device=device)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """CUDA with Triton, or CPU with Triton's interpreter; NHD."""
        interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on"}
        if device.type != "cuda" and not (device.type == "cpu" and interpreted):
            return f"device {device.type}: Triton kernels need CUDA (or TRITON_INTERPRET=1 on CPU)"
        if find_spec("triton") is None:
            return "triton is not installed: install it, or a CUDA build of torch"
        widest, limit = spec.head_dim, MAX_HEAD_DIM
        if spec.kind == "mla":
            widest, limit = spec.v_head_dim, MAX_LATENT
        if max(widest, spec.v_head_dim) > limit:
            return f"head_dim={widest}: at most {limit} fit a tile"
        if spec.layout != "nhd":
            return f"layout={spec.layout}: it reads pages of [page_size, heads, dim]"
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype={spec.dtype}"
        if spec.plane_dtype not in PLANE_DTYPES:
            return f"kv_dtype={spec.plane_dtype}"
        return None if device.type != "cuda" else _reason_not_capable(spec, device)

    def exactness(self) -> list[Exactness]:
        """Exact by construction; the GPU tests compare bits."""
        if not self.spec.exact:
            return not_exact(self.spec)
        tile = f"{self.tiles.prefill_rows} rows × {self.tiles.block_keys} keys"
        return unprobed_exactness(
            self.spec, "fixed tiles", f"{tile}, splits of {self.tiles.split_keys} keys"
        )

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Partition a step and upload its metadata. `TritonPlan` says how long it is valid."""
        partition = partition_step(batch, self._partition_config)
        arrays = self._arrays.upload(
            {
                "prefill_items": partition.prefill_items,
                "decode_items": partition.decode_items,
                "split_tokens": partition.split_tokens + 1,  # 0: none
                "tokens": partition.tokens,
                "positions": batch.positions,
                "split_offsets": partition.split_offsets,
                "block_table": batch.block_table,
            }
        )
        self._reserve(partition)
        kinds = (partition.prefill_items, partition.decode_items, partition.split_tokens)
        prefill, decode, merge = (
            next_power_of_two(len(items)) if len(items) else 0 for items in kinds
        )
        generations = self._arrays.generation, self._scratch_generation
        signature = (prefill, decode, merge, *generations)
        return TritonPlan(
            arrays,
            prefill,
            decode,
            merge,
            self._partial_acc,
            self._partial_ml,
            signature,
            batch.num_tokens,
        )

    def _reserve(self, partition: GpuPartition) -> None:
        """Grow the buffers for partial results."""
        rows = partition.num_partials * self.spec.num_heads
        if rows > len(self._partial_ml):
            rows = next_power_of_two(partition.num_partials) * self.spec.num_heads
            self._partial_acc = torch.empty(rows, self.spec.v_head_dim, device=self.device)
            self._partial_ml = torch.empty(rows, 2, device=self.device)
            self._scratch_generation += 1

    # -- once per layer ----------------------------------------------------------------------

    def run(
        self,
        plan: TritonPlan,
        layer: int,
        q: Tensor,
        planes: Mapping[str, Tensor],
        *,
        selected: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `AttentionBackend.run`. Call it on the stream that `plan` was called on."""
        from ramify.kernels.triton.paged_attention import merge_split_kv

        self._inputs.validate(plan.num_tokens, layer, q, planes, selected, sinks)
        spec, window = self.spec, self.spec.windows[layer] or 0
        if spec.sparse and selected is None:
            raise ConfigError("the spec has sparse=True but selected is None; give the positions")
        out = q.new_zeros(*q.shape[:-1], spec.v_head_dim)
        # FMA contraction may differ between kernels, and with it the bits
        options: dict[str, Any] = {"enable_fp_fusion": not spec.exact}
        q = q.contiguous()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            inputs, tiles = (window, q, planes, selected, sinks, out), self.tiles
            for items, programs, rows, warps in (
                ("prefill_items", plan.prefill_programs, tiles.prefill_rows, tiles.prefill_warps),
                ("decode_items", plan.decode_programs, tiles.decode_rows, tiles.decode_warps),
            ):
                if programs:
                    self._attend(plan, items, (programs, rows, warps), inputs, options)
            if plan.merge_programs:
                arrays = plan.arrays
                merge_split_kv[plan.merge_programs, spec.num_heads](
                    plan.partial_acc, plan.partial_ml, q if sinks is None else sinks, out,
                    arrays["split_tokens"],
                    arrays["positions"], arrays["split_offsets"],
                    HEADS=spec.num_heads, DIM_V=spec.v_head_dim, BLOCK_DV=_padded_dim(spec.v_head_dim),
                    WINDOW=window, SPLIT=self.tiles.split_keys, SINKS=spec.sinks, num_warps=4, **options,
                )  # fmt: skip
        return out

    def _attend(
        self,
        plan: TritonPlan,
        items: str,
        launch: tuple[int, int, int],
        inputs: tuple[int, Tensor, Mapping[str, Tensor], Tensor | None, Tensor | None, Tensor],
        options: dict[str, Any],
    ) -> None:
        """Launch the attention kernel on the prefill or decode items.

        Args:
            launch: programs, rows of a tile, warps.
        """
        from ramify.kernels.triton.paged_attention import TYPES, paged_attention

        programs, rows, warps = launch
        window, q, planes, selected, sinks, out = inputs
        spec, tiles, arrays = self.spec, self.tiles, plan.arrays
        latent = spec.kind == "mla"
        names = ("latent", "latent", "rope") if latent else ("k", "v", "k")
        (k, k_scale), (v, v_scale), (rope, rope_scale) = (
            (planes[name], planes.get(f"{name}_scale")) for name in names
        )
        keys = arrays["tokens"] if selected is None else selected.contiguous()
        dim_k = spec.v_head_dim if latent else spec.head_dim
        dim_rope = spec.head_dim - spec.v_head_dim if latent else 0
        heads_tile = min(spec.gqa_group_size, rows)
        table = arrays["block_table"]
        paged_attention[programs, spec.num_kv_heads * -(-spec.gqa_group_size // heads_tile)](
            q, _as_uint8(k), _as_uint8(v), _as_uint8(rope),
            q if k_scale is None else k_scale,
            q if v_scale is None else v_scale,
            q if rope_scale is None else rope_scale,
            q if sinks is None else sinks,
            out, plan.partial_acc, plan.partial_ml,
            arrays[items], arrays["tokens"], arrays["positions"], arrays["split_offsets"],
            table, keys, table.shape[1], keys.shape[-1], spec.scale,
            GROUP=spec.gqa_group_size, KV_HEADS=spec.num_kv_heads, HEADS_TILE=heads_tile,
            DIM_K=dim_k, DIM_ROPE=dim_rope, DIM_V=spec.v_head_dim,
            BLOCK_DK=_padded_dim(dim_k), BLOCK_DROPE=_padded_dim(dim_rope), BLOCK_DV=_padded_dim(spec.v_head_dim),
            PAGE=spec.page_size, WINDOW=window, SOFT_CAP=spec.soft_cap or 0.0,
            K_FP8=FLOAT8.get(k.dtype, 0), V_FP8=FLOAT8.get(v.dtype, 0),
            ROPE_FP8=FLOAT8.get(rope.dtype, 0), INTERPRETED=self._interpreted,
            TYPE=TYPES[dtype_name(_compute_dtype(spec))],
            K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
            ROPE_SCALED=latent and rope_scale is not None,
            LATENT=latent, SPARSE=spec.sparse,
            BLOCK_M=rows, BLOCK_N=tiles.block_keys,
            SPLIT_BLOCKS=tiles.split_keys // tiles.block_keys, MERGE_PER_SPLIT=spec.exact,
            SINKS=spec.sinks,
            num_warps=warps, num_stages=2, **options,
        )  # fmt: skip


def _compute_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of the kernel's dot operands: float32 if K/V are float32."""
    return torch.float32 if spec.plane_dtype == torch.float32 else spec.dtype


def _padded_dim(dim: int) -> int:
    """`dim` rounded up to a power of two, at least 16 as tl.dot needs."""
    return max(16, next_power_of_two(dim))


def _as_uint8(plane: Tensor) -> Tensor:
    """View float8 planes as bytes, which the kernel converts itself."""
    return plane.view(torch.uint8) if plane.dtype in FLOAT8 else plane


def _reason_not_capable(spec: AttentionSpec, device: torch.device) -> str | None:
    if (reason := reason_no_cuda(device)) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability}: it must be at least (8, 0)"
    if spec.plane_dtype == torch.float8_e4m3fn and capability < (8, 9):
        return f"kv_dtype={spec.plane_dtype} needs compute capability (8, 9), not {capability}"
    return None
