"""gpt-oss: attention sinks, experts with biases and a clamped activation, MXFP4 weights. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.dense_variant import DenseVariant
from ramify.models.configs.family import Biases, Family
from ramify.models.configs.fields import MAX_PARTS, ConfigFields, shown
from ramify.models.configs.moe import (
    MXFP4_GROUP,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    MoeConfig,
    softmax_experts,
)


def gpt_oss_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`: on q, k, v and o; true where it is absent."""
    bias = fields.flag("attention_bias", True)
    return Biases(qkv=bias, o=bias)


def gpt_oss_experts(fields: ConfigFields, _num_layers: int) -> MoeConfig:
    """gpt-oss: softmax over the chosen experts, which have biases and a clamped activation."""
    for name, value in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if fields.number(name, value) != value:
            raise UnsupportedModelError(
                f"{fields.source}: {name} is {shown(fields.config[name])}; experts have only {value}"
            )
    width, hidden_size = fields.count("intermediate_size"), fields.count("hidden_size")
    settings = fields.config.get("quantization_config")
    is_quantized = isinstance(settings, Mapping) and settings.get("quant_method") == "mxfp4"
    if is_quantized and (width % MXFP4_GROUP or hidden_size % MXFP4_GROUP):
        raise CheckpointError(
            f"{fields.source}: intermediate_size {width} and hidden_size {hidden_size} must be "
            f"multiples of {MXFP4_GROUP}, the weights of an MXFP4 block"
        )
    return softmax_experts(
        fields,
        num_experts=fields.count("num_local_experts", 128, limit=MAX_PARTS),
        top_k_default=4,
        expert_intermediate_size=width,
        # The softmax over all, divided by the sum of the chosen, is the softmax over the chosen.
        normalise=True,
        router="router",
        expert_names=("gate_up_proj", "down_proj"),
        expert_format="mxfp4" if is_quantized else "stacked",
        activation="clamped_swiglu_mul",
        has_bias=True,
    )


GPT_OSS = Family(
    model_type="gpt_oss",
    variant=lambda _fields, _num_layers: DenseVariant(attention_sinks=True),
    biases=gpt_oss_bias,
    experts=gpt_oss_experts,
    num_kv_heads=8,
    head_dim=64,
    windows="period",
    sliding_window=128,
    window_period=2,
    eps=1e-5,
    rope_theta=150_000.0,
    rope={
        "rope_type": "yarn",
        "factor": 32.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
)
