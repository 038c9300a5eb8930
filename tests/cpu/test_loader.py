"""Checkpoints: finding and reading them, and errors for broken ones."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ramify.attention.exactness import ProbeStore
from ramify.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from ramify.models.checkpoint.find import find_checkpoint
from ramify.models.checkpoint.tensors import load_weights
from ramify.models.configs.model_config import ModelConfig
from ramify.models.loader import load_model, read_config
from ramify.models.ops.quantized import as_tensor
from ramify.testing import write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def load(path: Path, config: ModelConfig | None = None) -> dict[str, torch.Tensor]:
    source = load_weights(path, config or read_config(path), dtype=torch.float32)
    return {name: as_tensor(weight) for name, weight in source.items()}


def rewrite(path: Path, **changes: Any) -> None:
    """Change tensors of a single-file checkpoint; None removes one."""
    weights: dict[str, Any] = load_file(path / "model.safetensors")
    weights |= {name.replace("__", "."): value for name, value in changes.items()}
    tensors = {name: value.clone() for name, value in weights.items() if value is not None}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def edit_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_shards_hold_what_a_single_file_holds(tmp_path: Path) -> None:
    """The number of files changes nothing."""
    single = write_tiny_checkpoint(tmp_path / "single", "qwen2")
    sharded = write_tiny_checkpoint(tmp_path / "sharded", "qwen2", shards=3)

    weights, sharded_weights = load(single), load(sharded)

    assert len(list(sharded.glob("*.safetensors"))) == 3
    assert weights.keys() == sharded_weights.keys()
    assert all(torch.equal(weights[name], sharded_weights[name]) for name in weights)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/maps")
def test_no_weight_is_mapped(tmp_path: Path) -> None:
    """A file that changes or shrinks later cannot end the process, nor count as its memory."""
    path = write_tiny_checkpoint(tmp_path, "llama")

    weights = load(path)

    assert weights
    assert str(path / "model.safetensors") not in Path("/proc/self/maps").read_text()


def test_weights_are_converted_when_asked(tmp_path: Path) -> None:
    """A bfloat16 checkpoint can be loaded as float32 or bfloat16."""
    path = write_tiny_checkpoint(tmp_path, "llama", dtype="bfloat16")
    config = read_config(path)

    assert config.torch_dtype == "bfloat16"
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_weights(path, config, dtype=dtype)
        assert {weight.dtype for weight in weights.values()} == {dtype}
    assert load_model(path, exact=False).dtype == torch.bfloat16
    assert load_model(path, dtype="float32", exact=False).dtype == torch.float32


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    """generation_config.json adds end tokens that config.json does not name."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    edit_json(path / "generation_config.json", eos_token_id=[5, 2])

    assert read_config(path).eos_token_ids == (2, 5)


def test_redundant_tensors_are_ignored(tmp_path: Path) -> None:
    """Rotary buffers of old files, and an lm_head equal to the embedding that it is tied to."""
    path = write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    rewrite(
        path,
        lm_head__weight=load(path)["model.embed_tokens.weight"],
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8),
    )

    assert "lm_head.weight" not in load(path)


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: both as they are stored, with a line in the log."""
    path = write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    plain = load_model(path, exact=False).config
    rewrite(path, lm_head__weight=torch.ones(300, 64))

    decoder = load_model(path, exact=False)

    assert plain.tie_word_embeddings
    assert not decoder.config.tie_word_embeddings
    assert "lm_head.weight that is not model.embed_tokens.weight" in caplog.text
    theirs = AutoModelForCausalLM.from_pretrained(path).lm_head.weight
    assert torch.equal(theirs, torch.ones(300, 64))
    assert torch.equal(load(path, decoder.config)["lm_head.weight"], torch.ones(300, 64))


def test_a_missing_head_is_the_embedding(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a line in the log; transformers draws one at random."""
    path = write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    rewrite(path, lm_head__weight=None)

    decoder = load_model(path, exact=False)

    assert decoder.config.tie_word_embeddings
    assert "has no lm_head.weight" in caplog.text


def test_a_missing_embedding_is_the_head_that_it_is_tied_to(tmp_path: Path) -> None:
    """As in transformers, which ties whichever of the two there is."""
    path = write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    head = load(path)["lm_head.weight"]
    rewrite(path, model__embed_tokens__weight=None)
    edit_json(path / "config.json", tie_word_embeddings=True)

    assert torch.equal(load(path)["model.embed_tokens.weight"], head)
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(theirs.model.embed_tokens.weight, head)


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """As in transformers: the index is a leftover, whether its shards exist or not."""
    path = write_tiny_checkpoint(tmp_path, "llama", shards=3)
    expected = {name: tensor + 1 for name, tensor in load(path).items()}
    save_file(expected, path / "model.safetensors")

    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(path).items())
    delete_shard(path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in load(path).items())


def truncate(path: Path) -> None:
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def empty_shard(path: Path) -> None:
    (path / "model-00002-of-00003.safetensors").write_bytes(b"")


def scramble_header(path: Path) -> None:
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(b"\xff" * 64 + shard.read_bytes()[64:])


def delete_shard(path: Path) -> None:
    (path / "model-00003-of-00003.safetensors").unlink()


def delete_index(path: Path) -> None:
    (path / INDEX).unlink()


def break_index(path: Path) -> None:
    (path / INDEX).write_text("{")


def empty_index(path: Path) -> None:
    (path / INDEX).write_text("{}")


def point_outside_the_directory(path: Path) -> None:
    shard_of = json.loads((path / INDEX).read_text())["weight_map"]
    edit_json(path / INDEX, weight_map=shard_of | {Q_PROJ: "../elsewhere.safetensors"})


def index_a_missing_tensor(path: Path) -> None:
    shard_of = json.loads((path / INDEX).read_text())["weight_map"]
    added = {"model.layers.9.x": "model-00001-of-00003.safetensors"}
    edit_json(path / INDEX, weight_map=shard_of | added)


def only_pickles(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")


def no_weights(path: Path) -> None:
    for file in path.glob("model*"):
        file.unlink()


def no_config(path: Path) -> None:
    (path / "config.json").unlink()


def config_is_a_list(path: Path) -> None:
    (path / "config.json").write_text("[]")


def config_is_binary(path: Path) -> None:
    (path / "config.json").write_bytes(b"\xff\xfe\x00")


def other_sizes(path: Path) -> None:
    edit_json(path / "config.json", hidden_size=128)


def more_layers(path: Path) -> None:
    edit_json(path / "config.json", num_hidden_layers=4)


def fewer_layers(path: Path) -> None:
    edit_json(path / "config.json", num_hidden_layers=2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model-00002-of-00003.safetensors is corrupt or truncated .*download"),
        (empty_shard, r"model-00002-of-00003.safetensors is corrupt or truncated"),
        (scramble_header, r"model-00002-of-00003.safetensors is corrupt or truncated"),
        (delete_shard, r"model-00003-of-00003.safetensors is missing \(1 of 3 shards"),
        (delete_index, rf"neither model.safetensors nor {INDEX}"),
        (break_index, rf"{INDEX} cannot be read"),
        (empty_index, "has no weight_map"),
        (point_outside_the_directory, "not a file name"),
        (index_a_missing_tensor, r"lacks the tensor model.layers.9.x"),
        (only_pickles, r"pickled weights only \(pytorch_model.bin\).*safetensors"),
        (no_weights, "has no weights"),
        (no_config, "config.json is missing"),
        (config_is_a_list, "config.json holds list, not an object"),
        (config_is_binary, "config.json cannot be read"),
        (other_sizes, r"has shape \[.*64.*\] but config.json asks for \[.*128.*\]"),
        (more_layers, r"lacks 9 of 39 tensors, the first is model.layers.3.self_attn.q_proj"),
        (fewer_layers, r"holds the tensor model.layers.2.* has no use for"),
    ],
)
def test_a_broken_checkpoint_gets_one_clear_error(
    tmp_path: Path, damage: Any, message: str
) -> None:
    """The message names the file, what is wrong and what to do."""
    path = write_tiny_checkpoint(tmp_path / "model", "llama", shards=3)
    damage(path)

    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(path, store=ProbeStore(None))

    assert str(path) in str(caught.value)


def test_a_wrong_shape_names_tensor_file_and_both_shapes(tmp_path: Path) -> None:
    """Weights of another model are detected before anything runs."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    rewrite(path, **{Q_PROJ.replace(".", "__"): torch.zeros(64, 32)})

    with pytest.raises(CheckpointError, match=r"\[64, 32\] but config.json asks for \[64, 64\]"):
        load(path)


def test_unexpected_weights_are_refused(tmp_path: Path) -> None:
    """Dropping a bias that the configuration does not have would change the answers."""
    path = write_tiny_checkpoint(tmp_path, "llama", attention_bias=True)
    edit_json(path / "config.json", attention_bias=False)

    with pytest.raises(CheckpointError, match=r"holds the tensor .*bias"):
        load(path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    """A quantised checkpoint without a quantization_config is recognised by its tensors."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    rewrite(path, **{Q_PROJ.replace(".", "__"): torch.zeros(64, 64, dtype=torch.int8)})

    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight is I8"):
        load(path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    """The message lists the supported dtypes."""
    path = write_tiny_checkpoint(tmp_path, "llama")
    wrong: Any = "float64"

    with pytest.raises(ConfigError, match="use auto, float32 or bfloat16"):
        load_model(path, dtype=wrong)


def test_directories_are_found(tmp_path: Path) -> None:
    """A local directory is returned as it is, given as string or path."""
    assert find_checkpoint(tmp_path) == tmp_path
    assert find_checkpoint(str(tmp_path)) == tmp_path


def test_a_cached_hub_model_is_found_by_its_name(tmp_path: Path) -> None:
    """The snapshot in the hub's cache; in a new process, as huggingface_hub reads HF_HUB_CACHE on import."""
    entry = tmp_path / "models--some--model"
    snapshot = write_tiny_checkpoint(entry / "snapshots" / ("0" * 40), "llama")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0" * 40)
    code = "from ramify.models.checkpoint.find import find_checkpoint; print(find_checkpoint('some/model'))"

    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HUB_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert Path(result.stdout.strip()).samefile(snapshot)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no directory"),
        ("/nowhere/at/all", "there is no directory"),
        ("some/long/path", "there is no directory"),
        ("", "there is no directory"),
        ("no spaces allowed", "no name of a hub model"),
        ("nobody/never-cached", "hf download nobody/never-cached"),
    ],
)
def test_a_missing_checkpoint_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    """No connection is opened; the message says what was looked for and what to do."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(CheckpointError, match=message):
        find_checkpoint(name, offline=True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "is an adapter.*merge_and_unload"),
        (["adapter_config.json", "config.json"], "is an adapter"),
        (["params.json", "consolidated.safetensors"], "Mistral's own format"),
        (["model_index.json"], "diffusers"),
    ],
)
def test_models_in_other_forms_are_named(files: list[str], message: str, tmp_path: Path) -> None:
    """The error says what the directory holds, and what makes a checkpoint of it."""
    for name in files:
        (tmp_path / name).write_bytes(b"{}")

    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint(tmp_path)

    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    """Naming the weights file instead of its directory raises."""
    path = write_tiny_checkpoint(tmp_path, "llama")

    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(path / "model.safetensors")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_headers_are_model_errors(seed: int, tmp_path: Path) -> None:
    """Bytes of the header changed, cut or added: a ModelError with the file's name, or the model loads."""
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False, num_hidden_layers=1)
    file = path / "model.safetensors"
    good, rng = file.read_bytes(), random.Random(seed)
    header_len = 8 + int.from_bytes(good[:8], "little")
    messages: list[str] = []
    for _ in range(60):
        body = bytearray(good)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(header_len)
            kind = rng.randrange(4)
            if kind == 0:
                body[at] = rng.randrange(256)
            elif kind == 1:
                del body[at : at + rng.choice((1, 3, 50))]
            elif kind == 2:
                body[at:at] = rng.randbytes(rng.choice((1, 3)))
            else:
                body = body[: rng.randrange(len(body))]
                break
        file.write_bytes(body)

        try:
            load_model(path, dtype="float32", ops="torch", store=ProbeStore(None), exact=False)
        except ModelError as error:
            messages.append(str(error))

    assert len(messages) > 40
    assert all(str(path) in message for message in messages)
