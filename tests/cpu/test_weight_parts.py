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
from ramify.models.ops.quantized import QuantizedWeight
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


def test_rows_of_a_quantised_matrix_are_a_part_and_columns_are_not() -> None:
    """Groups of a row belong together."""
    weight = QuantizedWeight.int8(torch.randn(6, 8))

    rows = cut(weight, WeightPart(0, ((1, 3), (5, 6))))

    assert isinstance(rows, QuantizedWeight)
    assert torch.equal(rows.dequantize(), weight.dequantize()[[1, 2, 5]])
    with pytest.raises(ValueError, match="columns"):
        cut(weight, WeightPart(1, ((0, 4),)))


def test_a_stored_tensor_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    """Before anything is read."""
    stored = StoredTensor(tmp_path / "none", "w", "F4", (4, 2), 0, 8)

    with pytest.raises(CheckpointError, match="has the type F4"):
        stored.read_ranges(0, [(0, 2)])
