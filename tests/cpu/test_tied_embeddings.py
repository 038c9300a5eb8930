"""Where embedding and LM head are one table, the packed head serves for both, bit for bit."""

from pathlib import Path

import pytest
import torch

from ramify.models.loader import load_model
from ramify.testing import write_tiny_checkpoint

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.models.ops.cpu.embedding import TokenRows
from ramify.models.ops.cpu.linear import PackedLinear

DTYPES = [torch.float32, torch.bfloat16]


def any_bits(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random values, among them subnormals, infinities, a NaN and a negative zero."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    special = torch.tensor([1e-40, -1e-40, torch.inf, -torch.inf, torch.nan, -0.0])
    weight[shape[0] // 2, : len(special)] = special.to(dtype)
    return weight


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (31, 6), (32, 64), (33, 7), (100, 48), (257, 9)])
def test_the_rows_of_a_packed_weight_are_those_it_was_made_of(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of every panel format, at panel ends and in the last panel; the same bits."""
    weight = any_bits(shape, dtype)
    ids = torch.tensor([0, shape[0] - 1, shape[0] // 2, 0])
    bits = torch.int32 if dtype == torch.float32 else torch.int16

    packed = PackedLinear(weight)

    for rows in (ids, torch.arange(shape[0]), ids[:0]):
        gathered = packed.weight_rows(rows)
        assert gathered.is_contiguous()
        assert torch.equal(gathered.view(bits), weight[rows].view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [None, 3.0])
def test_rows_are_the_same_before_and_after_sharing(
    dtype: torch.dtype, factor: float | None
) -> None:
    """With a factor too; a head in another dtype is another table."""
    table, ids = torch.randn(70, 16).to(dtype), torch.tensor([3, 69, 32, 3])
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    rows = TokenRows(table, None if factor is None else torch.tensor(factor, dtype=dtype))
    before = rows(ids)

    rows.share(PackedLinear(table.to(other)))
    assert rows._table is table
    rows.share(PackedLinear(table))

    assert isinstance(rows._table, PackedLinear)
    assert torch.equal(rows(ids), before)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_holds_its_table_once(tied: bool, tmp_path: Path) -> None:
    """The head's panels are the only copy; without a tie the table stays as it is in the file."""
    write_tiny_checkpoint(tmp_path, "llama", dtype="bfloat16", tie_word_embeddings=tied)

    decoder = load_model(tmp_path, ops="cpu")

    assert isinstance(decoder.embedding, TokenRows)
    assert isinstance(decoder.embedding._table, PackedLinear) == tied
    reference = load_model(tmp_path, ops="torch")
    ids = torch.arange(0, decoder.config.vocab_size, 3)
    assert torch.equal(decoder.embedding(ids), reference.embedding(ids))
