"""Embeddings as the files of sentence-transformers in a checkpoint say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ramify import LLM
from ramify.errors import (
    CheckpointError,
    InvalidParamsError,
    ModelError,
    PromptPoolingError,
    UnsupportedModelError,
)
from ramify.models.configs.pooling import read_pooling
from tests.cpu.models.family_cases import VOCAB_SIZE, write_checkpoint

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra ramify[hf]")

FLAGS = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
QUERY = "Instruct: find it\nQuery:"


def write_pooling(path: Path, *modes: str, modules: tuple[str, ...] = ("Normalize",)) -> None:
    """The files that sentence-transformers saves beside a model."""
    path.mkdir(exist_ok=True)
    kinds = ("Transformer", "Pooling", *modules)
    rows = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(rows))
    (path / "1_Pooling").mkdir(exist_ok=True)
    flags: dict[str, Any] = {f"pooling_mode_{name}": name in modes for name in FLAGS}
    flags |= {"word_embedding_dimension": 60, "include_prompt": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(flags))


def pooled(model: Any, prompt: list[int], mode: str) -> NDArray[np.float64]:
    with torch.inference_mode():
        hidden = model.get_decoder()(torch.tensor([prompt])).last_hidden_state[0].double()
    rows = {"cls_token": hidden[:1], "mean_tokens": hidden, "lasttoken": hidden[-1:]}[mode]
    return np.asarray(rows.mean(0))


@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens", "lasttoken"])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_vectors_are_pooled_as_the_checkpoint_says(
    mode: str, is_normalised: bool, tmp_path: Path
) -> None:
    """Cold, warm, alone and however the prompt is cut: the same bits; equal to transformers."""
    model = write_checkpoint("Qwen3", tmp_path)
    write_pooling(tmp_path, mode, modules=("Normalize",) if is_normalised else ())
    generator = torch.Generator().manual_seed(0)
    shared = torch.randint(3, VOCAB_SIZE, (150,), generator=generator).tolist()
    prompts = [[*shared, 7, 8], [*shared, 9], [5], shared]
    expected = np.stack([pooled(model, prompt, mode) for prompt in prompts])
    if is_normalised:
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)
    small = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024, max_batch_tokens=64)

    cold = llm.embed(prompts)
    warm = llm.embed(prompts)
    chunked = small.embed(prompts)

    assert np.abs(cold - expected).max() < 1e-5 * np.abs(expected).max()
    assert cold.tobytes() == warm.tobytes() == chunked.tobytes()


def test_only_the_last_token_needs_no_other(tmp_path: Path) -> None:
    """`lasttoken` reads the cache; the mean computes every token, says so, and leaves them cached."""
    write_checkpoint("Qwen3", tmp_path)
    write_pooling(tmp_path, "mean_tokens")
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)
    from ramify.engine.embedding import embedding_params

    prompt = [*range(3, 103)]

    reports = [
        llm.generate([prompt], embedding_params(mode))[0].cache for mode in ("mean", "mean", "last")
    ]

    assert [report.read_tokens for report in reports] == [0, 0, 96]
    assert "mean pooling" in str(reports[1].reason)
    assert reports[2].reason is None


@pytest.mark.parametrize(
    ("modes", "modules", "message"),
    [
        (("max_tokens",), (), "max_tokens"),
        (("weightedmean_tokens",), (), "weightedmean_tokens"),
        (("mean_tokens", "lasttoken"), (), "mean_tokens and lasttoken"),
        ((), (), "none"),
        (("lasttoken",), ("Dense", "Normalize"), "module Dense"),
    ],
)
def test_other_poolings_are_refused_when_they_are_used(
    modes: tuple[str, ...], modules: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    """With the file and what it says; the model still generates."""
    write_checkpoint("Qwen3", tmp_path)
    write_pooling(tmp_path, *modes, modules=modules)
    llm = LLM(str(tmp_path), dtype="float32", kv_cache_tokens=1024)

    with pytest.raises(UnsupportedModelError, match=message) as caught:
        llm.embed([[5, 6]])
    [output] = llm.generate([[5, 6]])

    assert str(tmp_path) in str(caught.value)
    assert len(output.token_ids) > 0


@pytest.mark.parametrize(
    ("value", "mode"), [("mean", "mean"), (["lasttoken"], "last"), ("cls", "cls")]
)
def test_a_mode_by_its_name(value: Any, mode: str, tmp_path: Path) -> None:
    """`pooling_mode`, which newer files have in place of the flags; without modules.json too."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": value}))

    pooling = read_pooling(tmp_path)

    assert (pooling.mode, pooling.is_normalised, pooling.refusal) == (mode, True, None)


def test_no_files_mean_the_last_token(tmp_path: Path) -> None:
    """As before: the last hidden state with length 1."""
    pooling = read_pooling(tmp_path)

    assert (pooling.mode, pooling.is_normalised, pooling.prompt_text(None)) == ("last", True, "")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", {}, "not a module"),
        ("modules.json", [{"type": 3}], "not a module"),
        ("modules.json", [{"type": "x.Pooling", "path": "../secrets"}], "not a module"),
        ("modules.json", [{"type": "x.Pooling", "path": "/secrets"}], "not a module"),
        ("1_Pooling/config.json", [], "not an object"),
        ("1_Pooling/config.json", {"pooling_mode_lasttoken": "yes"}, "'yes'; it must be true or"),
        ("1_Pooling/config.json", {"include_prompt": 2}, "include_prompt is 2"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, "prompts is"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts is"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "'a', which prompts"),
        ("config_sentence_transformers.json", {"default_prompt_name": [1]}, "which prompts"),
    ],
)
def test_damaged_files_are_named(file: str, content: Any, message: str, tmp_path: Path) -> None:
    """One line with the file and the value."""
    write_pooling(tmp_path, "lasttoken")
    (tmp_path / file).write_text(json.dumps(content))

    with pytest.raises(CheckpointError, match=message) as caught:
        read_pooling(tmp_path)

    assert file in str(caught.value)
    assert isinstance(caught.value, ModelError)


def test_prompts_go_before_texts(tmp_path: Path) -> None:
    """The default one, or one by name; an unknown name is refused with those there are."""
    write_pooling(tmp_path, "lasttoken")
    prompts = {"query": QUERY, "document": ""}
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "query"}))

    pooling = read_pooling(tmp_path)

    assert pooling.prompt_text(None) == pooling.role_text("passage") == QUERY
    assert pooling.prompt_text("document") == pooling.role_text("document", "passage") == ""
    with pytest.raises(InvalidParamsError, match=r"'passage'.*'query', 'document'"):
        pooling.prompt_text("passage")


def test_a_mean_without_its_prompt_is_refused(tmp_path: Path) -> None:
    """`include_prompt: false` leaves the prompt's tokens out of the mean; no vector without that."""
    write_pooling(tmp_path, "mean_tokens")
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))
    prompts = {"query": QUERY, "document": ""}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))

    pooling = read_pooling(tmp_path)

    assert pooling.prompt_text(None) == pooling.prompt_text("document") == ""
    with pytest.raises(InvalidParamsError, match=r"must be 'document' or None: .*include_prompt"):
        pooling.prompt_text("query")


def test_the_error_of_a_prompt_that_nobody_named_names_no_parameter(tmp_path: Path) -> None:
    """The default prompt, and those of queries and documents, come from the checkpoint."""
    write_pooling(tmp_path, "mean_tokens")
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"include_prompt": False}))
    settings = {"prompts": {"query": QUERY}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))

    pooling = read_pooling(tmp_path)

    for text_of in (lambda: pooling.prompt_text(None), lambda: pooling.role_text("query")):
        with pytest.raises(
            PromptPoolingError, match=r"'query'.*include_prompt.*token ids"
        ) as caught:
            text_of()
        assert "prompt_name" not in str(caught.value)
