"""Open the weights of a checkpoint directory: the source for the form that its experts have."""

from __future__ import annotations

from pathlib import Path

import torch

from ramify.models.checkpoint.gguf_source import open_gguf
from ramify.models.checkpoint.stacked_experts import StackedExperts
from ramify.models.checkpoint.tensors import load_weights
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.gguf.container import is_gguf


def open_source(path: Path, config: ModelConfig, *, dtype: torch.dtype) -> WeightSource:
    """Find and check the weights of a model; reads none.

    Args:
        path: of the checkpoint, or a GGUF file.
        dtype: that weights are computed in.

    Raises:
        CheckpointError, UnsupportedModelError: see `load_weights` and `open_gguf`.
    """
    # The form is chosen here, and nowhere else.
    if is_gguf(path):
        return open_gguf(path, config, dtype=dtype)
    tensors = load_weights(path, config, dtype=dtype)
    if config.moe is not None and config.moe.expert_format != "separate":
        return StackedExperts(tensors, config)
    return tensors
