"""The context of models whose rotary positions are scaled, as their model cards say."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.config import EngineConfig, ResolvedConfig, resolve
from ramify.errors import CheckpointError, ConfigError
from ramify.models.configs.fields import MAX_POSITIONS
from ramify.models.configs.model_config import ModelConfig

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
}


def config(num_positions: int, **fields: Any) -> ModelConfig:
    return ModelConfig.from_hf(TINY | {"max_position_embeddings": num_positions} | fields, "c")


@pytest.mark.parametrize(
    ("num_positions", "scaling", "context"),
    [
        # As the cards of Qwen2.5 and Qwen3 tell to set it, DeepSeek and gpt-oss have it, and others.
        (
            32_768,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            131_072,
        ),
        (
            40_960,
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
            131_072,
        ),
        (
            163_840,
            {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
            163_840,
        ),
        (4096, {"rope_type": "yarn", "factor": 2.5}, 10_240),
        (4096, {"type": "linear", "factor": 4.0}, 16_384),
        (
            16_384,
            {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096},
            16_384,
        ),
        (32_768, {"type": "dynamic", "factor": 2.0}, 65_536),
        (
            131_072,
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131_072,
        ),
        (4096, {"type": "linear", "factor": 1e30}, MAX_POSITIONS),
    ],
)
def test_the_context_is_that_of_pre_training_times_the_factor(
    num_positions: int, scaling: dict[str, Any], context: int
) -> None:
    """Whichever of the two `max_position_embeddings` gives."""
    assert config(num_positions, rope_scaling=scaling).max_model_len == context


def test_gemma_3_gives_its_context_after_scaling() -> None:
    """128 K as its card says, not eight times as many."""
    fields = {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": 10_000.0,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    scaling = {"rope_type": "linear", "factor": 8.0}

    assert config(131_072, rope_scaling=scaling, **fields).max_model_len == 131_072


def test_a_factor_that_is_no_number_is_named() -> None:
    """With the file and the field."""
    with pytest.raises(CheckpointError, match="factor"):
        config(4096, rope_scaling={"type": "linear", "factor": "many"})


def resolved(model: ModelConfig, **options: Any) -> ResolvedConfig:
    return resolve(
        EngineConfig.of(kv_cache_tokens=1024, **options),
        model_max_len=model.max_model_len,
        default_max_len=model.default_model_len,
        token_bytes=1,
        free_memory=0,
    )


def test_the_default_is_all_of_it_where_short_prompts_do_not_change() -> None:
    """`dynamic` has another base for a longer context, so that is by option, up to the same limit."""
    yarn = config(64, rope_scaling={"type": "yarn", "factor": 4.0})
    dynamic = config(64, rope_scaling={"type": "dynamic", "factor": 2.0})

    assert resolved(yarn).max_model_len == 256
    assert resolved(dynamic).max_model_len == 64
    assert resolved(dynamic, max_model_len=128).max_model_len == 128
    with pytest.raises(ConfigError, match="128"):
        resolved(dynamic, max_model_len=129)
    assert dynamic.at_context(64) == dynamic
    assert dynamic.at_context(128).rope.theta == pytest.approx(10_000 * 3 ** (16 / 14))


@pytest.mark.parametrize(
    ("head_dim", "factor"), [(2, 2.0), (4, 1e300), (16, 1e300)], ids=["narrow", "power", "product"]
)
def test_a_dynamic_base_that_is_no_number_is_refused(head_dim: int, factor: float) -> None:
    """As a fault of the file, where the context is longer than that of pre-training."""
    scaling = {"type": "dynamic", "factor": factor}
    model = config(64, rope_scaling=scaling, head_dim=head_dim)

    with pytest.raises(CheckpointError, match="no finite base for 128 tokens"):
        model.at_context(128)
