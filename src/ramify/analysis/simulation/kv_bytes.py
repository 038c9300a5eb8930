"""K/V bytes of a token, from a checkpoint's configuration alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ramify.errors import CheckpointError
from ramify.models.configs.fields import read_json_value
from ramify.models.configs.model_config import ModelConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
BUILT_IN = Path(__file__).parents[2] / "data"


def kv_token_bytes(model: str) -> int:
    """Bytes of K and V of one token over all layers, in the checkpoint's dtype.

    Args:
        model: a checkpoint directory, a `config.json`, or the name of a built-in model.

    Raises:
        CheckpointError: there is no configuration, or it has no known dtype.
        ModelError: the architecture is not supported.
    """
    values = _read_config(model)
    config = ModelConfig.from_hf(values, model)
    dtype = str(values.get("torch_dtype") or values.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"K/V of {model} is in {dtype!r}, not in {', '.join(DTYPE_BYTES)}; "
            "give capacities in tokens, without a model"
        )
    if config.mla is None:
        width = 2 * config.num_kv_heads * config.head_dim
    else:
        index = config.mla.index
        width = config.mla.latent_dim + config.mla.rope_dim + (index.head_dim if index else 0)
    return config.num_layers * width * DTYPE_BYTES[dtype]


def _read_config(model: str) -> dict[str, Any]:
    for path in (Path(model), Path(model) / "config.json", BUILT_IN / model / "config.json"):
        if path.is_file():
            values = read_json_value(path)
            if isinstance(values, dict):
                return values
            raise CheckpointError(f"{path} is no configuration of a model")
    raise CheckpointError(
        f"{model!r} is no checkpoint directory and no config.json; give a path to one, or capacities "
        "in tokens"
    )
