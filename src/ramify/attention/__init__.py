"""Attention over paged K/V whose prefixes are shared.

Public names resolve on first use: importing this package loads no torch. `models`, `engine` and
`cli` import it; it imports `kernels`, `kv`, `cache`, `outputs` and `errors`. Read in this order:

1. `sequence`, `planner` with `branching` and `repair`, `page_demand`, `partial_reuse`,
   `window_release`: requests → pages, through the prefix cache (no torch).
2. `batch`, `batch_reuse`: the metadata of a step, `AttentionBatch` (no torch).
3. `spec`, `backend`: a model's attention shape; the backend protocol, table and selection;
   `backend_timing`: the faster of two.
4. `backends/`: an implementation per file; `gather` is what several of them share, `inputs` validates
   what they get.
5. `mla`, `sparse_index`: DeepSeek's latent attention and its index of keys, over any backend;
   `paged_index`: the index by a Triton kernel; `expanded_heads`: long prefills on a device.
6. `paged`: a step's K/V writes and attention, as a decoder calls them.
7. `exactness` (are rows independent of the batch?), `staging_buffers`, `custom_op`.
8. `blocks/`: building blocks for learning and prototypes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.attention.backend import AttentionBackend as AttentionBackend
    from ramify.attention.backend import select_backend as select_backend
    from ramify.attention.batch import AttentionBatch, Extend, PageCopy, PagedKVArrays
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
    "PageCopy": "batch",
    "PagedKVArrays": "batch",
    "RadixAttentionBlock": "blocks.attention_block",
    "RadixAttentionPlanner": "planner",
    "RadixAttentionWithPagedKVCache": "blocks.paged_kv_cache",
    "RadixSequence": "sequence",
    "apply_rotary_pos_emb": "blocks.rotary",
    "rotate_half": "blocks.rotary",
    "select_backend": "backend",
}

# A star import takes only the names that need no torch.
__all__ = [
    "AttentionBatch",
    "Extend",
    "PageCopy",
    "PagedKVArrays",
    "RadixAttentionPlanner",
    "RadixSequence",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
