"""Mistral and Ministral: sliding windows. Mixtral: experts. No torch."""

from __future__ import annotations

from ramify.models.configs.family import Family
from ramify.models.configs.fields import MAX_PARTS, ConfigFields
from ramify.models.configs.moe import MoeConfig, softmax_experts


def mixtral_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """Mixtral: softmax over all experts, weights of the chosen ones normalised."""
    return softmax_experts(
        fields,
        num_experts=fields.count("num_local_experts", 8, limit=MAX_PARTS),
        expert_intermediate_size=fields.count("intermediate_size"),
        normalise=True,
        prefix="block_sparse_moe.",
        expert_names=("w1", "w3", "w2"),
    )


MISTRAL = Family(
    model_type="mistral",
    num_kv_heads=8,
    windows="all",
    sliding_window=4096,
    eos_token_id=2,
)

MINISTRAL = Family(
    model_type="ministral",
    num_kv_heads=8,
    windows="period",
    sliding_window=4096,
    eos_token_id=2,
)

MIXTRAL = Family(
    model_type="mixtral",
    experts=mixtral_experts,
    num_kv_heads=8,
    windows="all",
    eps=1e-5,
    rope_theta=1_000_000.0,
    eos_token_id=2,
)
