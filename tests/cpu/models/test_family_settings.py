"""Fields of `config.json` that few checkpoints have, or that old ones spell otherwise, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify.errors import CheckpointError, ModelError
from ramify.models.loader import load_model, read_config
from tests.cpu.models.family_cases import WINDOW, write_checkpoint
from tests.cpu.models.test_dense_families import NUM_TOKENS, logits_of, runner_of, token_ids_of

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE_FACTORS = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i / 3 for i in range(8)],
}
LONGROPE = LONGROPE_FACTORS | {"original_max_position_embeddings": 64}
NESTED = {"full_attention": {"rope_type": "default"}, "sliding_attention": None}
ABSENT = object()
# Case of `family_cases`, and what is changed in its config.json.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "legacy gelu": ("Gemma", {"hidden_act": "gelu"}),
    "windows of layers without rope": (
        "SmolLM3",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ABSENT},
    ),
    "windows of every other layer": (
        "Qwen2Moe",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
            "layer_types": ABSENT,
        },
    ),
    "windows switched off": ("Qwen3Moe", {"use_sliding_window": False, "sliding_window": WINDOW}),
    "windows switched on": ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "a fixed period": ("Gemma2", {"sliding_window_pattern": 3, "layer_types": ABSENT}),
    "another MLP width": ("GraniteMoeHybrid", {"shared_intermediate_size": 48}),
    "alpha of another family": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "alpha": 50.0}},
    ),
    "a base for local layers": (
        "Gemma3",
        {"rope_parameters": NESTED, "rope_theta": 500.0, "rope_local_base_freq": 70.0},
    ),
    "no base for local layers": ("Gemma3", {"rope_parameters": NESTED, "rope_theta": 500.0}),
    "one base, scaled in some layers": (
        "Olmo3",
        {"rope_parameters": ABSENT, "rope_theta": 500_000.0, "rope_scaling": YARN},
    ),
    "no base": ("Olmo3", {"rope_parameters": ABSENT}),
    "no original length beside Phi-3's rope": (
        "Phi3 longrope",
        {"original_max_position_embeddings": ABSENT},
    ),
    "an original length in the rope of others": ("Qwen2", {"rope_parameters": LONGROPE}),
    "no original length of others": (
        "Qwen2",
        {"rope_parameters": ABSENT, "rope_scaling": LONGROPE_FACTORS},
    ),
    "original lengths of others in both places": (
        "Qwen2",
        {"original_max_position_embeddings": 32, "rope_parameters": LONGROPE},
    ),
}
IMPOSSIBLE_ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn of base 1": ("Llama", YARN | {"rope_theta": 1.0}),
    "yarn's turns": ("Llama", YARN | {"beta_fast": 1e308}),
    "longrope of one position": ("Qwen2", LONGROPE | {"original_max_position_embeddings": 1}),
    "a factor beyond floats": ("Qwen2", LONGROPE | {"long_factor": [10**400] * 8}),
    "alpha": ("HunYuanDenseV1", {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e308}),
    "a layer type": ("Gemma3", {"full_attention": 5, "sliding_attention": {"rope_theta": 9.0}}),
    "the other layer type": ("Gemma3", {"full_attention": {}, "sliding_attention": "x"}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("Mixtral", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; experts have only silu"),
    "bidirectional": ("Gemma", {"use_bidirectional_attention": True}, "use_bidirectional"),
    "cap": ("Gemma3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0"),
    "no window": ("Gemma2", {"sliding_window": None}, "sliding_window is null"),
    "no period": (
        "Exaone4",
        {"layer_types": ABSENT, "sliding_window_pattern": "LLLG"},
        "'LLLG'.*layer_types",
    ),
    "linear": (
        "Phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "supported are default, longrope",
    ),
    "early yarn": ("Phi3", {"rope_parameters": YARN}, "short_factor must be a list"),
    "no MLP width": (
        "GraniteMoeHybrid",
        {"shared_intermediate_size": ABSENT},
        "shared_intermediate_size is missing",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE_ROPES)
def test_impossible_rotary_settings_are_one_error(name: str, tmp_path: Path) -> None:
    """Logarithms of nothing, powers beyond floats, settings of a layer type that are no object."""
    case, settings = IMPOSSIBLE_ROPES[name]
    write_checkpoint(case, tmp_path)
    change_config(tmp_path, {"rope_parameters": settings})
    with pytest.raises(CheckpointError, match="rotary settings"):
        read_config(tmp_path)


def change_config(path: Path, changes: dict[str, Any]) -> None:
    """Change or remove fields of a checkpoint's config.json."""
    file = path / "config.json"
    fields = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in fields.items() if v is not ABSENT}))


@pytest.mark.parametrize("name", CHANGES)
def test_settings_mean_what_they_mean_to_transformers(name: str, tmp_path: Path) -> None:
    """Logits of a random model of the changed configuration are within 1e-4 of the largest."""
    case, changes = CHANGES[name]
    write_checkpoint(case, tmp_path)
    change_config(tmp_path, changes)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    written = (tmp_path / "config.json").read_text()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(written)

    with torch.inference_mode():
        expected = model(torch.tensor([token_ids_of(NUM_TOKENS)])).logits[0]
        logits = logits_of(runner_of(tmp_path, "torch", "float32"), [NUM_TOKENS])

    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_be_ignored_are_refused(name: str, tmp_path: Path) -> None:
    """The error names the field and the file, in one line."""
    case, changes, message = REFUSED[name]
    write_checkpoint(case, tmp_path)
    change_config(tmp_path, changes)

    with pytest.raises(ModelError, match=message) as caught:
        read_config(tmp_path)

    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_draft_layers_behind_the_last_are_skipped(tmp_path: Path) -> None:
    """GLM-4-MoE checkpoints end with a multi-token-prediction layer, which no answer needs."""
    write_checkpoint("Glm4Moe", tmp_path)
    file = tmp_path / "model.safetensors"
    drafts = {
        "model.layers.4.eh_proj.weight": torch.zeros(60, 120),
        "model.layers.4.mlp.experts.0.up_proj.weight": torch.zeros(40, 60),
    }
    save_file(load_file(file) | drafts, file, metadata={"format": "pt"})

    decoder = load_model(tmp_path, dtype="float32", ops="torch")

    assert decoder.config.num_layers == 4
