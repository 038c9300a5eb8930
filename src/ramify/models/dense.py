"""Dense decoders of the Llama family: Llama, Mistral, Qwen2, Qwen3; variants are configuration."""

from __future__ import annotations

from torch import Tensor

from ramify.models.config import ModelConfig
from ramify.models.decoder import Family
from ramify.models.ops.mlp import GatedMlp
from ramify.models.ops.protocol import (
    Attended,
    ForwardStep,
    Heads,
    Linear,
    Norm,
    Ops,
    SelfAttention,
)


class DenseLayer:
    """Pre-norm layer with rotary positions, grouped-query attention and a gated MLP.

    hidden += o_proj(attention(rope(qk_norm(qkv(norm(hidden))))))
    hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))
    """

    def __init__(self, ops: Ops, config: ModelConfig, layer: int) -> None:
        prefix, eps = f"model.layers.{layer}.", config.rms_norm_eps
        attn = f"{prefix}self_attn."
        norm = Norm(f"{prefix}input_layernorm", eps)
        heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv = ops.linear(*(f"{attn}{name}_proj" for name in "qkv"), norm=norm, shard=heads)
        qk_norm = (Norm(f"{attn}q_norm", eps), Norm(f"{attn}k_norm", eps))
        self.attention = ops.attention(
            layer, heads, config.rope, qk_norm=qk_norm if config.qk_norm else None
        )
        self.o_proj = ops.linear(f"{attn}o_proj", shard="rows")
        norm = Norm(f"{prefix}post_attention_layernorm", eps)
        self.mlp = GatedMlp(ops, f"{prefix}mlp.", norm=norm)

    def attend(self, hidden: Tensor, step: ForwardStep) -> Attended:
        """See `DecoderLayer`."""
        return self.attention(self.qkv(hidden, step), step)

    def finish(self, hidden: Tensor, rows: Tensor, step: ForwardStep) -> Tensor:
        """See `DecoderLayer`."""
        hidden = self.o_proj(rows, step, residual=hidden)
        return self.mlp(hidden, step, residual=hidden)

    @property
    def fusable(self) -> tuple[Linear, SelfAttention, Linear, Linear, Linear]:
        """See `FusableLayer`."""
        return self.qkv, self.attention, self.o_proj, self.mlp.gate_up, self.mlp.down


DENSE = Family(DenseLayer)
