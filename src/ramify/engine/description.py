"""`EngineDescription`: what a server says of the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ramify.config import ResolvedConfig
from ramify.models.configs.pooling import PoolingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """Model and implementation of an engine; the defaults are those of an engine without a checkpoint."""

    path: str = ""  # of the checkpoint, on the machine of the engine
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()  # that end an answer
    dtype: str = ""  # of weights and arithmetic, without "torch."
    attention: str = ""  # name of the attention backend
    hidden_size: int | None = None  # elements of an embedding; None: not known
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    # Architecture of a model that reads images or audio, of which only the text decoder is loaded.
    wrapper: str | None = None


def summary(config: ResolvedConfig, description: EngineDescription | None) -> str:
    """Model and sizes of an engine in a line; `description` is None without a checkpoint."""
    parts = ["an engine without a checkpoint"]
    if description is not None:
        parts = [str(config.requested.model.model), description.dtype]
    if config.requested.attention.exact:
        parts.append("exact")
    parts.append(f"context {config.max_model_len:,} tokens")
    parts.append(f"pool {config.kv_cache_tokens:,} tokens in pages of {config.page_size}")
    return ", ".join(parts)
