"""Exaone 4: norms behind the blocks, QK norm, no rope in layers with full attention. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import POST_NORM_NAMES, DenseVariant
from ramify.models.configs.family import Family
from ramify.models.configs.fields import ConfigFields


def exaone4_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Exaone 4: norms behind the blocks, QK norm."""
    return DenseVariant(names=POST_NORM_NAMES, qk_norm="head")


EXAONE4 = Family(
    model_type="exaone4",
    full_attention_rope=False,
    variant=exaone4_variant,
    num_kv_heads=32,
    windows="period",
    sliding_window=4096,
    window_period=4,
    has_period_field=True,
    eps=1e-5,
    eos_token_id=2,
)
