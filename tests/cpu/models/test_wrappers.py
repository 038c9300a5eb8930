"""Text decoders of models that also read images or audio, against transformers' whole model on text."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ramify.errors import ModelError, UnsupportedModelError
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.wrappers import SAME_AS, WRAPPERS, find_wrapper, text_fields
from ramify.models.loader import read_config
from tests.cpu.models.test_dense_families import NUM_TOKENS, logits_of, runner_of, token_ids_of

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 14,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}
AUDIO = {
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "encoder_layers": 1,
    "num_attention_heads": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
}
MULTI_AXIS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 500.0}
# Architecture -> settings of the text decoder, and of the encoder beside it. transformers 5 leaves out
# the `logit_scale` of Cohere's text decoders where it wraps them.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 6},
        {"vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "Mistral3ForConditionalGeneration": (
        {"head_dim": 16, "sliding_window": None},
        {"vision_config": {"model_type": "pixtral"} | VISION, "tie_word_embeddings": False},
    ),
    "LlavaForConditionalGeneration": ({}, {"vision_config": VISION}),
    "LlavaNextForConditionalGeneration": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": VISION},
    ),
    "LlavaOnevisionForConditionalGeneration": (
        {},
        {"vision_config": {"model_type": "siglip_vision_model"} | VISION},
    ),
    "InternVLForConditionalGeneration": (
        {},
        {"vision_config": VISION | {"image_size": [28, 28], "patch_size": [14, 14]}},
    ),
    "Idefics3ForConditionalGeneration": ({}, {"vision_config": VISION}),
    "SmolVLMForConditionalGeneration": ({}, {"vision_config": VISION}),
    "AyaVisionForConditionalGeneration": (
        {"sliding_window": 24, "logit_scale": 1.0},
        {"vision_config": {"model_type": "siglip_vision_model"} | VISION},
    ),
    "Cohere2VisionForConditionalGeneration": (
        {"sliding_window": 24, "logit_scale": 1.0},
        {"vision_config": {"model_type": "siglip_vision_model"} | VISION},
    ),
    "Qwen2VLForConditionalGeneration": (
        {"rope_parameters": MULTI_AXIS},
        {"vision_config": QWEN_VISION | {"hidden_size": 64}},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        {"rope_parameters": MULTI_AXIS},
        {"vision_config": QWEN_VISION, "tie_word_embeddings": True},
    ),
    "Qwen3VLForConditionalGeneration": (
        {"head_dim": 16, "rope_parameters": MULTI_AXIS},
        {"vision_config": QWEN_VISION},
    ),
    "Qwen2AudioForConditionalGeneration": ({}, {"audio_config": AUDIO}),
    "VoxtralForConditionalGeneration": ({"head_dim": 16}, {"audio_config": AUDIO}),
}


def write_wrapper(architecture: str, path: Path) -> Any:
    """Save a random model with transformers; returns it in float32 with eager attention."""
    row = WRAPPERS[architecture]
    text, others = CASES[architecture]
    text = {"model_type": row.text_type} | TEXT | text
    config = CONFIG_MAPPING[row.model_type](text_config=text, **others)
    config._attn_implementation = "eager"
    torch.manual_seed(len(architecture))
    model = getattr(transformers, architecture)(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, 0.0 if "Gemma" in architecture else 1.0, 0.3)
    model.save_pretrained(path)
    return model


def expected_logits(model: Any) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([token_ids_of(NUM_TOKENS)])).logits[0]
    return logits


def assert_near(path: Path, expected: Tensor) -> None:
    with torch.inference_mode():
        logits = logits_of(runner_of(path, "torch", "float32"), [NUM_TOKENS])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def edit_config(path: Path, changes: Mapping[str, Any]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_every_wrapper_has_a_case() -> None:
    """A row without a comparison with transformers is a claim."""
    assert set(CASES) == set(WRAPPERS)


@pytest.mark.parametrize("architecture", CASES)
def test_logits_of_text_are_those_of_the_whole_model(architecture: str, tmp_path: Path) -> None:
    """Only the text decoder is loaded; on text it computes what transformers' whole model does."""
    model = write_wrapper(architecture, tmp_path)

    config = read_config(tmp_path)

    assert config.wrapper == architecture
    assert config.is_native
    assert_near(tmp_path, expected_logits(model))


@pytest.mark.parametrize(
    "given", [{}, {"rope_parameters": {"rope_type": "default"}}, {"rope_theta": 777.0}]
)
@pytest.mark.parametrize("architecture", CASES)
def test_settings_that_files_leave_out_are_those_of_transformers(
    architecture: str, given: dict[str, Any]
) -> None:
    """A `text_config` without sizes, as published files have it, means transformers' defaults."""
    row = WRAPPERS[architecture]
    text = {"model_type": row.text_type} | given
    # transformers changes what it is given.
    config = CONFIG_MAPPING[row.model_type](text_config=copy.deepcopy(text))
    whole = config.text_config.to_dict() | {"model_type": row.text_type}
    sparse = {"architectures": [architecture], "text_config": text}

    got, expected = (
        ModelConfig.from_hf(text_fields(fields, "test", architecture, has_head=True), "test")
        for fields in (sparse, sparse | {"text_config": whole})
    )

    assert got == expected


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("vision_tower.", "model.vision_tower."),
    ],
)
def test_names_of_other_versions_are_the_same_tensors(old: str, new: str, tmp_path: Path) -> None:
    """transformers 4.52 to 4.57 saved the text decoder and the encoder under other prefixes."""
    expected = expected_logits(write_wrapper("LlavaForConditionalGeneration", tmp_path))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file, metadata={"format": "pt"})

    assert_near(tmp_path, expected)


def test_early_files_have_all_settings_side_by_side(tmp_path: Path) -> None:
    """Qwen2-VL of transformers 4: no `text_config`, and a rotary type of its own."""
    architecture = "Qwen2VLForConditionalGeneration"
    expected = expected_logits(write_wrapper(architecture, tmp_path))
    fields = json.loads((tmp_path / "config.json").read_text())
    flat = fields.pop("text_config") | fields
    flat |= {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "rope_theta": 500.0}
    del flat["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(flat))

    assert find_wrapper({"model_type": "qwen2_vl"}) == architecture
    assert_near(tmp_path, expected)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_head_in_the_files_counts_more_than_the_settings(has_head: bool, tmp_path: Path) -> None:
    """Published configurations say that embeddings are tied beside a head of its own."""
    architecture = "LlavaForConditionalGeneration"
    model = write_wrapper(architecture, tmp_path)
    expected = expected_logits(model)
    edit_config(tmp_path, {"tie_word_embeddings": True})
    if not has_head:
        file = tmp_path / "model.safetensors"
        tensors = load_file(file)
        del tensors["language_model.lm_head.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        model.lm_head.weight = model.get_input_embeddings().weight
        expected = expected_logits(model)

    assert_near(tmp_path, expected)


@pytest.mark.parametrize("of_text", [True, False])
def test_a_missing_head_is_tied_if_any_setting_says_so(of_text: bool, tmp_path: Path) -> None:
    """LLaVA-OneVision 0.5B says false, and true in `text_config`; its files have no head."""
    model = write_wrapper("LlavaOnevisionForConditionalGeneration", tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text["tie_word_embeddings"] = of_text
    edit_config(tmp_path, {"tie_word_embeddings": not of_text, "text_config": text})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    others = {name: tensor for name, tensor in tensors.items() if "lm_head" not in name}
    assert len(others) == len(tensors) - 1
    save_file(others, file, metadata={"format": "pt"})
    model.lm_head.weight = model.get_input_embeddings().weight

    assert_near(tmp_path, expected_logits(model))


def test_a_lost_head_is_the_embedding(tmp_path: Path) -> None:
    """Settings say that embeddings are not tied, and the head is not in the files."""
    model = write_wrapper("LlavaForConditionalGeneration", tmp_path)
    edit_config(tmp_path, {"tie_word_embeddings": False})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    model.lm_head.weight = model.get_input_embeddings().weight

    assert_near(tmp_path, expected_logits(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 5}, "text_config is 5; it must be an object"),
        (
            {"text_config": {"model_type": "mamba"}},
            "text decoder of kind 'mamba'.*gpt_oss.*qwen2_vl",
        ),
        ({"text_config": {"model_type": [1]}}, "text decoder of kind"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method 'hqq'"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings is 'true'"),
    ],
)
def test_settings_that_cannot_run_are_one_error(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The error names the file and the field, in one line."""
    write_wrapper("LlavaForConditionalGeneration", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(1)}, file)
    edit_config(tmp_path, changes)

    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_wrappers_are_refused_with_their_name(tmp_path: Path) -> None:
    """PaliGemma's prompts see all their tokens, later ones too: no prefix of them can be shared."""
    config = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(UnsupportedModelError, match="PaliGemmaForConditionalGeneration") as caught:
        read_config(tmp_path)

    assert "\n" not in str(caught.value)


def test_the_other_names_are_of_families() -> None:
    """Every text decoder of a wrapper leads to a family."""
    for architecture, row in WRAPPERS.items():
        fields = text_fields(
            {"text_config": {"model_type": row.text_type}}, "t", architecture, has_head=True
        )
        assert fields["model_type"] == SAME_AS.get(row.text_type, row.text_type)
