"""SmolLM3: layers without rope. No torch."""

from __future__ import annotations

from ramify.errors import UnsupportedModelError
from ramify.models.configs.dense_variant import DenseVariant
from ramify.models.configs.family import Family, llama_bias
from ramify.models.configs.fields import ConfigFields, shown


def smollm3_variant(fields: ConfigFields, num_layers: int) -> DenseVariant:
    """SmolLM3: every fourth layer has no rope."""
    has_rope = fields.items("no_rope_layers")
    if has_rope is None:
        period = fields.count("no_rope_layer_interval", 4)
        has_rope = [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if len(has_rope) < num_layers or any(value not in (0, 1) for value in has_rope):
        raise UnsupportedModelError(
            f"{fields.source}: no_rope_layers must have {num_layers} entries, each 0 or 1; it is "
            f"{shown(has_rope)}"
        )
    without = frozenset(layer for layer in range(num_layers) if not has_rope[layer])
    return DenseVariant(layers_without_rope=without)


SMOLLM3 = Family(
    model_type="smollm3",
    variant=smollm3_variant,
    biases=llama_bias,
    num_kv_heads=4,
    windows="no_rope",
    has_window_switch=True,
    rope_theta=2_000_000.0,
    tie_word_embeddings=True,
    eos_token_id=128_001,
)
