"""A Llama checkpoint as a GGUF file, in full precision or quantised by llama.cpp's own program."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from engines.contract import Setup
from engines.weights import as_float32, read_weights

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(setup: Setup) -> Path:
    """The file made of a checkpoint; written if it is not there."""
    path = setup.folder / f"{setup.dtype}.gguf"
    if not path.is_file():
        begun = path.with_suffix(".begun")
        config = json.loads((setup.checkpoint / "config.json").read_text("utf-8"))
        _write(begun, config, read_weights(setup.checkpoint / "model.safetensors"))
        begun.rename(path)
    return path


def quantized_path(setup: Setup, file_type: str) -> Path:
    """Where the file of this type belongs, such as Q4_K_M."""
    return setup.folder / f"{setup.dtype}-{file_type}.gguf"


def write_quantized(setup: Setup, file_type: str, program: Path) -> Path:
    """The file that llama-quantize makes of a checkpoint's GGUF file; written if it is not there."""
    path = quantized_path(setup, file_type)
    if not path.is_file():
        begun = path.with_suffix(".begun")
        subprocess.run(
            [program, write_gguf(setup), begun, file_type, str(setup.threads)],
            check=True,
            capture_output=True,
        )
        begun.rename(path)
    return path


def token_weight_bytes(path: Path) -> int:
    """Bytes of a file's weights that a decode step reads: all but an embedding that is no head too."""
    gguf: Any = importlib.import_module("gguf")
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return sum(sizes.values())


def _write(path: Path, config: dict[str, Any], weights: dict[str, Any]) -> None:
    gguf: Any = importlib.import_module("gguf")
    halved = weights["model.embed_tokens.weight"].dtype == np.uint16
    kinds = gguf.LlamaFileType
    file = gguf.GGUFWriter(path, "llama")
    file.add_name("bench")
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_rope_dimension_count(config["head_dim"])
    file.add_rope_freq_base(config["rope_theta"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_vocab_size(config["vocab_size"])
    file.add_file_type(kinds.MOSTLY_BF16 if halved else kinds.ALL_F32)
    _add_tokens(file, config["vocab_size"])
    for name, values in weights.items():
        values = _interleaved(values, name, config)  # noqa: PLW2901
        if halved and values.ndim == 2:
            raw = np.ascontiguousarray(values).view(np.uint8)
            kind = gguf.GGMLQuantizationType.BF16
            file.add_tensor(_name(name), raw, raw_shape=raw.shape, raw_dtype=kind)
        else:
            file.add_tensor(_name(name), np.ascontiguousarray(as_float32(values)))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _add_tokens(file: Any, vocab: int) -> None:
    """A vocabulary of made-up words: only ids go in and out."""
    file.add_tokenizer_model("llama")
    file.add_tokenizer_pre("default")
    file.add_token_list(["<unk>", "<s>", "</s>", *(f"t{at}" for at in range(3, vocab))])
    file.add_token_scores([0.0] * vocab)
    file.add_token_types([2, 3, 3] + [1] * (vocab - 3))
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_unk_token_id(0)
    file.add_add_bos_token(False)


def _name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def _interleaved(values: Any, name: str, config: dict[str, Any]) -> Any:
    """Rows of q and k in the order in which this format rotates them: pairs side by side."""
    if "q_proj" in name:
        heads = config["num_attention_heads"]
    elif "k_proj" in name:
        heads = config["num_key_value_heads"]
    else:
        return values
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)
