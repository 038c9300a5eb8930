"""GGUF files of every architecture: the configuration and logits of the checkpoint that they were made from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import CheckpointError, ModelError, UnsupportedModelError
from ramify.models.checkpoint.find import find_checkpoint
from ramify.models.checkpoint.sources import open_source
from ramify.models.configs.model_config import ModelConfig
from ramify.models.configs.pooling import PoolingConfig
from ramify.models.gguf.architectures import ARCHITECTURES
from ramify.models.gguf.config import read_pooling
from ramify.models.gguf.container import model_name, part_paths, read_container
from ramify.models.loader import load_model, read_config
from ramify.models.ops.quantized import QuantizedWeight
from tests.budget import examples
from tests.cpu.models.family_cases import write_checkpoint
from tests.cpu.models.gguf_files import NAMES, TYPES, gguf, write_gguf
from tests.cpu.models.test_dense_families import logits_of, runner_of

NUM_TOKENS = 70
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
# Widths that blocks of 32 divide.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
TIED = {"tie_word_embeddings": True}
# Cases of `family_cases`, and what GGUF cannot say otherwise.
CASES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama yarn": {},
    "Llama llama3": {"rope_parameters": LLAMA3, "head_dim": 32, "num_attention_heads": 4},
    "Llama bias": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Mixtral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {},
    "Qwen2Moe": EXPERTS | {"mlp_only_layers": []},
    "Qwen3Moe": EXPERTS | {"decoder_sparse_step": 1},
    "Gemma": TIED,
    "Gemma2": TIED | {"query_pre_attn_scalar": 16},
    "Gemma3": TIED
    | {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    },
    "Phi3": {},
    "Phi3 longrope": {},
    "GptOss": {},
    "Starcoder2": {"sliding_window": 4096},
    "StableLm": {},
    "StableLm parallel": {},
    "Olmo2": {},
    "Olmo3": {},
    "Olmoe": {},
    "Granite": {},
    "Cohere": TIED,
    "Cohere qk_norm": TIED,
    "Cohere2": TIED | {"num_hidden_layers": 5, "sliding_window_pattern": 4},
    "Glm4": {},
    "Glm4Moe": EXPERTS | {"n_shared_experts": 2, "first_k_dense_replace": 1},
    "Exaone4": {},
    "Exaone4 global": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "SmolLM3": {"num_hidden_layers": 4},
    "SeedOss": {},
    "HunYuanDenseV1": {},
    "HunYuanDenseV1 alpha": {},
}
OWN = {"Llama llama3": "Llama", "Llama bias": "Llama", "Exaone4 global": "Exaone4"}


def narrow(value: float) -> float:
    """The number of 32 bits that a file has for it."""
    return float(np.float32(value))


def comparable(config: ModelConfig) -> ModelConfig:
    """A configuration without what a GGUF file says in another way."""
    moe = config.moe and replace(config.moe, expert_format="separate")
    rope = replace(
        config.rope,
        theta=narrow(config.rope.theta),
        attention_factor=narrow(config.rope.attention_factor),
        pair_factors=tuple(map(narrow, config.rope.pair_factors)),
    )
    if rope.scaling in ("default", "linear"):
        rope = replace(rope, original_max_len=0)
    return replace(config, moe=moe, rope=rope, eos_token_ids=(), torch_dtype="")


def written(case: str, folder: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint of a case, and the GGUF file of the same values."""
    checkpoint, path = folder / "checkpoint", folder / "model.gguf"
    folder.mkdir(exist_ok=True)
    model = write_checkpoint(OWN.get(case, case), checkpoint, **SIZES | CASES[case])
    write_gguf(case.split(maxsplit=1)[0], model.config, checkpoint, path, **options)
    return checkpoint, path


def test_every_architecture_has_a_case() -> None:
    """A row without a case would be untested."""
    assert {NAMES[case.split()[0]] for case in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_checkpoint(case: str, tmp_path: Path) -> None:
    """The same configuration, and the same bits of logits, with tensors of eight types in one file."""
    checkpoint, path = written(case, tmp_path)
    expected, config = read_config(checkpoint), read_config(path)

    with torch.inference_mode():
        logits = logits_of(runner_of(path, "torch", "float32"), [NUM_TOKENS])
        theirs = logits_of(runner_of(checkpoint, "torch", "float32"), [NUM_TOKENS])

    assert comparable(config) == comparable(expected)
    assert torch.equal(logits, theirs)


def test_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    """Each part names the model; a directory with all of them too."""
    checkpoint, _ = written("Llama", tmp_path / "whole", num_parts=3)
    folder = tmp_path / "whole"

    with torch.inference_mode():
        expected = logits_of(runner_of(checkpoint, "torch", "float32"), [NUM_TOKENS])
        for name in ("model-00001-of-00003.gguf", "model-00003-of-00003.gguf"):
            logits = logits_of(runner_of(folder / name, "torch", "float32"), [NUM_TOKENS])

            assert torch.equal(logits, expected)

    assert find_checkpoint(folder) == folder / "model-00001-of-00003.gguf"


def test_a_bfloat16_file_is_computed_in_bfloat16(tmp_path: Path) -> None:
    """Without quantised types the file has the dtype of its checkpoint."""
    _, path = written("Llama", tmp_path, types=("BF16",))
    _, quantised = written("Llama", tmp_path / "other", types=("BF16", "Q8_0"))

    assert read_config(path).torch_dtype == "bfloat16"
    assert read_config(quantised).torch_dtype == "float32"


def test_kinds_and_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    """Names of types in ggml; every tensor of the file counts once."""
    _, path = written("GptOss", tmp_path)
    source = open_source(path, read_config(path), dtype=torch.float32)

    kinds = {name: source.kind(name) for name in source}
    held = sum(info.num_bytes for info in read_container(path).tensors.values())

    assert kinds["model.norm.weight"] == "F32"
    assert kinds["model.embed_tokens.weight"] in TYPES
    assert sum(map(source.num_bytes, source)) == held
    assert not source.widened
    for name in source:
        assert source.shape(name) == tuple(source[name].shape)


def test_matrices_stay_quantised(tmp_path: Path) -> None:
    """Rows of q and k are put in order without touching their blocks."""
    _, path = written("Llama", tmp_path, types=("Q4_0",))
    source = open_source(path, read_config(path), dtype=torch.float32)

    weight = source["model.layers.0.self_attn.q_proj.weight"]

    assert isinstance(weight, QuantizedWeight)
    assert weight.format.bits == 4


def changed(path: Path, **keys: Any) -> None:
    """Write a file again with other keys; None leaves one out."""
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(path.with_suffix(".tmp"), architecture)
    values = {
        name: (field.types[0], field.contents())
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    kinds |= {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL}
    for name, value in keys.items():
        full = name.replace("__", ".")
        values.pop(full, None)
        if value is not None:
            kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else kinds[type(value)]
            values[full] = kind, value
    for name, (kind, value) in values.items():
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".tmp").replace(path)


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"llama__block_count": None}, CheckpointError, "llama.block_count: expected an integer"),
        ({"llama__block_count": 0}, CheckpointError, "0 layers of 4 heads"),
        ({"llama__block_count": 1 << 31}, CheckpointError, "2147483648 layers of 4 heads.* 1 to 10000"),
        ({"llama__attention__key_length": 0}, CheckpointError, "4 heads of 0 of 64 dimensions"),
        ({"llama__rope__scaling__type": [1, 2]}, CheckpointError, "type: expected a text, found"),
        ({"split__no": [0, 0]}, CheckpointError, "split.no: expected an integer, found"),
        ({"llama__block_count": 4}, CheckpointError, "lacks 9 of 39 tensors, the first is model.la"),
        ({"llama__embedding_length": "wide"}, CheckpointError, "llama.embedding_length: expected"),
        ({"llama__embedding_length": 96}, CheckpointError, "embed_tokens.weight: expected the shape"),
        ({"llama__context_length": 0}, CheckpointError, "max_position_embeddings is 0"),
        ({"llama__attention__head_count": 0}, CheckpointError, "0 heads"),
        ({"llama__attention__head_count_kv": 3}, CheckpointError, "no multiple"),
        ({"llama__attention__value_length": 8}, UnsupportedModelError, "only equal lengths"),
        ({"llama__attention__causal": False}, UnsupportedModelError, "only decoders run"),
        ({"llama__attention__clamp_kqv": 8.0}, UnsupportedModelError, "llama.attention.clamp_kqv is 8"),
        ({"llama__rope__dimension_count": 8}, UnsupportedModelError, "rotates them all"),
        ({"llama__rope__scaling__type": "ntk"}, UnsupportedModelError, "rope.scaling.type is 'ntk'"),
        ({"llama__rope__freq_base": 0.0}, CheckpointError, "rope_theta is 0"),
        ({"llama__expert_count": 4}, CheckpointError, "num_experts_per_tok is 0"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(
    keys: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Values that are missing, impossible, or of an arithmetic that is not ours."""
    _, path = written("Llama", tmp_path)
    changed(path, **keys)

    with pytest.raises(error, match=message):
        load_model(path, ops="torch")


def test_settings_of_no_use_are_ignored(tmp_path: Path) -> None:
    """A pooling type that is a list; a scale of 0, which is none."""
    _, path = written("Gemma3", tmp_path)
    expected = read_config(path)
    changed(path, gemma3__pooling_type=[1, 2], gemma3__attention__scale=0.0)

    assert read_pooling(path) == PoolingConfig()
    assert read_config(path) == expected


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    """With those that are read."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with pytest.raises(UnsupportedModelError, match=r"is 'mamba', which is not read.*llama, qwen2"):
        read_config(path)


@pytest.mark.parametrize("name", ["M.GGUF", "sha256-7f3a"])
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    """As blobs of other programs are stored, without a suffix."""
    checkpoint, path = written("Llama", tmp_path)
    other = path.rename(tmp_path / name)

    assert find_checkpoint(other) == other
    assert read_config(other).hidden_size == read_config(checkpoint).hidden_size


def test_the_suffix_may_have_capital_letters(tmp_path: Path) -> None:
    """In a directory, of parts, and where a server names its model."""
    names = [f"M-{part:05}-of-00002.GGUF" for part in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")

    assert find_checkpoint(tmp_path) == tmp_path / names[0]
    assert [path.name for path in part_paths(tmp_path / names[1])] == names
    assert {model_name(Path(name)) for name in (*names, "M.GGUF", "M.gguf", "M")} == {"M"}


def test_a_directory_has_one_model(tmp_path: Path) -> None:
    """Several are refused with their names; so is a file of another kind."""
    for name in ("b.gguf", "a.gguf", "mmproj-a.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "model.bin").touch()

    with pytest.raises(CheckpointError, match=r"has 2 models in GGUF: a.gguf, b.gguf; name one"):
        find_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"is a file, and not in GGUF"):
        find_checkpoint(tmp_path / "model.bin")
    # Not looked for among hub models.
    with pytest.raises(CheckpointError, match=r"there is no file 'absent.gguf'; name a GGUF"):
        find_checkpoint("absent.gguf")
    with pytest.raises(CheckpointError, match="there is no directory"):
        find_checkpoint("a\0b", offline=True)
    (tmp_path / "b.gguf").unlink()
    assert find_checkpoint(tmp_path) == tmp_path / "a.gguf"


byte_changes = st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 255))


@settings(max_examples=examples(400), deadline=None)
@given(changes=st.lists(byte_changes, min_size=1, max_size=3))
@example(changes=[(339, 0)])  # a rope base of 2e-38
def test_a_changed_header_is_read_or_refused(
    changes: list[tuple[int, int]],
    tiny_file: tuple[bytes, int],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Bytes of a model's header overwritten: a model with all tensors, or an error of ours."""
    raw, start = tiny_file
    changed_bytes = bytearray(raw)
    for at, value in changes:
        changed_bytes[at % start] = value
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(changed_bytes)

    with suppress(ModelError):
        Tokenizer.load(path)
    with suppress(ModelError):
        config = read_config(path)
        source = open_source(path, config, dtype=torch.float32)
        assert [source.shape(name) for name in source] == list(config.tensor_shapes().values())


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """A model's file with a tokenizer, and the bytes of its header."""
    place = tmp_path_factory.mktemp("tiny")
    _, path = written("Llama llama3", place)
    changed(path, tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="smollm")
    with_tokens(path)
    start = min(info.start for info in read_container(path).tensors.values())
    return path.read_bytes(), start


def with_tokens(path: Path) -> None:
    """Add the arrays of a small vocabulary."""
    arrays = {
        "tokens": ["a", "b", "ab", "<s>"],
        "token_type": [1, 1, 1, 3],
        "merges": ["a b"],
    }
    changed(path, **{f"tokenizer__ggml__{name}": values for name, values in arrays.items()})
