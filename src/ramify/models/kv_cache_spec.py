"""K/V layout, attention spec and attention backend that a model config needs."""

from __future__ import annotations

from functools import partial

import torch

from ramify.attention.backend import AttentionBackend
from ramify.attention.backends.triton import TritonBackend
from ramify.attention.expanded_heads import ExpandedHeads, heads_spec
from ramify.attention.mla import CPU, MlaAttention, reason_not_expanded
from ramify.attention.paged import PagedBackend
from ramify.attention.paged_index import PagedIndex
from ramify.attention.sparse_index import KeyIndex, SparseIndex
from ramify.attention.spec import AttentionSpec
from ramify.kv.pool import KVLayout
from ramify.models.configs.model_config import ModelConfig


def kv_layout(config: ModelConfig) -> KVLayout:
    """The K/V planes of this model: k and v, or latent and rope (MLA), and an index key (V3.2)."""
    mla = config.mla
    if mla is None:
        return KVLayout.mha(config.num_layers, config.num_kv_heads, config.head_dim)
    layout = KVLayout.mla(config.num_layers, mla.latent_dim, mla.rope_dim)
    return layout if mla.index is None else layout.with_index_key(mla.index.head_dim)


def resolve_kv_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Storage dtype of K/V for the option `kv_dtype` (auto, int8 or fp8); auto is the model's dtype."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kv_dtype, dtype)


def longest_window(config: ModelConfig) -> int | None:
    """The longest sliding window of all layers, in tokens; None if a layer has none."""
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    sizes = [window for window in windows if window is not None]
    return max(sizes) if len(sizes) == len(windows) else None


def attention_spec(
    config: ModelConfig,
    *,
    page_size: int,
    dtype: torch.dtype,
    exact: bool,
    kv_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    """The attention shape that a backend must support; MLA is one K/V head with wide keys."""
    windows = tuple(config.window_of(layer) for layer in range(config.num_layers))
    mla, variant = config.mla, config.variant
    if mla is None:
        return AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_size=page_size,
            dtype=dtype,
            windows=windows,
            scale=variant.attention_scale or config.head_dim**-0.5,
            soft_cap=variant.attention_soft_cap,
            exact=exact,
            kv_dtype=kv_dtype,
            sinks=variant.attention_sinks,
        )
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=1,
        head_dim=mla.latent_dim + mla.rope_dim,
        value_dim=mla.latent_dim,
        page_size=page_size,
        dtype=dtype,
        windows=windows,
        scale=mla.scale,
        exact=exact,
        kv_dtype=kv_dtype,
        kind="mla",
        sparse=mla.index is not None,
    )


def build_attention(
    config: ModelConfig,
    spec: AttentionSpec,
    backend: AttentionBackend,
    device: torch.device = CPU,
) -> PagedBackend:
    """The backend itself, or for MLA models the backend wrapped in `MlaAttention`, with its sparse index.

    Beside Triton's attention the scores of the index are those of a Triton kernel too. Off the CPU
    the backend also attends to expanded K and V, if it supports them, or else Triton's does.

    Args:
        device: the backend's.
    """
    mla = config.mla
    if mla is None:
        return backend
    index: KeyIndex | None = None
    if mla.index is not None:
        is_paged = isinstance(backend, TritonBackend)
        make = partial(PagedIndex, page_size=spec.page_size) if is_paged else SparseIndex
        index = make(
            top_k=mla.index.top_k,
            num_heads=mla.index.num_heads,
            head_dim=mla.index.head_dim,
            device=device,
            exact=spec.exact,
        )
    widths: dict[str, int] = {"nope_dim": mla.nope_dim, "value_dim": mla.value_dim}
    heads = None
    if device.type != "cpu" and reason_not_expanded(spec) is None:
        expanded = heads_spec(spec, spec.num_heads, **widths)
        kinds: tuple[type[AttentionBackend], ...] = (type(backend), TritonBackend)
        usable = [kind for kind in kinds if kind.supports(expanded, device) is None]
        if usable:
            heads = ExpandedHeads(usable[0], spec, device=device, **widths)
    return MlaAttention(
        backend,
        spec,
        nope_dim=mla.nope_dim,
        value_dim=mla.value_dim,
        index=index,
        heads=heads,
        device=device,
    )
