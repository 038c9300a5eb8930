"""`bit_scenarios` detects each fault that makes output bits depend on the cache."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.backends.blocked import BLOCK_KEYS, BlockedBackend
from ramify.attention.backends.blocked_matmul import choose_matmul
from ramify.attention.exactness import ProbeStore, batch_variant_row_counts
from ramify.attention.spec import AttentionSpec
from ramify.models.loader import load_model
from ramify.models.ops.protocol import RowOp
from ramify.models.ops.quantized import Weight, as_tensor
from ramify.models.ops.torch_linear import TORCH_LINEARS, TorchLinear
from tests.cpu.attention_mutants import (
    CutAtNodeBoundary,
    CutTree,
    FreshKeys,
    ShortenedLastBlock,
    UnpaddedRows,
)
from tests.cpu.bit_scenarios import AGAIN, FIRST, Ask, Scenario, Turn, compare
from tests.cpu.engine_cases import CPU, Model, Sizes
from tests.cpu.tiny_models import ops_of

ModelOf = Callable[[str, str], Model]
VARIANTS = ["float32", "bfloat16", "float32-torch", "bfloat16-torch"]


def runs_with_faults() -> Iterator[Scenario]:
    """Runs in which every fault must show, sooner or later.

    One step per turn; chunks that end in the middle of pages and key blocks; then more and more
    rows that decode beside longer and shorter ones. A fault in the last bit of a float32 sum
    survives the rounding to bfloat16 in one element of some ten thousands.
    """
    yield Scenario(
        Sizes(page_size=3, max_batch_tokens=37, num_pages=500), (Turn(FIRST), Turn(AGAIN))
    )
    yield Scenario(Sizes(max_batch_tokens=4096, num_pages=200), (Turn(FIRST), Turn(AGAIN)))
    for seed in range(40, 140, 10):
        mixed = tuple(Ask(seed + i, 10 + 35 * i, i, 1, 50) for i in range(8))
        yield Scenario(Sizes(max_batch_tokens=23, num_pages=200), (Turn(mixed),))


def find(model: Model, max_runs: int | None = None) -> list[str]:
    """Return the differences of the first run that has any, else an empty list."""
    for run in islice(runs_with_faults(), max_runs):
        differences = compare(model, run).differences
        if differences:
            return differences
    return []


def assert_found(model: Model, still: Callable[[], bool], fault: str) -> None:
    """Assert that the fault is detected; skip if it changes no bit on this machine."""
    differences = find(model)

    if not differences and not still():
        pytest.skip(f"{fault}: measured to change no bit on this machine")
    assert differences, f"{fault} changes bits on this machine, and nobody noticed"


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "float32"),
        ("llama", "float32-torch"),
        ("llama", "bfloat16"),
        ("llama", "float32-int8"),
        ("v2", "float32-int8"),
        ("qwen3", "float32-weights8"),
        ("qwen3", "bfloat16-weights4"),
        ("qwen3", "float32-gguf"),
    ],
)
def test_the_runs_that_catch_faults_are_clean_without_one(
    family: str, variant: str, model_of: ModelOf
) -> None:
    """Without a fault, the runs show no difference."""
    assert find(model_of(family, variant), max_runs=3) == []


def batch_scaled(weight: Weight, bias: Tensor | None) -> RowOp:
    """Rows rounded to int8 with one scale for all of a call, as with a dynamic scale per tensor."""

    def run(x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return F.linear((x / scale).round() * scale, as_tensor(weight), bias)

    return run


def switched(weight: Weight, bias: Tensor | None) -> RowOp:
    """Rows rounded to int8 up to eight of them, in full precision beyond, as where a GEMM takes over."""

    def run(x: Tensor) -> Tensor:
        scale = x.abs().amax(1, keepdim=True) / 127 + 1e-30
        rows = (x / scale).round() * scale if len(x) <= 8 else x
        return F.linear(rows, as_tensor(weight), bias)

    return run


@pytest.mark.parametrize("fault", [batch_scaled, switched])
def test_arithmetic_of_codes_that_depends_on_the_batch_is_found(
    fault: Callable[[Weight, Tensor | None], RowOp],
    model_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults of other engines' quantised linears, planted into ours."""
    monkeypatch.setitem(TORCH_LINEARS, "padded", fault)
    path = model_of.checkpoint("qwen3")
    decoder = load_model(path, dtype="float32", ops=ops_of("padded"), quantize="int8")

    assert find(Model("qwen3-fault", decoder))


def test_skipped_padding_of_linears_is_found(model_of: ModelOf) -> None:
    """float32 GEMM rows not padded to a multiple of 8 are detected."""
    model = model_of("llama", "float32-plain").with_fault(row_multiple=1)

    def still() -> bool:
        draw = torch.Generator().manual_seed(0)
        for shape in ((200, 76), (76, 120), (76, 100), (301, 76)):
            weight = torch.randn(shape, generator=draw)
            rows = torch.randn(600, shape[1], generator=draw)
            if batch_variant_row_counts(TorchLinear(weight, strategy="plain"), rows):
                return True
        return False

    assert_found(model, still, "padding of linears skipped")


@pytest.mark.parametrize("variant", VARIANTS)
def test_skipped_padding_of_attention_rows_is_found(variant: str, model_of: ModelOf) -> None:
    """Attention query rows without padding are detected in every dtype."""
    model = model_of("llama", variant).with_fault(backend=UnpaddedRows)
    row_counts = range(2, 40)  # two query heads share K/V: no GEMM has a single row

    assert_found(model, lambda: products_differ(row_counts), "padding of query rows skipped")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_shortened_last_block_is_found(variant: str, model_of: ModelOf) -> None:
    """A last key block cut to the keys in use is detected."""
    model = model_of("llama", variant).with_fault(backend=ShortenedLastBlock)

    assert_found(model, lambda: reductions_differ(ShortenedLastBlock), "last block shortened")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_reduction_cut_at_a_node_boundary_is_found(variant: str, model_of: ModelOf) -> None:
    """A reduction split at the end of the cached prefix is detected."""
    model = model_of("llama", variant).with_fault(backend=CutAtNodeBoundary)

    assert_found(model, lambda: reductions_differ(CutAtNodeBoundary), "reduction cut at a node")


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "float32"),
        ("llama", "float32-torch"),
        ("llama", "bfloat16-int8"),
        ("v2", "float32"),
    ],
)
def test_a_tree_that_merges_at_node_borders_is_found(
    family: str, variant: str, model_of: ModelOf
) -> None:
    """Partial attention results merged at node boundaries are detected."""
    assert find(model_of(family, variant).with_fault(backend=CutTree))


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("llama", "float32-int8"),
        ("llama", "float32-torch-int8"),
        ("mistral", "bfloat16-fp8"),
        ("v2", "float32-int8"),
    ],
)
def test_fresh_keys_instead_of_the_planes_are_found(
    family: str, variant: str, model_of: ModelOf
) -> None:
    """Attention over unrounded K/V of the current step is detected."""
    assert find(model_of(family, variant).with_fault(pool=FreshKeys))


def products_differ(row_counts: range) -> bool:
    """Return whether rows of attention's two GEMMs, as probed here, depend on the number of rows."""
    product, _ = choose_matmul(2, 20, BLOCK_KEYS, ProbeStore(None))
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, BLOCK_KEYS, 20, generator=draw) for _ in "kv")
    rows = torch.randn(2, 64, 20, generator=draw)
    weights = torch.rand(2, 64, BLOCK_KEYS, generator=draw)
    scores, sums = product(rows, keys.transpose(1, 2)), product(weights, values)
    return any(
        not torch.equal(product(rows[:, :n].contiguous(), keys.transpose(1, 2)), scores[:, :n])
        or not torch.equal(product(weights[:, :n].contiguous(), values), sums[:, :n])
        for n in row_counts
    )


def reductions_differ(fault: type[BlockedBackend]) -> bool:
    """Return whether the faulty reduction of a block ever differs in its bits."""
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=2,
        head_dim=20,
        page_size=16,
        dtype=torch.float32,
        windows=(None,),
        scale=1.0,
    )
    draw = torch.Generator().manual_seed(0)
    rows, k, v = (torch.randn(1, 2, 1, n, 20, generator=draw) for n in (8, *[BLOCK_KEYS] * 2))
    right, wrong = BlockedBackend(spec, CPU), fault(spec, CPU)
    for seen in range(1, BLOCK_KEYS):
        hidden = (torch.arange(BLOCK_KEYS) >= seen).expand(1, 1, 8, BLOCK_KEYS)
        if isinstance(wrong, CutAtNodeBoundary):
            wrong._cut = seen // 2
        pairs = zip(
            right._attend_block(rows, k, v, hidden),
            wrong._attend_block(rows, k, v, hidden),
            strict=True,
        )
        if not all(torch.equal(expected, actual) for expected, actual in pairs):
            return True
    return False
