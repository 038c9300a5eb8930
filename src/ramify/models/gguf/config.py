"""A GGUF file's metadata as the fields of a Hugging Face `config.json`, and of `generation_config.json`. No torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.fields import MAX_LAYERS, shown
from ramify.models.configs.pooling import PoolingConfig
from ramify.models.configs.pooling import read_pooling as pooling_of_directory
from ramify.models.configs.sampling_defaults import AUTO, SamplingDefaults, sampling_defaults
from ramify.models.configs.sampling_defaults import (
    read_sampling_defaults as sampling_defaults_of_directory,
)
from ramify.models.gguf.architectures import ARCHITECTURES, Architecture
from ramify.models.gguf.container import Container, StringArray, is_gguf, read_container
from ramify.models.gguf.metadata import ARCHITECTURE, Metadata, shortest
from ramify.models.gguf.tensor_types import FLOAT_TYPES
from ramify.params import PoolingMode

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FREQS, ROPE_LONG, ROPE_SHORT = (
    f"rope_{name}.weight" for name in ("freqs", "factors_long", "factors_short")
)
TOKENIZER = "tokenizer.ggml."
# Roles of tokens that end an answer, and tokens that do so in every model that has them, but for gpt-oss.
ENDS = ("eos", "eot", "eom")
END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
)
# of gpt-oss, where "<|end|>" ends a message, after which the answer goes on
HARMONY_ENDS = ("<|return|>", "<|call|>")
CONTROL = 3
# Parameters of `generation_config.json` -> keys.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}

POOLING_MODES: dict[Any, PoolingMode] = {1: "mean", 2: "cls", 3: "last"}


def architecture_of(container: Container) -> Architecture:
    """The row of a file's architecture.

    Raises:
        UnsupportedModelError: there is none.
        CheckpointError: the file does not say what it holds.
    """
    name = container.metadata.get(ARCHITECTURE)
    if not isinstance(name, str):
        raise CheckpointError(
            f"{container.path}: {ARCHITECTURE}: expected a text, found {shown(name)}; is it a model?"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{container.path}: {ARCHITECTURE} is {shown(name)}, which is not read from GGUF; these are: "
            f"{', '.join(ARCHITECTURES)}; use the original checkpoint in safetensors"
        )
    return ARCHITECTURES[name]


def config_fields(container: Container) -> dict[str, Any]:
    """The `config.json` of the model that a file was made from, as far as it can be told.

    Raises:
        UnsupportedModelError: the architecture or one of its settings is not supported.
        CheckpointError: a value is missing or impossible; names the key.
    """
    architecture = architecture_of(container)
    metadata = Metadata(container, container.metadata[ARCHITECTURE])
    family = FAMILIES[architecture.family]
    num_layers = metadata.integer("block_count") - metadata.integer("nextn_predict_layers", 0)
    heads, width = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    head_dim = metadata.integer("attention.key_length", width // max(heads, 1))
    # Below, lists have an entry for each layer.
    if not (heads and width and head_dim and 1 <= num_layers <= MAX_LAYERS):
        raise CheckpointError(
            f"{container.path}: {num_layers} layers of {heads} heads of {head_dim} of {width} dimensions; "
            f"expected 1 to {MAX_LAYERS} layers, and 1 or more of the others; download it again"
        )
    value_dim = metadata.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"{container.path}: attention.value_length is {value_dim} but attention.key_length is "
            f"{head_dim}; only equal lengths are supported"
        )
    if not metadata.flag("attention.causal", True):
        raise UnsupportedModelError(
            f"{container.path}: attention.causal is false; only decoders run"
        )
    eps = "layer_norm_rms_epsilon" if family.eps_field == "rms_norm_eps" else "layer_norm_epsilon"
    fields: dict[str, Any] = {
        "architectures": [architecture.family],
        "vocab_size": _vocab_size(container),
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "max_position_embeddings": metadata.integer("context_length"),
        family.eps_field: metadata.number(f"attention.{eps}"),
        "tie_word_embeddings": HEAD not in container.tensors,
        "eos_token_id": list(end_ids(container)) or None,
        "torch_dtype": _dtype(container),
    }
    fields |= _biases(container) | _windows(metadata, architecture, num_layers)
    fields |= _rope(metadata, architecture, fields)
    fields |= architecture.fields(metadata, fields)
    metadata.check_all_read()
    return fields


def read_sampling_defaults(choice: str, path: Path) -> SamplingDefaults:
    """Sampling defaults of a checkpoint directory or of a GGUF file; see those of directories.

    Raises:
        CheckpointError, ConfigError: as for directories.
    """
    if not is_gguf(path) or choice != AUTO:
        return sampling_defaults_of_directory(choice, path)
    fields = generation_fields(read_container(path))
    return sampling_defaults(fields, path) if fields else SamplingDefaults()


def read_pooling(path: Path) -> PoolingConfig:
    """Pooling of a checkpoint directory or of a GGUF file; see that of directories.

    Raises:
        CheckpointError: as for directories.
    """
    if not is_gguf(path):
        return pooling_of_directory(path)
    metadata = read_container(path).metadata
    kind = metadata.get(f"{metadata.get(ARCHITECTURE)}.pooling_type")
    mode = POOLING_MODES.get(kind) if isinstance(kind, int) else None
    return PoolingConfig() if mode is None else PoolingConfig(mode=mode)


def generation_fields(container: Container) -> dict[str, Any]:
    """The fields of `generation_config.json` that a file has."""
    keys = {name: f"general.sampling.{key}" for name, key in SAMPLING.items()}
    metadata = Metadata(container, "general.sampling")
    return {
        name: metadata.integer("top_k") if name == "top_k" else metadata.number(SAMPLING[name])
        for name, key in keys.items()
        if key in container.metadata
    }


def token_id(container: Container, role: str) -> int | None:
    """The id of the token that has a role, such as `bos`; None if there is none."""
    value = container.metadata.get(f"{TOKENIZER}{role}_token_id")
    tokens = container.metadata.get(f"{TOKENIZER}tokens")
    size = len(tokens) if isinstance(tokens, StringArray) else None
    if value is None or type(value) is not int or value < 0 or (size is not None and value >= size):
        return None
    return value


def end_ids(container: Container) -> tuple[int, ...]:
    """Ids of the tokens that end an answer: those with such a role, and control tokens known by name."""
    ids = [token_id(container, role) for role in ENDS]
    tokens = container.metadata.get(f"{TOKENIZER}tokens")
    kinds = container.metadata.get(f"{TOKENIZER}token_type")
    if isinstance(tokens, StringArray) and isinstance(kinds, np.ndarray):
        control = set(np.flatnonzero(kinds == CONTROL).tolist())
        texts = {id_: text for id_, text in enumerate(tokens) if id_ in control}
        is_harmony = set(HARMONY_ENDS) <= set(texts.values())
        ends = (*HARMONY_ENDS, "<|endoftext|>") if is_harmony else END_TEXTS
        ids += [id_ for id_, text in texts.items() if text in ends]
    return tuple(dict.fromkeys(id_ for id_ in ids if id_ is not None))


def _vocab_size(container: Container) -> int:
    """Rows of the embedding: other keys may count tokens that were cut off."""
    embedding = container.tensors.get(EMBEDDING)
    if embedding is None:
        raise CheckpointError(
            f"{container.path}: expected a tensor {EMBEDDING}, found none; is it a whole model?"
        )
    return embedding.shape[0]


def _dtype(container: Container) -> str:
    """float32 for what is quantised: its scales are finer than bfloat16."""
    kinds = {info.kind.name for info in container.tensors.values()}
    return "bfloat16" if "BF16" in kinds and kinds <= set(FLOAT_TYPES) else "float32"


def _biases(container: Container) -> dict[str, Any]:
    """The settings of all families by the tensors of the first layer; each reads its own."""
    tensors = container.tensors
    qkv = "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors
    return {
        **dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "use_bias"), qkv),
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _windows(metadata: Metadata, architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """The sliding window, and the layers that have it; 0 is none, no key the architecture's own."""
    if FAMILIES[architecture.family].windows == "none" and architecture.window_period is None:
        return {}
    fields: dict[str, Any] = {}
    if metadata.has("attention.sliding_window"):
        fields["sliding_window"] = metadata.integer("attention.sliding_window") or None
    else:
        fields["sliding_window"] = architecture.window
    if architecture.window_period is None:
        return fields
    layers = metadata.window_layers(
        "attention.sliding_window_pattern", num_layers, architecture.window_period
    )
    if fields.get("sliding_window", 1) is not None:
        kinds = ("full_attention", "sliding_attention")
        fields["layer_types"] = [kinds[is_local] for is_local in layers]
    return fields


def _rope(metadata: Metadata, architecture: Architecture, fields: dict[str, Any]) -> dict[str, Any]:
    """Base, rotated share of a head, and scaling."""
    head_dim, container = fields["head_dim"], metadata.container
    dims = metadata.integer("rope.dimension_count", head_dim)
    theta, scaling = metadata.number("rope.freq_base", 10_000.0), _scaling(metadata, fields)
    made: dict[str, Any] = {"rope_theta": theta, "rope_scaling": scaling}
    if scaling is not None and scaling["rope_type"] == "longrope":
        name = "original_max_position_embeddings"
        made[name] = scaling[name]
    local_theta = metadata.number("rope.freq_base_swa", theta)
    if local_theta != theta and not architecture.has_local_rope:
        raise UnsupportedModelError(
            f"{container.path}: rope.freq_base_swa is {local_theta} and rope.freq_base {theta}; this "
            "architecture has one for all layers"
        )
    if dims != head_dim and not architecture.has_partial_rotary:
        raise UnsupportedModelError(
            f"{container.path}: rope.dimension_count is {dims}, but heads have {head_dim} dimensions, and "
            "this architecture rotates them all"
        )
    if architecture.has_partial_rotary and head_dim:
        share = dims / head_dim
        made["partial_rotary_factor"] = (
            share if int(head_dim * share) == dims else math.nextafter(share, 2)
        )
    frequencies = container.tensors.get(ROPE_FREQS)
    if frequencies is not None:
        factors = _floats(container, ROPE_FREQS)
        made["rope_scaling"] = _llama3_scaling(factors, theta, fields["max_position_embeddings"])
    return made


def _scaling(metadata: Metadata, fields: dict[str, Any]) -> dict[str, Any] | None:
    """`rope_scaling` of the keys; None: the frequencies are not scaled."""
    container = metadata.container
    kind = metadata.text("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0))
    original = metadata.integer("rope.scaling.original_context_length", 0)
    attention = metadata.number("rope.scaling.attn_factor", 0.0)
    yarn = {
        "attention_factor": metadata.number("rope.scaling.yarn_attn_factor", 0.0),
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 0.0),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 0.0),
    }
    if ROPE_LONG in container.tensors or ROPE_SHORT in container.tensors:
        long, short = (_floats(container, name) for name in (ROPE_LONG, ROPE_SHORT))
        return {
            "rope_type": "longrope",
            "long_factor": [shortest(value) for value in long],
            "short_factor": [shortest(value) for value in short],
            "original_max_position_embeddings": original or fields["max_position_embeddings"],
            **({"attention_factor": attention} if attention else {}),
        }
    if kind in (None, "none", "longrope") or (kind == "linear" and factor == 1.0):
        if kind is not None or factor == 1.0:
            return None
        kind = "linear"
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        made = {"rope_type": "yarn", "factor": factor}
        made |= {name: value for name, value in yarn.items() if value}
        return made | ({"original_max_position_embeddings": original} if original else {})
    raise UnsupportedModelError(
        f"{container.path}: rope.scaling.type is {shown(kind)}; supported are none, linear, yarn and "
        "longrope"
    )


def _floats(container: Container, name: str) -> NDArray[np.float32]:
    """The values of a vector of float32, all above 0."""
    info = container.tensors.get(name)
    if info is None or info.kind.name != "F32":
        actual = "none" if info is None else info.kind.name
        raise CheckpointError(
            f"{container.path}: expected a tensor {name} of float32, found {actual}; download it again"
        )
    values = info.read_rows().view("<f4").ravel()
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(
            f"{container.path}: {name}: expected numbers above 0, found others; download it again"
        )
    return values


def _llama3_scaling(
    factors: NDArray[np.float32], theta: float, num_positions: int
) -> dict[str, Any]:
    """The scaling of Llama 3 that has these divisors of the frequencies, else the divisors themselves."""
    factor = shortest(factors.max())
    low, high, original = 1.0, 4.0, 8192
    dim = 2 * len(factors)
    with np.errstate(all="ignore"):  # a file may have any theta and divisors
        frequencies = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        turns = original * frequencies / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
    if np.allclose(factors, expected, rtol=1e-4):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    return {
        "rope_type": "longrope",
        "short_factor": [shortest(value) for value in factors],
        "long_factor": [shortest(value) for value in factors],
        "attention_factor": 1.0,
        "factor": 1.0,
        "original_max_position_embeddings": num_positions,
    }
