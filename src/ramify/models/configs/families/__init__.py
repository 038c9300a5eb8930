"""`FAMILIES`: a row for each architecture, from the file of its family. No torch.

A file has the rows of a family, and the readers of the fields of its `config.json` that are not Llama's. A
family whose arithmetic `DenseVariant` can say is such a file, a line here, and a case in
`tests/cpu/models`.
"""

from __future__ import annotations

from ramify.models.configs.families import (
    cohere,
    deepseek,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    llama,
    mistral,
    olmo,
    phi,
    qwen,
    seed_oss,
    smollm,
    stablelm,
    starcoder,
)
from ramify.models.configs.family import Family

# In the order in which errors and the table of models list them.
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": llama.LLAMA,
    "MistralForCausalLM": mistral.MISTRAL,
    "MinistralForCausalLM": mistral.MINISTRAL,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "GemmaForCausalLM": gemma.GEMMA,
    "Gemma2ForCausalLM": gemma.GEMMA2,
    "Gemma3ForCausalLM": gemma.GEMMA3,
    "Phi3ForCausalLM": phi.PHI3,
    "Olmo2ForCausalLM": olmo.OLMO2,
    "Olmo3ForCausalLM": olmo.OLMO3,
    "GraniteForCausalLM": granite.GRANITE,
    "GraniteMoeHybridForCausalLM": granite.GRANITE_HYBRID,
    "SmolLM3ForCausalLM": smollm.SMOLLM3,
    "GlmForCausalLM": glm.GLM,
    "Glm4ForCausalLM": glm.GLM4,
    "Exaone4ForCausalLM": exaone.EXAONE4,
    "CohereForCausalLM": cohere.COHERE,
    "Cohere2ForCausalLM": cohere.COHERE2,
    "Starcoder2ForCausalLM": starcoder.STARCODER2,
    "StableLmForCausalLM": stablelm.STABLELM,
    "SeedOssForCausalLM": seed_oss.SEED_OSS,
    "HunYuanDenseV1ForCausalLM": hunyuan.HUNYUAN,
    "MixtralForCausalLM": mistral.MIXTRAL,
    "Qwen2MoeForCausalLM": qwen.QWEN2_MOE,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
    "OlmoeForCausalLM": olmo.OLMOE,
    "Glm4MoeForCausalLM": glm.GLM4_MOE,
    "GptOssForCausalLM": gpt_oss.GPT_OSS,
    "DeepseekV2ForCausalLM": deepseek.DEEPSEEK_V2,
    "DeepseekV3ForCausalLM": deepseek.DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": deepseek.DEEPSEEK_V32,
}
