"""Hunyuan dense: QK norm after rope, a rotary base scaled by alpha. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import Family, attention_bias
from ramify.models.configs.fields import ConfigFields


def hunyuan_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Hunyuan dense: QK norm after rope."""
    names = WeightNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
    return DenseVariant(names=names, qk_norm="after_rope")


HUNYUAN = Family(
    model_type="hunyuan_v1_dense",
    has_rope_alpha=True,
    variant=hunyuan_variant,
    biases=attention_bias,
    eps=1e-5,
    eos_token_id=2,
)
