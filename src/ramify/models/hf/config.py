"""`ModelConfig` of a checkpoint that only transformers knows, and the reasons why some cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from typing import Any

from ramify.errors import CheckpointError, UnsupportedModelError, shortened
from ramify.models.checkpoint.safetensors_files import tensor_names
from ramify.models.configs.dense_variant import DenseVariant
from ramify.models.configs.families import FAMILIES
from ramify.models.configs.fields import MAX_LAYERS, MAX_POSITIONS, ConfigFields
from ramify.models.configs.model_config import DTYPES, ModelConfig, token_ids
from ramify.models.configs.quantization.config import quantization_settings
from ramify.models.configs.rope import NO_ROPE, context_len
from ramify.models.configs.wrappers import WRAPPERS

# Rotary frequencies that follow the length of a request: its keys would differ from those of another
# request with the same prefix.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
CONTEXT_FIELDS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx",
    "max_target_positions",
)  # fmt: skip
MAX_REASON_CHARS = 400  # of an error of transformers, which may quote a whole value
SINKS = ".self_attn.sinks"  # how names of tensors of attention sinks end
LAYER_FIELDS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
RECURRENT = "keeps a recurrent state, which a cache of prefixes cannot share"
NO_ATTENTION_INTERFACE = "attends by itself, not through transformers' attention interface, so that its K/V cannot be paged"
KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "attention")
RECURRENT_LAYERS = {
    "linear_attention",
    "mamba",
    "mamba2",
    "recurrent",
    "conv",
    "hybrid",
    "hybrid_sliding",
}
CHUNKED_LAYERS = {"chunked_attention", "window_attention"}
SPARSE_LAYERS = {"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"}


def read_hf_config(path: Path, fields: Mapping[str, Any]) -> ModelConfig:
    """Read `config.json` with transformers.

    Args:
        path: of the checkpoint directory.
        fields: of its config.json, for error messages.

    Raises:
        UnsupportedModelError: transformers is not installed or does not know the architecture, or the
            model is no causal decoder with attention in every layer.
        CheckpointError: a size is missing.
    """
    source = str(path / "config.json")
    name = _architecture(fields)
    if fields.get("auto_map") and not fields.get("model_type"):
        raise UnsupportedModelError(
            f"{source}: {name} has code of its own (auto_map), which Ramify does not run; use a "
            "checkpoint of an architecture that transformers has"
        )
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedModelError(
            f"{source}: {name} is none of the families that Ramify has itself "
            f"({', '.join(FAMILIES)}); to run it through transformers: pip install 'ramify[hf]'"
        )
    from transformers import __version__

    _check_sizes(fields, source)
    if quantization_settings(fields):
        raise UnsupportedModelError(
            f"{source}: {name} is quantised (quantization_config); quantised weights are read for the "
            "families that Ramify has itself, and only float32, bfloat16 and float16 ones run through "
            "transformers, so use the original checkpoint"
        )
    whole = _parsed(path, name, fields)
    if getattr(whole, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{source}: {name} is an encoder-decoder; only causal decoders run"
        )
    config = whole.get_text_config(decoder=True)
    model_class = _causal_class(whole)
    if model_class is None and config is not whole and _causal_class(config) is not None:
        raise UnsupportedModelError(
            f"{source}: {name} is a text decoder (model_type {config.model_type!r}) with other parts; "
            f"only the text decoders of {', '.join(WRAPPERS)} run without the whole"
        )
    if model_class is None:
        raise UnsupportedModelError(
            f"{source}: transformers {__version__} has no causal decoder for {name} "
            f"(model_type {whole.model_type!r}); only language models with causal attention run"
        )
    reason = _reason_to_refuse(config)
    if reason is not None:
        raise UnsupportedModelError(f"{source}: {name} {reason}")
    max_model_len = _max_model_len(config)
    if max_model_len is None and may_be_recurrent(model_class):
        raise UnsupportedModelError(f"{source}: {name} {RECURRENT}")
    if max_model_len is None and not has_attention_interface(model_class):
        raise UnsupportedModelError(f"{source}: {name} {NO_ATTENTION_INTERFACE}")
    return _model_config(path, name, config, fields, max_model_len)


def _parsed(path: Path, name: str, fields: Mapping[str, Any]) -> Any:
    """The configuration as transformers reads it. UnsupportedModelError if it cannot."""
    from transformers import AutoConfig, __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    source = path / "config.json"
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    # Its validators raise exceptions of every kind.
    except Exception as error:
        if not is_foreign(error):
            raise
        hint = "a newer version may know it: pip install -U transformers"
        if fields.get("auto_map"):
            hint = "the checkpoint has code of its own (auto_map), which Ramify does not run"
        elif str(fields.get("model_type")) in CONFIG_MAPPING_NAMES:
            hint = "mend that field, or download config.json again"
        raise UnsupportedModelError(
            f"{source}: transformers {__version__} cannot read {name} ({first_line(error)}); {hint}"
        ) from error


def _check_sizes(fields: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if transformers would not get through the layers, or the positions."""
    inner = fields.get("text_config")
    limits = dict.fromkeys(LAYER_FIELDS, MAX_LAYERS) | dict.fromkeys(CONTEXT_FIELDS, MAX_POSITIONS)
    for config in (fields, inner if isinstance(inner, Mapping) else {}):
        for name, limit in limits.items():
            value = config.get(name)
            if isinstance(value, int) and value > limit:
                ConfigFields(config, source).count(name, limit=limit)


def _causal_class(config: Any) -> Any:
    """The class of a causal language model with this configuration; None if transformers has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def may_be_recurrent(model_class: Any) -> bool:
    """Whether transformers calls a class stateful; other settings may give all layers attention."""
    return bool(getattr(model_class, "_is_stateful", False))


def has_attention_interface(model_class: Any) -> bool:
    """Whether transformers says that a class takes attention functions; recurrent ones may, too."""
    return bool(getattr(model_class, "_supports_attention_backend", False))


def _max_model_len(config: Any) -> int | None:
    for field in CONTEXT_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _architecture(fields: Mapping[str, Any]) -> str:
    named = fields.get("architectures") or [fields.get("model_type")]
    return str(named[0]) if isinstance(named, list) and named else str(named)


def is_foreign(error: Exception) -> bool:
    """Whether what the catching function called has raised, with no call back into Ramify on the way."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(error.__traceback__)]
    return len(modules) > 1 and all(name.partition(".")[0] != "ramify" for name in modules[1:])


def first_line(error: Exception) -> str:
    """The first line of an error's text, with the next one if it ends in a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    count = 2 if lines and lines[0].endswith(":") else 1
    return shortened(" ".join(lines[:count]) or type(error).__name__, MAX_REASON_CHARS)


def _reason_to_refuse(config: Any) -> str | None:
    """Reason in the configuration why prefixes of this model cannot be cached, or None."""
    if getattr(config, "is_heterogeneous", False):
        return "has layers with heads of different sizes; the K/V pool has one size for all"
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    foreign = sorted(set(map(str, kinds)) - set(KNOWN_LAYER_TYPES))
    if foreign:
        why = ""
        for group, text in (
            (RECURRENT_LAYERS, ", which keep a recurrent state"),
            (CHUNKED_LAYERS, ", which attend in chunks"),
            (SPARSE_LAYERS, ", which attend to selected or compressed keys"),
        ):
            why = why or (text if group.intersection(foreign) else "")
        return (
            f"has layers of kind {', '.join(foreign)}{why}; a cache of prefixes needs full or "
            "sliding attention in every layer"
        )
    if getattr(config, "attention_chunk_size", None):
        return "has attention in chunks, which a cache of prefixes does not know"
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, Mapping))):
        kind = rope.get("rope_type")
        if kind in LENGTH_DEPENDENT_ROPE:
            return (
                f"has {kind} rotary frequencies, which follow the length of a request; requests "
                "could not share the keys of a prefix"
            )
    return None


def _model_config(
    path: Path, name: str, config: Any, fields: Mapping[str, Any], max_model_len: int | None
) -> ModelConfig:
    source = str(path / "config.json")

    def size(*names: str, default: int | None = None) -> int:
        for field in names:
            value = getattr(config, field, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        if default is None:
            raise CheckpointError(f"{source}: {names[0]} of {name} is missing")
        return default

    num_heads, hidden_size = size("num_attention_heads"), size("hidden_size")
    num_layers, window = size("num_hidden_layers"), getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(config, "layer_types", None) or []
    full = frozenset(layer for layer, kind in enumerate(kinds) if kind != "sliding_attention")
    cap = getattr(config, "attn_logit_softcapping", None)
    has_sinks = any(tensor.endswith(SINKS) for tensor in tensor_names(path))
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    return ModelConfig(
        architecture=name,
        vocab_size=size("vocab_size"),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("num_key_value_heads", default=num_heads),
        head_dim=size("head_dim", default=hidden_size // num_heads),
        intermediate_size=size("intermediate_size", "ffn_dim", default=4 * hidden_size),
        max_model_len=context_len(
            ConfigFields(fields, source), size(CONTEXT_FIELDS[0], default=max_model_len)
        ),
        rms_norm_eps=1e-6,
        rope=NO_ROPE,
        variant=DenseVariant(
            attention_soft_cap=None if cap is None else float(cap), attention_sinks=has_sinks
        ),
        sliding_window=window if isinstance(window, int) and window > 0 else None,
        full_attention_layers=full,
        eos_token_ids=_end_tokens(fields, config, source),
        torch_dtype=dtype if dtype in DTYPES else "float32",
        is_native=False,
    )


def _end_tokens(fields: Mapping[str, Any], config: Any, source: str) -> tuple[int, ...]:
    """End tokens of the whole and of its text decoder; where neither names any, transformers' own."""
    text = fields.get("text_config")
    parts = [part for part in (fields, text) if isinstance(part, Mapping)]
    named = [part["eos_token_id"] for part in parts if "eos_token_id" in part]
    given = named or [getattr(config, "eos_token_id", None)]
    return tuple(dict.fromkeys(token for value in given for token in token_ids(value, source)))
