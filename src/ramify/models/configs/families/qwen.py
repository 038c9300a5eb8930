"""Qwen 2 and 3, dense and with experts: biases or QK norm, sliding windows. No torch."""

from __future__ import annotations

from ramify.errors import CheckpointError
from ramify.models.configs.dense_variant import DenseVariant
from ramify.models.configs.family import Biases, Family, attention_bias
from ramify.models.configs.fields import MAX_PARTS, ConfigFields, shown
from ramify.models.configs.moe import MoeConfig, softmax_experts


def qwen2_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Qwen2-MoE: softmax, and a shared expert with a gate of its own."""
    return _qwen_experts(
        fields, num_layers, defaults=(60, 4, 1408), shared_default=5632, has_shared=True
    )


def qwen3_experts(fields: ConfigFields, num_layers: int) -> MoeConfig | None:
    """Qwen3-MoE: softmax, no shared expert."""
    return _qwen_experts(
        fields, num_layers, defaults=(128, 8, 768), shared_default=0, has_shared=False
    )


def _qwen_experts(
    fields: ConfigFields,
    num_layers: int,
    *,
    defaults: tuple[int, int, int],
    shared_default: int,
    has_shared: bool,
) -> MoeConfig | None:
    only_mlp = fields.items("mlp_only_layers") or []
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in only_mlp):
        raise CheckpointError(
            f"{fields.source}: mlp_only_layers is {shown(only_mlp)}; it must list numbers of layers"
        )
    step = fields.count("decoder_sparse_step", 1)
    dense = frozenset(
        layer for layer in range(num_layers) if layer in only_mlp or (layer + 1) % step
    )
    if len(dense) == num_layers:
        return None
    num_experts, top_k, width = defaults
    return softmax_experts(
        fields,
        # transformers 5 writes it under either name.
        num_experts=fields.count(
            "num_experts",
            fields.count("num_local_experts", num_experts, limit=MAX_PARTS),
            limit=MAX_PARTS,
        ),
        top_k_default=top_k,
        expert_intermediate_size=fields.count("moe_intermediate_size", width),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size", shared_default)
        if has_shared
        else 0,
        normalise=fields.flag("norm_topk_prob", False),
        dense_layers=dense,
        has_shared_gate=has_shared,
    )


QWEN2 = Family(
    model_type="qwen2",
    biases=lambda _fields: Biases(qkv=True),
    num_kv_heads=32,
    windows="last",
    has_window_switch=True,
    sliding_window=4096,
)

QWEN3 = Family(
    model_type="qwen3",
    variant=lambda _fields, _num_layers: DenseVariant(qk_norm="head"),
    biases=attention_bias,
    num_kv_heads=32,
    head_dim=128,
    windows="last",
    has_window_switch=True,
    sliding_window=4096,
)

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    biases=lambda fields: Biases(qkv=fields.flag("qkv_bias", True)),
    experts=qwen2_experts,
    num_kv_heads=16,
    windows="alternate",
    has_window_switch=True,
    sliding_window=4096,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    variant=lambda _fields, _num_layers: DenseVariant(qk_norm="head"),
    biases=attention_bias,
    experts=qwen3_experts,
    num_kv_heads=4,
    windows="all",
    has_window_switch=True,
    sliding_window=4096,
)
