"""Types of what a decoder calls: attention of a step, and functions of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate

from torch import Tensor

# [rows, ...] -> [rows, ...]
RowFunction = Callable[[Tensor], Tensor]

# attend(layer, query, *kv) -> attention output. It writes kv, one tensor [T, ...] per K/V plane, to the
# step's slots, then attends. The engine's is `ramify.attention.paged.PagedAttention`.
#
#   dense     attend(layer, q [T, num_heads, head_dim], k, v [T, num_kv_heads, head_dim]) -> like q
#   DeepSeek  attend(layer, MlaQuery, latent [T, latent_dim], rope [T, rope_dim][, index_key [T, dim]])
#             -> [T, num_heads, value_dim]
#
# Two optional attributes, which `DenseDecoder` reads:
#   fused_args   `cpu_layer_attention.FusedAttentionArgs` of this step: fused layers may write K/V and
#                attend by themselves, without calling `attend`.
#   output_rows  [R] int64, ascending: the rows of the last layer that are wanted beyond its K/V.
#                `attend` gets only their queries then.
Attention = Callable[Concatenate[int, Any, ...], Tensor]
