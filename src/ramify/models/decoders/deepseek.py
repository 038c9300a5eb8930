"""DeepSeek-V2, V3 and V3.2: multi-head latent attention, sparse index (V3.2), mixture of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from ramify.attention.mla import MlaQuery, UpProjection
from ramify.attention.sparse_index import IndexQuery
from ramify.models.configs.families.deepseek import IndexConfig, MlaConfig
from ramify.models.configs.model_config import ModelConfig
from ramify.models.decoders.decoder import DecoderBinding
from ramify.models.decoders.moe import MoeMlp
from ramify.models.ops.mlp import Mlp
from ramify.models.ops.protocol import Attended, ForwardStep, Norm, Ops

# The norms between low-rank projections have this eps, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


class DeepseekLayer:
    """Pre-norm layer with MLA and a gated MLP or mixture of experts.

        x = norm(hidden)
        q_latent = norm(q_a(x))
        q_nope, q_rope = split(q_b(q_latent))
        latent, k_rope = split(kv_a(x))
        hidden += o_proj(attention(MlaQuery(q_nope, rope(q_rope)), norm(latent), rope(k_rope)))
        hidden += mlp(norm(hidden))

    The K/V cache holds `latent` and `k_rope` of a token, for all heads. The step's attention leads to
    `ramify.attention.mla.MlaAttention`.
    """

    def __init__(self, ops: Ops, config: ModelConfig, layer: int) -> None:
        assert config.mla is not None
        mla = self.mla = config.mla
        prefix, num_heads, eps = f"model.layers.{layer}.", config.num_heads, config.rms_norm_eps
        attn = f"{prefix}self_attn."
        self.layer = layer
        self.input_norm = ops.norm(Norm(f"{prefix}input_layernorm", eps))
        self.q_a = self.q_a_norm = None
        if mla.q_lora_rank is not None:
            self.q_a = ops.linear(f"{attn}q_a_proj")
            self.q_a_norm = ops.norm(Norm(f"{attn}q_a_layernorm", LATENT_NORM_EPS))
        name = "q_proj" if self.q_a is None else "q_b_proj"
        self.q_b = ops.linear(f"{attn}{name}", shard="columns")
        self.kv_a = ops.linear(f"{attn}kv_a_proj_with_mqa")
        self.kv_a_norm = ops.norm(Norm(f"{attn}kv_a_layernorm", LATENT_NORM_EPS))
        self.q_rope, self.k_rope = (
            ops.rope(
                config.rope, dim=mla.rope_dim, num_heads=count, interleaved=mla.rope_interleaved
            )
            for count in (num_heads, 1)
        )
        self.up = _up_projection(ops, f"{attn}kv_b_proj", mla, num_heads)
        self.indexer = None
        if mla.index is not None:
            self.indexer = Indexer(ops, config, mla, mla.index, f"{attn}indexer.")
        self.o_proj = ops.linear(f"{attn}o_proj", shard="rows")
        self.mlp_norm = ops.norm(Norm(f"{prefix}post_attention_layernorm", eps))
        self.mlp: Mlp | MoeMlp
        if config.moe is None or layer in config.moe.dense_layers:
            self.mlp = Mlp(ops, f"{prefix}mlp.")
        else:
            self.mlp = MoeMlp(ops, config.moe, prefix)

    def attend(self, hidden: Tensor, step: ForwardStep) -> Attended:
        """See `DecoderLayer`."""
        mla, x = self.mla, self.input_norm(hidden)
        q_latent = x
        if self.q_a is not None and self.q_a_norm is not None:
            q_latent = self.q_a_norm(self.q_a(x, step))
        q = self.q_b(q_latent, step).unflatten(-1, (-1, mla.nope_dim + mla.rope_dim))
        q_nope, q_rope = q.split((mla.nope_dim, mla.rope_dim), -1)
        latent, k_rope = self.kv_a(x, step).split((mla.latent_dim, mla.rope_dim), -1)
        kv: tuple[Tensor, ...] = (
            self.kv_a_norm(latent.contiguous()),
            self.k_rope(k_rope[:, None], step)[:, 0],
        )
        index = None
        if self.indexer is not None:
            index, index_key = self.indexer(x, q_latent, step)
            kv += (index_key,)
        query = MlaQuery(q_nope, self.q_rope(q_rope, step), self.up, index)
        return Attended(step.attention(self.layer, query, *kv).flatten(1), kv)

    def finish(self, hidden: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        """See `DecoderLayer`."""
        hidden = self.o_proj(rows, step, residual=hidden)
        return self.mlp(self.mlp_norm(hidden), step, residual=hidden)


class Indexer:
    """The lightning indexer (V3.2): queries, a key and a weight for each index head."""

    def __init__(
        self, ops: Ops, config: ModelConfig, mla: MlaConfig, index: IndexConfig, prefix: str
    ) -> None:
        self.head_dim = index.head_dim
        self.query = ops.linear(f"{prefix}wq_b")
        self.key = ops.linear(f"{prefix}wk")
        self.key_norm = ops.norm(Norm(f"{prefix}k_norm", 1e-6, "layer"))
        self.weights = ops.linear(f"{prefix}weights_proj", dtype=torch.float32)
        self.q_rope, self.k_rope = (
            ops.rope(config.rope, dim=mla.rope_dim, num_heads=count)
            for count in (index.num_heads, 1)
        )

    def __call__(self, x: Tensor, q_latent: Tensor, step: ForwardStep) -> tuple[IndexQuery, Tensor]:
        """x [T, hidden_size], q_latent [T, q_lora_rank] -> index queries, index key [T, head_dim]."""
        q = self.query(q_latent, step).unflatten(-1, (-1, self.head_dim))
        key = self.key_norm(self.key(x, step))[:, None]
        weights = self.weights(x.float(), step)
        return IndexQuery(self.q_rope(q, step), weights), self.k_rope(key, step)[:, 0]


def _up_projection(ops: Ops, name: str, mla: MlaConfig, num_heads: int) -> UpProjection:
    """`kv_b` by head: W_UK, which the query absorbs, and W_UV, which makes values of latents."""
    w_uk = ops.head_linear(name, num_heads=num_heads, rows=slice(0, mla.nope_dim))
    values = slice(mla.nope_dim, mla.nope_dim + mla.value_dim)
    w_uv = ops.head_linear(name, num_heads=num_heads, rows=values, transpose=True)
    return UpProjection(w_uk.weight, w_uv.weight, w_uk, w_uv)


DEEPSEEK = DecoderBinding(DeepseekLayer)
