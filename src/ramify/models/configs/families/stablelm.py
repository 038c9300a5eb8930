"""StableLM 2: layer norms, rope in a quarter of a head. No torch."""

from __future__ import annotations

from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import Biases, Family
from ramify.models.configs.fields import ConfigFields


def stablelm_bias(fields: ConfigFields) -> Biases:
    """`use_qkv_bias`."""
    return Biases(qkv=fields.flag("use_qkv_bias", False))


def stablelm_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """StableLM 2: layer norms, rope in a quarter of a head."""
    is_parallel = fields.flag("use_parallel_residual", False)
    names = WeightNames(
        before_mlp=None if is_parallel else "post_attention_layernorm",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
    )
    has_norm = fields.flag("qk_layernorm", False)
    return DenseVariant(
        names=names,
        block="parallel" if is_parallel else "sequential",
        norm="layer",
        norm_bias=True,
        qk_norm="head" if has_norm else None,
        qk_norm_kind="layer",
        qk_norm_per_head="list",
    )


STABLELM = Family(
    model_type="stablelm",
    variant=stablelm_variant,
    biases=stablelm_bias,
    num_kv_heads=32,
    eps_field="layer_norm_eps",
    eps=1e-5,
    partial_rotary=0.25,
    eos_token_id=0,
)
