"""Decoders of quantised linear layers: values are those of the format's formula, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.scheme import Scheme
from ramify.models.ops.quantized import QuantizedWeight
from ramify.models.packed_formats.affine import Decoded, WidenedWeight
from ramify.models.packed_formats.decode import decode_linear
from ramify.models.packed_formats.fp4 import mxfp4

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def integers(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    """Random int64 in low..high, both ends among them."""
    values = torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed))
    values.view(-1)[0], values.view(-1)[-1] = low, high
    return values


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Positive scales from 1e-7 to 1e2, subnormal float16 among them."""
    exponents = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 9 - 7
    return torch.pow(10, exponents).to(dtype)


def packed(values: Tensor, bits: int, dim: int) -> Tensor:
    """Integers in int32 words along `dim`, lowest bits first; the last word is filled with 0."""
    values, per_word = values.movedim(dim, -1), 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_word))
    words: Tensor = (values.unflatten(-1, (-1, per_word)) << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, dim).contiguous()


def values_of(decoded: Decoded | Tensor) -> Tensor:
    """The float32 matrix that was decoded."""
    assert not isinstance(decoded, Tensor)
    return decoded.weight if isinstance(decoded, WidenedWeight) else decoded.dequantize()


def gptq_layer(
    bits: int, group_size: int, sym: bool, offset: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Tensors of a GPTQ layer [16, 64], and its codes, zero points and scales as the formula has them."""
    top, groups = 2**bits - 1, 64 // group_size
    codes = integers(0, top, 64, 16)
    zeros = integers(offset, top + offset, groups, 16, seed=1)
    zeros = torch.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
    scales = floats(groups, 16, dtype=dtype)
    tensors = {
        "qweight": packed(codes, bits, 0),
        "qzeros": packed(zeros - offset, bits, 1),
        "scales": scales,
    }
    return tensors, codes, zeros, scales


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [-1, 16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptq(bits: int, group_size: int, sym: bool, offset: int, dtype: torch.dtype) -> None:
    """Both versions; only 8 bits with zero points and scales of float32 have to be widened."""
    size = 64 if group_size == -1 else group_size
    tensors, codes, zeros, scales = gptq_layer(bits, size, sym, offset, dtype)
    tensors["g_idx"] = (torch.arange(64) // size).int()
    scheme = Scheme("gptq", 4 if bits == 4 else 8, group_size, symmetric=sym, zero_offset=offset)

    decoded = decode_linear("q_proj", tensors, (16, 64), scheme)

    rows = torch.arange(64) // size
    assert torch.equal(values_of(decoded), ((codes - zeros[rows]).float() * scales[rows].float()).T)
    is_wide = bits == 8 and not sym and dtype == torch.float32
    assert isinstance(decoded, WidenedWeight) == is_wide
    if isinstance(decoded, QuantizedWeight):
        assert decoded.group_size == size
        assert decoded.codes.dtype == torch.int8
        if bits == 4 and decoded.format.bits == 4:
            assert set(decoded.codes.flatten().tolist()) <= set(decoded.format.levels)
        if sym:
            assert (decoded.mins, decoded.format.bits) == (None, bits)


@pytest.mark.parametrize("scattered", [False, True])
def test_act_order(scattered: bool) -> None:
    """Whole groups in another order take their scales along; scattered ones are widened, with the reason."""
    tensors, codes, zeros, scales = gptq_layer(4, 16, False, 1, torch.float16)
    index = torch.tensor([2, 0, 3, 1]).repeat_interleave(16)
    index = (
        index[torch.randperm(64, generator=torch.Generator().manual_seed(3))]
        if scattered
        else index
    )
    tensors["g_idx"] = index.int()

    decoded = decode_linear("q", tensors, (16, 64), Scheme("gptq", 4, 16, zero_offset=1))

    expected = ((codes - zeros[index]).float() * scales[index].float()).T
    assert torch.equal(values_of(decoded), expected)
    assert isinstance(decoded, WidenedWeight) == scattered
    if isinstance(decoded, WidenedWeight):
        assert "act-order" in decoded.reason


def test_awq() -> None:
    """Column c of eight lies at nibble [0 4 1 5 2 6 3 7][c], of zero points too."""
    codes, zeros = integers(0, 15, 64, 16), integers(0, 15, 2, 16, seed=1)
    scales = floats(2, 16, dtype=torch.float16)
    order = torch.tensor(AWQ_COLUMNS)
    shuffled = [part.unflatten(1, (-1, 8))[..., order].flatten(1) for part in (codes, zeros)]
    tensors = {
        "qweight": packed(shuffled[0], 4, 1),
        "qzeros": packed(shuffled[1], 4, 1),
        "scales": scales,
    }

    decoded = decode_linear("q", tensors, (16, 64), Scheme("awq", 4, 32, symmetric=False))

    rows = torch.arange(64) // 32
    assert isinstance(decoded, QuantizedWeight)
    assert torch.equal(values_of(decoded), ((codes - zeros[rows]).float() * scales[rows].float()).T)


@pytest.mark.parametrize("group_size", [0, -1, 16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_pack_quantized(bits: int, symmetric: bool, group_size: int) -> None:
    """Widths that do not fill a word or a group; zero points are packed along the output."""
    if group_size == 0 and not symmetric:
        pytest.skip("refused when the configuration is read")
    size = group_size if group_size > 0 else 61
    groups, middle = -(-61 // size), 2 ** (bits - 1)
    codes = integers(-middle, middle - 1, 13, 61)
    zeros = integers(-middle, middle - 1, 13, groups, seed=1) * (not symmetric)
    scales = floats(*((1,) if group_size == 0 else (13, groups)), dtype=torch.bfloat16)
    tensors = {
        "weight_packed": packed(codes + middle, bits, 1),
        "weight_scale": scales,
        "weight_shape": torch.tensor([13, 61]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros + middle, bits, 0)
    scheme = Scheme("pack-quantized", 4 if bits == 4 else 8, group_size, symmetric=symmetric)

    decoded = decode_linear("q", tensors, (13, 61), scheme)

    columns, spread = torch.arange(61) // size, scales.float().expand(13, groups)
    assert isinstance(decoded, QuantizedWeight)
    expected = (codes - zeros[:, columns]).float() * spread[:, columns]
    assert torch.equal(values_of(decoded), expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(symmetric: bool) -> None:
    """Codes are as stored; zero points become offsets."""
    codes, zeros = integers(-128, 127, 9, 40), integers(-128, 127, 9, 1, seed=1) * (not symmetric)
    tensors = {"weight": codes.to(torch.int8), "weight_scale": floats(9, 1, dtype=torch.bfloat16)}
    if not symmetric:
        tensors["weight_zero_point"] = zeros.to(torch.int8)

    decoded = decode_linear("q", tensors, (9, 40), Scheme("int-quantized", 8, symmetric=symmetric))

    assert isinstance(decoded, QuantizedWeight)
    assert torch.equal(decoded.codes, tensors["weight"])
    assert torch.equal(
        values_of(decoded), (codes - zeros).float() * tensors["weight_scale"].float()
    )


def test_bitsandbytes_int8() -> None:
    """A row's scale is its largest element / 127."""
    tensors = {"weight": integers(-127, 127, 9, 40).to(torch.int8), "SCB": floats(9)}

    decoded = decode_linear("q", tensors, (9, 40), Scheme("bnb-8bit", 8))

    expected = tensors["weight"].float() * (tensors["SCB"] / 127)[:, None]
    assert torch.equal(values_of(decoded), expected)


def every_e4m3(rows: int, width: int) -> Tensor:
    """All finite float8_e4m3fn values, subnormal ones too."""
    byte = torch.arange(rows * width) % 256
    return (
        torch.where(byte % 128 == 127, 1, byte)
        .to(torch.uint8)
        .view(torch.float8_e4m3fn)
        .view(rows, width)
    )


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (30, 1)])
def test_fp8_of_a_matrix_or_a_row(name: str, shape: tuple[int, ...]) -> None:
    """Both names multiply."""
    tensors = {"weight": every_e4m3(30, 40), name: floats(*shape)}

    decoded = decode_linear("q", tensors, (30, 40), Scheme("fp8", 8))

    assert isinstance(decoded, WidenedWeight)
    expected = tensors["weight"].float() * tensors[name].reshape(-1, 1)
    assert torch.equal(decoded.weight, expected)


@pytest.mark.parametrize("shape", [(16, 16), (5, 51)])
def test_fp8_of_every_byte(shape: tuple[int, int]) -> None:
    """An even and an odd number of elements; NaN stays NaN."""
    rows, width = shape
    weight = torch.arange(rows * width).to(torch.uint8).view(torch.float8_e4m3fn).view(shape)

    decoded = decode_linear(
        "q", {"weight": weight, "weight_scale": torch.ones(1)}, shape, Scheme("fp8", 8)
    )

    assert isinstance(decoded, WidenedWeight)
    assert torch.equal(decoded.weight.nan_to_num(1e9), weight.float().nan_to_num(1e9))


@pytest.mark.parametrize("exponents", [False, True])
def test_fp8_of_blocks(exponents: bool) -> None:
    """The last block of a side may be smaller; scales may be exponents."""
    scales = integers(100, 140, 2, 3).to(torch.uint8) if exponents else floats(2, 3)
    tensors = {"weight": every_e4m3(200, 300), "weight_scale_inv": scales}

    decoded = decode_linear("q", tensors, (200, 300), Scheme("fp8", 8, block=(128, 128)))

    factors = 2.0 ** (scales.float() - 127) if exponents else scales
    spread = factors[torch.arange(200) // 128][:, torch.arange(300) // 128]
    assert torch.equal(values_of(decoded), tensors["weight"].float() * spread)


@pytest.mark.parametrize("group_size", [0, -1, 16])
def test_float_quantized(group_size: int) -> None:
    """A scale for the matrix, a row, or a group of it."""
    shape = {0: (1,), -1: (6, 1), 16: (6, 3)}[group_size]
    tensors = {"weight": every_e4m3(6, 48), "weight_scale": floats(*shape, dtype=torch.bfloat16)}

    decoded = decode_linear("q", tensors, (6, 48), Scheme("float-quantized", 8, group_size))

    spread = tensors["weight_scale"].float().expand(6, -1).repeat_interleave(48 // shape[-1], 1)
    assert torch.equal(values_of(decoded), tensors["weight"].float() * spread)


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(nested: bool) -> None:
    """Element 2i is in the high nibble; blocks run over rows; scales may be quantised themselves."""
    codes, levels = integers(0, 15, 6 * 48), torch.linspace(-1, 1, 16) ** 3
    state = {"blocksize": 64, "shape": [6, 48], "nested_blocksize": 4, "nested_offset": 0.03}
    tensors = {
        "weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.quant_map": levels,
        "weight.absmax": floats(5),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    if nested:
        tensors["weight.absmax"] = integers(0, 255, 5).to(torch.uint8)
        tensors["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        tensors["weight.nested_absmax"] = floats(2)

    decoded = decode_linear("q", tensors, (6, 48), Scheme("bnb-4bit", 4, nested=nested))

    scales = tensors["weight.absmax"]
    if nested:
        outer = tensors["weight.nested_absmax"][torch.arange(5) // 4]
        scales = tensors["weight.nested_quant_map"][scales.int()] * outer + 0.03
    assert isinstance(decoded, WidenedWeight)
    expected = levels[codes] * scales[torch.arange(6 * 48) // 64]
    assert torch.equal(decoded.weight.flatten(), expected)


LARGEST = 2**31 - 1


@pytest.mark.parametrize("kind", ["block", "group", "zero points", "g_idx", "nf4"])
def test_a_group_that_is_larger_than_the_row_takes_no_memory(kind: str) -> None:
    """Whatever the file says: a terabyte of scales would be the program's end."""
    weight = every_e4m3(6, 48)
    state = {
        "blocksize": LARGEST,
        "nested_blocksize": LARGEST,
        "nested_offset": 0,
        "shape": [6, 48],
    }
    words = {
        "weight_packed": packed(integers(0, 255, 6, 48), 8, 1),
        "weight_shape": torch.tensor([6, 48]),
        "weight_scale": floats(6, 1),
        "weight_zero_point": packed(integers(100, 140, 6, 1), 8, 0),
    }
    nf4 = {
        "weight": torch.zeros(144, 1, dtype=torch.uint8),
        "weight.quant_map": floats(16),
        "weight.absmax": torch.zeros(1, dtype=torch.uint8),
        "weight.nested_absmax": floats(1),
        "weight.nested_quant_map": floats(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }
    in_words = Scheme("pack-quantized", 8, LARGEST, symmetric=False)
    cases: dict[str, tuple[dict[str, Tensor], Scheme]] = {
        "block": (
            {"weight": weight, "weight_scale_inv": floats(1, 1)},
            Scheme("fp8", 8, block=(LARGEST, LARGEST)),
        ),
        "group": (
            {"weight": weight, "weight_scale": floats(6, 1)},
            Scheme("float-quantized", 8, LARGEST),
        ),
        "zero points": (words, in_words),
        "g_idx": (words | {"weight_g_idx": torch.zeros(48, dtype=torch.int32)}, in_words),
        "nf4": (nf4, Scheme("bnb-4bit", 4, nested=True)),
    }
    tensors, scheme = cases[kind]

    decoded = decode_linear("q", tensors, (6, 48), scheme)

    assert values_of(decoded).shape == (6, 48)


def test_mxfp4() -> None:
    """Every nibble, and exponents at both ends; the low nibble comes first."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = torch.tensor([*values, *(-value for value in values)])
    codes, scales = integers(0, 15, 5, 64), integers(0, 250, 5, 2, seed=1).to(torch.uint8)
    blocks = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).unflatten(1, (2, 16))

    weight = mxfp4("q", blocks, scales, (5, 64), torch.float32)

    factors = (2.0 ** (scales.double() - 127)).float().repeat_interleave(32, 1)
    assert torch.equal(weight.dequantize(), table[codes] * factors)
    with pytest.raises(CheckpointError, match="found 255, which is NaN"):
        mxfp4("q", blocks, torch.full_like(scales, 255), (5, 64), torch.float32)


FP8 = {"weight": every_e4m3(4, 8), "weight_scale": floats(1)}
GPTQ = gptq_layer(4, 16, False, 1, torch.float16)[0]


@pytest.mark.parametrize(
    ("tensors", "scheme", "shape", "message"),
    [
        ({"weight": FP8["weight"]}, Scheme("fp8", 8), (4, 8), "q.weight_scale is missing"),
        (FP8 | {"zero": floats(1)}, Scheme("fp8", 8), (4, 8), "q.zero is not expected"),
        (
            FP8,
            Scheme("fp8", 8, block=(2, 4)),
            (4, 8),
            r"q.weight_scale: expected \[2, 2\] .*found \[1\] float32",
        ),
        (FP8, Scheme("fp8", 8), (8, 4), r"q.weight: expected \[8, 4\] .*found \[4, 8\]"),
        (
            FP8 | {"weight_scale": torch.tensor([float("nan")])},
            Scheme("fp8", 8),
            (4, 8),
            "scales hold NaN",
        ),
        (
            GPTQ,
            Scheme("gptq", 4, 32),
            (16, 64),
            r"q.qzeros: expected \[2, 2\] int32, found \[4, 2\]",
        ),
        (GPTQ, Scheme("gptq", 8, 16), (16, 64), r"q.qweight: expected \[16, 16\] int32, found \[8"),
        (
            GPTQ | {"g_idx": torch.full((64,), 4)},
            Scheme("gptq", 4, 16),
            (16, 64),
            "q.g_idx: expected groups 0 to 3, found 4 to 4",
        ),
        (GPTQ, Scheme("awq", 4, 16), (16, 64), r"q.qweight: expected \[64, 2\]"),
        (GPTQ, Scheme("gptq", 4, 16), (12, 64), "width of 12 is no multiple of 8"),
    ],
)
def test_tensors_that_contradict_the_scheme_are_refused(
    tensors: dict[str, Tensor], scheme: Scheme, shape: tuple[int, int], message: str
) -> None:
    """The message names the tensor, what was expected and what was found."""
    with pytest.raises(CheckpointError, match=message):
        decode_linear("q", tensors, shape, scheme)
