"""Figures of one layer of DeepSeek-V3's shape: latent attention, the sparse index, a step of experts.

Each is the bound of its bytes or of its arithmetic, whichever takes longer, beside the time of the
kernels on the device, replayed as a graph as decode steps are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_attention import DTYPE, PAGE_SIZE, Case, Limits, batch_of, timed
from torch import Tensor

from ramify.attention.backends.triton import TritonBackend
from ramify.attention.paged_index import PagedIndex
from ramify.attention.sparse_index import IndexQuery
from ramify.attention.spec import AttentionSpec
from ramify.engine.execution.step_graphs import CudaGraphs
from ramify.models.configs.moe import MoeConfig
from ramify.models.ops.routing import route


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer, and of the decode step over it."""

    num_heads: int = 128
    latent_dim: int = 512
    rope_dim: int = 64
    index_heads: int = 64
    index_dim: int = 128
    index_top_k: int = 2048
    num_experts: int = 256
    top_k: int = 8
    num_groups: int = 8
    topk_groups: int = 4
    hidden_size: int = 7168
    expert_size: int = 2048
    num_requests: int = 64
    kv_len: int = 4096  # of latent attention
    index_len: int = 32_768  # of the index


SHAPE = Shape()  # DeepSeek-V3's, the index of V3.2


@dataclass(frozen=True)
class Work:
    """What a step must move and compute."""

    num_bytes: float
    flops: float

    def seconds(self, limits: Limits) -> float:
        """The time of its bytes or of its arithmetic, whichever is longer."""
        return max(self.num_bytes / limits.copy_bytes_per_s, self.flops / limits.matmul_flops_per_s)


def latent_work(shape: Shape) -> Work:
    """Latents and ropes of every token once, queries and outputs; products of all heads with them."""
    tokens, width = shape.num_requests * shape.kv_len, shape.latent_dim + shape.rope_dim
    rows = shape.num_requests * shape.num_heads * (width + shape.latent_dim)
    flops = 2.0 * tokens * shape.num_heads * (width + shape.latent_dim)
    return Work(float((tokens * width + rows) * DTYPE.itemsize), flops)


def index_work(shape: Shape) -> Work:
    """Index keys of every token once, and their products with the queries of all index heads."""
    tokens = shape.num_requests * shape.index_len
    flops = 2.0 * tokens * shape.index_heads * shape.index_dim
    return Work(float(tokens * shape.index_dim * DTYPE.itemsize), flops)


def experts_work(shape: Shape, num_used: int) -> Work:
    """Matrices of the experts that are used, once, and the products of all pairs of rows and experts."""
    matrices = 3 * shape.hidden_size * shape.expert_size
    pairs = shape.num_requests * shape.top_k
    return Work(float(num_used * matrices * DTYPE.itemsize), 2.0 * pairs * matrices)


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=device()) * scale


def milliseconds(call: Callable[[], Tensor]) -> float:
    """The median time of a call that is replayed as a graph."""
    captured = CudaGraphs(device()).capture(lambda: (call(),))
    return median(timed(captured.replay))


def share_of_bound(work: Work, ms: float, limits: Limits) -> tuple[float, Mapping[str, Any]]:
    """The bound of some work, divided by its time."""
    bound = work.seconds(limits) * 1e3
    details = {"ms": ms, "bound_ms": bound, "bytes": work.num_bytes, "flops": work.flops}
    return bound / ms, details


def latent_decode(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Share of the bound that absorbed attention of a decode step reaches."""
    limits, shape = Limits.measured(device()), SHAPE
    spec = AttentionSpec(
        num_heads=shape.num_heads, num_kv_heads=1, head_dim=shape.latent_dim + shape.rope_dim,
        value_dim=shape.latent_dim, page_size=PAGE_SIZE, dtype=DTYPE, windows=(None,),
        scale=(128 + shape.rope_dim) ** -0.5, exact=False, kind="mla",
    )  # fmt: skip
    case = Case("latents", ((shape.kv_len - 1, 1),) * shape.num_requests)
    batch, backend = batch_of(case, is_shared=False), TritonBackend(spec, device())
    pages = int(batch.block_table.max()) + 1, PAGE_SIZE
    planes = {
        "latent": random(*pages, shape.latent_dim),
        "rope": random(*pages, shape.rope_dim),
    }
    q, plan = random(batch.num_tokens, spec.num_heads, spec.head_dim), backend.plan(batch)
    ms = milliseconds(lambda: backend.run(plan, 0, q, planes))
    return share_of_bound(latent_work(shape), ms, limits)


def sparse_index(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Share of the bound that scores and selection of a decode step reach."""
    limits, shape = Limits.measured(device()), SHAPE
    index = PagedIndex(
        top_k=shape.index_top_k, num_heads=shape.index_heads, head_dim=shape.index_dim,
        device=device(), page_size=PAGE_SIZE, exact=False,
    )  # fmt: skip
    case = Case("index", ((shape.index_len - 1, 1),) * shape.num_requests)
    batch = batch_of(case, is_shared=False)
    planes = {"index_key": random(int(batch.block_table.max()) + 1, PAGE_SIZE, shape.index_dim)}
    query = IndexQuery(
        random(batch.num_tokens, shape.index_heads, shape.index_dim),
        random(batch.num_tokens, shape.index_heads).float(),
    )
    plan = index.plan(batch)
    ms = milliseconds(lambda: index.select(plan, query, planes))
    return share_of_bound(index_work(shape), ms, limits)


def moe_step(_: Path) -> tuple[float, Mapping[str, Any]]:
    """Time of router choice and experts of a decode step, divided by its roofline."""
    from ramify.kernels.triton.grouped_gemm import GroupedGemm
    from ramify.models.ops.triton_experts import RoutedExperts

    limits, shape = Limits.measured(device()), SHAPE
    config = MoeConfig(
        num_experts=shape.num_experts, top_k=shape.top_k, scoring="sigmoid",
        expert_intermediate_size=shape.expert_size, shared_intermediate_size=0,
        num_groups=shape.num_groups, topk_groups=shape.topk_groups, normalise=True, scale=2.5,
        dense_layers=frozenset(),
    )  # fmt: skip
    first = random(shape.num_experts, 2 * shape.expert_size, shape.hidden_size, scale=0.01)
    second = random(shape.num_experts, shape.hidden_size, shape.expert_size, scale=0.01)
    experts = RoutedExperts(GroupedGemm(first), GroupedGemm(second), "silu_mul", shape.top_k)
    x = random(shape.num_requests, shape.hidden_size)
    logits = torch.randn(shape.num_requests, shape.num_experts, device=device())
    num_used = int((route(logits, None, config) != 0).any(0).sum())
    ms = milliseconds(lambda: experts(x, route(logits, None, config)))
    share, details = share_of_bound(experts_work(shape, num_used), ms, limits)
    return 1 / share, {**details, "experts_used": num_used}
