"""Triton's row kernels in the interpreter: norm, activation, rope and K/V write, against plain torch."""

from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the interpreter of Triton's kernels comes with triton")

from ramify.kernels.triton.activation import gated_activation
from ramify.kernels.triton.norm import add_rms_norm
from ramify.kernels.triton.rope_kv import HeadNorms, rope_kv
from ramify.kv.pool import KVLayout, KVPool
from ramify.models.configs.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops.functional import GATED_ACTIVATIONS, apply_rotary, rms_norm
from ramify.models.ops.rotary_table import RotaryTable
from tests.cpu.attention_cases import assert_same_bits

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = tuple(TOLERANCE)


def rows_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within a step of the dtype: sums and exponentials may be rounded otherwise."""
    assert actual.dtype == expected.dtype
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    assert float(error.max()) <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "offset", "eps"), [(40, 0.0, 1e-5), (600, 1.0, 1e-6)])
def test_a_norm_after_an_addition_is_torchs(
    width: int, offset: float, eps: float, dtype: torch.dtype
) -> None:
    """hidden += x, then RMS norm, with Gemma's 1 + weight as well; the sum has torch's bits."""
    x, hidden = (rows_of(3, width, dtype=dtype, seed=seed) for seed in range(2))
    weight = rows_of(width, dtype=dtype, seed=2)
    total = hidden.clone().add_(x)
    expected = rms_norm(total, weight, eps, offset)

    alone = add_rms_norm(total, weight, eps, offset)
    fused = add_rms_norm(x, weight, eps, offset, residual=hidden)

    assert_same_bits(hidden, total)
    assert_same_bits(fused, alone)
    assert_close(fused, expected)
    assert_same_bits(add_rms_norm(total[1:2], weight, eps, offset), alone[1:2])


# NumPy warns of an infinite exp(-x), whose reciprocal is 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GATED_ACTIVATIONS)
def test_a_gated_activation_is_torchs(kind: str, dtype: torch.dtype) -> None:
    """act(gate) * up over a width that no block divides; a row is the same alone."""
    gate_up = rows_of(3, 2 * 1030, dtype=dtype) * 4
    call = partial(gated_activation, kind=kind, alpha=SWIGLU_ALPHA, limit=SWIGLU_LIMIT)

    actual = call(gate_up)

    assert_close(actual, GATED_ACTIVATIONS[kind](*gate_up.chunk(2, -1)))
    assert_same_bits(call(gate_up[2:]), actual[2:])


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "dtype", "kv_dtype", "norm"),
    [
        ((6, 2), 24, torch.float32, torch.float32, "none"),
        ((3, 1), 80, torch.bfloat16, torch.bfloat16, "before"),
        ((12, 10), 16, torch.bfloat16, torch.int8, "after"),
        ((2, 2), 64, torch.bfloat16, torch.float8_e4m3fn, "none"),
        ((4, 2), 32, torch.float16, torch.float16, "offset"),
    ],
)
def test_a_page_has_the_bits_of_the_pools_own_write(
    num_heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    norm: str,
) -> None:
    """Queries and keys are rotated as by torch; planes and scales are those of `KVPool.write_kv`."""
    (num_q, num_kv), num_rows = num_heads, 5
    qkv = rows_of(num_rows, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    positions = torch.tensor([0, 7, 3, 40, 3])
    slots = torch.tensor([13, 0, 5, 9, 22])
    table = RotaryTable(RopeConfig(theta=100.0), head_dim=head_dim, max_len=64, dtype=dtype)
    table.extend(64)
    layout = KVLayout.mha(1, num_kv, head_dim)
    pool, expected_pool = (KVPool(layout, 6, 4, dtype=kv_dtype) for _ in range(2))
    weights = rows_of(head_dim, dtype=dtype, seed=5), rows_of(head_dim, dtype=dtype, seed=6)
    offset = 1.0 if norm == "offset" else 0.0
    norms = None if norm == "none" else HeadNorms(*weights, 1e-5, offset, norm == "after")
    q, k, v = (
        part.clone() for part in qkv.unflatten(1, (-1, head_dim)).split((num_q, num_kv, num_kv), 1)
    )
    if norms is not None and not norms.is_after_rope:
        q, k = (rms_norm(x, w, 1e-5, offset) for x, w in zip((q, k), weights, strict=True))
    angles = table.cos_sin(positions)
    q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
    if norms is not None and norms.is_after_rope:
        q, k = (rms_norm(x, w, 1e-5, offset) for x, w in zip((q, k), weights, strict=True))

    results = rope_kv(
        qkv, num_heads, positions, (table.cos, table.sin), slots, pool.planes(0), norms
    )

    for actual, expected in zip(results, (q, k, v), strict=True):
        assert_close(actual, expected)
    expected_pool.write_kv(0, slots, k=results[1].contiguous(), v=results[2].contiguous())
    for name, plane in expected_pool.planes(0).items():
        assert torch.equal(pool.planes(0)[name].view(torch.uint8), plane.view(torch.uint8)), name


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # NumPy warns of inf / inf
def test_damage_stays_visible_in_codes() -> None:
    """A row with NaN or infinity dequantises to NaN; a row without a slot is not written."""
    qkv = rows_of(3, 3 * 16, dtype=torch.float32)
    qkv[0, 20], qkv[1, 40] = torch.nan, torch.inf
    table = RotaryTable(RopeConfig(theta=100.0), head_dim=16, max_len=8, dtype=torch.float32)
    table.extend(8)
    for kv_dtype in (torch.int8, torch.float8_e4m3fn):
        pool = KVPool(KVLayout.mha(1, 1, 16), 2, 2, dtype=kv_dtype)
        before = {name: plane.clone() for name, plane in pool.planes(0).items()}

        rope_kv(
            qkv.clone(), (1, 1), torch.tensor([0, 1, 2]), (table.cos, table.sin),
            torch.tensor([0, 1, -1]), pool.planes(0),
        )  # fmt: skip

        kv = pool.gather_kv(0, torch.tensor([0, 1]))
        assert kv["k"][0].isnan().all() and kv["v"][1].isnan().all()
        assert kv["k"][1].isfinite().all() and kv["v"][0].isfinite().all()
        for name, plane in pool.planes(0).items():
            rest, old = (x.view(torch.uint8).flatten(0, 1)[2:] for x in (plane, before[name]))
            assert torch.equal(rest, old)
