"""Granite 3, and Granite 4 without recurrent layers: scales. No torch."""

from __future__ import annotations

from dataclasses import replace

from ramify.errors import UnsupportedModelError
from ramify.models.configs.dense_variant import DenseVariant, WeightNames
from ramify.models.configs.family import Family, attention_bias, llama_bias
from ramify.models.configs.fields import ConfigFields, shown


def granite_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Granite: scaled embeddings, scores, additions and logits."""
    return DenseVariant(
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def granite_hybrid_variant(fields: ConfigFields, num_layers: int) -> DenseVariant:
    """Granite 4 without recurrent layers and without experts."""
    config, source = fields.config, fields.source
    kinds = fields.items("layer_types") or fields.items("layers_block_type") or ["mamba"]
    recurrent = set(map(str, kinds)) - {"attention", "full_attention"}
    if recurrent:
        raise UnsupportedModelError(
            f"{source}: layer_types has {shown(sorted(recurrent))}, layers with a recurrent state, which "
            "a cache of prefixes cannot share; only dense Granite 4 models run"
        )
    if config.get("num_local_experts", 8):
        raise UnsupportedModelError(
            f"{source}: num_local_experts is {shown(config.get('num_local_experts', 8))}; only dense "
            "Granite 4 models (0) run"
        )
    positions = config.get("position_embedding_type")
    if positions not in ("rope", "nope", None):
        raise UnsupportedModelError(
            f"{source}: position_embedding_type is {shown(positions)}; supported are 'rope', 'nope' "
            "and null"
        )
    return replace(
        granite_variant(fields, num_layers),
        names=WeightNames(gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"),
        layers_without_rope=frozenset() if positions == "rope" else frozenset(range(num_layers)),
    )


GRANITE = Family(
    model_type="granite",
    variant=granite_variant,
    biases=llama_bias,
    eos_token_id=2,
)

GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    intermediate_field="shared_intermediate_size",
    variant=granite_hybrid_variant,
    biases=attention_bias,
    eos_token_id=2,
)
