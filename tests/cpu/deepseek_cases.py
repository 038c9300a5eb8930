"""Tiny random DeepSeek checkpoints saved by transformers, its logits and its greedy answers."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

VOCAB = 97
# All widths differ, and none is a power of two unless it must be.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with the usual 0.02 attention would be uniform
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 128,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
# 16 index heads: with few heads many scores are zero, and transformers breaks ties in another way.
INDEX = {"index_topk": 20, "index_head_dim": 16, "index_n_heads": 16}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": (
        "DeepseekV2Config",
        {**GROUPS, "topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "v2-lite": (
        "DeepseekV2Config",
        {"q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.7},
    ),
    "v3": ("DeepseekV3Config", {**GROUPS, "rope_parameters": YARN, "attention_bias": True}),
    "v3-halves": (
        "DeepseekV3Config",
        {**GROUPS, "q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False},
    ),
    "v3-no-experts": ("DeepseekV3Config", {"first_k_dense_replace": 3, **GROUPS}),
    "v32": ("DeepseekV32Config", {**GROUPS, **INDEX, "rope_parameters": YARN}),
}


@dataclass(frozen=True)
class Oracle:
    """A checkpoint and transformers' model of it in float32 with eager attention."""

    name: str
    path: Path
    model: Any

    def logits(self, tokens: list[int]) -> Tensor:
        """Logits of every position: [len(tokens), VOCAB] float32."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    def greedy(self, prompt: list[int], num_new: int) -> tuple[list[int], list[float]]:
        """The greedy answer of `num_new` tokens, and the log probability of each."""
        answer: list[int] = []
        logprobs: list[float] = []
        for _ in range(num_new):
            row = self.logits([*prompt, *answer])[-1].log_softmax(-1)
            answer.append(int(row.argmax()))
            logprobs.append(float(row.max()))
        return answer, logprobs


def save_oracle(name: str, path: Path, **changes: Any) -> Oracle:
    """Write a checkpoint with random weights of CONFIGS[name] and load it, by transformers."""
    config_class, overrides = CONFIGS[name]
    torch.manual_seed(list(CONFIGS).index(name))
    config = getattr(transformers, config_class)(**(BASE | overrides | changes))
    created = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor_name, parameter in created.named_parameters():
            if "norm" in tensor_name or tensor_name.endswith(".bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
        for tensor_name, buffer in created.named_buffers():
            if tensor_name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.3)
    created.save_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    )
    return Oracle(name, path, model.eval())


def prompts(seed: int = 0) -> list[list[int]]:
    """Seven prompts: two prefixes with three suffixes each, and one that shares nothing."""
    draw = random.Random(seed)
    prefixes = [draw.choices(range(3, VOCAB), k=length) for length in (31, 58)]
    shared = [
        prefix + draw.choices(range(3, VOCAB), k=length)
        for prefix in prefixes
        for length in (1, 7, 12)
    ]
    return [*shared, draw.choices(range(3, VOCAB), k=17)]
