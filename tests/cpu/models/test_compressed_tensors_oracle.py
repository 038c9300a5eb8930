"""compressed-tensors as a second oracle: its own files of each format, read to the bits that it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.models.configs.quantization.config import read_quantization
from ramify.models.packed_formats.affine import WidenedWeight
from ramify.models.packed_formats.decode import decode_linear

REASON = "the oracle needs the package compressed-tensors"
compressors = pytest.importorskip("compressed_tensors.compressors", reason=REASON)
theirs = pytest.importorskip("compressed_tensors.quantization", reason=REASON)

ROWS, WIDTH = 40, 192
CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("pack-quantized", {"num_bits": bits, "symmetric": symmetric, **scales})
        for bits in (4, 8)
        for symmetric in (True, False)
        for scales in ({"strategy": "group", "group_size": 32}, {"strategy": "channel"})
    ),
    ("pack-quantized", {"num_bits": 4, "strategy": "tensor"}),
    ("int-quantized", {"strategy": "channel"}),
    ("int-quantized", {"strategy": "channel", "symmetric": False}),
    ("int-quantized", {"strategy": "tensor"}),
    ("float-quantized", {"type": "float", "strategy": "tensor"}),
    ("float-quantized", {"type": "float", "strategy": "channel"}),
    ("float-quantized", {"type": "float", "strategy": "block", "block_structure": [16, 64]}),
]


def extremes(weight: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Least and largest element of what shares a scale."""
    strategy = settings["strategy"]
    if strategy == "group":
        parts = weight.unflatten(1, (-1, settings["group_size"]))
        return parts.amin(-1), parts.amax(-1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "tensor":
        return weight.amin().view(1), weight.amax().view(1)
    high, wide = settings["block_structure"]
    padded = torch.nn.functional.pad(weight, (0, -WIDTH % wide, 0, -ROWS % high))
    blocks = padded.unflatten(1, (-1, wide)).unflatten(0, (-1, high))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layout", "settings"), CASES)
def test_matrices_are_those_that_the_package_reads(
    layout: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    """Its configuration, its packing, its scales; the bits of its float32 matrix."""
    scheme = theirs.QuantizationScheme(targets=["Linear"], weights=settings)
    config = theirs.QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"]
    )
    weight = torch.randn((ROWS, WIDTH), generator=torch.Generator().manual_seed(0)).to(dtype)
    scales, zeros = theirs.utils.calculate_qparams(*extremes(weight, settings), scheme.weights)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    tensors = compressor.compress(
        {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, scheme
    )

    written = config.model_dump(mode="json")
    quantization = read_quantization({"quantization_config": written}, "config.json")
    assert quantization is not None
    own_scheme = quantization.scheme("model.layers.0.self_attn.q_proj")
    assert own_scheme is not None
    decoded = decode_linear("q", tensors, (ROWS, WIDTH), own_scheme)

    wide = {
        name: part.float() if name == "weight_scale" else part for name, part in tensors.items()
    }
    expected = compressor.decompress(wide, scheme)["weight"]
    assert expected.dtype == torch.float32
    is_asymmetric_byte = settings.get("num_bits", 8) == 8 and not settings.get("symmetric", True)
    is_wide = layout == "float-quantized" or (is_asymmetric_byte and dtype == torch.float32)
    assert isinstance(decoded, WidenedWeight) == is_wide
    matrix = decoded.weight if isinstance(decoded, WidenedWeight) else decoded.dequantize()
    assert torch.equal(matrix, expected)
    assert (matrix - weight.float()).abs().max() < 0.7
    assert quantization.scheme("lm_head") is None
