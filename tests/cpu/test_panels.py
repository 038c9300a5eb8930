"""The product kernel: right, and the same for a row whatever rows stand beside it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exact import ROW_COUNTS, differing_row_counts
from ramify.models.panels import Panels, why_not_panels

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

DTYPES = [torch.float32, torch.bfloat16]
# widths around one and several panels, one strip and several, and none of these
SHAPES = [(64, 128), (1, 1), (7, 3), (16, 256), (33, 257), (100, 76), (301, 511), (48, 1030)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_count_and_no_place_changes_a_bit(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """1 to 33 rows and large counts, with blocks that are full, one over and one short."""
    linear = Panels(random(*shape, dtype=dtype), random(shape[0], dtype=dtype, seed=1))
    rows = random(600, shape[1], dtype=dtype, seed=2)
    counts = {*range(1, 34), *ROW_COUNTS, 95, 96, 97, 191, 193, 288, 511, 599}

    assert differing_row_counts(linear, rows, sorted(counts)) == ()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, threads: int) -> None:
    """Who computes a task does not matter."""
    linear, x = Panels(random(301, 511, dtype=dtype)), random(130, 511, dtype=dtype, seed=2)
    expected, before = linear(x), torch.get_num_threads()

    try:
        torch.set_num_threads(threads)
        found = linear(x)
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_as_near_to_the_truth_as_the_dtype_allows(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    """Against float64: two roundings of the terms' sizes, and of the result; on average `F.linear`'s."""
    weight = random(*shape, dtype=dtype)
    bias = (
        random(shape[0], dtype=dtype, seed=1) if with_bias else torch.zeros(shape[0], dtype=dtype)
    )
    linear = Panels(weight, bias if with_bias else None)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    for num_rows in (1, 2, 3, 5, 12, 47, 130):
        x = random(num_rows, shape[1], dtype=dtype, seed=num_rows)
        wide = x.double(), weight.double(), bias.double()
        truth = F.linear(*wide)
        sizes = F.linear(*(part.abs() for part in wide))

        found = linear(x)

        assert found.dtype == dtype
        error = (found.double() - truth).abs()
        assert (error <= 2.0**-22 * sizes + unit * truth.abs()).all()
        other = F.linear(x.float(), weight.float(), bias.float()).to(dtype).double() - truth
        assert num_rows < 8 or error.norm() <= 1.5 * other.norm() + 1e-30


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_that_fits_is_exact_and_rounds_to_even(dtype: torch.dtype) -> None:
    """Small integers have one answer; halfway between two bfloat16 the even one is taken."""
    weight = torch.arange(-20, 20, dtype=torch.float32).reshape(4, 10).to(dtype)
    x = torch.arange(30, dtype=torch.float32).reshape(3, 10).to(dtype)
    halfway = torch.tensor([[256.0, 1.0], [256.0, 3.0]]).to(dtype)

    assert torch.equal(Panels(weight)(x), (x.double() @ weight.double().T).to(dtype))
    assert torch.equal(
        Panels(torch.ones(1, 2, dtype=dtype))(halfway)[:, 0],
        torch.tensor([257.0, 259.0]).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_numbers_stay_alone(dtype: torch.dtype) -> None:
    """NaN and infinity in one row reach that row's results and no other."""
    linear, x = Panels(random(40, 70, dtype=dtype)), random(9, 70, dtype=dtype, seed=1)
    expected = linear(x)
    x[4, 3], x[5, 69] = torch.nan, torch.inf

    found = linear(x)

    assert found[4].isnan().all()
    assert (~found[5].isfinite()).all()
    kept = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_and_nothing_at_all(dtype: torch.dtype) -> None:
    """Rows may be far apart or transposed; no rows give no rows."""
    linear = Panels(random(20, 30, dtype=dtype))
    wide, tall = random(6, 90, dtype=dtype), random(30, 6, dtype=dtype)

    assert torch.equal(linear(wide[:, 31:61]), linear(wide[:, 31:61].contiguous()))
    assert torch.equal(linear(tall.T), linear(tall.T.contiguous()))
    assert linear(wide[:0, :30]).shape == (0, 20)


def test_what_cannot_be_computed_is_refused_with_the_reason() -> None:
    """float64 and other devices are for others."""
    assert why_not_panels(torch.zeros(2, 2)) is None
    assert "float64" in (why_not_panels(torch.zeros(2, 2, dtype=torch.float64)) or "")
    assert "device meta" in (why_not_panels(torch.zeros(2, 2, device="meta")) or "")
