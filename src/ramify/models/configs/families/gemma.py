"""Gemma 1 to 3: scaled embeddings, norms by 1 + weight, soft caps or QK norm. No torch."""

from __future__ import annotations

from ramify.errors import UnsupportedModelError
from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import ACTIVATIONS, Family, attention_bias
from ramify.models.configs.fields import ConfigFields, shown

_GEMMA_NAMES = WeightNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Gemma: norms multiply by 1 + weight, embeddings are scaled."""
    _refuse(fields, "use_bidirectional_attention", None, False)
    return DenseVariant(norm_offset=1.0, embedding_scale=fields.count("hidden_size") ** 0.5)


def gemma2_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Gemma 2: norms before and behind both blocks, soft caps of scores and logits."""
    _refuse(fields, "use_bidirectional_attention", None, False)
    return DenseVariant(
        names=_GEMMA_NAMES,
        norm_offset=1.0,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=_optional(fields, "attn_logit_softcapping", 50.0),
        embedding_scale=fields.count("hidden_size") ** 0.5,
        logit_soft_cap=_optional(fields, "final_logit_softcapping", 30.0),
    )


def gemma3_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Gemma 3: as Gemma 2, with QK norm in place of the caps."""
    _refuse(fields, "use_bidirectional_attention", None, False)
    # transformers reads it, and applies it nowhere.
    _refuse(fields, "attn_logit_softcapping", None)
    return DenseVariant(
        names=_GEMMA_NAMES,
        norm_offset=1.0,
        qk_norm="head",
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        logit_soft_cap=_optional(fields, "final_logit_softcapping", None),
    )


def _optional(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """A positive number, or None if it is null; `default` if it is absent."""
    if name in fields.config and fields.config[name] is None:
        return None
    return default if name not in fields.config else fields.number(name)


def _refuse(fields: ConfigFields, name: str, *allowed: object) -> None:
    value = fields.config.get(name)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{fields.source}: {name} is {shown(value)}, which is not supported"
        )


GEMMA = Family(
    model_type="gemma",
    variant=gemma_variant,
    # Early files say "gelu", and mean its approximation.
    activations=ACTIVATIONS | {"gelu": "gelu_tanh"},
    biases=attention_bias,
    num_kv_heads=16,
    head_dim=256,
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    eos_token_id=1,
)

GEMMA2 = Family(
    model_type="gemma2",
    variant=gemma2_variant,
    biases=attention_bias,
    num_kv_heads=4,
    head_dim=256,
    windows="period",
    sliding_window=4096,
    window_period=2,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    tie_word_embeddings=True,
    eos_token_id=1,
)

GEMMA3 = Family(
    model_type="gemma3_text",
    variant=gemma3_variant,
    biases=attention_bias,
    num_kv_heads=4,
    head_dim=256,
    windows="period",
    sliding_window=4096,
    window_period=6,
    has_period_field=True,
    activation_field="hidden_activation",
    activation="gelu_pytorch_tanh",
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    tie_word_embeddings=True,
    eos_token_id=1,
)
