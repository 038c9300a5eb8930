"""`ARCHITECTURES`: for each value of `general.architecture` that is read, its family and what differs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ramify.errors import UnsupportedModelError
from ramify.models.configs.fields import shown
from ramify.models.gguf.metadata import Metadata

Fields = dict[str, Any]
# Names within a layer: those of Hugging Face -> those of GGUF.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
POST_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A row of `ARCHITECTURES`.

    Args:
        family: its architecture in transformers.
        fields: those of `config.json` that only this family has.
        names: entries that differ from `LAYER_NAMES`.
        permutes_heads: rows of q and k have their rotary pairs as neighbours, where transformers has them
            half a head apart.
        norm_offset: was added to the weights of norms.
        has_partial_rotary: `rope.dimension_count` may be below the dimensions of a head.
        window: sliding window in tokens where the file does not say; None: there is none then.
        window_period: layers from one without a sliding window to the next, where the file does not say.
        has_local_rope: layers with a window have a rotary base of their own.
    """

    family: str
    fields: Callable[[Metadata, Fields], Fields] = lambda _metadata, _fields: {}
    names: Mapping[str, str] = field(default_factory=dict)
    permutes_heads: bool = False
    norm_offset: float = 0.0
    has_partial_rotary: bool = False
    window: int | None = None
    window_period: int | None = None
    has_local_rope: bool = False


def _has(metadata: Metadata, name: str) -> bool:
    return f"blk.0.{name}" in metadata.container.tensors


def mixtral(metadata: Metadata, fields: Fields) -> Fields:
    """Llama with experts is Mixtral."""
    num_experts = metadata.integer("expert_count", 0)
    num_used = metadata.integer("expert_used_count", 0)
    if not num_experts:
        return {}
    width = metadata.integer("expert_feed_forward_length", fields["intermediate_size"])
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_used,
        "intermediate_size": width,
        "sliding_window": None,
    }


def qwen_experts(metadata: Metadata, fields: Fields, *, normalises: bool) -> Fields:
    """Qwen 2 and 3 with experts; layers without a router are dense."""
    tensors, num_layers = metadata.container.tensors, fields["num_hidden_layers"]
    routers = (f"blk.{layer}.ffn_gate_inp.weight" for layer in range(num_layers))
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    stack = tensors.get("blk.0.ffn_gate_exps.weight")
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer(
            "expert_feed_forward_length",
            stack.shape[-2] if stack and len(stack.shape) > 1 else None,
        ),
        "shared_expert_intermediate_size": metadata.integer(
            "expert_shared_feed_forward_length",
            shared.shape[0] if shared else fields["intermediate_size"],
        ),
        "norm_topk_prob": metadata.flag("expert_weights_norm", normalises),
        "mlp_only_layers": [layer for layer, name in enumerate(routers) if name not in tensors],
    }


def gemma_scale(metadata: Metadata, fields: Fields, largest: int) -> Fields:
    """`query_pre_attn_scalar`: the dimensions of a head, but for the largest model of a family."""
    scale = metadata.number("attention.scale", 0.0)
    if scale:
        return {"query_pre_attn_scalar": scale**-2}
    width, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    is_largest = fields["num_hidden_layers"] == largest
    return {"query_pre_attn_scalar": width // num_heads if is_largest else fields["head_dim"]}


def gemma2(metadata: Metadata, fields: Fields) -> Fields:
    """Gemma 2: soft caps."""
    return gemma_scale(metadata, fields, 46) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


def gemma3(metadata: Metadata, fields: Fields) -> Fields:
    """Gemma 3: a rotary base of its own in layers with a window."""
    cap = metadata.number("final_logit_softcapping", 0.0)
    base = metadata.number("rope.freq_base_swa", 10_000.0)
    return gemma_scale(metadata, fields, 62) | {
        "final_logit_softcapping": cap or None,
        "rope_local_base_freq": metadata.number("rope.local.freq_base", base),
        "rope_theta": metadata.number("rope.global.freq_base", fields["rope_theta"]),
    }


def gpt_oss(metadata: Metadata, fields: Fields) -> Fields:
    """gpt-oss: experts; its rotary ramp is not rounded, which no key says."""
    rope = fields["rope_scaling"]
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "intermediate_size": metadata.integer(
            "expert_feed_forward_length", fields["intermediate_size"]
        ),
        "rope_scaling": rope and {**rope, "truncate": False},
    }


def granite(metadata: Metadata, fields: Fields) -> Fields:
    """Granite: scales."""
    if not metadata.flag("rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{metadata.container.path}: granite.rope.scaling.finetuned is False, a model without rotary "
            "embedding, which is not read from GGUF; use the original checkpoint in safetensors"
        )
    head_scale = fields["head_dim"] ** -0.5
    return {
        "attention_multiplier": metadata.number("attention.scale", 0.0) or head_scale,
        "embedding_multiplier": metadata.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": metadata.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": metadata.number("logit_scale", 0.0) or 1.0,
    }


def cohere(metadata: Metadata, _fields: Fields) -> Fields:
    """Command R: a scale of logits, QK norm if there are its tensors."""
    return {
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": _has(metadata, "attn_q_norm.weight"),
    }


def stablelm(metadata: Metadata, _fields: Fields) -> Fields:
    """StableLM 2: blocks in parallel or not, QK norm if there are its tensors."""
    return {
        "use_parallel_residual": metadata.flag("use_parallel_residual", False),
        "qk_layernorm": _has(metadata, "attn_q_norm.weight"),
    }


def olmo2(_metadata: Metadata, fields: Fields) -> Fields:
    """OLMo 2; with a sliding window it is OLMo 3."""
    return {"architectures": ["Olmo3ForCausalLM"]} if fields.get("sliding_window") else {}


def olmoe(metadata: Metadata, _fields: Fields) -> Fields:
    """OLMoE: experts."""
    return {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": metadata.flag("expert_weights_norm", False),
    }


def glm4_moe(metadata: Metadata, _fields: Fields) -> Fields:
    """GLM-4 with experts: scores by sigmoid."""
    gating = metadata.integer("expert_gating_func", 2)
    if gating != 2:
        raise UnsupportedModelError(
            f"{metadata.container.path}: glm4moe.expert_gating_func is {shown(gating)}; only 2 (sigmoid) "
            "is supported"
        )
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count", 1),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("expert_weights_norm", True),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "use_qk_norm": _has(metadata, "attn_q_norm.weight"),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(family="LlamaForCausalLM", fields=mixtral, permutes_heads=True),
    "qwen2": Architecture(family="Qwen2ForCausalLM"),
    "qwen3": Architecture(family="Qwen3ForCausalLM"),
    "qwen2moe": Architecture(
        family="Qwen2MoeForCausalLM", fields=partial(qwen_experts, normalises=False)
    ),
    "qwen3moe": Architecture(
        family="Qwen3MoeForCausalLM",
        fields=partial(qwen_experts, normalises=True),
    ),
    "gemma": Architecture(family="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(
        family="Gemma2ForCausalLM",
        fields=gemma2,
        names=POST_ATTENTION,
        norm_offset=1.0,
        window=4096,
        window_period=2,
    ),
    "gemma3": Architecture(
        family="Gemma3ForCausalLM",
        fields=gemma3,
        names=POST_ATTENTION,
        norm_offset=1.0,
        window=4096,
        window_period=6,
        has_local_rope=True,
    ),
    "phi3": Architecture(family="Phi3ForCausalLM", has_partial_rotary=True),
    "gpt-oss": Architecture(
        family="GptOssForCausalLM",
        fields=gpt_oss,
        names=POST_ATTENTION,
        window=128,
        window_period=2,
    ),
    # Converters leave out the window, which all models of the family have.
    "starcoder2": Architecture(family="Starcoder2ForCausalLM", window=4096),
    "stablelm": Architecture(
        family="StableLmForCausalLM", fields=stablelm, has_partial_rotary=True
    ),
    "olmo2": Architecture(
        family="Olmo2ForCausalLM", fields=olmo2, names=POST_ATTENTION, window_period=4
    ),
    "olmoe": Architecture(family="OlmoeForCausalLM", fields=olmoe),
    "granite": Architecture(family="GraniteForCausalLM", fields=granite, permutes_heads=True),
    "command-r": Architecture(family="CohereForCausalLM", fields=cohere),
    "cohere2": Architecture(
        family="Cohere2ForCausalLM", fields=cohere, window=4096, window_period=4
    ),
    "glm4": Architecture(family="Glm4ForCausalLM", has_partial_rotary=True),
    "glm4moe": Architecture(
        family="Glm4MoeForCausalLM",
        fields=glm4_moe,
        names=POST_ATTENTION,
        has_partial_rotary=True,
    ),
    "exaone4": Architecture(family="Exaone4ForCausalLM", names=POST_ATTENTION, window_period=4),
    "smollm3": Architecture(family="SmolLM3ForCausalLM", permutes_heads=True),
    "seed_oss": Architecture(family="SeedOssForCausalLM", names=POST_ATTENTION),
    "hunyuan-dense": Architecture(family="HunYuanDenseV1ForCausalLM"),
}
