"""Dense decoders against transformers for every family and variant, and the reading of config.json."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ramify.attention.exactness import ProbeStore
from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.dense_variant import LLAMA
from ramify.models.configs.model_config import ModelConfig
from ramify.models.loader import load_model
from ramify.models.ops.protocol import ForwardStep
from ramify.testing import TinyFamily, write_tiny_checkpoint

FAMILIES: tuple[TinyFamily, ...] = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[TinyFamily, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, as many kv heads": ("llama", {"num_key_value_heads": 4}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, llama3 rope": ("llama", {"rope_scaling": LLAMA3}),
    "llama, linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama, dynamic rope": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama, yarn rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, new style": (
        "llama",
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 500.0}, "dtype": "float32"},
    ),
    "llama, head_dim": ("llama", {"head_dim": 24}),
    "llama, widths off 32": ("llama", {"hidden_size": 60, "head_dim": 10, "vocab_size": 291}),
    "mistral": ("mistral", {}),
    "mistral, window": ("mistral", {"sliding_window": 8}),
    "mistral, head_dim": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3, head_dim": ("qwen3", {"head_dim": 24}),
    "qwen3, windows by layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def dense_causal(config: ModelConfig) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Causal attention over the rows of one call: softmax(q k^T * scale) v, without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5
        distances = torch.arange(len(q))[:, None] - torch.arange(len(q))
        window = config.window_of(layer) or len(q)
        masked = (distances < 0) | (distances >= window)
        weights = scores.masked_fill(masked, -torch.inf).float().softmax(-1).to(q.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def our_logits(
    path: Path, tokens: Tensor, dtype: str = "float32", *, exact: bool = True, ops: str = "auto"
) -> Tensor:
    model = load_model(path, dtype=dtype, exact=exact, ops=ops, store=ProbeStore(None))
    positions = torch.arange(len(tokens))
    with torch.inference_mode():
        return model.logits(
            model.forward(tokens, ForwardStep(positions, dense_causal(model.config)))
        )


def reference(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, report = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=dtype, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def random_tokens(seed: int, num_tokens: int, low: int = 6, high: int = 290) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(low, high) for _ in range(num_tokens)]


def test_a_longer_context_has_the_base_of_its_length(tmp_path: Path) -> None:
    """`dynamic` rope: the logits of transformers for a prompt as long as the engine's context."""
    scaling = {"type": "dynamic", "factor": 2.0}
    path = write_tiny_checkpoint(
        tmp_path, "llama", seed=7, rope_scaling=scaling, max_position_embeddings=64
    )
    tokens = torch.tensor(random_tokens(1, 100))
    model = load_model(path, max_model_len=100, store=ProbeStore(None))

    with torch.inference_mode():
        step = ForwardStep(torch.arange(100), dense_causal(model.config))
        ours = model.logits(model.forward(tokens, step))
        theirs = reference(path)(tokens[None]).logits[0]

    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("ops", ["auto", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(tmp_path: Path, variant: str, ops: str) -> None:
    """Every family and variant, with exact=True and False, within 1e-4 of the largest logit."""
    family, overrides = VARIANTS[variant]
    path = write_tiny_checkpoint(tmp_path, family, seed=7, **overrides)
    tokens = torch.tensor(random_tokens(1, 100))

    results = [our_logits(path, tokens, exact=exact, ops=ops) for exact in (True, False)]

    with torch.inference_mode():
        expected = reference(path)(tokens[None]).logits[0]
    for logits in results:
        assert logits.dtype == torch.float32
        assert logits.shape == expected.shape
        assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("ops", ["auto", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(
    tmp_path: Path, family: TinyFamily, ops: str
) -> None:
    """Our error against float32 is at most 1.3 times that of transformers: no extra roundings."""
    path = write_tiny_checkpoint(tmp_path, family, dtype="bfloat16")
    tokens = torch.tensor(random_tokens(2, 60))

    logits = our_logits(path, tokens, "bfloat16", ops=ops)

    with torch.inference_mode():
        wide = reference(path)(tokens[None]).logits[0]
        narrow = reference(path, torch.bfloat16)(tokens[None]).logits[0].float()
    error, reference_error = ((x - wide).square().mean().sqrt() for x in (logits, narrow))
    assert error < 1.3 * reference_error


def test_float16_checkpoints_are_computed_in_float32(tmp_path: Path) -> None:
    """`dtype="auto"` loses nothing of a float16 checkpoint."""
    path = write_tiny_checkpoint(tmp_path, "llama", dtype="float16")
    tokens = torch.tensor(random_tokens(2, 30))

    logits = our_logits(path, tokens, "auto")

    with torch.inference_mode():
        expected = reference(path)(tokens[None]).logits[0]
    assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_continuations_depend_on_the_whole_context(tmp_path: Path, family: TinyFamily) -> None:
    """Tiny checkpoints can reveal faults: replacing the first 16 of 100 tokens changes every answer.

    Their answers also vary, and near ties of the best logits are rare.
    """
    path = write_tiny_checkpoint(tmp_path, family)
    model = reference(path)
    prompts = torch.tensor([random_tokens(seed, 100) for seed in range(20)])
    replaced = prompts.clone()
    replaced[:, :16] = torch.tensor([random_tokens(99 + seed, 16) for seed in range(20)])

    def continuations(batch: Tensor) -> Any:
        return model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )

    outcome = continuations(prompts)
    answers = outcome.sequences[:, 100:]
    of_replaced = continuations(replaced).sequences[:, 100:]
    of_suffix = continuations(prompts[:, 16:]).sequences[:, 84:]

    assert (answers != of_replaced).any(1).all()
    assert (answers != of_suffix).any(1).all()
    best = torch.stack(outcome.logits).topk(2).values
    assert float((best[..., 0] - best[..., 1] < 1e-4).float().mean()) <= 0.005
    assert sum(len(answer.unique()) for answer in answers) / 20 > 5


def hf_config(**changes: Any) -> dict[str, Any]:
    """A Llama config.json with changes; a value of `...` removes the field."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    return {name: value for name, value in (config | changes).items() if value is not ...}


def test_absent_fields_get_the_familys_defaults() -> None:
    """A short config.json is read as transformers reads it."""
    config = ModelConfig.from_hf(hf_config(), "test")

    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.rms_norm_eps == 1e-6
    assert config.rope.theta == 10000.0
    assert config.eos_token_ids == (2,)
    assert config.torch_dtype == "float32"
    assert config.window_of(0) is None
    assert not (config.attention_bias or config.o_bias or config.mlp_bias)
    assert config.variant == LLAMA


def test_model_type_stands_in_for_architectures() -> None:
    """A config.json without `architectures` is read by its `model_type`."""
    config = ModelConfig.from_hf(hf_config(architectures=..., model_type="llama"), "test")

    assert config.architecture == "LlamaForCausalLM"


def test_windows_are_per_layer() -> None:
    """Qwen's first `max_window_layers` layers have full attention, the others a sliding window."""
    config = ModelConfig.from_hf(
        hf_config(
            architectures=["Qwen2ForCausalLM"],
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=32,
            max_window_layers=1,
        ),
        "test",
    )

    assert [config.window_of(layer) for layer in range(2)] == [None, 32]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "relu2"}, "relu2"),
        ({"quantization_config": {"bits": 4}}, "quant_method None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal is False"),
        ({"model_type": "mistral"}, "names LlamaForCausalLM, but model_type is 'mistral'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["x", "y"],
            },
            "layer_types",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "num_key_value_heads": 2,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "chunked_attention"],
            },
            "chunked_attention",
        ),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    """A setting that would change the results raises; the message names it and the file."""
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        ModelConfig.from_hf(hf_config(**changes), "some/config.json")

    assert "some/config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor must be"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ],
)
def test_broken_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    """A missing, wrong or contradictory field raises; the message names it."""
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_hf(hf_config(**changes), "config.json")


def test_two_spellings_of_rotary_settings_must_agree() -> None:
    """`rope_scaling` of transformers 4 and `rope_parameters` of 5: a contradiction raises."""
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old, new = {"type": "llama3", **llama3}, {"rope_type": "llama3", "rope_theta": 5e5, **llama3}

    both = ModelConfig.from_hf(hf_config(rope_scaling=old, rope_parameters=new), "test")

    assert both == ModelConfig.from_hf(hf_config(rope_parameters=new), "test")
    for other in ({"rope_type": "default"}, new | {"factor": 4.0}):
        with pytest.raises(CheckpointError, match="which of them holds"):
            ModelConfig.from_hf(hf_config(rope_scaling=old, rope_parameters=other), "test")
    longer = hf_config(rope_parameters=new, original_max_position_embeddings=32)
    assert ModelConfig.from_hf(longer, "test").rope.original_max_len == 32  # as transformers does
