"""Quantised safetensors checkpoints compute what their dequantised float32 checkpoint computes, bit for bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ramify import LLM, SamplingParams
from ramify.attention.exactness import ProbeStore
from ramify.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from ramify.models.checkpoint.sources import open_source
from ramify.models.loader import load_model, read_config
from ramify.models.ops.quantized import QuantizedWeight
from ramify.testing import write_tiny_checkpoint
from tests.cpu.engine_cases import Model, cold
from tests.cpu.models import packed_checkpoints as packers
from tests.cpu.models.packed_checkpoints import edit_config, edit_tensors, write_pair
from tests.cpu.tiny_models import ops_of

ATTENTION = "model.layers.0.self_attn."
Q_PROJ = f"{ATTENTION}q_proj."
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BNB_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Settings of compressed-tensors: all linear layers but the head."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int"} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def int4(**weights: Any) -> dict[str, Any]:
    """`compressed` in words of 4 bits in groups of 32."""
    return compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, **weights)


# Name -> packer, settings, whether it has to be widened.
CASES: dict[str, tuple[packers.Packer, dict[str, Any], bool]] = {
    "gptq": (packers.gptq(4, 32), GPTQ, False),
    "gptq v2": (
        packers.gptq(4, 64, symmetric=False, offset=0),
        GPTQ | {"checkpoint_format": "gptq_v2", "group_size": 64, "sym": False},
        False,
    ),
    "gptq 8 bits": (packers.gptq(8, -1), GPTQ | {"bits": 8, "group_size": -1}, False),
    "gptq act-order": (packers.gptq_act_order, GPTQ | {"desc_act": True}, True),
    "awq": (packers.awq, AWQ, False),
    "pack-quantized": (packers.pack_quantized(4, 32), int4(), False),
    "pack-quantized with zero points": (
        packers.pack_quantized(4, 32, symmetric=False),
        int4(symmetric=False),
        False,
    ),
    "pack-quantized 8 bits": (
        packers.pack_quantized(8, -1),
        compressed("pack-quantized", strategy="channel"),
        False,
    ),
    "int-quantized": (
        packers.int_quantized,
        compressed("int-quantized", strategy="channel"),
        False,
    ),
    "float-quantized": (
        packers.float8("row"),
        compressed("float-quantized", type="float", strategy="channel"),
        True,
    ),
    "fp8": (packers.float8("tensor"), FP8, True),
    "fp8 rows": (packers.float8("row"), {"quant_method": "fbgemm_fp8"}, True),
    "fp8 blocks": (
        packers.float8("block", "weight_scale_inv"),
        FP8 | {"weight_block_size": [128, 128]},
        True,
    ),
    "nf4": (packers.bnb_4bit("nf4"), NF4, True),
    "nf4 nested": (
        packers.bnb_4bit("nf4", nested=True),
        NF4 | {"bnb_4bit_use_double_quant": True},
        True,
    ),
    "fp4": (packers.bnb_4bit("fp4"), NF4 | {"bnb_4bit_quant_type": "fp4"}, True),
    "bitsandbytes int8": (packers.bnb_int8, BNB_INT8, False),
}


def logits(path: Path, dtype: str = "float32") -> torch.Tensor:
    """Logits of 40 tokens: linear layers by `F.linear` of padded rows, whatever their weights are."""
    model = load_model(path, dtype=dtype, ops=ops_of("padded"), store=ProbeStore(None))
    return cold(Model("llama", model), tuple(range(3, 43))).logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_dequantised_checkpoint(
    case: str, dtype: str, tmp_path: Path
) -> None:
    """Bit for bit, in both dtypes; what no kernel can keep packed is widened."""
    packer, settings, is_wide = CASES[case]
    path, wide = write_pair(tmp_path, packer, settings)

    assert torch.equal(logits(path, dtype), logits(wide, dtype))
    config = read_config(path)
    source = open_source(path, config, dtype=getattr(torch, dtype))
    matrices = [source[name] for name in source if name.endswith("_proj.weight")]
    assert {isinstance(matrix, QuantizedWeight) for matrix in matrices} == {not is_wide}
    assert len(source.widened) == (len(matrices) if is_wide else 0)


@pytest.mark.parametrize("case", ["gptq", "int-quantized", "fp8"])
def test_a_source_knows_its_weights_before_it_reads_them(case: str, tmp_path: Path) -> None:
    """Names, shapes, bytes in the file, and the type as stored."""
    packer, settings, _ = CASES[case]
    path, _ = write_pair(tmp_path, packer, settings)
    config = read_config(path)

    source = open_source(path, config, dtype=torch.float32)

    assert {name: source.shape(name) for name in source} == config.tensor_shapes()
    stored = load_file(path / "model.safetensors").values()
    assert sum(map(source.num_bytes, source)) == sum(tensor.nbytes for tensor in stored)
    kinds = {
        "gptq": "gptq, 4 bits, groups of 32",
        "int-quantized": "int-quantized, 8 bits, a scale for each row",
        "fp8": "fp8, 8 bits, a scale for each row",
    }
    assert {source.kind(name) for name in source} == {"F32", kinds[case]}
    assert all(source[name].shape == source.shape(name) for name in source)


def test_widening_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """How many matrices, from what, to what, what they cost, and why; nothing where none is widened."""
    packer, settings, _ = CASES["nf4"]
    path, _ = write_pair(tmp_path / "wide", packer, settings)
    packed, _ = write_pair(tmp_path / "packed", *CASES["gptq"][:2])
    caplog.set_level(logging.INFO)

    load_model(packed, ops="torch", exact=False)
    assert "widened" not in caplog.text
    load_model(path, ops="torch", exact=False)

    lines = [record.message for record in caplog.records if "widened" in record.message]
    assert len(lines) == 1
    wide = 4 * sum(
        torch.Size(shape).numel()
        for name, shape in read_config(path).tensor_shapes().items()
        if name.endswith("_proj.weight")
    )
    assert lines[0].startswith("14 quantised matrices (bnb-4bit, 4 bits")
    assert f"are widened to float32: {wide:,} bytes in memory" in lines[0]


@pytest.mark.parametrize("case", ["nf4", "fp8"])
def test_activations_of_int8_need_weights_that_stay_quantised(case: str, tmp_path: Path) -> None:
    """Where all are widened the option would do nothing, silently; where some are not it may be given."""
    path, _ = write_pair(tmp_path / "wide", *CASES[case][:2])
    packed, _ = write_pair(tmp_path / "packed", *CASES["gptq"][:2])

    load_model(packed, activations="int8", exact=False)
    with pytest.raises(ConfigError, match=r"all those of .* are widened to float32; leave it out"):
        load_model(path, activations="int8", exact=False)


def test_projections_of_unlike_formats_are_one_linear(tmp_path: Path) -> None:
    """q and k are quantised, v is not; all layers but the last; the head, if the file says so."""
    settings = GPTQ | {"lm_head": True, "dynamic": {r"-:.*\.v_proj": {}, r"-:.*\.1\.mlp": {}}}

    def is_packed(layer: str) -> bool:
        return layer == "lm_head" or (
            layer.endswith("_proj") and not layer.endswith("v_proj") and ".1.mlp" not in layer
        )

    # Rows of the head must fill words.
    path, wide = write_pair(
        tmp_path, packers.gptq(4, 32), settings, is_packed=is_packed, vocab_size=304
    )

    assert torch.equal(logits(path), logits(wide))


def test_rotary_pairs_that_are_neighbours(tmp_path: Path) -> None:
    """The rows of quantised q and k projections are reordered with their scales and offsets."""
    path, wide = write_pair(tmp_path, packers.awq, AWQ, family="cohere", tie_word_embeddings=True)

    assert torch.equal(logits(path), logits(wide))


@pytest.mark.parametrize("case", ["awq", "int-quantized", "fp8 blocks"])
def test_an_engine_serves_it_from_the_cache(case: str, tmp_path: Path) -> None:
    """A warm request has the tokens and log probabilities of the cold one."""
    path, _ = write_pair(tmp_path, *CASES[case][:2])
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    llm = LLM(str(path), kv_cache_tokens=1024)

    first, second = (llm.generate([list(range(3, 73))], params)[0] for _ in range(2))

    assert second.cache.read_tokens >= 64
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)


def test_types_of_weights_are_part_of_what_a_prefix_is_cached_under(tmp_path: Path) -> None:
    """Same files, same namespace; the types, rounding at load and the dtype make others."""
    path, wide = write_pair(tmp_path, *CASES["gptq"][:2])

    def namespace(model: Path, **options: Any) -> bytes:
        options = {"dtype": "float32", "kv_dtype": "int8", "ops": "torch"} | options
        llm = LLM(str(model), kv_cache_tokens=512, **options)
        return llm.engine.core.namespaces.base

    first = namespace(path)
    assert namespace(path) == first
    others = [
        namespace(path, dtype="bfloat16"),
        namespace(path, quantize="widen"),
        namespace(wide),
        namespace(wide, quantize="int8"),
    ]
    assert len({first, *others}) == 5


def test_weights_of_another_type_replace_them(tmp_path: Path) -> None:
    """What they take is known before: the size of full precision, not of the codes that they replace."""
    path, wide = write_pair(tmp_path, *CASES["gptq"][:2])
    llm = LLM(str(path), kv_cache_tokens=256)
    engine, codes = llm.engine, llm.engine.num_weight_bytes

    expected = engine.max_weight_bytes(wide, read_config(wide))
    assert engine.max_weight_bytes(path, read_config(path)) == codes
    llm.reload_weights(wide)

    assert engine.num_weight_bytes == expected > 2 * codes
    llm.reload_weights(path)
    assert engine.num_weight_bytes == codes


@pytest.mark.parametrize(
    ("file", "settings", "packer"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "sym": True}, packers.gptq(4, 32)),
        (
            "quant_config.json",
            {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
            packers.awq,
        ),
    ],
)
def test_settings_in_a_file_beside_config_json(
    file: str, settings: dict[str, Any], packer: packers.Packer, tmp_path: Path
) -> None:
    """As older tools wrote them; those in config.json win."""
    path, wide = write_pair(tmp_path, packer, {})
    edit_config(path, quantization_config=None)
    (path / file).write_text(json.dumps(settings))

    assert torch.equal(logits(path), logits(wide))
    edit_config(path, quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedModelError, match="'hqq'"):
        read_config(path)


def test_a_bias_of_zeros_is_ignored(tmp_path: Path) -> None:
    """Older tools wrote one for layers that have none; any other is refused."""
    path, wide = write_pair(tmp_path, *CASES["gptq"][:2])
    edit_tensors(path, {f"{Q_PROJ}bias": torch.zeros(128)})

    assert torch.equal(logits(path), logits(wide))
    edit_tensors(path, {f"{Q_PROJ}bias": torch.ones(128)})
    with pytest.raises(CheckpointError, match=r"q_proj\.bias, which the model has no use for"):
        logits(path)


def test_a_bias_beside_a_layer_in_full_precision_is_refused(tmp_path: Path) -> None:
    """As in a checkpoint that is not quantised; whatever the settings say of the layer."""
    path, _ = write_pair(tmp_path, *CASES["gptq"][:2], is_packed=lambda layer: "mlp" in layer)
    edit_tensors(path, {f"{Q_PROJ}bias": torch.zeros(128)})

    with pytest.raises(CheckpointError, match=r"holds the tensor .*q_proj\.bias, which Llama"):
        logits(path)


def test_a_head_in_float8_is_refused_beside_tied_embeddings(tmp_path: Path) -> None:
    """By name; it is not compared with the embedding."""
    path = write_tiny_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(path, {"lm_head.weight": embedding.to(torch.float8_e4m3fn)})

    with pytest.raises(UnsupportedModelError, match=r"tensor lm_head\.weight is F8_E4M3"):
        load_model(path, ops="torch", store=ProbeStore(None))


@pytest.mark.parametrize("case", ["gptq", "fp8 blocks", "nf4"])
def test_tensors_of_a_layer_may_be_in_several_files(case: str, tmp_path: Path) -> None:
    """Every second tensor in another shard, so that codes and scales part; one that is missing is named."""
    path, wide = write_pair(tmp_path, *CASES[case][:2])
    tensors = load_file(path / "model.safetensors")
    shards = {name: f"{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in ("0.safetensors", "1.safetensors"):
        own = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        save_file(own, path / shard, metadata={"format": "pt"})
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))

    assert torch.equal(logits(path), logits(wide))
    (path / "1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"1\.safetensors is missing"):
        logits(path)


def test_scales_of_activations_and_of_the_cache_are_skipped(tmp_path: Path) -> None:
    """Both stay in full precision."""
    path, wide = write_pair(tmp_path, *CASES["fp8"][:2])
    edit_tensors(
        path,
        {
            f"{Q_PROJ}input_scale": torch.ones(1),
            f"{ATTENTION}k_scale": torch.ones(1),
            f"{ATTENTION}v_proj.output_scale": torch.ones(1),
        },
    )

    assert torch.equal(logits(path), logits(wide))


BAD_TENSORS: list[tuple[str, str, torch.Tensor | None, str]] = [
    ("fp8", "weight_scale", None, "q_proj.weight_scale is missing"),
    ("fp8", "weight_scale", torch.ones(3), r"q_proj.weight_scale: expected \[1\] .*found \[3\]"),
    ("fp8", "weight_scale_inv", torch.ones(1), "q_proj.weight_scale is not expected"),
    ("fp8", "weight_scale", torch.full((1,), torch.nan), "q_proj: its scales hold NaN"),
    ("fp8", "weight", None, "q_proj.weight is missing"),
    ("fp8", "weight", torch.ones(128, 128), "q_proj.weight: expected .*float8_e4m3fn, found"),
    ("gptq", "scales", None, "q_proj.scales is missing"),
    ("gptq", "scales", torch.ones(4, 64).half(), r"q_proj.scales: expected \[4, 128\]"),
    ("gptq", "qzeros", torch.zeros(4, 16), r"q_proj.qzeros: expected .*int32, found .*float32"),
    ("gptq", "g_idx", torch.full((128,), 4).int(), r"g_idx: expected groups 0 to 3, found 4"),
    ("gptq", "more", torch.ones(1), "q_proj.more is not expected"),
    ("awq", "qweight", torch.zeros(64, 16).int(), r"q_proj.qweight: expected \[128, 16\]"),
    ("pack-quantized", "weight_shape", torch.tensor([128, 64]), "q_proj.weight_shape: expected"),
    ("bitsandbytes int8", "SCB", None, "q_proj.SCB is missing"),
    ("nf4", "weight.absmax", torch.ones(3), r"q_proj.weight.absmax: expected \[256\]"),
    ("nf4", "weight.quant_state.bitsandbytes__nf4", None, "is missing"),
]


@pytest.mark.parametrize(("case", "suffix", "tensor", "message"), BAD_TENSORS)
def test_bad_tensors_are_refused(
    case: str, suffix: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    """By the name of the tensor; a quantised weight is never read without its scales."""
    path, _ = write_pair(tmp_path, *CASES[case][:2])
    edit_tensors(path, {f"{Q_PROJ}{suffix}": tensor})

    with pytest.raises(CheckpointError, match=message):
        logits(path)


@pytest.mark.parametrize(
    ("number", "layout"), [(1, "col32"), (2, "col_turing"), (3, "col_ampere"), (9, "9")]
)
def test_reordered_int8_is_refused(number: int, layout: str, tmp_path: Path) -> None:
    """bitsandbytes stored the order of its kernels for a while."""
    path, _ = write_pair(tmp_path, *CASES["bitsandbytes int8"][:2])
    edit_tensors(path, {f"{Q_PROJ}weight_format": torch.tensor(number, dtype=torch.uint8)})

    with pytest.raises(UnsupportedModelError, match=f"q_proj.weight_format: the layout {layout} "):
        logits(path)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fp8", r"tensor model.layers.*.weight is F8_E4M3; only float32"),
        ("int-quantized", r"tensor model.layers.*.weight is I8; only float32"),
        ("gptq", r"holds the tensor model.layers.*(g_idx|qweight), which Llama"),
    ],
)
def test_quantised_tensors_that_nothing_announces_are_refused(
    case: str, message: str, tmp_path: Path
) -> None:
    """Without a `quantization_config`, or with one that leaves the layer in full precision."""
    path, _ = write_pair(tmp_path, *CASES[case][:2])
    ignored = compressed("int-quantized", strategy="channel") | {"ignore": ["re:.*"]}

    for settings in (None, ignored):
        edit_config(path, quantization_config=settings)
        with pytest.raises(ModelError, match=message):
            load_model(path, ops="torch", exact=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "quark"}, "quant_method 'quark' is not supported; supported: gptq.*Use"),
        ({"quant_method": "mxfp4"}, "'mxfp4'.*experts that are stacked.*original checkpoint"),
        ({"bits": 4}, "quant_method None is not supported"),
        (int4() | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (int4() | {"ignore": ["re:(a+"]}, "no regular expression"),
        (int4() | {"ignore": ["re:a"] * 300}, "300 regular expressions, above 256"),
    ],
)
def test_settings_are_refused_before_anything_is_read(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """With the field and the way out."""
    path, _ = write_pair(tmp_path, *CASES["gptq"][:2])
    edit_config(path, quantization_config=settings)

    with pytest.raises(ModelError, match=message):
        read_config(path)


def test_modelopt_is_refused_by_name(tmp_path: Path) -> None:
    """Its settings are in a file of their own."""
    path, _ = write_pair(tmp_path, *CASES["fp8"][:2])
    edit_config(path, quantization_config=None)
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')

    with pytest.raises(UnsupportedModelError, match="quant_method 'modelopt' is not supported"):
        read_config(path)
