"""Embeddings of prompts against transformers, cold and from the cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ramify import LLM
from tests.cpu.models.family_cases import VOCAB_SIZE, write_checkpoint
from tests.cpu.models.test_hf_adapter import write_checkpoint as write_adapter_checkpoint

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")


@pytest.mark.parametrize("case", ["Qwen3", "Gemma3", "PhiForCausalLM"])
def test_embeddings_are_the_last_hidden_states(case: str, tmp_path: Path) -> None:
    """Of transformers, scaled to length 1: alone, in a batch and behind a cached prefix."""
    write = write_adapter_checkpoint if case.endswith("ForCausalLM") else write_checkpoint
    model = write(case, tmp_path)
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCAB_SIZE, (64,), generator=generator).tolist()
    prompts = [[*shared, 7, 8], [*shared, 9], [5], shared]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            hidden = model.get_decoder()(torch.tensor([prompt])).last_hidden_state[0, -1]
            expected.append((hidden / hidden.norm()).numpy())
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)

    batch = llm.embed(prompts)
    warm = llm.embed(prompts)
    alone = np.concatenate([llm.embed(prompt) for prompt in prompts])

    assert np.abs(batch - np.array(expected)).max() < 1e-5
    assert batch.tobytes() == warm.tobytes() == alone.tobytes()


def test_no_prompts_have_no_embeddings(tmp_path: Path) -> None:
    """An empty list gives an array without rows, as `generate` gives an empty list."""
    write_checkpoint("Qwen3", tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)

    vectors = llm.embed([])

    assert vectors.shape == (0, llm.engine.model_config.hidden_size)


def test_a_base_checkpoint_without_prefix_and_head_embeds(tmp_path: Path) -> None:
    """Tensors as Qwen3-Embedding names them: `layers.0…` without `model.`, tied, no head."""
    model = write_checkpoint("Qwen3", tmp_path)
    from safetensors.torch import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    config = (tmp_path / "config.json").read_text()
    assert head.shape[0] == VOCAB_SIZE
    (tmp_path / "config.json").write_text(
        config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})

    vector = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024).embed([5, 6, 7])[0]

    with torch.inference_mode():
        hidden = model.get_decoder()(torch.tensor([[5, 6, 7]])).last_hidden_state[0, -1]
    assert np.abs(vector - (hidden / hidden.norm()).numpy()).max() < 1e-5
