"""Rounding at load: the error of the scale search beside that of plain rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ramify.errors import ConfigError
from ramify.models.ops import weight_rounding
from ramify.models.ops.quantized import QuantizedWeight
from ramify.models.ops.weight_rounding import quantize_weight


def matrix(kind: str, rows: int = 64, width: int = 512) -> Tensor:
    """Elements of a normal distribution, or of Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(rows, width, generator=generator)
    if kind == "normal":
        return normal
    return torch.div(normal, (torch.randn(3, rows, width, generator=generator) ** 2).mean(0).sqrt())


def plain_int4(weight: Tensor, group_size: int) -> Tensor:
    """The largest element of a group becomes -8."""
    groups: Tensor = weight.unflatten(1, (-1, group_size))
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


def relative_error(weight: Tensor, restored: Tensor) -> float:
    """Root of the squared error over the squares of the weights."""
    return float((restored - weight).norm() / weight.norm())


@pytest.mark.parametrize(("kind", "ratio"), [("normal", 0.95), ("heavy", 0.975)])
def test_the_search_beats_plain_rounding(kind: str, ratio: float) -> None:
    """In every group, and by 5 % of the whole matrix's error (2.5 % with heavy tails), measured 5.7 % (3.3 %)."""
    weight = matrix(kind)

    restored = quantize_weight(weight, 4, 32).dequantize()

    plain = plain_int4(weight, 32)
    assert relative_error(weight, restored) < ratio * relative_error(weight, plain)
    errors = [(value - weight).unflatten(1, (-1, 32)).norm(dim=-1) for value in (restored, plain)]
    assert bool((errors[0] <= errors[1] * 1.001).all())


@pytest.mark.parametrize(("bits", "group_size"), [(8, -1), (8, 32), (4, 32)])
def test_chunks_and_short_groups_change_nothing(
    bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's codes depend on that row alone; a last group of 8 is rounded like any other."""
    weight = matrix("normal", 7, 72)
    whole = quantize_weight(weight, bits, group_size)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_rounding, "CHUNK_ELEMENTS", 150)
    chunked = quantize_weight(weight, bits, group_size)  # type: ignore[arg-type]

    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scales, chunked.scales)
    assert whole.scales.shape == (7, 1 if group_size == -1 else 3)
    last = quantize_weight(weight[:, 64:], bits, group_size)  # type: ignore[arg-type]
    if group_size == 32:
        assert torch.equal(whole.codes[:, 64:], last.codes)


def test_int8_of_a_row_is_that_of_the_class() -> None:
    """The same codes and scales as `QuantizedWeight.int8`."""
    weight = matrix("heavy").bfloat16()

    rounded, expected = quantize_weight(weight, 8), QuantizedWeight.int8(weight)

    assert rounded.format == expected.format
    assert torch.equal(rounded.codes, expected.codes)
    assert torch.equal(rounded.scales, expected.scales)


@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_int4_of_any_magnitude(factor: float) -> None:
    """Zeros stay zeros, damage stays visible, codes are of the levels, scales of float16 if they fit."""
    weight = matrix("normal", 4, 64) * factor
    weight[0], weight[1, 40] = 0, torch.inf

    rounded = quantize_weight(weight, 4, 32)

    assert rounded.codes.min() >= -8
    assert rounded.codes.max() <= 7
    restored = rounded.dequantize()
    assert not bool(restored[0].any())
    assert bool(restored[1, 32:].isnan().all())
    assert relative_error(weight[2:] / factor, restored[2:] / factor) < 0.1


def test_scales_fit_float16() -> None:
    """So that kernels may store them in 2 bytes."""
    scales = quantize_weight(matrix("heavy"), 4, 32).scales

    assert torch.equal(scales, scales.half().float())


def test_impossible_groups_are_refused() -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match="group_size=0: use 4 or 8 bits"):
        quantize_weight(matrix("normal"), 4, 0)
