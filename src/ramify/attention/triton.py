"""Own Triton kernels: paged, split, grouped, latent and sparse attention on a GPU.

With `exact=True` every launch uses tiles of one shape and no fused multiply-add, so that the bits
of a row are those of `triton_kernels`' unit of arithmetic, however rows share programs.
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

from ramify.attention.backend import AttentionSpec, told
from ramify.attention.batch import AttentionBatch
from ramify.attention.exact import Exactness
from ramify.attention.staging import StepArrays, room
from ramify.attention.tiles import Cut, Cutting, cut

MAX_HEAD_DIM = 256
MAX_LATENT = 512
FLOAT8 = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
PLANE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, *FLOAT8)
WAVES = 4  # programs per multiprocessor below which keys are split


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shapes of the kernel's tiles: query rows × keys, and keys of a split.

    The defaults come from register and shared memory arithmetic; nobody has measured them yet.
    """

    short_rows: int  # for decode and drafts
    long_rows: int  # for chunks
    block_keys: int
    split_keys: int
    short_warps: int
    long_warps: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> Tiles:
        """One shape when exact: another would be another instruction, and other bits."""
        wide = max(spec.out_dim, spec.head_dim) > 128
        if spec.kind == "mla":
            return cls(16, 16 if spec.exact else 32, 32, 512, 8, 8)
        if _compute_dtype(spec) == torch.float32:
            return cls(16, 16, 32, 512, 8, 8)
        if spec.exact:
            return cls(64, 64, 32 if wide else 64, 512, 8, 8)
        return cls(16, 64 if wide else 128, 32 if wide else 64, 512, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """A step on the device. The next `plan` of the same backend overwrites what it points to.

    A CUDA graph of `run` serves every later step with the same `signature`: replay it after `plan`.
    """

    arrays: dict[str, Tensor]
    long_programs: int  # of each kind, rounded up: those without an item do nothing
    short_programs: int
    merge_programs: int
    part_total: Tensor
    part_stats: Tensor
    signature: tuple[int, ...]


class TritonBackend:
    """Cuts a step into items on the host, uploads them at once, launches at most three kernels.

    Args:
        spec, device: see `AttentionBackend`.
        tiles: shapes to use instead of the defaults.
        enough_programs: fill the device; fewer and keys are split.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        *,
        tiles: Tiles | None = None,
        enough_programs: int | None = None,
    ) -> None:
        self.spec, self.device = spec, device
        self._interpreted = device.type == "cpu"
        self.tiles = tiles or Tiles.of(spec)
        short, long = self.tiles.short_rows, self.tiles.long_rows
        head_tiles = -(-spec.group // min(spec.group, short))
        if enough_programs is None:
            on_gpu = device.type == "cuda"
            sms = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
            enough_programs = WAVES * sms
        short_tokens = max(1, short // spec.group)
        self._cutting = Cutting(
            split=self.tiles.split_keys,
            short_tokens=short_tokens,
            long_tokens=max(1, long // spec.group),
            short_limit=short_tokens if short == long else 4 * short_tokens,
            programs_per_item=spec.num_kv_heads * head_tiles,
            enough_programs=enough_programs,
            one_by_one=spec.sparse,
        )
        self._arrays = StepArrays(device)
        self._scratch_generation = 0
        self._part_total = torch.empty(0, device=device)
        self._part_stats = torch.empty(0, device=device)

    @classmethod
    def supports(cls, spec: AttentionSpec, device: torch.device) -> str | None:
        """CUDA with Triton, or anything with Triton's interpreter; K/V page after page."""
        interpreted = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "yes", "on"}
        if device.type != "cuda" and not (device.type == "cpu" and interpreted):
            return f"device {device.type}: Triton kernels need CUDA (or TRITON_INTERPRET=1 on CPU)"
        if find_spec("triton") is None:
            return "triton is not installed: install it, or a CUDA build of torch"
        widest, limit = spec.head_dim, MAX_HEAD_DIM
        if spec.kind == "mla":
            widest, limit = spec.out_dim, MAX_LATENT
        if max(widest, spec.out_dim) > limit:
            return f"head_dim={widest}: more than {limit} do not fit a tile"
        if spec.layout != "nhd":
            return f"layout={spec.layout}: it reads pages of [page_size, heads, dim]"
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"dtype={spec.dtype}"
        if spec.plane_dtype not in PLANE_DTYPES:
            return f"kv_dtype={spec.plane_dtype}"
        if device.type != "cuda":
            return None
        if not torch.cuda.is_available():
            return "device cuda: this torch finds no CUDA device"
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 0):
            return f"compute capability {capability}: at least (8, 0)"
        if spec.plane_dtype == torch.float8_e4m3fn and capability < (8, 9):
            return f"kv_dtype={spec.plane_dtype} needs compute capability (8, 9), not {capability}"
        return None

    def exactness(self) -> list[Exactness]:
        """By construction; the GPU tier of the tests compares bits."""
        if not self.spec.exact:
            return told(self.spec, "together", "exact=False")
        tile = f"{self.tiles.long_rows} rows × {self.tiles.block_keys} keys"
        return told(self.spec, "fixed tiles", f"{tile}, splits of {self.tiles.split_keys} keys")

    # -- once per step -----------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> TritonPlan:
        """Items and metadata on the device. See `TritonPlan` for how long they hold."""
        found = cut(batch, self._cutting)
        arrays = self._arrays.put(
            {
                "long_items": found.long_items,
                "short_items": found.short_items,
                "split_tokens": found.split_tokens + 1,  # 0 is none
                "tokens": found.tokens,
                "positions": batch.positions,
                "first_slots": found.first_slots,
                "block_table": batch.block_table,
            }
        )
        self._reserve(found)
        kinds = (found.long_items, found.short_items, found.split_tokens)
        long, short, merge = (room(len(items)) if len(items) else 0 for items in kinds)
        generations = (self._arrays.generation, self._scratch_generation)
        return TritonPlan(
            arrays,
            long,
            short,
            merge,
            self._part_total,
            self._part_stats,
            (long, short, merge, *generations),
        )

    def _reserve(self, found: Cut) -> None:
        rows = found.num_slots * self.spec.num_heads
        if rows > len(self._part_stats):
            rows = room(found.num_slots) * self.spec.num_heads
            self._part_total = torch.empty(rows, self.spec.out_dim, device=self.device)
            self._part_stats = torch.empty(rows, 2, device=self.device)
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
    ) -> Tensor:
        """See `AttentionBackend.run`. On the stream `plan` was called on."""
        from ramify.attention.triton_kernels import merge_splits

        spec, window = self.spec, self.spec.windows[layer] or 0
        out = q.new_zeros(*q.shape[:-1], spec.out_dim)
        # another shape of tile, or fused multiply-adds chosen anew in another kernel: other bits
        options: dict[str, Any] = {"enable_fp_fusion": not spec.exact}
        q = q.contiguous()
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if plan.long_programs:
                shape = (self.tiles.long_rows, self.tiles.long_warps)
                self._attend(plan, "long_items", shape, (window, q, planes, selected, out), options)
            if plan.short_programs:
                shape = (self.tiles.short_rows, self.tiles.short_warps)
                self._attend(
                    plan, "short_items", shape, (window, q, planes, selected, out), options
                )
            if plan.merge_programs:
                arrays = plan.arrays
                merge_splits[plan.merge_programs, spec.num_heads](
                    plan.part_total, plan.part_stats, out, arrays["split_tokens"],
                    arrays["positions"], arrays["first_slots"],
                    HEADS=spec.num_heads, DIM_V=spec.out_dim, LANES_V=_lanes(spec.out_dim),
                    WINDOW=window, SPLIT=self.tiles.split_keys, num_warps=4, **options,
                )  # fmt: skip
        return out

    def _attend(
        self,
        plan: TritonPlan,
        which: str,
        shape: tuple[int, int],
        inputs: tuple[int, Tensor, Mapping[str, Tensor], Tensor | None, Tensor],
        options: dict[str, Any],
    ) -> None:
        from ramify.attention.triton_kernels import attend

        rows, warps = shape
        window, q, planes, selected, out = inputs
        spec, tiles, arrays = self.spec, self.tiles, plan.arrays
        latent = spec.kind == "mla"
        names = ("latent", "latent", "rope") if latent else ("k", "v", "k")
        (k, k_scale), (v, v_scale), (rope, rope_scale) = (
            (planes[name], planes.get(f"{name}_scale")) for name in names
        )
        assert all(plane.is_contiguous() for plane in (k, v, rope))
        assert spec.sparse == (selected is not None)
        chosen = arrays["tokens"] if selected is None else selected.contiguous()
        dim_k = spec.out_dim if latent else spec.head_dim
        dim_rope = spec.head_dim - spec.out_dim if latent else 0
        heads_tile = min(spec.group, rows)
        programs = plan.long_programs if which == "long_items" else plan.short_programs
        table = arrays["block_table"]
        attend[programs, spec.num_kv_heads * -(-spec.group // heads_tile)](
            q, _bytes(k), _bytes(v), _bytes(rope),
            q if k_scale is None else k_scale,
            q if v_scale is None else v_scale,
            q if rope_scale is None else rope_scale,
            out, plan.part_total, plan.part_stats,
            arrays[which], arrays["tokens"], arrays["positions"], arrays["first_slots"],
            table, chosen, table.shape[1], chosen.shape[-1], spec.scale,
            GROUP=spec.group, KV_HEADS=spec.num_kv_heads, HEADS_TILE=heads_tile,
            DIM_K=dim_k, DIM_ROPE=dim_rope, DIM_V=spec.out_dim,
            LANES_K=_lanes(dim_k), LANES_ROPE=_lanes(dim_rope), LANES_V=_lanes(spec.out_dim),
            PAGE=spec.page_size, WINDOW=window, SOFT_CAP=spec.soft_cap or 0.0,
            K_FP8=FLOAT8.get(k.dtype, 0), V_FP8=FLOAT8.get(v.dtype, 0),
            ROPE_FP8=FLOAT8.get(rope.dtype, 0), **self._dtypes(),
            K_SCALED=k_scale is not None, V_SCALED=v_scale is not None,
            ROPE_SCALED=latent and rope_scale is not None,
            LATENT=latent, SPARSE=spec.sparse,
            BLOCK_M=rows, BLOCK_N=tiles.block_keys,
            SPLIT_BLOCKS=tiles.split_keys // tiles.block_keys, NESTED=spec.exact,
            num_warps=warps, num_stages=2, **options,
        )  # fmt: skip

    def _dtypes(self) -> dict[str, Any]:
        from ramify.attention.triton_kernels import TYPES

        rounded = TYPES[str(_compute_dtype(self.spec)).removeprefix("torch.")]
        return {"TYPE": rounded, "INTERPRETED": self._interpreted}


def _compute_dtype(spec: AttentionSpec) -> torch.dtype:
    """What products multiply: float32 where either side has it."""
    return torch.float32 if spec.plane_dtype == torch.float32 else spec.dtype


def _lanes(dim: int) -> int:
    """Lanes for a dimension: a power of two, and at least what a matrix instruction takes."""
    return max(16, room(dim))


def _bytes(plane: Tensor) -> Tensor:
    return plane.view(torch.uint8) if plane.dtype in FLOAT8 else plane
