"""Tiles of bfloat16: their sums are those of a formula, and the emulation has the bits of the instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from ramify.attention.exactness import batch_variant_row_counts
from ramify.kernels.cpu.abi import BF16, BF16_TILES, BF16_TILES_EMULATED, BF16_VNNI
from ramify.models.ops.cpu.linear import PackedLinear
from ramify.models.ops.protocol import Activation

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

from ramify.kernels.cpu import targets, tile_choice

# [out_width, in_width] around one and several panels, one and several strips of K, and odd widths
SHAPES = [(64, 128), (1, 1), (7, 3), (33, 257), (100, 76), (301, 511), (48, 1030)]
ROW_COUNTS = (1, 2, 3, 5, 15, 16, 17, 31, 32, 33, 47, 96, 97, 130, 256, 257, 300)

needs_tiles = pytest.mark.skipif(not targets.has_tiles(), reason="this processor has no tiles")


def random_bits(kind: str, *shape: int, seed: int) -> Tensor:
    """Bfloat16 numbers of random sign and fraction, with exponents of a kind."""
    generator = np.random.default_rng(seed)
    exponents = {
        "ordinary": generator.integers(120, 132, shape),
        "any finite": generator.integers(0, 255, shape),
        # products and sums around the smallest normal number
        "tiny": generator.integers(55, 70, shape),
        "subnormal": np.where(generator.random(shape) < 0.3, 0, generator.integers(60, 68, shape)),
        "zero or subnormal": generator.integers(0, 3, shape),
        "huge": generator.integers(180, 255, shape),
        "infinite or NaN": np.where(
            generator.random(shape) < 0.002, 255, generator.integers(110, 140, shape)
        ),
    }[kind]
    words = (
        generator.integers(0, 2, shape) << 15 | exponents << 7 | generator.integers(0, 128, shape)
    )
    return torch.from_numpy(words.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


KINDS = [
    "ordinary",
    "any finite",
    "tiny",
    "subnormal",
    "zero or subnormal",
    "huge",
    "infinite or NaN",
]


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Weights that are packed meanwhile are multiplied by the emulation, on any machine."""
    monkeypatch.setenv(tile_choice.TILES_VARIABLE, "emulated")
    tile_choice.bf16_tile_kind.cache_clear()
    yield
    tile_choice.bf16_tile_kind.cache_clear()


def weight_kind(linear: PackedLinear) -> int:
    return linear._record.weight_kind


@needs_tiles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_emulation_has_the_bits_of_the_instructions(
    shape: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all numbers of rows, with and without a bias; a NaN is any NaN."""
    weight = random_bits(kind, *shape, seed=1)
    bias = None if shape[0] % 2 else torch.linspace(-3, 3, shape[0])
    by_tiles, by_emulation = PackedLinear(weight, bias), PackedLinear(weight, bias)
    record = by_emulation._record._replace(weight_kind=BF16_TILES_EMULATED)
    monkeypatch.setattr(by_emulation, "_record", record)
    assert weight_kind(by_tiles) == BF16_TILES

    for num_rows in ROW_COUNTS:
        x = random_bits(kind, num_rows, shape[1], seed=num_rows)

        expected, y = by_tiles(x), by_emulation(x)

        is_equal = y.view(torch.int16) == expected.view(torch.int16)
        assert (is_equal | (y.isnan() & expected.isnan())).all()


def tile_sums(x: Tensor, weight: Tensor, bias: Tensor) -> np.ndarray:
    """The formula of `tile_microkernels`, K filled up with zeros. Exact where float64 holds product + sum."""
    padding = (0, -x.shape[1] % 32)
    pairs = [
        torch.nn.functional.pad(part.double(), padding).numpy().reshape(len(part), -1, 16, 2)
        for part in (x, weight)
    ]
    total = np.repeat(bias.float().numpy()[None], len(x), 0)
    for step in range(pairs[0].shape[1]):
        sums = np.zeros((2, len(x), len(weight)), np.float32)
        for k in range(16):
            for half in (0, 1):
                products = np.outer(*(part[:, step, k, half] for part in pairs))
                sums[half] = (sums[half].astype(np.float64) + products).astype(np.float32)
        total += sums[0] + sums[1]
    return total


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_the_formula(shape: tuple[int, int]) -> None:
    """Rounded to bfloat16 once, at the end; the bias comes first."""
    weight = random_bits("ordinary", *shape, seed=1)
    bias = torch.linspace(-3, 3, shape[0])
    x = random_bits("ordinary", 21, shape[1], seed=2)

    y = PackedLinear(weight, bias)(x)

    assert torch.equal(y, torch.from_numpy(tile_sums(x, weight, bias)).bfloat16())


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("activation", [None, "silu_mul"])
def test_no_row_count_and_no_place_changes_a_bit(activation: Activation | None, norm: bool) -> None:
    """By the emulation, on any machine: blocks that are full, a row over and a row short."""
    weight = random_bits("ordinary", 102, 257, seed=1)
    norm_weight = (random_bits("ordinary", 257, seed=3), 1e-5) if norm else None
    linear = PackedLinear(weight, norm=norm_weight, activation=activation)
    rows = random_bits("ordinary", 600, 257, seed=2)
    assert weight_kind(linear) == BF16_TILES_EMULATED

    counts = (*range(1, 34), 47, 48, 95, 96, 97, 191, 255, 256, 257, 511, 599)
    assert batch_variant_row_counts(linear, rows, counts) == ()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("width", [31, 64])
def test_rows_of_the_weight_come_back(width: int) -> None:
    """As they were before they were packed: an embedding shares them with the head."""
    weight = random_bits("ordinary", 70, width, seed=1)

    rows = PackedLinear(weight).weight_rows(torch.tensor([69, 0, 31, 32, 33]))

    assert torch.equal(rows, weight[[69, 0, 31, 32, 33]])


@pytest.mark.usefixtures("emulated")
def test_a_row_that_is_not_finite_stays_alone() -> None:
    """Also where other rows share its tile."""
    linear, x = PackedLinear(torch.ones(40, 70).bfloat16()), torch.ones(19, 70).bfloat16()
    x[4, 3], x[18, 69] = torch.nan, torch.inf

    y = linear(x)

    assert y[4].isnan().all() and y[18].isinf().all()
    assert (y[[row for row in range(19) if row not in (4, 18)]] == 70).all()


@pytest.mark.parametrize(
    ("setting", "kind"), [("off", None), ("emulated", BF16_TILES_EMULATED), ("", "either")]
)
def test_a_variable_chooses_the_arithmetic_of_a_process(setting: str, kind: object) -> None:
    """Off, emulated, or tiles where the machine has them."""
    assert kind_of_a_process(setting) == (
        str((BF16_TILES if targets.has_tiles() else None) if kind == "either" else kind)
    )


@pytest.mark.parametrize(
    ("cpu", "features", "is_fast"),
    [
        ("znver4", ("avx512bf16",), True),
        ("znver6", ("avx512bf16", "avx512fp16"), True),
        ("cooperlake", ("avx512bf16",), True),
        ("sapphirerapids", ("avx512bf16", "avx512fp16"), False),
        ("icelake-server", (), False),
    ],
)
@pytest.mark.parametrize("width", [64, 31])
def test_without_tiles_the_faster_instructions_multiply(
    cpu: str, features: tuple[str, ...], is_fast: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dot products on AMD and before AMX, else FMA; FMA for an odd width."""
    monkeypatch.setattr(targets, "_HOST_FEATURES", dict.fromkeys(features, True))
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_name", lambda: cpu)
    monkeypatch.setattr(targets, "has_bf16_dot", lambda: "avx512bf16" in features)
    monkeypatch.setattr(tile_choice, "bf16_tile_kind", lambda: None)
    targets.has_fast_bf16_dot.cache_clear()

    kind = tile_choice.bf16_weight_kind(width)

    targets.has_fast_bf16_dot.cache_clear()
    assert kind == (BF16_VNNI if is_fast and width == 64 else BF16)


def test_another_setting_of_the_variable_is_refused() -> None:
    """With the settings that there are."""
    assert 'RAMIFY_BF16_TILES=on; use "off", "emulated"' in kind_of_a_process("on")


def kind_of_a_process(setting: str) -> str:
    """What `bf16_tile_kind` gives in a process of this setting, or its error."""
    program = "from ramify.kernels.cpu.tile_choice import bf16_tile_kind; print(bf16_tile_kind())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {tile_choice.TILES_VARIABLE: setting},
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or result.stderr
