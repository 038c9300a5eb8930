"""What `quantization_config` says of each module, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.errors import CheckpointError, UnsupportedModelError
from ramify.models.configs.quantization.config import QuantizationConfig, read_quantization
from ramify.models.configs.quantization.scheme import Scheme

LAYER = "model.layers.0.mlp.gate_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel"}


def compressed(
    weights: dict[str, Any], layout: object = "pack-quantized", **more: Any
) -> dict[str, Any]:
    """Settings of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        **more,
    }


def read(settings: object) -> QuantizationConfig:
    """The configuration of a file with these settings."""
    quantization = read_quantization({"quantization_config": settings}, "config.json")
    assert quantization is not None
    return quantization


@pytest.mark.parametrize(
    ("settings", "scheme"),
    [
        (GPTQ, Scheme("gptq", 4, 128, zero_offset=1)),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1, "sym": False},
            Scheme("gptq", 8, -1, symmetric=False),
        ),
        (AWQ, Scheme("awq", 4, 128, symmetric=False)),
        (FP8, Scheme("fp8", 8, block=(128, 128))),
        ({"quant_method": "fp8"}, Scheme("fp8", 8)),
        ({"quant_method": "fbgemm_fp8"}, Scheme("fp8", 8)),
        (NF4, Scheme("bnb-4bit", 4)),
        (NF4 | {"bnb_4bit_use_double_quant": True}, Scheme("bnb-4bit", 4, nested=True)),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Scheme("bnb-8bit", 8)),
        ({"quant_method": "mxfp4"}, Scheme("mxfp4", 4, 32)),
        (compressed(INT4), Scheme("pack-quantized", 4, 32)),
        (
            compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, "int-quantized"),
            Scheme("int-quantized", 8, -1),
        ),
        (compressed(FLOAT, "float-quantized"), Scheme("float-quantized", 8, -1)),
        (
            compressed(FLOAT | {"strategy": "tensor"}, "naive-quantized"),
            Scheme("float-quantized", 8, 0),
        ),
        (
            compressed(
                FLOAT | {"strategy": "block", "block_structure": [128, 64]}, "float-quantized"
            ),
            Scheme("float-quantized", 8, -1, block=(128, 64)),
        ),
    ],
)
def test_the_scheme_of_a_linear_layer(settings: dict[str, Any], scheme: Scheme) -> None:
    """By method and settings."""
    assert read(settings).scheme(LAYER) == scheme


@pytest.mark.parametrize(
    ("settings", "kept", "quantized"),
    [
        (GPTQ, "lm_head", LAYER),
        (GPTQ | {"dynamic": {r"-:.*\.mlp\.": {}}}, LAYER, "model.layers.0.self_attn.q_proj"),
        (AWQ | {"modules_to_not_convert": ["mlp.gate"]}, "model.layers.1.mlp.gate", LAYER),
        (FP8 | {"ignored_layers": [LAYER]}, LAYER, f"{LAYER}2"),
        (NF4 | {"llm_int8_skip_modules": ["lm_head"]}, "lm_head", LAYER),
        (compressed(INT4, ignore=["lm_head", r"re:.*up_proj"]), "model.up_proj", LAYER),
        (compressed(INT4, ignore=["lm_head"]), "lm_head", "model.lm_head_2"),
    ],
)
def test_modules_in_full_precision(settings: dict[str, Any], kept: str, quantized: str) -> None:
    """A part of a name is whole components: "mlp.gate" is not "mlp.gate_proj"."""
    quantization = read(settings)

    assert quantization.scheme(kept) is None
    assert quantization.scheme(quantized) is not None


def test_settings_of_single_modules() -> None:
    """GPTQ's `dynamic`, its head, and groups of compressed-tensors with a format of their own."""
    gptq = read(
        GPTQ | {"lm_head": True, "dynamic": {r"+:.*down_proj": {"bits": 8, "group_size": 32}}}
    )
    mixed = compressed(INT4)
    own = {"targets": [r"re:.*down_proj"], "weights": FLOAT, "format": "float-quantized"}
    mixed["config_groups"]["group_1"] = own

    assert gptq.scheme("model.layers.1.mlp.down_proj") == Scheme("gptq", 8, 32, zero_offset=1)
    assert gptq.scheme("lm_head") == gptq.scheme(LAYER) == Scheme("gptq", 4, 128, zero_offset=1)
    assert read(mixed).scheme("a.down_proj") == Scheme("float-quantized", 8, -1)
    assert read(mixed).scheme(LAYER) == Scheme("pack-quantized", 4, 32)


def test_other_places_of_the_settings() -> None:
    """`text_config` and `compression_config`; none at all is None."""
    own = {key: value for key, value in compressed(INT4).items() if key != "quant_method"}
    places: list[tuple[dict[str, Any], str]] = [
        ({"text_config": {"quantization_config": AWQ}}, "awq"),
        ({"compression_config": own}, "compressed-tensors"),
    ]

    for config, method in places:
        quantization = read_quantization(config, "config.json")
        assert quantization is not None
        assert quantization.method == method
    assert read_quantization({"quantization_config": None}, "config.json") is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (
                {"quant_method": method},
                f"quant_method '{method}' is not supported; supported: gptq,",
            )
            for method in ("auto-round", "torchao", "hqq", "quark", "bitnet", "modelopt")
        ),
        ({}, None),
        (GPTQ | {"bits": 3}, "bits 3 is not supported; supported: 4 and 8"),
        (GPTQ | {"bits": 2}, "bits 2"),
        (
            GPTQ | {"group_size": 1024},
            "group_size 1024 is not supported; supported: -1 and 1 to 128",
        ),
        (GPTQ | {"checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p' is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format 'marlin'"),
        (GPTQ | {"checkpoint_format": [1]}, r"checkpoint_format \[1\]"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        (AWQ | {"version": "gemv_fast"}, "version 'gemv_fast'"),
        (AWQ | {"bits": 8}, "bits 8 is not supported; supported: 4 with awq"),
        (
            compressed(INT4, "nvfp4-pack-quantized"),
            "format 'nvfp4-pack-quantized' is not supported",
        ),
        (compressed(INT4, "marlin-24"), "format 'marlin-24'"),
        (compressed(INT4, [1]), r"format \[1\]"),
        (compressed(INT4 | {"num_bits": 3}), "num_bits 3"),
        (compressed(INT4, sparsity_config={"format": "sparse-bitmask"}), "'sparse-bitmask'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    settings: dict[str, Any], message: str | None
) -> None:
    """With what is."""
    if message is None:
        assert read_quantization({"quantization_config": settings}, "config.json") is None
        return
    with pytest.raises(UnsupportedModelError, match=message):
        read(settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([1], "must be an object"),
        (GPTQ | {"dynamic": {"(": {}}}, "no regular expression"),
        (FP8 | {"ignored_layers": [3]}, "must list strings"),
        (FP8 | {"weight_block_size": [128]}, "must be two integers"),
        (NF4 | {"load_in_8bit": True}, "load_in_4bit and load_in_8bit are both true"),
        ({"quant_method": "compressed-tensors"}, "config_groups is None"),
    ],
)
def test_damaged_settings_are_refused(settings: object, message: str) -> None:
    """The message names the field."""
    with pytest.raises(CheckpointError, match=message):
        read(settings)
