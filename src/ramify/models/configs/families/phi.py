"""Phi-3 and Phi-4: fused matrices, LongRoPE. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import FUSED_GATE_UP, FUSED_QKV, DenseVariant, WeightNames
from ramify.models.configs.family import Family
from ramify.models.configs.fields import ConfigFields


def phi3_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Phi-3 and Phi-4: one matrix for q, k, v, one for gate and up."""
    return DenseVariant(names=WeightNames(qkv=FUSED_QKV, gate_up=FUSED_GATE_UP))


PHI3 = Family(
    model_type="phi3",
    variant=phi3_variant,
    windows="all",
    eps=1e-5,
    partial_rotary=1.0,
    rope_scalings=("default", "longrope"),
    original_max_len=4096,
    eos_token_id=32_000,
)
