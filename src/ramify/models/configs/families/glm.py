"""GLM-4 of 2024 and 2025: interleaved rope in half of a head. GLM-4-MoE: experts. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import FUSED_GATE_UP, DenseVariant, WeightNames
from ramify.models.configs.family import Biases, Family
from ramify.models.configs.fields import MAX_PARTS, ConfigFields
from ramify.models.configs.moe import MoeConfig, check_expert_groups, num_first_dense_layers


def glm_bias(fields: ConfigFields) -> Biases:
    """`attention_bias` on q, k and v only."""
    return Biases(qkv=fields.flag("attention_bias", True))


def glm_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4 (2024): neighbouring rotary pairs in half of a head."""
    return DenseVariant(names=WeightNames(gate_up=FUSED_GATE_UP), rope_interleaved=True)


def glm4_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4 (2025): as `glm_variant`, with norms behind both blocks too."""
    names = WeightNames(
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        gate_up=FUSED_GATE_UP,
    )
    return DenseVariant(names=names, rope_interleaved=True)


def glm4_moe_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4-MoE: QK norm if the configuration says so."""
    return DenseVariant(qk_norm="head" if fields.flag("use_qk_norm", False) else None)


def glm4_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """GLM-4-MoE: sigmoid scores with a bias for the choice, as in DeepSeek-V3."""
    first = num_first_dense_layers(fields, 1)
    if first >= num_layers:
        return None
    num_experts = fields.count("n_routed_experts", 128, limit=MAX_PARTS)
    groups = fields.count("n_group", 1)
    topk_groups, top_k = fields.count("topk_group", 1), fields.count("num_experts_per_tok", 8)
    check_expert_groups(fields.source, num_experts, groups, topk_groups, top_k)
    width = fields.count("moe_intermediate_size", 1408)
    return MoeConfig(
        num_experts=num_experts,
        top_k=top_k,
        expert_intermediate_size=width,
        shared_intermediate_size=width * fields.count("n_shared_experts", 1),
        scoring="sigmoid",
        num_groups=groups,
        topk_groups=topk_groups,
        normalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        dense_layers=frozenset(range(first)),
    )


GLM = Family(
    model_type="glm",
    variant=glm_variant,
    biases=glm_bias,
    num_kv_heads=2,
    head_dim=128,
    eps=1.5625e-07,
    partial_rotary=0.5,
    eos_token_id=(151_329, 151_336, 151_338),
)

GLM4 = Family(
    model_type="glm4",
    variant=glm4_variant,
    biases=glm_bias,
    num_kv_heads=2,
    head_dim=128,
    eps=1.5625e-07,
    partial_rotary=0.5,
    eos_token_id=(151_329, 151_336, 151_338),
)

GLM4_MOE = Family(
    model_type="glm4_moe",
    variant=glm4_moe_variant,
    biases=lambda fields: Biases(qkv=fields.flag("attention_bias", False)),
    experts=glm4_experts,
    has_mtp_layers=True,
    num_kv_heads=8,
    eps=1e-5,
    partial_rotary=0.5,
)
