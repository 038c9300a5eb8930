"""What tests of Ramify, and of programs around it, can build without a download.

Importing this module loads neither torch nor a tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ramify.errors import ConfigError
from ramify.models.config import FAMILIES, ModelConfig

if TYPE_CHECKING:
    from torch import Generator, Tensor

TinyFamily = Literal["llama", "mistral", "qwen2", "qwen3"]

TINY_SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TINY_MERGES = ("th", "he", "in", "er", "an", "re", "on", "at", "en", "or", "es", "is", "it", "al")
TINY_CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ('system', 'user', 'assistant') -%}"
    "{{- raise_exception('unknown role ' ~ message.role) -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
_PAD, _BOS, _END = 0, 1, 2


def write_tiny_checkpoint(
    path: str | Path,
    family: TinyFamily,
    *,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Write a random Hugging Face checkpoint of about 0.2 million weights, and return its path.

    It knows nothing, but unlike a freshly initialised network its greedy continuations depend on
    every part of the context, so that a wrong page shows in the tokens.

    Args:
        path: directory to write to; made if needed.
        shards: number of safetensors files; with more than one there is an index.
        tokenizer: write a byte-level tokenizer and a chat template too.
        overrides: entries of `config.json`, such as num_hidden_layers or rope_scaling.

    Raises:
        ConfigError: no such family, or fewer than one shard.
        ModelError: `overrides` describe no model that Ramify supports.
    """
    import torch
    from safetensors.torch import save_file

    path = Path(path)
    config = _tiny_config(family, dtype) | overrides
    model = ModelConfig.from_hf(config, "the tiny checkpoint's configuration")
    if shards < 1:
        raise ConfigError(f"shards={shards} is not possible; at least 1 is needed")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: _tiny_weight(name, shape, generator).to(getattr(torch, dtype))
        for name, shape in model.tensor_shapes().items()
    }
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", config)
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(path / "generation_config.json", ends)
    names = list(weights)
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    else:
        places: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: weights[name] for name in names[number::shards]}
            save_file(part, path / file, metadata={"format": "pt"})
            places |= dict.fromkeys(part, file)
        total = sum(weight.numel() * weight.element_size() for weight in weights.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        _write_json(path / "model.safetensors.index.json", index)
    if tokenizer:
        _write_tiny_tokenizer(path, model.vocab_size)
    return path


def _tiny_config(family: str, dtype: str) -> dict[str, Any]:
    """`config.json` of a family: no width is a multiple of 32 but the hidden one's."""
    architectures = {entry.model_type: name for name, entry in FAMILIES.items()}
    if family not in architectures:
        raise ConfigError(f"family={family!r} is unknown; use one of {', '.join(architectures)}")
    config: dict[str, Any] = {
        "architectures": [architectures[family]],
        "model_type": family,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": _BOS,
        "eos_token_id": _END,
        "pad_token_id": _PAD,
        "torch_dtype": dtype,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 3}
    return config


# Standard deviation of a projection's outputs for inputs of deviation 1. With the usual small ones
# attention is nearly uniform and a token decides its successor almost alone.
_GAINS = {"q": 2.0, "k": 2.0, "v": 1.0, "o": 3.0, "gate": 1.5, "up": 1.0, "down": 2.0}


def _tiny_weight(name: str, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Random values of one tensor, by the role that its name tells."""
    import torch

    noise = torch.randn(shape, generator=generator)
    if "norm" in name:  # that of each head takes the place of the projections' gain
        return (2.0 if "self_attn" in name else 1.0) * (1 + 0.1 * noise)
    if name.endswith(".bias"):
        return 0.2 * noise
    if name == "model.embed_tokens.weight":
        return noise
    gain = 3.0 if name == "lm_head.weight" else _GAINS[name.split(".")[-2].removesuffix("_proj")]
    return noise * gain / math.sqrt(shape[-1])


def _write_tiny_tokenizer(path: Path, vocab_size: int) -> None:
    """Byte-level BPE: special tokens, the 256 bytes, and as many merges as there is room for."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    pieces = [*TINY_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    if vocab_size < len(pieces):
        raise ConfigError(
            f"vocab_size={vocab_size} is below {len(pieces)}, the bytes and special tokens; "
            "use a larger one, or tokenizer=False"
        )
    merges = TINY_MERGES[: vocab_size - len(pieces)]
    vocabulary = {piece: number for number, piece in enumerate([*pieces, *merges])}
    core = tokenizers.Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in merges]))
    core.add_special_tokens(list(TINY_SPECIAL_TOKENS))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    bos = TINY_SPECIAL_TOKENS[_BOS]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, _BOS)]
    )
    core.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": TINY_SPECIAL_TOKENS[_END],
        "pad_token": TINY_SPECIAL_TOKENS[_PAD],
        "clean_up_tokenization_spaces": False,
        "chat_template": TINY_CHAT_TEMPLATE,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
