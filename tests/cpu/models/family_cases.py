"""Tiny checkpoints of every dense family, with settings that make each of its peculiarities matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

VOCAB_SIZE, MAX_LEN, WINDOW = 211, 512, 24
# Widths that are no multiple of a vector's.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(6)],
    "long_factor": [2.0 + i / 3 for i in range(6)],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
}
HEAD = {"head_dim": 16}
EXPERTS = {
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}
# Architecture's prefix in transformers -> settings; several cases of one after a space.
CASES: dict[str, dict[str, Any]] = {
    "Llama": HEAD,
    "Llama yarn": HEAD | {"rope_parameters": YARN | {"rope_theta": 500.0}},
    "Mistral": HEAD | {"sliding_window": WINDOW},
    "Ministral": HEAD
    | {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "Qwen2": {"hidden_size": 64},
    "Qwen3": HEAD,
    "Gemma": HEAD,
    "Gemma2": HEAD
    | {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "Gemma3": HEAD
    | {
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 4,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "Phi3": HEAD | {"sliding_window": WINDOW},
    "Phi3 longrope": {
        "hidden_size": 64,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 64,
    },
    "Olmo2": HEAD,
    "Olmo3": HEAD
    | {
        "sliding_window": WINDOW,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "Granite": HEAD
    | {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "GraniteMoeHybrid": {
        "hidden_size": 64,
        "mamba_n_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 100,
        "layer_types": ["attention"] * 4,
        "position_embedding_type": "rope",
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "SmolLM3": HEAD,
    "Glm": HEAD,
    "Glm4": HEAD,
    "Exaone4": HEAD | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "Cohere": {"hidden_size": 64, "logit_scale": 0.4},
    "Cohere qk_norm": {"hidden_size": 64, "use_qk_norm": True},
    "Cohere2": {"hidden_size": 64, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "Starcoder2": {"hidden_size": 64, "sliding_window": WINDOW, "use_bias": True},
    "StableLm": {"hidden_size": 64, "use_qkv_bias": True},
    "StableLm parallel": {
        "hidden_size": 64,
        "use_parallel_residual": True,
        "qk_layernorm": True,
    },
    "SeedOss": HEAD | {"attention_out_bias": True},
    "Mixtral": HEAD | EXPERTS | {"sliding_window": WINDOW},
    "Qwen2Moe": HEAD | EXPERTS | {"shared_expert_intermediate_size": 56, "mlp_only_layers": [1]},
    "Qwen3Moe": HEAD | EXPERTS | {"norm_topk_prob": True, "decoder_sparse_step": 2},
    "Olmoe": {"hidden_size": 64} | EXPERTS,
    "Glm4Moe": HEAD | EXPERTS | {"use_qk_norm": True, "routed_scaling_factor": 1.7},
    "GptOss": HEAD
    | EXPERTS
    | {
        "sliding_window": WINDOW,
        "rope_parameters": YARN | {"rope_theta": 500.0, "truncate": False},
    },
    "HunYuanDenseV1": HEAD | {"attention_bias": True},
    "HunYuanDenseV1 alpha": HEAD
    | {
        "rope_parameters": {
            "rope_type": "dynamic",
            "alpha": 1000.0,
            "rope_theta": 500.0,
            "factor": 1.0,
        }
    },
}


def write_checkpoint(case: str, path: Path, **changes: Any) -> Any:
    """Save a random model of a case with transformers; returns it, in float32 with eager attention.

    Args:
        changes: settings that replace those of the case.
    """
    family = case.split(maxsplit=1)[0]
    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**SIZES | CASES[case] | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(len(case))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 0.0 if "Gemma" in case else 1.0, 0.3)
        elif name.endswith(("bias", "gate.weight")):
            torch.nn.init.normal_(weight, std=0.3)
        elif name.endswith("sinks"):
            torch.nn.init.normal_(weight, 1.0, 2.0)
        elif name.endswith("experts.gate_up_proj") and family == "GptOss":
            # Beyond the limit of the activation.
            torch.nn.init.normal_(weight, std=0.6)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.save_pretrained(path)
    return model
