"""How the ranks of tensor parallelism divide a model: which numbers of ranks can, and the heads of each. No torch."""

from __future__ import annotations

from dataclasses import replace

from ramify.errors import ConfigError
from ramify.models.configs.model_config import ModelConfig


def kv_heads_of(num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """First K/V head of a rank, and the one behind its last; ranks share a head where there are fewer."""
    begin = num_kv_heads * rank // size
    return begin, max(begin + 1, num_kv_heads * (rank + 1) // size)


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The model with the query and K/V heads of one rank, for its K/V pool and its attention."""
    if size == 1:
        return config
    num_heads = config.num_heads // size
    num_kv_heads = num_heads if config.mla is not None else max(1, config.num_kv_heads // size)
    return replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads)


def check_divisible(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks that cannot divide this model.

    Raises:
        ConfigError: names what cannot be divided, and the numbers of ranks that can divide it.
    """
    reason = _reason_not_divisible(config, size)
    if reason is None:
        return
    sizes = [n for n in range(1, config.num_heads + 1) if _reason_not_divisible(config, n) is None]
    raise ConfigError(
        f"tensor_parallel_size={size}, but {reason}; use {', '.join(map(str, sizes))}"
    )


def _reason_not_divisible(config: ModelConfig, size: int) -> str | None:
    if size == 1:
        return None
    if not config.is_native:
        return f"{config.architecture} runs through transformers, in one process"
    if config.variant.qk_norm == "width":
        return (
            f"{config.architecture} has a norm over all heads of q together, which a rank has not"
        )
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    if num_heads % size:
        return f"the model has {num_heads} attention heads, of which every rank needs as many"
    if config.mla is None and num_kv_heads % size and size % num_kv_heads:
        return (
            f"the model has {num_kv_heads} K/V heads, of which every rank needs as many, or one that it "
            "shares with as many ranks as every other"
        )
    counts = {"tokens": config.vocab_size, "MLP columns": config.intermediate_size}
    if config.moe is not None:
        counts["experts"] = config.moe.num_experts
        if config.moe.shared_intermediate_size:
            counts["columns of the shared expert"] = config.moe.shared_intermediate_size
    for name, count in counts.items():
        if count < size:
            return f"the model has {count} {name}, fewer than ranks"
    return None
