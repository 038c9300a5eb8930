"""Seed-OSS: biases of its own. No torch."""

from __future__ import annotations

from ramify.models.configs.family import Biases, Family
from ramify.models.configs.fields import ConfigFields


def seed_oss_bias(fields: ConfigFields) -> Biases:
    """`attention_bias` on q, k and v, `attention_out_bias` on o."""
    return Biases(
        qkv=fields.flag("attention_bias", True),
        o=fields.flag("attention_out_bias", False),
        mlp=fields.flag("mlp_bias", False),
    )


SEED_OSS = Family(
    model_type="seed_oss",
    biases=seed_oss_bias,
    num_kv_heads=8,
    head_dim=128,
    eos_token_id=2,
)
