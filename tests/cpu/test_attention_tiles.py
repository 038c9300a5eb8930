"""Attention by tiles of bfloat16: the bits of the instructions, of the formula, and of rows read in place."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.spec import AttentionSpec
from ramify.kernels.cpu import simd, targets, tile_choice
from ramify.kernels.cpu.abi import BF16_TILES, BF16_TILES_EMULATED
from tests.cpu.attention_cases import (
    CPU,
    Step,
    assert_same_bits,
    batch_of,
    pages_of,
    planes_of,
    run,
    spec_of,
)
from tests.cpu.test_bf16_tiles import tile_sums

BF16 = torch.bfloat16
SPECS = {
    "one_step": spec_of(head_dim=32, dtype=BF16),
    "groups": spec_of(num_heads=9, num_kv_heads=3, head_dim=64, page_size=4, dtype=BF16),
    "window": spec_of(head_dim=96, dtype=BF16, windows=(70,), soft_cap=5.0),
    "wide": spec_of(num_heads=2, num_kv_heads=1, head_dim=128, value_dim=72, dtype=BF16),
    "mla": spec_of(
        kind="mla", num_heads=16, num_kv_heads=1, head_dim=160, value_dim=128, dtype=BF16
    ),
}
LENGTHS = (40, 255, 257, 300, 513)

pytestmark = pytest.mark.skipif(
    not simd.HAS_BF16_DOT, reason="this processor has no AVX-512 with bfloat16"
)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends that are made meanwhile compute by the emulation."""
    monkeypatch.setenv(tile_choice.TILES_VARIABLE, "emulated")
    tile_choice.bf16_tile_kind.cache_clear()
    yield
    tile_choice.bf16_tile_kind.cache_clear()


def step_of(
    spec: AttentionSpec, new: tuple[int, ...], *, scale: float = 1.0, seed: int = 0
) -> Step:
    """The last `new` tokens of requests of LENGTHS; K/V and queries times `scale`."""
    noise = torch.Generator().manual_seed(seed)
    rows = pages_of([*LENGTHS], spec.page_size, noise)
    planes = planes_of(spec, rows, [*LENGTHS], noise)
    batch = batch_of(spec, [(n - m, m) for n, m in zip(LENGTHS, new, strict=True)], rows)
    q = torch.randn(batch.num_tokens, spec.num_heads, spec.head_dim, generator=noise)
    scaled = {name: (plane.float() * scale).to(BF16) for name, plane in planes.items()}
    return Step(batch, (q * scale).to(BF16), scaled, None)


@pytest.mark.skipif(not targets.has_tiles(), reason="this processor has no tiles")
@pytest.mark.parametrize("scale", [1.0, 1e-19, 3e-20, 1e18])
@pytest.mark.parametrize("name", SPECS)
def test_the_emulation_has_the_bits_of_the_instructions(name: str, scale: float) -> None:
    """Also where products and sums are subnormal or overflow."""
    backend = CpuBackend(SPECS[name], CPU)
    assert backend._tiles == BF16_TILES
    for new in ((40, 255, 257, 300, 513), (17, 1, 20, 3, 33)):
        step = step_of(SPECS[name], new, scale=scale)
        by_tiles = run(backend, step)
        backend._tiles = BF16_TILES_EMULATED

        assert_same_bits(run(backend, step), by_tiles)
        backend._tiles = BF16_TILES


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("scale", [1.0, 1e-19])
@pytest.mark.parametrize("name", SPECS)
def test_rows_read_in_place_have_the_bits_of_packed_blocks(name: str, scale: float) -> None:
    """One token and four of each request beside whole chunks, and each request alone."""
    spec = SPECS[name]
    backend, chunks = CpuBackend(spec, CPU), step_of(spec, (40,) * len(LENGTHS), scale=scale)
    assert backend._tiles == BF16_TILES_EMULATED
    expected = run(backend, chunks).view(len(LENGTHS), 40, spec.num_heads, spec.v_head_dim)
    q = chunks.q.view(len(LENGTHS), 40, spec.num_heads, spec.head_dim)
    for count in (1, 2, 4, 7):
        few = step_of(spec, (count,) * len(LENGTHS), scale=scale)
        few = replace(few, q=q[:, -count:].flatten(0, 1))

        assert_same_bits(run(backend, few), expected[:, -count:].flatten(0, 1))


@pytest.mark.usefixtures("emulated")
def test_a_value_that_is_not_finite_stays_with_the_rows_that_see_it() -> None:
    """In the last odd place of a block; whoever shares the tile is unharmed."""
    spec = SPECS["groups"]
    backend, step = CpuBackend(spec, CPU), step_of(spec, (20,) * len(LENGTHS))
    expected, planes = run(backend, step), dict(step.planes)
    values = planes["v"] = planes["v"].clone()
    last = int(step.batch.block_table[1, 254 // 4])
    values[last, 254 % 4, 0, 3] = torch.inf

    out = run(backend, replace(step, planes=planes))

    is_last = torch.zeros(step.batch.num_tokens, dtype=torch.bool)
    is_last[39] = True  # the last token of the second request
    assert_same_bits(out[~is_last], expected[~is_last])
    assert out[39, :3, 3].isinf().all()


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("count", [4, 40])
def test_other_operations_keep_subnormals(count: int) -> None:
    """In all threads that attention ran in, with rows in place and with packed blocks."""
    spec = SPECS["groups"]
    tiny = torch.full((1 << 20,), 1e-40)

    run(CpuBackend(spec, CPU), step_of(spec, (count,) * len(LENGTHS)))

    assert torch.equal((tiny * 1.0).view(torch.int32), tiny.view(torch.int32))


@pytest.mark.usefixtures("emulated")
def test_sums_are_those_of_the_formula() -> None:
    """Scores 0 make all weights 1: the output is the sum of values over their number, rounded."""
    spec = spec_of(num_heads=2, num_kv_heads=1, head_dim=32, dtype=BF16)
    noise = torch.Generator().manual_seed(1)
    rows = pages_of([77], spec.page_size, noise)
    planes = planes_of(spec, rows, [77], noise)
    batch = batch_of(spec, [(0, 77)], rows)
    zeros = torch.zeros(77, 2, 32, dtype=BF16)

    out = run(CpuBackend(spec, CPU), Step(batch, zeros, planes, None))

    places = torch.tensor([rows[0][i // 8] * 8 + i % 8 for i in range(77)])
    values = planes["v"].flatten(0, 1)[places, 0]
    visible = torch.ones(77, 77).tril().to(BF16)
    expected = (
        tile_sums(visible, values.T, torch.zeros(32)) / np.arange(1, 78, dtype=np.float32)[:, None]
    )
    assert torch.equal(out[:, 0], torch.from_numpy(expected).to(BF16))
    assert torch.equal(out[:, 1], out[:, 0])
