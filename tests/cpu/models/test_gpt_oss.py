"""gpt-oss beyond what every family shows: MXFP4 experts, its published configuration, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ramify import LLM, SamplingParams
from ramify.errors import ModelError
from ramify.models.configs.model_config import ModelConfig
from ramify.models.kv_cache_spec import attention_spec
from ramify.models.loader import load_model, read_config
from ramify.models.packed_formats.fp4 import mxfp4
from tests.cpu.models.test_dense_families import NUM_TOKENS, logits_of, runner_of, token_ids_of
from tests.cpu.test_loading_memory import peak_of_loading

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")
pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

# As published, but for `layer_types` and fields that say nothing about the arithmetic.
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200_002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131_072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199_999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150_000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201_088,
}
SMALL = GPT_OSS_20B | {
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 6,
    "pad_token_id": 0,
    "sliding_window": 24,
    "vocab_size": 211,
}


def write_mxfp4(path: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    """Write a random checkpoint with the tensors of a published one; returns them."""
    draw = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in ModelConfig.from_hf(config, "config.json").stored_shapes().items():
        if name.endswith("_blocks"):
            tensors[name] = torch.randint(256, shape, generator=draw).to(torch.uint8)
        elif name.endswith("_scales"):
            tensors[name] = torch.randint(120, 125, shape, generator=draw).to(torch.uint8)
        else:
            around = 1.0 if "norm" in name else 0.0
            values = around + 0.3 * torch.randn(shape, generator=draw)
            tensors[name] = values.to(torch.bfloat16)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return tensors


def widened_by_transformers(config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """transformers' model of these tensors, MXFP4 widened by its own code; float32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    settings = transformers.GptOssConfig(**plain)
    settings._attn_implementation = settings._experts_implementation = "eager"
    model = transformers.GptOssForCausalLM(settings).eval()
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            wide = convert_moe_packed_tensors(tensor, scales, dtype=torch.float32)
            weights[name.removesuffix("_blocks")] = wide
        elif not name.endswith("_scales"):
            weights[name] = tensor.float()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_widens_as_in_transformers(dtype: torch.dtype) -> None:
    """All pairs of FP4 values under all finite scales have the bits that transformers gives them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(1, 250, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous()
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(len(scales), -1, -1)

    wide = mxfp4("experts", blocks, scales, (len(scales), 512), dtype).dequantize()

    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].T
    assert wide.isfinite().all()
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("ops", ["cpu", "torch"])
def test_mxfp4_logits_are_those_of_transformers(ops: str, tmp_path: Path) -> None:
    """A checkpoint in MXFP4 computes what transformers computes with the widened weights."""
    model = widened_by_transformers(SMALL, write_mxfp4(tmp_path, SMALL))
    token_ids = torch.tensor([token_ids_of(NUM_TOKENS)])

    with torch.inference_mode():
        expected = model(token_ids).logits[0]
        logits = logits_of(runner_of(tmp_path, ops, "float32"), [NUM_TOKENS])

    # The kernels round rows to int16.
    limit = 1e-4 if ops == "torch" else 2e-3
    assert (logits - expected).abs().max() <= limit * expected.abs().max()
    assert (logits - expected).norm() <= 5e-4 * expected.norm()


def test_mxfp4_serves_from_the_cache(tmp_path: Path) -> None:
    """In the dtype that `auto` gives, a warm request has the tokens of the cold one, bit for bit."""
    write_mxfp4(tmp_path, SMALL)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    llm = LLM(str(tmp_path), kv_cache_tokens=1024)

    cold, warm = (llm.generate([token_ids_of(70)], params)[0] for _ in range(2))

    assert cold.cache.read_tokens == 0
    assert warm.cache.read_tokens >= 64
    assert warm.token_ids == cold.token_ids
    assert warm.logprobs == cold.logprobs


def test_the_published_configuration(tmp_path: Path) -> None:
    """The 20B model's config.json: bfloat16, windows in even layers, a bias and sinks everywhere."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))

    config = read_config(tmp_path)

    assert config.torch_dtype == "bfloat16"
    assert [config.window_of(layer) for layer in range(4)] == [128, None, 128, None]
    assert (config.attention_bias, config.o_bias) == (True, True)
    assert (config.rope.scaling, config.rope.factor, config.rope.truncate) == ("yarn", 32.0, False)
    assert attention_spec(config, page_size=16, dtype=torch.bfloat16, exact=True).sinks
    shapes = config.stored_shapes()
    experts = "model.layers.23.mlp.experts."
    assert shapes[f"{experts}gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert shapes[f"{experts}down_proj_scales"] == (32, 2880, 90)
    assert shapes["model.layers.0.self_attn.sinks"] == (64,)
    assert len(shapes) == 3 + 24 * 19
    assert len(config.tensor_shapes()) == 3 + 24 * (13 + 4 * 32)


def test_rotary_settings_may_be_absent() -> None:
    """Without them transformers scales by yarn, from 4,096 to 131,072 tokens; so do we."""
    bare = {name: value for name, value in GPT_OSS_20B.items() if not name.startswith("rope_")}
    theirs = transformers.GptOssConfig(**bare).rope_parameters

    rope = ModelConfig.from_hf(bare, "config.json").rope

    assert rope == ModelConfig.from_hf(GPT_OSS_20B, "config.json").rope
    assert (theirs["rope_type"], theirs["factor"], theirs["truncate"]) == ("yarn", 32.0, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'.*stacked.*mxfp4"),
        ({"quantization_config": ["mxfp4"]}, "must be an object"),
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0; experts have only 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"intermediate_size": 100}, "intermediate_size 100 .* multiples of 32"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 is above the 6"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "'mxfp4'.*stacked"),
    ],
)
def test_settings_without_an_implementation_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    """One line that names the field and its value."""
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(SMALL | changes, "config.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", r"down_proj_scales is F32, not U8, but config.json says that it is quantised"),
        ("shape", r"down_proj_scales has shape \[6, 64, 2\] but config.json asks for \[6, 64, 3\]"),
        ("missing", r"lacks 1 of \d+ tensors, the first is .*0.mlp.experts.down_proj_scales"),
        ("plain", r"no use for with this config.json"),
    ],
)
def test_damaged_experts_are_refused(change: str, message: str, tmp_path: Path) -> None:
    """The error names tensor, expected and found."""
    tensors = write_mxfp4(tmp_path, SMALL)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    scales = tensors.pop(name)
    if change == "dtype":
        tensors[name] = scales.float()
    elif change == "shape":
        tensors[name] = scales[..., :2].contiguous()
    elif change == "plain":
        tensors[name.removesuffix("_scales")] = scales
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's memory counters")
@pytest.mark.parametrize("is_packed", [False, True])
def test_peak_memory_is_that_of_the_weights(is_packed: bool, tmp_path: Path) -> None:
    """Experts are read and packed one by one: at most 1.2 times the bytes of the weights."""
    # About a layer's experts are held beside the packed weights: four layers would make that a quarter.
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_local_experts": 10}
    config = SMALL | sizes | {"num_hidden_layers": 8}
    if not is_packed:
        del config["quantization_config"]
    write_mxfp4(tmp_path, config)
    shapes = ModelConfig.from_hf(config, "config.json").tensor_shapes()
    num_bytes = 0.0
    for name, shape in shapes.items():
        # A code of 4 bits, and a float32 scale for 32 of them.
        is_code = is_packed and ".experts." in name and name.endswith(".weight")
        num_bytes += torch.Size(shape).numel() * (0.625 if is_code else 4)
    assert num_bytes > (50 << 20 if is_packed else 150 << 20)

    peak = peak_of_loading(tmp_path, "cpu")

    assert peak <= 1.2 * num_bytes
