"""`EngineDescription`: what a server says of the engine behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

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
