"""OLMo 2 and 3: norms behind the blocks, QK norm over all heads. OLMoE: experts. No torch."""

from __future__ import annotations

from ramify.errors import UnsupportedModelError
from ramify.models.configs.dense_variant import POST_NORM_NAMES, DenseVariant
from ramify.models.configs.family import Family, attention_bias
from ramify.models.configs.fields import MAX_PARTS, ConfigFields, shown
from ramify.models.configs.moe import MoeConfig, softmax_experts


def olmo2_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """OLMo 2 and 3: norms behind the blocks, QK norm over all heads together."""
    return DenseVariant(names=POST_NORM_NAMES, qk_norm="width")


def olmoe_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """OLMoE: softmax over all experts."""
    if fields.config.get("clip_qkv") is not None:
        raise UnsupportedModelError(
            f"{fields.source}: clip_qkv is {shown(fields.config['clip_qkv'])}, which is not supported"
        )
    return softmax_experts(
        fields,
        num_experts=fields.count("num_experts", 64, limit=MAX_PARTS),
        top_k_default=8,
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=fields.flag("norm_topk_prob", False),
    )


OLMO2 = Family(
    model_type="olmo2",
    variant=olmo2_variant,
    biases=attention_bias,
    eps=1e-5,
    eos_token_id=50_279,
)

OLMO3 = Family(
    model_type="olmo3",
    variant=olmo2_variant,
    biases=attention_bias,
    windows="period",
    sliding_window=4096,
    window_period=4,
    eps=1e-5,
    rope_theta=500_000.0,
    local_rope_theta=500_000.0,
    local_rope_field="rope_theta",
    eos_token_id=50_279,
)

OLMOE = Family(
    model_type="olmoe",
    variant=lambda _fields, _num_layers: DenseVariant(qk_norm="width"),
    biases=attention_bias,
    experts=olmoe_experts,
    eps=1e-5,
    eos_token_id=50_279,
)
