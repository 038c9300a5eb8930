"""A rank reads its part of each tensor, and no more of the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from ramify.errors import CheckpointError
from ramify.models.checkpoint.stored_tensor import StoredTensor, stored_tensors
from ramify.models.loader import open_weights, read_config
from ramify.models.ops.quantized import QuantizedWeight, WeightFormat
from ramify.models.ops.weight_part import WeightPart, cut, read_part
from ramify.testing import write_tiny_checkpoint

Axis = Literal[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize(
    ("shape", "axis", "ranges"),
    [
        ((7, 5), 0, ((2, 6),)),
        ((7, 5), 0, ((0, 1), (4, 7))),
        ((7, 5), 1, ((1, 4),)),
        ((7, 5), 1, ((0, 1), (3, 5))),
        ((9,), 0, ((3, 4), (6, 9))),
        ((7, 5), 1, ((2, 2),)),
    ],
)
def test_ranges_are_those_of_the_tensor(
    shape: tuple[int, ...],
    axis: Axis,
    ranges: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    """Rows and columns, several ranges, in every size of an element."""
    whole = torch.arange(math.prod(shape)).view(shape).to(dtype)
    save_file({"before": torch.zeros(3), "w": whole}, tmp_path / "model.safetensors")
    part = WeightPart(axis, ranges)

    read = stored_tensors(tmp_path)["w"].read_ranges(axis, ranges)

    expected = cut(whole, part)
    assert isinstance(expected, torch.Tensor)
    assert torch.equal(read, expected)
    assert read.shape == part.shape_of(shape)
    assert read.dtype == dtype


def test_bytes_behind_the_part_are_not_read(tmp_path: Path) -> None:
    """The first columns of all rows but the last can be read from a file that ends there."""
    file = tmp_path / "model.safetensors"
    whole = torch.arange(12.0).view(3, 4)
    save_file({"w": whole}, file)
    stored = stored_tensors(tmp_path)["w"]
    file.write_bytes(file.read_bytes()[:-8])  # the last two elements

    assert torch.equal(stored.read_ranges(1, [(0, 2)]), whole[:, :2])
    assert torch.equal(stored.read_ranges(0, [(0, 2)]), whole[:2])
    with pytest.raises(CheckpointError, match="ends inside the tensor w"):
        stored.read_ranges(1, [(1, 3)])


def test_a_source_reads_parts_in_the_dtype_that_it_computes_in(tmp_path: Path) -> None:
    """Every matrix of a checkpoint, through the source that a loader opens."""
    write_tiny_checkpoint(tmp_path, "qwen2", tokenizer=False)
    config = read_config(tmp_path)
    source, _ = open_weights(tmp_path, config, dtype=torch.bfloat16, quantize="off")
    for name in source:
        rows = source.shape(name)[0]
        part = WeightPart(0, ((rows // 3, rows),))
        whole = source[name]

        read = read_part(source, name, part)

        assert isinstance(whole, torch.Tensor)
        assert isinstance(read, torch.Tensor)
        assert torch.equal(read, whole[rows // 3 :])
        assert read.dtype == torch.bfloat16


def quantised(groups: int, *, has_min: bool, has_factors: bool) -> QuantizedWeight:
    """A matrix [6, 512] of 8-bit codes."""
    return QuantizedWeight(
        WeightFormat(8, 512 // groups, has_min),
        torch.randint(-128, 128, (6, 512)).to(torch.int8),
        torch.rand(6, groups),
        torch.rand(6, groups) if has_min else None,
        torch.float32,
        torch.rand(6, 1 + has_min, 2).half() if has_factors else None,
    )


@pytest.mark.parametrize("groups", [1, 2, 16])
@pytest.mark.parametrize(("has_min", "has_factors"), [(False, False), (True, False), (True, True)])
def test_parts_of_a_quantised_matrix(groups: int, has_min: bool, has_factors: bool) -> None:
    """Rows, and whole groups of columns, are what the whole is there."""
    weight = quantised(groups, has_min=has_min, has_factors=has_factors and groups > 1)
    whole = weight.dequantize()

    rows = cut(weight, WeightPart(0, ((1, 3), (5, 6))))
    columns = cut(weight, WeightPart(1, ((256, 512),)))

    assert isinstance(rows, QuantizedWeight)
    assert isinstance(columns, QuantizedWeight)
    assert torch.equal(rows.dequantize(), whole[[1, 2, 5]])
    assert torch.equal(columns.dequantize(), whole[:, 256:])
    if columns.factors is not None and weight.factors is not None:
        assert torch.equal(columns.factors, weight.factors[:, :, 1:])


@pytest.mark.parametrize(("groups", "ends"), [(16, (16, 512)), (16, (0, 40)), (2, (128, 256))])
def test_columns_that_are_no_whole_groups_are_refused(groups: int, ends: tuple[int, int]) -> None:
    """A group has one scale."""
    weight = quantised(groups, has_min=False, has_factors=False)

    with pytest.raises(ValueError, match=f"no whole groups of {512 // groups}"):
        cut(weight, WeightPart(1, (ends,)))


def test_a_stored_tensor_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    stored = StoredTensor(tmp_path / "none", "w", "F4", (4, 2), 0, 8)

    with pytest.raises(CheckpointError, match="has the type F4"):
        stored.read_ranges(0, [(0, 2)])
