"""Attention over paged, shared K/V. Names resolve on first use: importing this loads no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.attention.backend import AttentionBackend as AttentionBackend
    from ramify.attention.backend import select_backend as select_backend
    from ramify.attention.batch import AttentionBatch, Extend
    from ramify.attention.blocks.attention_block import RadixAttentionBlock as RadixAttentionBlock
    from ramify.attention.blocks.paged_kv_cache import (
        RadixAttentionWithPagedKVCache as RadixAttentionWithPagedKVCache,
    )
    from ramify.attention.blocks.rotary import apply_rotary_pos_emb as apply_rotary_pos_emb
    from ramify.attention.blocks.rotary import rotate_half as rotate_half
    from ramify.attention.planner import RadixAttentionPlanner
    from ramify.attention.sequence import RadixSequence
    from ramify.attention.spec import AttentionSpec as AttentionSpec

_HOMES = {
    "AttentionBackend": "backend",
    "AttentionBatch": "batch",
    "AttentionSpec": "spec",
    "Extend": "batch",
    "RadixAttentionBlock": "blocks.attention_block",
    "RadixAttentionPlanner": "planner",
    "RadixAttentionWithPagedKVCache": "blocks.paged_kv_cache",
    "RadixSequence": "sequence",
    "apply_rotary_pos_emb": "blocks.rotary",
    "rotate_half": "blocks.rotary",
    "select_backend": "backend",
}

# Those that need no torch: a star import takes no more. The others are found by name.
__all__ = ["AttentionBatch", "Extend", "RadixAttentionPlanner", "RadixSequence"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
