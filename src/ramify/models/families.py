"""Dense families: a row each with the fields of their `config.json` that are not Llama's. No torch.

A family whose arithmetic `DenseVariant` can say is a row here and a case in `tests/cpu/models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ramify.models.config_fields import ConfigFields
from ramify.models.deepseek_config import deepseek_experts
from ramify.models.dense_variant import LLAMA, ActivationName, DenseVariant
from ramify.models.family_variants import (
    Biases,
    attention_bias,
    cohere_variant,
    exaone4_variant,
    gemma2_variant,
    gemma3_variant,
    gemma_variant,
    glm4_moe_variant,
    glm4_variant,
    glm_bias,
    glm_variant,
    granite_hybrid_variant,
    granite_variant,
    hunyuan_variant,
    llama_bias,
    olmo2_variant,
    phi3_variant,
    seed_oss_bias,
    smollm3_variant,
    stablelm_bias,
    stablelm_variant,
    starcoder2_bias,
    starcoder2_variant,
)
from ramify.models.moe_config import (
    MoeConfig,
    glm4_experts,
    mixtral_experts,
    olmoe_experts,
    qwen2_experts,
    qwen3_experts,
)

# How a family says which layers have a sliding window.
#   all: every layer, if there is a window     qwen: `use_sliding_window`, from a layer on
#   pattern: `layer_types`, else every `sliding_window_pattern`-th layer has full attention
WindowRule = Literal["none", "all", "qwen", "pattern"]
# Which linears have biases: `attention_bias` for q, k, v and o; always q, k, v; those of `reader`.
BiasRule = Literal["none", "attention_bias", "qkv", "reader"]

ACTIVATIONS: dict[str, ActivationName] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of `FAMILIES`: defaults of an architecture, and how its own fields are read."""

    model_type: str
    variant: Callable[[ConfigFields, int], DenseVariant] = lambda _fields, _num_layers: LLAMA
    biases: Callable[[Mapping[str, Any]], Biases] = lambda _config: Biases()
    experts: Callable[[ConfigFields, int], MoeConfig | None] = lambda _fields, _num_layers: None
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: hidden_size / num_heads
    windows: WindowRule = "none"
    sliding_window: int | None = None
    window_period: int = 1  # of the rule `pattern`: one layer of so many has full attention
    eps_field: str = "rms_norm_eps"
    eps: float = 1e-6
    activation_field: str = "hidden_act"
    activation: str = "silu"
    rope_theta: float = 10_000.0
    partial_rotary: float | None = None  # None: whole heads, whatever the configuration says
    full_attention_rope: bool = True  # False: layers without a window have no rope
    local_rope_theta: float | None = None  # layers with a window have a rope of their own
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    is_latent: bool = False  # DeepSeek: MLA, mixture of experts


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama", biases=llama_bias, bos_token_id=1, eos_token_id=2
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        num_kv_heads=8,
        windows="all",
        sliding_window=4096,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MinistralForCausalLM": Family(
        model_type="ministral",
        num_kv_heads=8,
        windows="pattern",
        sliding_window=4096,
        window_period=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        biases=lambda _config: Biases(qkv=True),
        num_kv_heads=32,
        windows="qwen",
        sliding_window=4096,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        variant=lambda _fields, _num_layers: DenseVariant(qk_norm="head"),
        biases=attention_bias,
        num_kv_heads=32,
        head_dim=128,
        windows="qwen",
        sliding_window=4096,
    ),
    "GemmaForCausalLM": Family(
        model_type="gemma",
        variant=gemma_variant,
        biases=attention_bias,
        num_kv_heads=16,
        head_dim=256,
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        variant=gemma2_variant,
        biases=attention_bias,
        num_kv_heads=4,
        head_dim=256,
        windows="pattern",
        sliding_window=4096,
        window_period=2,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        variant=gemma3_variant,
        biases=attention_bias,
        num_kv_heads=4,
        head_dim=256,
        windows="pattern",
        sliding_window=4096,
        window_period=6,
        activation_field="hidden_activation",
        activation="gelu_pytorch_tanh",
        rope_theta=1_000_000.0,
        local_rope_theta=10_000.0,
        tie_word_embeddings=True,
        bos_token_id=2,
        eos_token_id=1,
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        variant=phi3_variant,
        windows="all",
        eps=1e-5,
        partial_rotary=1.0,
        bos_token_id=1,
        eos_token_id=32_000,
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        variant=olmo2_variant,
        biases=attention_bias,
        eps=1e-5,
        eos_token_id=50_279,
    ),
    "Olmo3ForCausalLM": Family(
        model_type="olmo3",
        variant=olmo2_variant,
        biases=attention_bias,
        windows="pattern",
        sliding_window=4096,
        window_period=4,
        eps=1e-5,
        local_rope_theta=10_000.0,
        eos_token_id=50_279,
    ),
    "GraniteForCausalLM": Family(
        model_type="granite",
        variant=granite_variant,
        biases=llama_bias,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "GraniteMoeHybridForCausalLM": Family(
        model_type="granitemoehybrid",
        variant=granite_hybrid_variant,
        biases=attention_bias,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "SmolLM3ForCausalLM": Family(
        model_type="smollm3",
        variant=smollm3_variant,
        biases=llama_bias,
        num_kv_heads=4,
        windows="qwen",
        rope_theta=2_000_000.0,
        tie_word_embeddings=True,
        bos_token_id=128_000,
        eos_token_id=128_001,
    ),
    "GlmForCausalLM": Family(
        model_type="glm",
        variant=glm_variant,
        biases=glm_bias,
        num_kv_heads=2,
        head_dim=128,
        eps=1.5625e-07,
        partial_rotary=0.5,
        eos_token_id=(151_329, 151_336, 151_338),
    ),
    "Glm4ForCausalLM": Family(
        model_type="glm4",
        variant=glm4_variant,
        biases=glm_bias,
        num_kv_heads=2,
        head_dim=128,
        eps=1.5625e-07,
        partial_rotary=0.5,
        eos_token_id=(151_329, 151_336, 151_338),
    ),
    "Exaone4ForCausalLM": Family(
        model_type="exaone4",
        full_attention_rope=False,
        variant=exaone4_variant,
        num_kv_heads=32,
        windows="pattern",
        sliding_window=4096,
        window_period=4,
        eps=1e-5,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "CohereForCausalLM": Family(
        model_type="cohere",
        variant=cohere_variant,
        biases=attention_bias,
        eps_field="layer_norm_eps",
        eps=1e-5,
        rope_theta=500_000.0,
        tie_word_embeddings=True,
        bos_token_id=5,
        eos_token_id=255_001,
    ),
    "Cohere2ForCausalLM": Family(
        model_type="cohere2",
        full_attention_rope=False,
        variant=cohere_variant,
        biases=attention_bias,
        windows="pattern",
        sliding_window=4096,
        window_period=4,
        eps_field="layer_norm_eps",
        eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=5,
        eos_token_id=255_001,
    ),
    "Starcoder2ForCausalLM": Family(
        model_type="starcoder2",
        variant=starcoder2_variant,
        biases=starcoder2_bias,
        num_kv_heads=2,
        windows="all",
        eps_field="norm_epsilon",
        eps=1e-5,
        activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        bos_token_id=50_256,
        eos_token_id=50_256,
    ),
    "StableLmForCausalLM": Family(
        model_type="stablelm",
        variant=stablelm_variant,
        biases=stablelm_bias,
        num_kv_heads=32,
        eps_field="layer_norm_eps",
        eps=1e-5,
        partial_rotary=0.25,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "SeedOssForCausalLM": Family(
        model_type="seed_oss",
        biases=seed_oss_bias,
        num_kv_heads=8,
        head_dim=128,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        model_type="hunyuan_v1_dense",
        variant=hunyuan_variant,
        biases=attention_bias,
        eps=1e-5,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        experts=mixtral_experts,
        num_kv_heads=8,
        windows="all",
        eps=1e-5,
        rope_theta=1_000_000.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "Qwen2MoeForCausalLM": Family(
        model_type="qwen2_moe",
        biases=lambda config: Biases(qkv=bool(config.get("qkv_bias", True))),
        experts=qwen2_experts,
        num_kv_heads=16,
        windows="qwen",
        sliding_window=4096,
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        variant=lambda _fields, _num_layers: DenseVariant(qk_norm="head"),
        biases=attention_bias,
        experts=qwen3_experts,
        num_kv_heads=4,
        windows="all",
    ),
    "OlmoeForCausalLM": Family(
        model_type="olmoe",
        variant=lambda _fields, _num_layers: DenseVariant(qk_norm="width"),
        biases=attention_bias,
        experts=olmoe_experts,
        eps=1e-5,
        eos_token_id=50_279,
    ),
    "Glm4MoeForCausalLM": Family(
        model_type="glm4_moe",
        variant=glm4_moe_variant,
        biases=lambda config: Biases(qkv=bool(config.get("attention_bias", False))),
        experts=glm4_experts,
        num_kv_heads=8,
        eps=1e-5,
        partial_rotary=0.5,
    ),
    "DeepseekV2ForCausalLM": Family(
        model_type="deepseek_v2",
        experts=lambda fields, num_layers: deepseek_experts(fields, "deepseek_v2", num_layers),
        biases=attention_bias,
        bos_token_id=1,
        eos_token_id=2,
        is_latent=True,
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        experts=lambda fields, num_layers: deepseek_experts(fields, "deepseek_v3", num_layers),
        biases=attention_bias,
        bos_token_id=0,
        eos_token_id=1,
        is_latent=True,
    ),
    "DeepseekV32ForCausalLM": Family(
        model_type="deepseek_v32",
        experts=lambda fields, num_layers: deepseek_experts(fields, "deepseek_v32", num_layers),
        biases=attention_bias,
        bos_token_id=0,
        eos_token_id=1,
        is_latent=True,
    ),
}
