"""The batch-invariant GEMM in the interpreter: torch's products, and a row's bits whoever is beside it."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

from ramify.kernels.triton.gemm import BatchInvariantGemm, GemmTiles
from ramify.kernels.triton.head_gemm import HeadGemm
from tests.cpu.attention_cases import assert_same_bits

TILES = GemmTiles(rows=8, columns=32, block_k=16, split_k=32, group_rows=2)
# rows, N and K that no tile divides; K of three splits
ROWS, OUT, IN = 19, 40, 70
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and residual."""
    noise = torch.Generator().manual_seed(0)
    shapes = ((ROWS, IN), (OUT, IN), (OUT,), (ROWS, OUT))
    x, weight, bias, residual = (torch.randn(shape, generator=noise) for shape in shapes)
    return x.to(dtype), (weight * IN**-0.5).to(dtype), bias.to(dtype), residual.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_products_are_torchs(dtype: torch.dtype) -> None:
    """x @ weight.T + bias, added to a residual in place or not."""
    x, weight, bias, residual = operands(dtype)
    expected = F.linear(x, weight, bias)
    gemm = BatchInvariantGemm(weight, bias, tiles=TILES, num_programs=3)

    out = gemm(x)
    into = residual.clone()

    assert gemm(x, residual=into) is into
    for actual, reference in ((out, expected), (into, residual + expected)):
        error = (actual.double() - reference.double()).abs() / (1 + reference.double().abs())
        assert float(error.max()) < TOLERANCE[dtype]
    assert_same_bits(into, residual + out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """Alone, in a chunk, at another place of a tile; tiles of one program, or one split a program."""
    x, weight, bias, _ = operands(dtype)
    whole = BatchInvariantGemm(weight, bias, tiles=TILES, num_programs=2)
    split = BatchInvariantGemm(weight, bias, tiles=TILES, num_programs=1000)
    expected = whole(x)

    assert_same_bits(split(x), expected)
    for rows in (slice(0, 1), slice(7, 10), slice(18, 19)):
        assert_same_bits(whole(x[rows]), expected[rows])
        assert_same_bits(split(x[rows]), expected[rows])
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    assert_same_bits(split(x[order]), expected[order])


def test_no_rows_are_no_work() -> None:
    """An empty batch gives an empty result."""
    _, weight, bias, _ = operands(torch.float32)

    assert BatchInvariantGemm(weight, bias, tiles=TILES)(weight[:0]).shape == (0, OUT)


@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_matrix_for_each_head(dtype: torch.dtype, transposed: bool) -> None:
    """The per-head matmul of torch, over strided views of one matrix; each row as alone."""
    noise = torch.Generator().manual_seed(0)
    heads, k, n = 3, 70, 75
    rows, columns = (n, k) if transposed else (k, n)
    whole = (torch.randn(heads, 8 + rows, columns, generator=noise) / 8).to(dtype)
    matrices = whole[:, 8:].transpose(1, 2) if transposed else whole[:, 8:]
    x = torch.randn(37, heads, k, generator=noise).to(dtype)
    gemm = HeadGemm(matrices)

    out = gemm(x)

    expected = torch.einsum("thk,hkn->thn", x.double(), matrices.double())
    error = (out.double() - expected).abs() / (1 + expected.abs())
    assert out.dtype == dtype and float(error.max()) < TOLERANCE[dtype]
    for part in (slice(0, 1), slice(7, 10), slice(20, 37)):
        assert_same_bits(gemm(x[part]), out[part])
    assert gemm(x[:0]).shape == (0, heads, n)
