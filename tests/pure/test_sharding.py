"""Which numbers of ranks can divide a model, and the heads of each."""

import pytest

from ramify.errors import ConfigError
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.sharding import check_divisible, kv_heads_of, rank_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


def llama(**changes: object) -> ModelConfig:
    return ModelConfig.from_hf(LLAMA | changes, "config.json")


def test_every_query_head_is_with_its_key_head() -> None:
    """For each number of ranks, a rank's K/V heads are those that its query heads read."""
    for size in (1, 2, 4, 8, 12, 24):
        check_divisible(llama(), size)
        own = rank_config(llama(), size)
        group = own.num_heads // own.num_kv_heads
        for rank in range(size):
            first, end = kv_heads_of(4, rank, size)
            assert end - first == own.num_kv_heads
            read = [(rank * own.num_heads + head) // 6 for head in range(own.num_heads)]
            assert read == [first + head // group for head in range(own.num_heads)]


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 5, "24 attention heads, of which every rank needs as many; use 1, 2, 4, 8, 12, 24"),
        ({}, 3, "4 K/V heads, .*; use 1, 2, 4, 8, 12, 24"),
        ({"vocab_size": 7}, 8, "7 tokens, fewer than ranks; use 1, 2, 4"),
        ({"intermediate_size": 3}, 4, "3 MLP columns, fewer than ranks; use 1, 2$"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(
    changes: dict[str, object], size: int, words: str
) -> None:
    """With what cannot be divided, and the numbers of ranks that can."""
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}, but .*{words}"):
        check_divisible(llama(**changes), size)
