"""GGUF files of tiny models, written as llama.cpp's converters do, and checkpoints of the same values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

gguf = pytest.importorskip("gguf", reason="it writes the files of these tests")

Array = NDArray[Any]
# Value of `general.architecture` by the family's name in transformers.
NAMES = {
    "Llama": "llama",
    "Mixtral": "llama",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen2Moe": "qwen2moe",
    "Qwen3Moe": "qwen3moe",
    "Gemma": "gemma",
    "Gemma2": "gemma2",
    "Gemma3": "gemma3",
    "Phi3": "phi3",
    "GptOss": "gpt-oss",
    "Starcoder2": "starcoder2",
    "StableLm": "stablelm",
    "Olmo2": "olmo2",
    "Olmo3": "olmo2",
    "Olmoe": "olmoe",
    "Granite": "granite",
    "Cohere": "command-r",
    "Cohere2": "cohere2",
    "Glm4": "glm4",
    "Glm4Moe": "glm4moe",
    "Exaone4": "exaone4",
    "SmolLM3": "smollm3",
    "SeedOss": "seed_oss",
    "HunYuanDenseV1": "hunyuan-dense",
}
PERMUTED = ("llama", "granite", "smollm3")
OFFSET = ("gemma", "gemma2", "gemma3")
TYPES = ("Q4_0", "Q8_0", "F16", "Q4_1", "Q5_0", "BF16", "Q5_1", "F32")


def write_gguf(
    family: str,
    config: Any,
    checkpoint: Path,
    path: Path,
    *,
    types: Sequence[str] = TYPES,
    num_parts: int = 1,
) -> None:
    """Write a GGUF file of a checkpoint; its tensors become the values that the file has.

    Args:
        family: see `NAMES`.
        config: of transformers.
        checkpoint: directory with one safetensors file, which is overwritten.
        types: of matrices, one after the other.
        num_parts: files, of which `path` names none.
    """
    name = NAMES[family]
    state = load_file(checkpoint / "model.safetensors")
    cycle, of_stack = itertools.cycle(types), dict[str, str]()
    kinds: dict[str, str] = {}
    for key in sorted(state):
        if is_matrix(key, state[key]):
            stack = re.sub(r"experts\.\d+", "experts", key)
            kinds[key] = of_stack[stack] = of_stack.get(stack) or next(cycle)
    # What the file's formats make of the values.
    stored = {key: rounded(value, kinds.get(key, "F32")) for key, value in state.items()}
    if name in OFFSET:
        for key, value in stored.items():
            if key.endswith("norm.weight"):
                stored[key] = (value + np.float32(1)) - np.float32(1)
    paths = [path]
    if num_parts > 1:
        paths = [
            path.with_name(f"{path.stem}-{part + 1:05}-of-{num_parts:05}.gguf")
            for part in range(num_parts)
        ]
    writers = [gguf.GGUFWriter(part, name) for part in paths]
    write_settings(writers[0], family, config)
    tensors = list(converted(name, config, state, kinds))
    for number, writer in enumerate(writers):
        if num_parts > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", num_parts)
            writer.add_int32("split.tensors.count", len(tensors))
        for key, value, kind in tensors[number::num_parts]:
            number_of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(key, encoded(value, kind), raw_dtype=number_of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    save_file(stored, checkpoint / "model.safetensors", metadata={"format": "pt"})


def is_matrix(name: str, value: Array) -> bool:
    """Whether converters quantise a tensor."""
    is_vector = value.squeeze().ndim < 2 or name.endswith(("_bias", "sinks", "norm.weight"))
    return not is_vector and ".gate.weight" not in name and "router" not in name


def encoded(value: Array, kind: str) -> Array:
    """The bytes of a tensor in a type: rows of blocks."""
    if kind == "F32":
        return value.astype(np.float32)
    encoder = gguf.GGMLQuantizationType[kind]
    rows = gguf.quantize(
        np.ascontiguousarray(value, np.float32).reshape(-1, value.shape[-1]), encoder
    )
    return np.ascontiguousarray(rows.reshape(*value.shape[:-1], -1))


def rounded(value: Array, kind: str) -> Array:
    """The values of a tensor in a type."""
    if kind == "F32":
        return value.astype(np.float32)
    # Blocks of gpt-oss's stacks lie along the dimension before the last.
    encoder = gguf.GGMLQuantizationType[kind]
    is_stack = value.ndim == 3
    rows = value.swapaxes(-1, -2) if is_stack else value
    whole = gguf.dequantize(encoded(np.ascontiguousarray(rows), kind), encoder).reshape(rows.shape)
    return np.ascontiguousarray(whole.swapaxes(-1, -2) if is_stack else whole, np.float32)


def permuted(value: Array, num_heads: int) -> Array:
    """Rotary pairs, half a head apart, as neighbours."""
    halves = value.reshape(num_heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def converted(
    name: str, config: Any, state: dict[str, Array], kinds: dict[str, str]
) -> Iterable[tuple[str, Array, str]]:
    """Names in GGUF, values and types."""
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def renamed(key: str) -> str:
        made = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert made is not None, key
        return str(made)

    stacks: dict[str, list[tuple[int, Array, str]]] = {}
    for key, value in state.items():
        kind = kinds.get(key, "F32")
        expert = re.fullmatch(r"(.*experts)\.(\d+)\.(\w+)\.weight", key)
        norm = re.fullmatch(r"(.*)\.norms\.(\d+)\.weight", key)
        if expert:
            stack = f"{expert[1]}.{expert[3]}.weight"
            stacks.setdefault(stack, []).append((int(expert[2]), value, kind))
        elif norm:
            stacks.setdefault(f"{norm[1]}.weight", []).append((int(norm[2]), value, kind))
        elif name == "gpt-oss" and ".experts." in key:
            yield from gpt_oss_experts(renamed, key, value, kind)
        elif key.endswith("e_score_correction_bias"):
            layer = key.split(".")[2]
            yield f"blk.{layer}.exp_probs_b.bias", value, kind
        else:
            if name in PERMUTED and ".q_proj." in key:
                value = permuted(value, config.num_attention_heads)
            if name in PERMUTED and ".k_proj." in key:
                value = permuted(value, config.num_key_value_heads)
            if name in OFFSET and key.endswith("norm.weight"):
                value = value + np.float32(1)
            full = f"{key}.weight" if key.endswith("sinks") else key
            yield renamed(full), value.squeeze(), kind
    for key, parts in stacks.items():
        rows = [value for _, value, _ in sorted(parts, key=lambda part: part[0])]
        key = key.replace("block_sparse_moe.experts", "feed_forward.experts")
        key = key.replace("model.layers", "layers") if "feed_forward" in key else key
        yield renamed(key), np.stack(rows), parts[0][2]
    yield from rope_tensors(name, config)


def gpt_oss_experts(
    renamed: Any, key: str, value: Array, kind: str
) -> Iterable[tuple[str, Array, str]]:
    suffix = "bias" if key.endswith("_bias") else "weight"
    stem = key.removesuffix("_bias")
    if suffix == "weight":
        value = value.swapaxes(-1, -2)
    if "gate_up_proj" in stem:
        gate = stem.replace("gate_up_proj", "gate_proj")
        up = stem.replace("gate_up_proj", "up_proj")
        yield renamed(f"{gate}.{suffix}"), np.ascontiguousarray(value[:, 0::2]), kind
        yield renamed(f"{up}.{suffix}"), np.ascontiguousarray(value[:, 1::2]), kind
    else:
        yield renamed(f"{stem}.{suffix}"), np.ascontiguousarray(value), kind


def rope_tensors(name: str, config: Any) -> Iterable[tuple[str, Array, str]]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        for key in ("long", "short"):
            values = np.array(rope[f"{key}_factor"], np.float32)
            yield f"rope_factors_{key}.weight", values, "F32"
    if rope.get("rope_type") == "llama3":
        dim = config.head_dim
        factor, low, high = (
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        divisors = []
        for pair in range(0, dim, 2):
            wavelength = 2 * math.pi * rope["rope_theta"] ** (pair / dim)
            smooth = (8192 / wavelength - low) / (high - low)
            if wavelength < 8192 / high:
                divisors.append(1.0)
            elif wavelength > 8192 / low:
                divisors.append(factor)
            else:
                divisors.append(1 / ((1 - smooth) / factor + smooth))
        yield "rope_freqs.weight", np.array(divisors, np.float32), "F32"


def write_settings(writer: Any, family: str, config: Any) -> None:
    """The keys of a model's arithmetic."""
    c, rope = config, config.rope_parameters
    full = rope.get("full_attention", rope)
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    elif full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    elif full.get("rope_type") == "longrope":
        original = full["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = c.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    theta = full["rope_theta"]
    if full.get("alpha"):
        theta *= full["alpha"] ** (c.head_dim / (c.head_dim - 2))
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    if family not in ("Gemma", "Gemma2"):
        writer.add_rope_freq_base(theta)
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    for name in ("layer_norm_eps", "norm_epsilon"):
        if getattr(c, name, None) is not None:
            writer.add_layer_norm_eps(getattr(c, name))
    if getattr(c, "rms_norm_eps", None) is not None:
        writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    if family != "Granite" and getattr(c, "head_dim", None):
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    writer.add_file_type(2)
    write_special_settings(writer, family, c, head_dim)


def write_special_settings(writer: Any, family: str, c: Any, head_dim: int) -> None:
    """Those of single families."""
    experts = next(
        (
            getattr(c, name)
            for name in ("num_local_experts", "n_routed_experts", "num_experts")
            if getattr(c, name, None)
        ),
        0,
    )
    if family in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "Glm4Moe", "GptOss"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
    if family in ("Qwen2Moe", "Qwen3Moe", "Glm4Moe"):
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if family == "Qwen2Moe":
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if family == "GptOss":
        writer.add_expert_feed_forward_length(c.intermediate_size)
    if family == "Glm4Moe":
        writer.add_expert_shared_count(c.n_shared_experts)
        writer.add_leading_dense_block_count(c.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(c.routed_scaling_factor)
        writer.add_expert_weights_norm(c.norm_topk_prob)
        writer.add_expert_group_count(c.n_group)
        writer.add_expert_group_used_count(c.topk_group)
    share = c.rope_parameters.get("partial_rotary_factor") or 1.0
    if family in ("Llama", "Mixtral", "Granite", "Phi3", "Glm4", "Glm4Moe", "StableLm", "SmolLM3"):
        writer.add_rope_dimension_count(int(head_dim * share))
    if family in ("Gemma2", "Gemma3", "GptOss", "Cohere2", "Phi3"):
        writer.add_sliding_window(c.sliding_window or 0)
    if family in ("Olmo3", "Exaone4") and c.sliding_window:
        writer.add_sliding_window(c.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])
    if family == "Gemma2":
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    if family == "Granite":
        writer.add_attention_scale(c.attention_multiplier)
        writer.add_embedding_scale(c.embedding_multiplier)
        writer.add_residual_scale(c.residual_multiplier)
        writer.add_logit_scale(c.logits_scaling)
    if family in ("Cohere", "Cohere2"):
        writer.add_logit_scale(c.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "StableLm":
        writer.add_parallel_residual(c.use_parallel_residual)
