"""Readers of the `config.json` fields that dense families have beyond Llama's. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ramify.errors import UnsupportedModelError
from ramify.models.configs.dense_variant import FUSED_GATE_UP, FUSED_QKV, DenseVariant, WeightNames
from ramify.models.configs.fields import ConfigFields, shown


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears of a layer have a bias."""

    qkv: bool = False
    o: bool = False
    mlp: bool = False


def attention_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`: on q, k, v and o."""
    bias = fields.flag("attention_bias", False)
    return Biases(qkv=bias, o=bias)


def llama_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`, and `mlp_bias` on the MLP."""
    bias = fields.flag("attention_bias", False)
    return Biases(qkv=bias, o=bias, mlp=fields.flag("mlp_bias", False))


def glm_bias(fields: ConfigFields) -> Biases:
    """`attention_bias` on q, k and v only."""
    return Biases(qkv=fields.flag("attention_bias", True))


def gpt_oss_bias(fields: ConfigFields) -> Biases:
    """`attention_bias`: on q, k, v and o; true where it is absent."""
    bias = fields.flag("attention_bias", True)
    return Biases(qkv=bias, o=bias)


def seed_oss_bias(fields: ConfigFields) -> Biases:
    """`attention_bias` on q, k and v, `attention_out_bias` on o."""
    return Biases(
        qkv=fields.flag("attention_bias", True),
        o=fields.flag("attention_out_bias", False),
        mlp=fields.flag("mlp_bias", False),
    )


def starcoder2_bias(fields: ConfigFields) -> Biases:
    """`use_bias`: on every linear."""
    bias = fields.flag("use_bias", True)
    return Biases(qkv=bias, o=bias, mlp=bias)


def stablelm_bias(fields: ConfigFields) -> Biases:
    """`use_qkv_bias`."""
    return Biases(qkv=fields.flag("use_qkv_bias", False))


def _optional(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """A positive number, or None if it is null; `default` if it is absent."""
    if name in fields.config and fields.config[name] is None:
        return None
    return default if name not in fields.config else fields.number(name)


_GEMMA_NAMES = WeightNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
_POST_NORM_NAMES = WeightNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
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


def phi3_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Phi-3 and Phi-4: one matrix for q, k, v, one for gate and up."""
    return DenseVariant(names=WeightNames(qkv=FUSED_QKV, gate_up=FUSED_GATE_UP))


def olmo2_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """OLMo 2 and 3: norms behind the blocks, QK norm over all heads together."""
    return DenseVariant(names=_POST_NORM_NAMES, qk_norm="width")


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


def glm_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4 (2024): neighbouring rotary pairs in half of a head."""
    return DenseVariant(names=WeightNames(gate_up=FUSED_GATE_UP), rope_interleaved=True)


def glm4_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4 (2025): as `glm_variant`, with norms behind both blocks too."""
    names = WeightNames(
        after_attention="post_self_attn_layernorm",
        after_mlp="post_mlp_layernorm",
        gate_up=FUSED_GATE_UP,
    )
    return DenseVariant(names=names, rope_interleaved=True)


def glm4_moe_variant(fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """GLM-4-MoE: QK norm if the configuration says so."""
    return DenseVariant(qk_norm="head" if fields.flag("use_qk_norm", False) else None)


def exaone4_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Exaone 4: norms behind the blocks, QK norm."""
    return DenseVariant(names=_POST_NORM_NAMES, qk_norm="head")


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


def starcoder2_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """StarCoder 2: layer norms, an MLP without gate."""
    names = WeightNames(gate_up=("mlp.c_fc",), down="mlp.c_proj")
    return DenseVariant(names=names, norm="layer", norm_bias=True, has_gate=False)


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


def hunyuan_variant(_fields: ConfigFields, _num_layers: int) -> DenseVariant:
    """Hunyuan dense: QK norm after rope."""
    names = WeightNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
    return DenseVariant(names=names, qk_norm="after_rope")


def _refuse(fields: ConfigFields, name: str, *allowed: object) -> None:
    value = fields.config.get(name)
    if value not in allowed:
        raise UnsupportedModelError(
            f"{fields.source}: {name} is {shown(value)}, which is not supported"
        )
