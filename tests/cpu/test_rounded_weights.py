"""The option `quantize`: what is rounded and what is not, refusals, equal bits, and what is said of the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ramify import LLM
from ramify.attention.exactness import ProbeStore, cache_folder
from ramify.cli import app
from ramify.engine.exactness_check import ExactnessCheck, random_prompts
from ramify.engine.execution.weight_loss import (
    STORE,
    LossSum,
    WeightLoss,
    known_loss,
    loss_key,
    text_logits,
    write_rows,
)
from ramify.errors import CheckpointError, ConfigError
from ramify.models.checkpoint.changed_weights import (
    INT8_GROUP,
    ChangedWeights,
    change_weights,
    is_rounded,
)
from ramify.models.checkpoint.loaded_weights import LoadedWeight, weight_figures
from ramify.models.checkpoint.sources import open_source
from ramify.models.checkpoint.weight_source import WeightSource
from ramify.models.configs.model_config import ModelConfig
from ramify.models.loader import load_model, read_config
from ramify.models.ops.quantized import QuantizedWeight, as_tensor
from ramify.models.ops.weight_rounding import quantize_weight
from ramify.testing import write_tiny_checkpoint
from tests.cpu.models.family_cases import CASES, SIZES

# Matrices that are no linear layers, or gates of experts.
NO_LINEARS = (
    ".gate.weight",
    ".router.weight",
    "expert_gate.weight",
    "q_norm.weight",
    "k_norm.weight",
)
PARTS = ("attention", "experts", "MLP")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("rounded"), "llama")


def opened(path: Path) -> tuple[WeightSource, ModelConfig]:
    """The float32 weights of a checkpoint, and its configuration."""
    config = read_config(path)
    return open_source(path, config, dtype=torch.float32), config


@pytest.mark.parametrize(("quantize", "bits"), [("int4", 4), ("int8", 8)])
def test_linear_layers_are_rounded_and_nothing_else_is(
    checkpoint: Path, quantize: str, bits: Any
) -> None:
    """Embedding and LM head have 8 bits; norms are as they were; what is read twice is the same."""
    source, config = opened(checkpoint)

    rounded = change_weights(source, config, quantize, "model")

    assert [*rounded] == [*source]
    for name in rounded:
        weight, original = rounded[name], as_tensor(source[name])
        if original.dim() == 1:
            assert torch.equal(as_tensor(weight), original)
            assert rounded.kind(name) == source.kind(name)
            continue
        is_table = name in ("model.embed_tokens.weight", "lm_head.weight")
        is_wide = is_table or bits == 8
        form = ("int8", INT8_GROUP) if is_wide else ("int4", 32)
        expected = quantize_weight(original, 8 if is_wide else 4, form[1])
        assert isinstance(weight, QuantizedWeight)
        assert weight.format == expected.format
        assert torch.equal(weight.codes, expected.codes)
        assert rounded.kind(name) == f"F32 to {form[0]}, groups of {form[1]}"
        assert rounded.shape(name) == weight.shape


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mlp.experts.3.gate_proj", True),
        ("mlp.experts.gate_up_proj", True),
        ("self_attn.qkv_proj", True),
        ("mlp.c_fc", True),
        ("mlp.c_proj", True),
        ("self_attn.kv_a_proj_with_mqa", True),
        ("mlp.gate", False),
        ("mlp.shared_expert_gate", False),
        ("self_attn.q_norm", False),
        ("self_attn.kv_b_proj", False),
        ("self_attn.indexer.weights_proj", False),
    ],
)
def test_gates_and_what_is_used_by_head_are_not_rounded(
    checkpoint: Path, name: str, expected: bool
) -> None:
    """Linear layers of all families are, and their experts."""
    assert is_rounded(f"model.layers.0.{name}.weight", read_config(checkpoint)) is expected


@pytest.mark.parametrize("case", CASES)
def test_no_family_names_its_linear_layers_in_another_way(case: str) -> None:
    """Of all matrices, gates and norms of heads alone stay as they are, and are counted as such or with their layer."""
    architecture = f"{case.split(maxsplit=1)[0]}ForCausalLM"
    fields = SIZES | CASES[case] | {"architectures": [architecture]}
    config = ModelConfig.from_hf(fields, "config.json")
    matrices = {name: shape for name, shape in config.tensor_shapes().items() if len(shape) == 2}

    linears = {name for name in matrices if not name.endswith(NO_LINEARS)}

    assert {name for name in matrices if is_rounded(name, config)} == linears
    weights = {name: LoadedWeight("F32", "float32", matrices[name], 0) for name in linears}
    assert weight_figures(weights).keys() <= {"in all", "embedding, LM head", *PARTS}


@pytest.mark.parametrize("damage", [torch.inf, torch.nan])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path: Path, damage: float) -> None:
    """A norm's is not looked at: it is not rounded."""
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    tensors, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = damage
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(CheckpointError, match=f"{name} has an infinity or a NaN, which int4"):
        load_model(path, quantize="int4", ops="torch", store=ProbeStore(None))


def test_a_quantised_checkpoint_is_refused(checkpoint: Path) -> None:
    """With the types that it has; `widen` and `off` take it."""
    source, config = opened(checkpoint)
    kinds: Callable[[str, str], str] = lambda name, kind: "Q4_K" if "mlp" in name else kind  # noqa: E731
    quantized = ChangedWeights(source, lambda _, weight: weight, kinds)

    for option in ("off", "widen"):
        assert [*change_weights(quantized, config, option, "m.gguf")] == [*source]
    with pytest.raises(
        ConfigError, match=r"quantize='int8', but m\.gguf is quantised already \(Q4_K\)"
    ):
        change_weights(quantized, config, "int8", "m.gguf")


@pytest.mark.parametrize("ops", ["auto", "torch"])
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_every_way_of_computing_gives_the_same_bits(
    checkpoint: Path, quantize: str, ops: str
) -> None:
    """Cold, warm, chunked, batched and preempted."""
    llm = LLM(checkpoint, quantize=quantize, ops=ops, kv_cache_tokens=2048)
    prompts = random_prompts(3, llm.engine.model_config.vocab_size, llm.config.max_model_len)

    ways = {way.name: way for way in ExactnessCheck(llm, prompts, 4).scenarios()}

    assert all(way.differences == [] for way in ways.values())
    assert ways["warm"].read_tokens
    assert ways["chunked"].num_logits


def test_the_cache_tells_roundings_apart(checkpoint: Path) -> None:
    """A prefix of one is none of another; nothing is widened here."""
    options = ("off", "int8", "int4", "widen")

    off, int8, int4, widen = (
        LLM(checkpoint, quantize=option, ops="torch", kv_cache_tokens=64).core.namespaces.base
        for option in options
    )

    assert len({off, int8, int4}) == 3
    assert widen == off


def test_widened_weights_are_those_that_are_not_quantised(checkpoint: Path) -> None:
    """Bit for bit, of a checkpoint in full precision."""
    models = [
        load_model(checkpoint, quantize=option, ops="torch", store=ProbeStore(None))
        for option in ("off", "widen")
    ]

    tokens = torch.arange(9)
    assert torch.equal(*(model.embedding(tokens) for model in models))


def run(*args: str) -> Any:
    """The result of a command line."""
    return CliRunner().invoke(app, [*args])


def test_info_says_bits_per_weight_and_what_was_measured(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole and of parts; the loss once `verify --against-full` has measured it, of that rounding."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = tmp_path / "text.txt"
    text.write_text("all that is read " * 40)
    info = ("info", str(checkpoint), "--ops", "torch", "--json", "--quantize")
    before = json.loads(run(*info, "int4").stdout)["weights"]

    measured = run(
        "verify", str(checkpoint), "--ops", "torch", "--quantize", "int4", "--against-full",
        *("--text", str(text), "--tokens", "300", "--json"),
    )  # fmt: skip

    assert measured.exit_code == 0, measured.output
    loss = json.loads(measured.stdout)
    assert 0 < loss["kl"] < 1
    assert loss["num_tokens"] == 299
    after = json.loads(run(*info, "int4").stdout)["weights"]
    assert "to int4, groups of 32" in after["attention"]
    assert f"to int8, groups of {INT8_GROUP}" in after["embedding, LM head"]
    assert " 4.50 bits each" in after["attention"]
    assert before["loss"].startswith("not measured")
    assert after["loss"].startswith("perplexity ")
    assert "299 tokens of text.txt" in after["loss"]
    full = json.loads(run(*info, "off").stdout)["weights"]
    assert full["loss"].startswith("not measured")
    assert " 32.00 bits each" in full["in all"]


def test_the_loss_of_nothing_is_nothing(checkpoint: Path) -> None:
    """A checkpoint in float32 beside itself, on the text that ships; the table of the command."""
    result = run("verify", str(checkpoint), "--ops", "torch", "--against-full", "--tokens", "80")

    assert result.exit_code == 0, result.output
    lines = dict(line.split(":", 1) for line in result.stdout.splitlines())
    assert lines["perplexity"].endswith(", +0.00%")
    assert float(lines["rms error of logits"].split()[0]) == 0
    assert lines["same top token"].strip() == "100.00%"
    assert "79 tokens of origin_of_species_chapter_3.txt" in lines["text"]


def test_figures_of_two_distributions() -> None:
    """Divergence, error and perplexity as their formulas say."""
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    full = torch.tensor([[5.0, 6.0, 8.0], [1.0, 2.0, 0.0]])
    targets, total = torch.tensor([2, 0]), LossSum()

    total.add(logits[:1], full[:1], targets[:1])
    total.add(logits[1:], full[1:], targets[1:])
    loss = total.loss("t", 2)

    p, q = full.softmax(1), logits.softmax(1)
    assert loss.kl == pytest.approx(float((p * (p / q).log()).sum(1).mean()), rel=1e-5)
    nll = -q.gather(1, targets[:, None]).log().mean()
    assert loss.perplexity == pytest.approx(float(nll.exp()), rel=1e-5)
    assert (loss.num_tokens, loss.same_top) == (2, 0.5)
    centred = [rows - rows.mean(1, keepdim=True) for rows in (logits, full)]
    expected = float((centred[0] - centred[1]).norm() / centred[1].norm())
    assert loss.rms_error == pytest.approx(expected, rel=1e-5)
    assert replace(loss, kl=0.0).kl == 0


def test_logits_that_do_not_differ_have_no_error() -> None:
    """All zeros, as of a head of zeros."""
    total = LossSum()

    total.add(torch.zeros(1, 4), torch.zeros(1, 4), torch.tensor([1]))

    assert total.loss("t", 2).rms_error == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_is_one_line() -> None:
    """With the place, and what to do."""
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(ConfigError, match=r"logits do not fit into .*TMPDIR"),
    ):
        write_rows(file, torch.zeros(1, 4))


@pytest.mark.parametrize("entry", [[], {"kl": 1}, dict.fromkeys(WeightLoss.__slots__, "x")])
def test_a_damaged_store_is_no_measurement(
    checkpoint: Path, entry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ramify info` says that nothing was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_folder()
    engine = LLM(checkpoint, ops="torch", kv_cache_tokens=64).engine
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STORE).write_text(json.dumps({loss_key(engine): entry}))

    assert known_loss(engine) is None


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ["generate", "{ck}", "--prompt", "x", "--quantize", "int3"],
            ["--quantize", "int3", "int4"],
        ),
        # before the model is loaded
        (["verify", "/nowhere", "--against-full", "--text", "nowhere.txt"], ["nowhere.txt"]),
        (["verify", "{ck}", "--against-full", "--text", "{ck}"], ["text", "name a file"]),
    ],
)
def test_bad_options_are_errors(checkpoint: Path, args: list[str], words: list[str]) -> None:
    """Exit code 2, with the value."""
    result = run(*(arg.replace("{ck}", str(checkpoint)) for arg in args))

    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


def test_activations_of_int8_are_another_arithmetic(checkpoint: Path) -> None:
    """They are near those of int16, and the cache tells them apart."""
    pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")
    tokens = [*range(100, 140)]
    llms = [
        LLM(checkpoint, quantize="int8", activations=activations, kv_cache_tokens=64)
        for activations in ("int16", "int8")
    ]

    wide, narrow = (next(text_logits(llm.engine, tokens, len(tokens)))[0] for llm in llms)

    assert not torch.equal(wide, narrow)
    assert float((wide - narrow).std() / wide.std()) < 0.15
    assert llms[0].core.namespaces.base != llms[1].core.namespaces.base


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "concerns quantised weights, and .* has none; add quantize='int8' or 'int4'"),
        ({"quantize": "widen"}, "dequantised weights meet no integers"),
        ({"quantize": "int8", "ops": "torch"}, "is written for ops='cpu', and .*ops='torch'"),
    ],
)
def test_activations_of_int8_need_codes_and_kernels(
    checkpoint: Path, options: dict[str, Any], message: str
) -> None:
    """Else the option would do nothing, silently."""
    with pytest.raises(ConfigError, match=message):
        LLM(checkpoint, activations="int8", kv_cache_tokens=64, **options)
