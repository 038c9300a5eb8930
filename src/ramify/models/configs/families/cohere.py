"""Command R: layer norms, attention and MLP in parallel. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import Family, attention_bias
from ramify.models.configs.fields import ConfigFields


def cohere_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Command R: layer norms without bias, attention and MLP in parallel."""
    has_norm = fields.flag("use_qk_norm", False)
    return DenseVariant(
        names=WeightNames(before_mlp=None),
        block="parallel",
        norm="layer",
        qk_norm="head" if has_norm else None,
        qk_norm_kind="layer",
        qk_norm_per_head="matrix",
        rope_interleaved=True,
        logit_scale=fields.number("logit_scale", 0.0625),
    )


COHERE = Family(
    model_type="cohere",
    variant=cohere_variant,
    biases=attention_bias,
    eps_field="layer_norm_eps",
    eps=1e-5,
    rope_theta=500_000.0,
    tie_word_embeddings=True,
    eos_token_id=255_001,
)

COHERE2 = Family(
    model_type="cohere2",
    full_attention_rope=False,
    variant=cohere_variant,
    biases=attention_bias,
    windows="period",
    sliding_window=4096,
    window_period=4,
    has_period_field=True,
    eps_field="layer_norm_eps",
    eps=1e-5,
    tie_word_embeddings=True,
    eos_token_id=255_001,
)
