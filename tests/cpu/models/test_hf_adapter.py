"""Decoders that only transformers knows, over our paged K/V; and why others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_map
from typer.testing import CliRunner

from ramify import LLM, SamplingParams
from ramify.cli import app
from ramify.errors import CheckpointError, ModelError, UnsupportedModelError
from ramify.models.hf.config import is_foreign
from ramify.models.loader import load_decoder, read_config
from tests.cpu.models.family_cases import MAX_LEN, VOCAB_SIZE

transformers = pytest.importorskip("transformers", reason="the adapter needs the extra ramify[hf]")
pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "n_positions": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = {"num_key_value_heads": 2}
# Class in transformers -> settings. GPT-2 and OPT have learned positions, GPT-2 no torch.nn.Linear.
SERVED: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {},
    "GPT2LMHeadModel": {},
    "OPTForCausalLM": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "PhiForCausalLM": {},
    "OlmoForCausalLM": GQA | {"clip_qkv": 2.0},
    "NemotronForCausalLM": GQA,
    "PersimmonForCausalLM": {},
    "ApertusForCausalLM": GQA,
    "Ministral3ForCausalLM": GQA | {"head_dim": 16, "sliding_window": 24},
    "ArceeForCausalLM": GQA,
    "BioGptForCausalLM": {},
    "CwmForCausalLM": GQA | {"head_dim": 16, "sliding_window": 24},
    "Ernie4_5ForCausalLM": GQA | {"head_dim": 16},
    "GPTBigCodeForCausalLM": {},
    "HeliumForCausalLM": GQA | {"head_dim": 16},
    "HyperCLOVAXForCausalLM": GQA | {"head_dim": 16},
    "Jais2ForCausalLM": GQA | {"head_dim": 16},
    "ModernBertDecoderForCausalLM": {"cls_token_id": 1, "sep_token_id": 2},
    "NanoChatForCausalLM": GQA,
    "VaultGemmaForCausalLM": GQA | {"head_dim": 16},
    "GraniteSWAForCausalLM": GQA
    | {
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 96,
    "n_group": 1,
    "topk_group": 1,
}
# Experts in one grouped GEMM: a row's bits depend on the others.
SERVED_INEXACT: dict[str, dict[str, Any]] = {
    "GraniteMoeForCausalLM": GQA | EXPERTS,
    "GraniteMoeSharedForCausalLM": GQA | EXPERTS,
    "Ernie4_5_MoeForCausalLM": GQA
    | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "FlexOlmoForCausalLM": GQA | EXPERTS,
    "HunYuanMoEV1ForCausalLM": GQA | EXPERTS | {"head_dim": 16},
    "MiniMaxM2ForCausalLM": GQA | EXPERTS | {"head_dim": 16},
    "PhimoeForCausalLM": GQA | EXPERTS,
    "GraniteMoeSWAForCausalLM": GQA | EXPERTS | {"sliding_window": 24},
}
BART = {
    "d_model": 64,
    "decoder_layers": 3,
    "encoder_layers": 1,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "is_encoder_decoder": False,
}
MLA = EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "T5ForConditionalGeneration": ({}, "encoder-decoder"),
    "MambaForCausalLM": ({}, "layers of kind linear_attention"),
    "JambaForCausalLM": ({}, "layers of kind linear_attention"),
    "RecurrentGemmaForCausalLM": ({}, "layers of kind linear_attention"),
    "RwkvForCausalLM": ({"attention_hidden_size": 64}, "keeps a recurrent state"),
    "BertLMHeadModel": ({}, "bidirectional"),
    "BartForCausalLM": (BART, "decoder of an encoder-decoder"),
    "BigBirdPegasusForCausalLM": (BART, "decoder of an encoder-decoder"),
    "RobertaForCausalLM": ({"is_decoder": True}, "positions of a prompt otherwise"),
    "Llama4ForCausalLM": (
        {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96},
        "attend in chunks",
    ),
    "AXK1ForCausalLM": (MLA, "keys of 24 and values of 16"),
    "DiffLlamaForCausalLM": (GQA, "attends 6 times in 3 layers"),
    "BloomForCausalLM": ({}, "attends by itself"),
    "MptForCausalLM": ({}, "attends by itself"),
    "FalconForCausalLM": ({}, "attends by itself"),
    "PhiForCausalLM": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
}


def write_checkpoint(name: str, path: Path, **changes: Any) -> Any:
    kind = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    kind = kind.removesuffix("ForConditionalGeneration")
    kind = {"Llama4": "Llama4Text"}.get(kind, kind)
    config = getattr(transformers, f"{kind}Config")(**SIZES | changes)
    torch.manual_seed(len(name))
    model = getattr(transformers, name)(config).eval()
    for tensor, weight in model.named_parameters():
        if tensor.endswith("sinks"):
            torch.nn.init.normal_(weight, 1.0, 2.0)
    model.save_pretrained(path)
    return model


def prompt_of(num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(3, VOCAB_SIZE, (num_tokens,), generator=generator).tolist()


@pytest.mark.parametrize("name", [*SERVED, *SERVED_INEXACT])
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Cold, from the cache, several prompts at once, and as a second turn."""
    model = write_checkpoint(name, tmp_path, **(SERVED | SERVED_INEXACT)[name])
    prompts = [prompt_of(70), prompt_of(33), prompt_of(7)]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(18):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
            expected.append(tokens)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    exact = name in SERVED
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, exact=exact)

    for least_hit in (0, 64):
        outputs = llm.generate(prompts, params)
        for prompt, tokens, output in zip(prompts, expected, outputs, strict=True):
            assert list(output.token_ids) == tokens[len(prompt) : len(prompt) + 12]
        assert outputs[0].cache.read_tokens >= least_hit
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [second] = llm.generate([expected[0][:82]], params)

    assert list(second.token_ids) == expected[0][82:88]
    assert second.cache.read_tokens > 64


@pytest.mark.parametrize("name", REFUSED)
def test_models_without_a_shareable_prefix_are_refused_with_the_reason(
    name: str, tmp_path: Path
) -> None:
    """Other state than K/V, other masks, other attention: the error says which."""
    changes, reason = REFUSED[name]
    write_checkpoint(name, tmp_path, **changes)

    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        load_decoder(tmp_path, dtype="float32")

    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        ("XmodConfig", "XmodForCausalLM", "does not run with attention of its own"),
        ("Gemma4TextConfig", "Gemma4ForCausalLM", "heads of different sizes"),
        ("BertConfig", "BertForMaskedLM", "bidirectional"),
        ("ViTConfig", "ViTModel", "no causal decoder"),
        ("CLIPTextConfig", "CLIPTextModel", "no causal decoder"),
    ],
)
def test_models_that_the_adapter_cannot_drive_get_one_line(
    config: str, model: str, message: str, tmp_path: Path
) -> None:
    """Whatever transformers raises on the way, the error is ours and names the checkpoint."""
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES))
    made.save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModelError, match=message) as caught:
        load_decoder(tmp_path, dtype="float32")

    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_that_depend_on_the_batch_need_exact_false(tmp_path: Path) -> None:
    """Experts in one grouped GEMM: refused with exact=True, served without."""
    write_checkpoint("GraniteMoeForCausalLM", tmp_path, num_local_experts=4, num_experts_per_tok=2)

    with pytest.raises(UnsupportedModelError, match="--no-exact"):
        load_decoder(tmp_path, dtype="float32")
    decoder = load_decoder(tmp_path, dtype="float32", exact=False)

    assert decoder.config.num_layers == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "of-next-year", "architectures": ["NextForCausalLM"]}, "newer version"),
        (
            {
                "model_type": "custom",
                "architectures": ["CustomForCausalLM"],
                "auto_map": {"AutoConfig": "configuration_custom.CustomConfig"},
            },
            "code of its own",
        ),
    ],
)
def test_unknown_architectures_get_a_line_that_says_what_to_do(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A configuration that is too new, or one that brings code."""
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_config(tmp_path)

    assert "\n" not in str(caught.value)


def test_errors_of_ramifys_own_code_are_not_the_checkpoints(tmp_path: Path) -> None:
    """What transformers raises on a file is foreign; a wrong call is not, nor a callback's error."""
    with pytest.raises(Exception, match="config") as foreign:
        transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    with pytest.raises(TypeError) as wrong_call:
        transformers.AutoConfig.from_pretrained()
    with pytest.raises(ModelError) as callback:
        tree_map(read_config, [tmp_path])

    errors = (foreign, wrong_call, callback)
    assert [is_foreign(error.value) for error in errors] == [True, False, False]


def test_a_checkpoint_without_weights_is_a_model_error(tmp_path: Path) -> None:
    """Missing and truncated weight files are named."""
    write_checkpoint("PhiForCausalLM", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])

    with pytest.raises(ModelError) as caught:
        load_decoder(tmp_path, dtype="float32")

    assert isinstance(caught.value, CheckpointError)


def test_info_does_not_count_weights(tmp_path: Path) -> None:
    """They are transformers'; it says so, instead of none."""
    write_checkpoint("PhiForCausalLM", tmp_path)

    result = CliRunner().invoke(app, ["info", str(tmp_path), "--json"])

    assert json.loads(result.stdout)["weights"]["in all"] == "not counted: run by transformers"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_that_nothing_announces_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """transformers would cast them, and drop their scales."""
    write_checkpoint("PhiForCausalLM", tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.fc1.weight"
    tensors = load_file(file)
    scale = tensors[name].abs().max() / 100
    tensors |= {name: (tensors[name] / scale).to(dtype), f"{name}_scale": scale}
    save_file(tensors, file, metadata={"format": "pt"})

    with pytest.raises(UnsupportedModelError, match=rf"{name} is (F8_E4M3|I8); PhiForCausalLM"):
        load_decoder(tmp_path, dtype="float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 5000},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"num_attention_heads": 0},
        {"num_attention_heads": 10**9},
        {"attention_bias": "x"},
        {"dtype": "x"},
        {"dtype": 1e308},
        {"hidden_size": -1},
        {"max_position_embeddings": 10**9},
        {"vocab_size": 10**12},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": "awq"},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_damaged_settings_are_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever transformers raises of them, and however many layers it would make."""
    write_checkpoint("GPTNeoXForCausalLM", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    with pytest.raises(ModelError) as caught:
        load_decoder(tmp_path, dtype="float32")

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_norm_eps": float("nan")}, "not finite.*settings are damaged"),
        ({"hidden_act": 5}, "hidden_act.*mend that field, or download config.json again"),
    ],
)
def test_the_way_out_of_damaged_settings_is_not_another_version(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """transformers knows the architecture, so a newer one would not help."""
    write_checkpoint("GPTNeoXForCausalLM", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    with pytest.raises(UnsupportedModelError, match=message):
        load_decoder(tmp_path, dtype="float32")


def test_a_model_with_another_head_is_refused(tmp_path: Path) -> None:
    """transformers would make a random LM head for it, and answer nonsense."""
    write_checkpoint("PhiForCausalLM", tmp_path)
    config = transformers.PhiConfig(**SIZES)
    transformers.PhiForSequenceClassification(config).save_pretrained(tmp_path)

    with pytest.raises(CheckpointError, match=r"lacks 2 tensors .* lm_head.*PhiForSequenceClass"):
        load_decoder(tmp_path, dtype="float32")


def test_a_base_model_without_a_head_makes_vectors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Embedding checkpoints are saved so; a warning says that there is no LM head."""
    transformers.GPTNeoXModel(transformers.GPTNeoXConfig(**SIZES)).save_pretrained(tmp_path)

    load_decoder(tmp_path, dtype="float32")

    assert "has no LM head (GPTNeoXModel)" in caplog.text


FUZZED = ("GPTNeoXForCausalLM", "NemotronForCausalLM", "Ministral3ForCausalLM")
BAD_VALUES: tuple[Any, ...] = (
    "3", "x", "true", None, -1, 0, 1.5, 10**9, 10**400, float("nan"), [1], [], {}, True,
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [FUZZED[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FUZZED[1:])]
)
def test_bad_values_are_one_error_or_the_same_model(name: str, tmp_path: Path) -> None:
    """Every field in turn: read, or a ModelError of one line, whatever transformers raises of it."""
    write_checkpoint(name, tmp_path, **SERVED[name])
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    for field in written:
        for value in BAD_VALUES:
            file.write_text(json.dumps(written | {field: value}))
            message = ""
            try:
                read_config(tmp_path)
            except ModelError as error:
                message = str(error)
            assert "\n" not in message, (field, value)
            assert len(message) < 1500, (field, value)
