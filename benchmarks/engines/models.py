"""The random checkpoints S, M and L, written once and read by every engine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from engines.roofline import ModelShape

MAX_LEN = 8192
MODELS: dict[str, dict[str, Any]] = {
    "S": {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3584, "vocab_size": 8192,
        "max_position_embeddings": MAX_LEN,
    },
    "M": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 32000,
        "max_position_embeddings": MAX_LEN,
    },
    "L": {
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 5632, "vocab_size": 32000,
        "max_position_embeddings": MAX_LEN,
    },
    "XS": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512,
        "max_position_embeddings": MAX_LEN,
    },
}  # fmt: skip
TITLES = {
    "S": "S (59 M)", "M": "M (0.35 B)", "L": "L (1.1 B)", "XS": "XS (0.2 M, to try things out)",
}  # fmt: skip
DTYPES = ("float32", "bfloat16")
VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def shape_of(model: str) -> ModelShape:
    """What the roofline needs to know of a model."""
    return ModelShape.of(MODELS[model])


def write_model(root: Path, model: str, dtype: str, *, follows: bool = False) -> Path:
    """The folder of a model, with its checkpoint in this dtype; written if it is not there.

    Args:
        follows: make a model whose next token depends on the last one alone: what attention adds is
            multiplied by zero after it was computed. Its text repeats itself, and copies from the
            prompt, at the full cost of the real one.
    """
    folder = root / (f"{model}-follows" if follows else model)
    path = folder / dtype
    if (path / "complete").is_file():
        return folder
    from safetensors.torch import load_file, save_file

    from ramify.testing import write_tiny_checkpoint

    shutil.rmtree(path, ignore_errors=True)
    write_tiny_checkpoint(path, "llama", dtype=_literal(dtype), tokenizer=False, **MODELS[model])
    config = json.loads((path / "config.json").read_text("utf-8"))
    config |= {"torch_dtype": dtype, "dtype": dtype, "attention_bias": False, "mlp_bias": False}
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    if follows:
        weights = load_file(path / "model.safetensors")
        for name in weights:
            if name.endswith("o_proj.weight"):
                weights[name].zero_()
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "complete").touch()
    return folder


def _literal(dtype: str) -> Any:
    return dtype
