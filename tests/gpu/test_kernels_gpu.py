"""Triton's kernels on a CUDA device: torch's results, rows that depend on no other row, no host sync."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton", reason="a CUDA build of torch brings triton")

from ramify.attention.device_probe import batch_variant_scores
from ramify.attention.paged_index import PagedIndex
from ramify.kernels.triton.activation import gated_activation
from ramify.kernels.triton.gemm import BatchInvariantGemm
from ramify.kernels.triton.grouped_gemm import GroupedGemm
from ramify.kernels.triton.head_gemm import HeadGemm
from ramify.kernels.triton.norm import add_rms_norm
from ramify.kernels.triton.rope_kv import HeadNorms, rope_kv
from ramify.kernels.triton.sample_batch import SampleBatch, likeliest
from ramify.kernels.triton.sampling import OK
from ramify.kv.pool import KVLayout, KVPool
from ramify.models.configs.moe import SWIGLU_ALPHA, SWIGLU_LIMIT
from ramify.models.configs.rope import RopeConfig
from ramify.models.ops.functional import GATED_ACTIVATIONS, apply_rotary, rms_norm
from ramify.models.ops.rotary_table import RotaryTable
from ramify.models.ops.triton_experts import RoutedExperts
from tests.cpu.attention_cases import assert_same_bits, spec_of
from tests.cpu.test_triton_sampling import ROWS, VOCAB, expected_token, logits_of

GPU = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BATCHES = (1, 2, 7, 16, 63, 64, 65, 200)


def rows_of(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(GPU, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).abs() / (1 + expected.double().abs())
    assert float(error.max()) <= TOLERANCE[actual.dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [40, 4096, 16384])
def test_a_norm_after_an_addition_is_torchs(width: int, dtype: torch.dtype) -> None:
    """hidden += x, then RMS norm; each row as alone."""
    x, hidden = (rows_of(200, width, dtype=dtype, seed=seed) for seed in range(2))
    weight = rows_of(width, dtype=dtype, seed=2)
    total = hidden.clone().add_(x)

    out = add_rms_norm(x, weight, 1e-6, 1.0, residual=hidden)

    assert_same_bits(hidden, total)
    assert_close(out, rms_norm(total, weight, 1e-6, 1.0))
    for count in BATCHES:
        assert_same_bits(add_rms_norm(total[-count:], weight, 1e-6, 1.0), out[-count:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", GATED_ACTIVATIONS)
def test_a_gated_activation_is_torchs(kind: str, dtype: torch.dtype) -> None:
    """act(gate) * up; each row as alone."""
    gate_up = rows_of(200, 2 * 1030, dtype=dtype) * 4

    out = gated_activation(gate_up, kind, alpha=SWIGLU_ALPHA, limit=SWIGLU_LIMIT)

    assert_close(out, GATED_ACTIVATIONS[kind](*gate_up.chunk(2, -1)))
    alone = gated_activation(gate_up[7:8], kind, alpha=SWIGLU_ALPHA, limit=SWIGLU_LIMIT)
    assert_same_bits(alone, out[7:8])


@pytest.mark.parametrize("norm", ["none", "before", "after"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_page_has_the_bits_of_the_pools_own_write(kv_dtype: torch.dtype, norm: str) -> None:
    """Queries and keys are rotated as by torch; planes and scales are those of a pool on either device."""
    dtype, num_q, num_kv, head_dim, num_rows = torch.bfloat16, 20, 10, 96, 50
    qkv = rows_of(num_rows, (num_q + 2 * num_kv) * head_dim, dtype=dtype)
    positions = torch.arange(num_rows, device=GPU) * 3
    slots = torch.randperm(16 * 7, generator=torch.Generator().manual_seed(1))[:num_rows].to(GPU)
    rope = RopeConfig(theta=10_000.0)
    table = RotaryTable(rope, head_dim=head_dim, max_len=256, dtype=dtype, device=GPU)
    layout = KVLayout.mha(1, num_kv, head_dim)
    pool = KVPool(layout, 7, 16, dtype=kv_dtype, device=GPU)
    weights = rows_of(head_dim, dtype=dtype, seed=5), rows_of(head_dim, dtype=dtype, seed=6)
    norms = None if norm == "none" else HeadNorms(*weights, 1e-5, is_after_rope=norm == "after")
    q, k, v = (
        part.clone() for part in qkv.unflatten(1, (-1, head_dim)).split((num_q, num_kv, num_kv), 1)
    )
    if norm == "before":
        q, k = rms_norm(q, weights[0], 1e-5), rms_norm(k, weights[1], 1e-5)
    angles = table.cos_sin(positions)
    q, k = apply_rotary(q, *angles), apply_rotary(k, *angles)
    if norm == "after":
        q, k = rms_norm(q, weights[0], 1e-5), rms_norm(k, weights[1], 1e-5)

    results = rope_kv(
        qkv, (num_q, num_kv), positions, (table.cos, table.sin), slots, pool.planes(0), norms
    )

    for actual, expected in zip(results, (q, k, v), strict=True):
        assert_close(actual, expected)
    for device in (GPU, torch.device("cpu")):
        other = KVPool(layout, 7, 16, dtype=kv_dtype, device=device)
        k, v = (rows.contiguous().to(device) for rows in results[1:])
        other.write_kv(0, slots.to(device), k=k, v=v)
        for name, plane in other.planes(0).items():
            written = pool.planes(0)[name].to(device)
            assert torch.equal(written.view(torch.uint8), plane.view(torch.uint8)), (device, name)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("out_width", "in_width"), [(4096, 4096), (4096, 14336), (1000, 776)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    out_width: int, in_width: int, dtype: torch.dtype
) -> None:
    """x @ weight.T + bias is torch's; whatever the number of rows, tiles split or not."""
    x = rows_of(max(BATCHES) * 8, in_width, dtype=dtype)
    weight = rows_of(out_width, in_width, dtype=dtype, seed=1) * in_width**-0.5
    bias = rows_of(out_width, dtype=dtype, seed=2)
    gemm = BatchInvariantGemm(weight, bias)

    out = gemm(x)

    assert_close(out, F.linear(x.double(), weight.double(), bias.double()).to(dtype))
    for count in BATCHES:
        for start in (0, 1, len(x) - count):
            rows = slice(start, start + count)
            assert_same_bits(gemm(x[rows]), out[rows])
    residual = rows_of(len(x), out_width, dtype=dtype, seed=3)
    assert_same_bits(gemm(x, residual.clone()), residual + out)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_matrix_for_each_head(dtype: torch.dtype) -> None:
    """W_UK and W_UV of a layer, views of one matrix; each row as alone."""
    whole = rows_of(16, 256, 512, dtype=dtype) / 16
    for matrices in (whole[:, :128], whole[:, 128:].transpose(1, 2)):
        x = rows_of(200, 16, matrices.shape[1], dtype=dtype, seed=1)
        gemm = HeadGemm(matrices)

        out = gemm(x)

        assert_close(out, torch.einsum("thk,hkn->thn", x.double(), matrices.double()).to(dtype))
        for count in BATCHES:
            assert_same_bits(gemm(x[-count:]), out[-count:])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_are_those_of_a_loop_without_a_host_sync(dtype: torch.dtype) -> None:
    """32 experts of 4 a row, one of which most rows have; each row as alone, and as by the GEMM of a matrix."""
    hidden, inner, count, top_k = 776, 520, 32, 4
    first = rows_of(count, 2 * inner, hidden, dtype=dtype) * hidden**-0.5
    second = rows_of(count, hidden, inner, dtype=dtype, seed=1) * inner**-0.5
    x = rows_of(max(BATCHES), hidden, dtype=dtype, seed=2)
    routed = RoutedExperts(GroupedGemm(first), GroupedGemm(second), "silu_mul", top_k)
    weights = routed.sample_weights(x)
    routed(x, weights)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = routed(x, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    total = torch.zeros_like(x)
    for number in range(count):
        gemms = BatchInvariantGemm(first[number]), BatchInvariantGemm(second[number])
        product = gemms[1](gated_activation(gemms[0](x), "silu_mul"))
        is_routed = weights[:, number, None] != 0
        weighted = (product.float() * weights[:, number, None]).to(dtype)
        total = torch.where(is_routed, total + weighted, total)
    assert_same_bits(out, total)
    for num_rows in BATCHES:
        assert_same_bits(routed(x[-num_rows:], weights[-num_rows:]), out[-num_rows:])


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_scores_of_the_index_depend_on_no_other_row(kv_dtype: torch.dtype) -> None:
    """The index of DeepSeek-V3.2: prefills and decodes, alone, in chunks and together."""
    spec = spec_of(dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=16)
    index = PagedIndex(top_k=64, num_heads=64, head_dim=128, device=GPU, page_size=16)

    assert batch_variant_scores(index, spec) == []


def test_tokens_are_those_of_the_sampler_of_the_cpu() -> None:
    """Every option alone and together, over seeds and positions, from the same random numbers."""
    rows = [
        row._replace(seed=seed, position=position)
        for row in ROWS.values()
        for seed, position in ((1, 5), (2**63 - 12345, 40_000), (77, 12))
    ]
    logits = logits_of(len(rows))

    sampled = SampleBatch.of(rows, VOCAB, GPU).sample(logits.to(GPU))

    assert sampled.statuses.tolist() == [OK] * len(rows)
    tokens = sampled.tokens.tolist()
    assert tokens == [
        expected_token(row_logits, row) for row_logits, row in zip(logits, rows, strict=True)
    ]


def test_a_large_vocabulary_is_sampled_without_a_host_sync() -> None:
    """128k logits a row; the same tokens alone; the likeliest in order."""
    vocab_size, count = 128_256, 12
    logits = rows_of(count, vocab_size, dtype=torch.float32) * 3
    rows = [
        row._replace(mask=None, position=at, seed=3)
        for at, row in enumerate(
            [ROWS["top_p"], ROWS["top_k"], ROWS["all of them"], ROWS["edits"]] * 3
        )
    ]
    batch = SampleBatch.of(rows, vocab_size, GPU)
    batch.sample(logits)
    top = torch.arange(count, dtype=torch.int32, device=GPU)

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampled = batch.sample(logits)
        ids, logprobs = likeliest(logits, top, sampled.log_sums, 5)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(ids.long(), expected.indices)
    assert float((logprobs - expected.values).abs().max()) < 1e-4
    for at, row in enumerate(rows):
        alone = SampleBatch.of([row], vocab_size, GPU).sample(logits[at : at + 1].clone())
        assert alone.tokens.tolist() == sampled.tokens[at : at + 1].tolist()
