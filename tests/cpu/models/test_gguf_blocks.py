"""GGUF blocks: the bits of each type's formula."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ramify.models.gguf.blocks import decode_rows
from ramify.models.gguf.tensor_types import TENSOR_TYPES
from ramify.models.ops.quantized import as_tensor

gguf = pytest.importorskip("gguf", reason="the oracle of these tests")
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    **dict.fromkeys(["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)),
}
EDGES = np.array([0, -0.0, 6e-8, -6e-8, 6.1e-5, 65504, -65504, 1], np.float16)


@pytest.mark.parametrize("number", TENSOR_TYPES)
def test_values_have_the_bits_of_the_formula(number: int) -> None:
    """Random blocks; zero, subnormal, smallest and largest scales."""
    kind, generator = TENSOR_TYPES[number], np.random.default_rng(number)
    blocks = generator.integers(0, 256, (640, kind.num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind.name, ()):
        scales = generator.normal(size=640).astype(np.float16)
        scales[:64] = generator.choice(EDGES, 64)
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = np.arange(640) % 255
    rows = blocks.reshape(160, -1)

    values = as_tensor(decode_rows(kind, rows, torch.float32)).float().numpy()

    with np.errstate(over="ignore"):
        expected = gguf.dequantize(rows, gguf.GGMLQuantizationType(number)).reshape(160, -1)
    finite = ~np.isnan(expected)
    assert np.array_equal(np.isnan(values), ~finite)
    assert np.array_equal(values[finite].view(np.uint32), expected[finite].view(np.uint32))
