"""Rounding at load: error bounds, the scale search beside plain rounding, bits that depend on a group alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.errors import ConfigError
from ramify.kernels.cpu.abi import NORMAL_LEVELS
from ramify.models.ops import weight_rounding
from ramify.models.ops.weight_rounding import INT4_GROUP, int4_by_torch, quantize_weight

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HAS_KERNEL = importlib.util.find_spec("numba") is not None


def matrix(kind: str, rows: int = 64, width: int = 512, seed: int = 5) -> Tensor:
    """Elements of a normal distribution, or of Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, width, generator=generator)
    if kind == "normal":
        return normal
    return torch.div(normal, (torch.randn(3, rows, width, generator=generator) ** 2).mean(0).sqrt())


def odd_rows() -> Tensor:
    """[14, 64]: rows of every magnitude, zeros, ties, a single element, float32's largest numbers."""
    weight = matrix("normal", 14, 64)
    for row, factor in enumerate((1e-4, 1e-7, 1e6, 1e-20, 1e-30, 1e-37, 1e-44, 1e30, 0.0)):
        weight[row] *= factor
    weight[9] = weight[9].round()
    weight[10] = 0
    weight[10, 5] = -3e38
    weight[11, ::2], weight[11, 1::2] = 1.0, -1.0
    weight[12] = 1.0
    weight[13, :32] = 0
    return weight


def damaged_rows() -> Tensor:
    """[6, 64]: rows with NaN or infinities among numbers, among zeros, alone; and one of -0."""
    weight = matrix("normal", 6, 64)
    weight[0, 3], weight[1, 40], weight[2, 5] = torch.nan, torch.inf, -torch.inf
    weight[3], weight[4], weight[5] = 0.0, torch.nan, -0.0
    weight[3, 7] = torch.nan
    return weight


def plain_int4(weight: Tensor) -> Tensor:
    """The largest element of a group becomes -8."""
    groups: Tensor = weight.unflatten(1, (-1, INT4_GROUP))
    scale = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(1)


def relative_error(weight: Tensor, restored: Tensor) -> float:
    """Root of the squared error over the squares of the weights."""
    return float((restored - weight).norm() / weight.norm())


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_levels_and_search_beat_plain_rounding(kind: str) -> None:
    """By 10 % of the whole matrix's error; three groups of four gain, and none has half more."""
    weight = matrix(kind)

    restored = quantize_weight(weight, 4, INT4_GROUP).dequantize()

    plain = plain_int4(weight)
    assert relative_error(weight, restored) < 0.9 * relative_error(weight, plain)
    errors = [(value - weight).unflatten(1, (-1, 32)).norm(dim=-1) for value in (restored, plain)]
    ratios = errors[0] / errors[1]
    assert float((ratios < 1).float().mean()) > 0.75
    assert float(ratios.max()) < 1.5


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    """Matrices of any shape and of magnitudes that differ by row and element."""
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 100))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 1.0, 8.0, 30.0]))
    exponents = torch.randn(rows, width, generator=generator) * spread / 3
    weight = torch.randn(rows, width, generator=generator) * torch.exp2(exponents)
    weight[torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0, 0.3, 1]))] = 0
    return weight.to(draw(st.sampled_from(DTYPES))).nan_to_num(posinf=1.0, neginf=1.0)


@given(weights(), st.sampled_from([-1, 1, 7, 32, 64]))
@settings(deadline=None)
def test_int8_is_within_half_a_step(weight: Tensor, group_size: int) -> None:
    """Codes of [-127, 127]; a scale is at most a sixteenth above the largest element over 127."""
    rounded = quantize_weight(weight, 8, group_size)

    size = rounded.group_size
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % size))
    largest = padded.unflatten(1, (-1, size)).abs().amax(-1)
    assert bool((rounded.scales <= largest / 127 * 17 / 16).all())
    assert rounded.codes.min() >= -127
    steps = rounded.scales.repeat_interleave(size, 1)[:, : weight.shape[1]]
    error = (rounded.codes.float() * steps - weight.float()).abs()
    # Half a step, and the rounding of float32 where a step is subnormal.
    assert bool((error <= 0.50002 * steps + 2.0**-140).all())


@given(weights())
@settings(deadline=None)
def test_int4_is_the_nearest_code_of_a_scale(weight: Tensor) -> None:
    """But for the rounding of elements to units of the largest; never half of the largest off."""
    rounded = quantize_weight(weight, 4, INT4_GROUP)

    values = weight.float()
    steps = rounded.scales.repeat_interleave(INT4_GROUP, 1)[:, : weight.shape[1]]
    levels = torch.tensor(NORMAL_LEVELS)
    assert bool(torch.isin(rounded.codes, levels).all())
    error = (rounded.codes.float() * steps - values).abs()
    nearest = (steps[..., None] * levels - values[..., None]).abs().amin(-1)
    largest = values.abs().amax(1, keepdim=True)
    assert bool((error <= nearest + 0.001 * largest + 2.0**-119).all())
    assert bool((error <= 0.5 * largest + 2.0**-119).all())


@pytest.mark.parametrize(("bits", "group_size"), [(8, -1), (8, 32), (8, 7), (4, 32)])
@pytest.mark.parametrize("width", [72, 64, 20])
def test_chunks_and_short_groups_change_nothing(
    bits: int, group_size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's codes depend on the group alone; a short last one is rounded like any other."""
    weight = matrix("normal", 7, width)
    whole = quantize_weight(weight, bits, group_size)  # type: ignore[arg-type]

    for name in ("INT8_CHUNK", "TORCH_CHUNK", "KERNEL_CHUNK"):
        monkeypatch.setattr(weight_rounding, name, 150)
    chunked = quantize_weight(weight, bits, group_size)  # type: ignore[arg-type]

    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.scales, chunked.scales)
    assert whole.scales.shape == (7, 1 if group_size == -1 else -(-width // group_size))
    if group_size != -1 and width % group_size:
        start = width // group_size * group_size
        last = quantize_weight(weight[:, start:], bits, group_size)  # type: ignore[arg-type]
        assert torch.equal(whole.codes[:, start:], last.codes)


@pytest.fixture
def threads() -> Iterator[None]:
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("threads")
def test_threads_do_not_change_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 2 and 3 threads, each with several chunks, and with a number of groups that none divides."""
    for name in ("INT8_CHUNK", "TORCH_CHUNK", "KERNEL_CHUNK"):
        monkeypatch.setattr(weight_rounding, name, 1500)
    weight, results = matrix("heavy", 101, 160), []

    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(quantize_weight(weight, bits, 32))  # type: ignore[arg-type]

    assert all(torch.equal(results[0].codes, other.codes) for other in results)
    assert all(torch.equal(results[0].scales, other.scales) for other in results)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.usefixtures("threads")
def test_a_caller_may_be_in_inference_mode(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads, which are not in it by themselves, write to the tensors that it makes."""
    for name in ("INT8_CHUNK", "TORCH_CHUNK", "KERNEL_CHUNK"):
        monkeypatch.setattr(weight_rounding, name, 1500)
    torch.set_num_threads(2)
    weight = matrix("normal", 101, 160)
    expected = quantize_weight(weight, bits, 32)  # type: ignore[arg-type]

    with torch.inference_mode():
        rounded = quantize_weight(weight, bits, 32)  # type: ignore[arg-type]

    assert torch.equal(rounded.codes, expected.codes)
    assert torch.equal(rounded.scales, expected.scales)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.usefixtures("default_dtype")
def test_the_default_dtype_of_torch_does_not_matter(bits: int, dtype: torch.dtype) -> None:
    """Weights are rounded in float32, and scales are."""
    weight = matrix("normal", 9, 96)
    expected = quantize_weight(weight, bits, 32)  # type: ignore[arg-type]

    torch.set_default_dtype(dtype)
    rounded = quantize_weight(weight, bits, 32)  # type: ignore[arg-type]

    assert torch.equal(rounded.codes, expected.codes)
    assert rounded.scales.dtype == torch.float32
    assert torch.equal(rounded.scales, expected.scales)


@pytest.mark.skipif(not HAS_KERNEL, reason="the kernels need the extra ramify[cpu]")
@pytest.mark.parametrize("kind", ["normal", "heavy", "odd", "damaged"])
def test_the_kernel_gives_the_bits_of_torch(kind: str) -> None:
    """So that a model is the same on every machine; a NaN may have other bits."""
    made = {"odd": odd_rows, "damaged": damaged_rows}
    weight = made[kind]() if kind in made else matrix(kind, 33, 96)

    rounded = quantize_weight(weight, 4, INT4_GROUP)

    codes, scales = int4_by_torch(weight.reshape(-1, INT4_GROUP))
    assert torch.equal(rounded.codes, codes.view_as(rounded.codes))
    scales = scales.view_as(rounded.scales)
    assert torch.equal(rounded.scales.isnan(), scales.isnan())
    bits, expected = (values.nan_to_num().view(torch.int32) for values in (rounded.scales, scales))
    assert torch.equal(bits, expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_magnitudes(bits: int) -> None:
    """Groups of zeros stay zeros; the error of a group that is not tiny is that of its codes."""
    weight = odd_rows()

    restored = quantize_weight(weight, bits, 32).dequantize()  # type: ignore[arg-type]

    assert bool(restored.isfinite().all())
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    assert not bool(restored[largest == 0].any())
    is_tiny = largest < 2.0**-119
    assert bool(
        ((restored - weight).abs() <= largest * (0.13 if bits == 4 else 0.0045))[~is_tiny].all()
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_damage_shows_in_the_scale_of_its_group(bits: int, damage: float) -> None:
    """And nowhere else."""
    weight = matrix("normal", 4, 96)
    weight[1, 40] = damage

    scales = quantize_weight(weight, bits, 32).scales  # type: ignore[arg-type]

    assert scales.isfinite().logical_not().nonzero().tolist() == [[1, 1]]


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_fit_float16(bits: int) -> None:
    """So that kernels may store them in 2 bytes: also those of small weights and of zeros."""
    weight = matrix("heavy") * torch.logspace(-4, 1, 64)[:, None]
    weight[5, 32:64] = 0

    scales = quantize_weight(weight, bits, 32).scales  # type: ignore[arg-type]

    assert torch.equal(scales, scales.half().float())


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 64), (4, -1), (5, 32)])
def test_impossible_groups_are_refused(bits: int, group_size: int) -> None:
    """With what there is."""
    with pytest.raises(ConfigError, match=f"group_size={group_size}: use 4 bits in groups of 32"):
        quantize_weight(matrix("normal"), bits, group_size)  # type: ignore[arg-type]
