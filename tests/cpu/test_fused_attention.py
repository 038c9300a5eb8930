"""Short steps with attention inside the fused layers: same bits as attention called by layer."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ramify.attention.backends.blocked import BlockedBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.attention.batch import AttentionBatch, Extend
from ramify.attention.paged import PagedAttention
from ramify.attention.spec import AttentionSpec
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import StepPlan
from ramify.kernels.cpu import threads
from ramify.kv.block_table import PagedBlockTable
from ramify.kv.pool import KVPool
from ramify.models.decoders.decoder import CausalDecoder, Decoder
from ramify.models.kv_cache_spec import attention_spec, kv_layout
from ramify.models.loader import load_model
from ramify.models.ops.cpu.layer_attention import FusedAttention
from ramify.models.ops.cpu.layers import FusedLayers
from ramify.models.ops.protocol import ForwardStep
from ramify.testing import TinyFamily, write_tiny_checkpoint
from tests.cpu.attention_cases import assert_same_bits
from tests.cpu.tiny_models import DENSE

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")

PAGE, NUM_PAGES = 8, 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fused_attention")


def runner_of(
    folder: Path,
    family: str,
    dtype: str,
    *,
    kv_dtype: torch.dtype | None = None,
    head_dim: int | None = None,
) -> ModelRunner:
    """`head_dim`: another one than the family's in `DENSE`."""
    path, changes = folder / family, dict(DENSE[family])
    if head_dim is not None:
        path, changes["head_dim"] = folder / f"{family}-{head_dim}", head_dim
    if not path.exists():
        named = cast(TinyFamily, family)
        write_tiny_checkpoint(path, named, tokenizer=False, num_hidden_layers=3, **changes)
    model = load_model(path, dtype=dtype, ops="cpu")
    plane_dtype = kv_dtype or model.dtype
    pool = KVPool(kv_layout(model.config), NUM_PAGES, PAGE, dtype=plane_dtype)
    return ModelRunner(model, pool, CpuBackend(spec_of(model, plane_dtype), torch.device("cpu")))


def spec_of(model: CausalDecoder, kv_dtype: torch.dtype) -> AttentionSpec:
    return attention_spec(
        model.config, page_size=PAGE, dtype=model.dtype, exact=True, kv_dtype=kv_dtype
    )


def layers_of(runner: ModelRunner) -> FusedLayers:
    assert isinstance(runner.model, Decoder)
    assert isinstance(runner.model.layers, FusedLayers)
    return runner.model.layers


def fused_attention_of(runner: ModelRunner) -> FusedAttention | None:
    """What attends inside the fused layers of this runner's steps."""
    return layers_of(runner)._fused_attention(runner.backend, runner.pool)


def call_attention_by_layer(runner: ModelRunner) -> None:
    """Never attend inside the fused layers."""
    layers_of(runner)._fused_attention = lambda *_: None  # type: ignore[method-assign]


def plan_of(shares: list[tuple[int, int]], *, shared: int = 0, seed: int = 0) -> StepPlan:
    """A step of requests (cached tokens, new tokens); all share the first's prefix of `shared` tokens."""
    pages = iter(range(NUM_PAGES))
    rows: list[list[int]] = []
    for cached, new in shares:
        common = rows[0][: shared // PAGE] if rows else []
        rows.append(common + [next(pages) for _ in range(-(-(cached + new) // PAGE) - len(common))])
    extends = [Extend(i, i, cached, new) for i, (cached, new) in enumerate(shares)]
    sharing = [(-1, 0)] + [(0, shared) if shared else (-1, 0)] * (len(shares) - 1)
    batch = AttentionBatch.build(extends, PagedBlockTable.of(rows, PAGE), sharing)
    tokens = np.random.default_rng(seed).integers(3, 200, batch.num_tokens)
    return StepPlan(batch, tokens, (), (), tuple(range(len(shares))))


def num_weights(path: Path) -> int:
    """Number of weights in the linears of all layers."""
    tensors = load_file(path / "model.safetensors").items()
    return sum(tensor.numel() for name, tensor in tensors if name.endswith("_proj.weight"))


def outcome(runner: ModelRunner, plans: list[StepPlan]) -> list[torch.Tensor]:
    """Hidden rows of each step, then K and V planes of all layers at the end."""
    for layer in range(runner.pool.layout.num_layers):
        for name, plane in runner.pool.planes(layer).items():
            plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(layer)))
            assert name in "kv"
    hidden = [runner.forward(plan).clone() for plan in plans]
    layers = range(runner.pool.layout.num_layers)
    return hidden + [runner.pool.planes(layer)[name].clone() for layer in layers for name in "kv"]


CASES = {
    "one token": [plan_of([(0, 1)])],
    "one long request": [plan_of([(700, 1)]), plan_of([(701, 1)]), plan_of([(702, 5)])],
    "several": [plan_of([(20, 1), (300, 2), (0, 9), (600, 1)]), plan_of([(21, 1), (302, 1)])],
    "a shared prefix": [plan_of([(540, 1), (530, 1), (514, 3)], shared=512)],
    "a chunk of a prefill": [plan_of([(0, 300), (20, 1)]), plan_of([(300, 210), (21, 1), (0, 70)])],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DENSE)
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_attention_layer_by_layer(
    folder: Path, family: str, dtype: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden rows and every slot of K/V, slots that are not written included."""
    by_layer, runner = (runner_of(folder, family, dtype) for _ in range(2))
    call_attention_by_layer(by_layer)
    expected = outcome(by_layer, CASES[case])
    assert fused_attention_of(runner) is not None

    def never(*_: object) -> None:
        raise AssertionError("attention was called layer by layer")

    monkeypatch.setattr(runner.pool, "write_kv", never)
    monkeypatch.setattr(runner.backend, "run", never)
    fused = outcome(runner, CASES[case])

    for tensor, reference in zip(fused, expected, strict=True):
        assert_same_bits(tensor, reference)


@pytest.mark.parametrize("case", CASES)
def test_steps_with_attention_by_tiles_have_the_same_bits(folder: Path, case: str) -> None:
    """Heads of a multiple of 32 in bfloat16: tiles of weights and of attention take turns, where there are tiles."""
    by_layer, runner = (runner_of(folder, "llama", "bfloat16", head_dim=64) for _ in range(2))
    call_attention_by_layer(by_layer)
    assert fused_attention_of(runner) is not None

    fused = outcome(runner, CASES[case])

    for tensor, reference in zip(fused, outcome(by_layer, CASES[case]), strict=True):
        assert_same_bits(tensor, reference)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("case", ["several", "a shared prefix", "one long request"])
def test_workers_and_threads_need_not_be_as_many(
    folder: Path, case: str, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers on 1, 2 and 4 threads: a worker that starts late finds its tasks done by others."""
    import numba

    before = torch.get_num_threads()
    expected = outcome(runner_of(folder, "llama", "bfloat16"), CASES[case])
    try:
        torch.set_num_threads(4)
        runner = runner_of(folder, "llama", "bfloat16")
        for module in ("ramify.models.ops.cpu.layers", "ramify.attention.backends.cpu"):
            monkeypatch.setattr(
                f"{module}.set_num_threads",
                lambda _: numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS)),
            )
        for _ in range(10):
            for tensor, reference in zip(outcome(runner, CASES[case]), expected, strict=True):
                assert_same_bits(tensor, reference)
    finally:
        torch.set_num_threads(before)
        # The patch set Numba's number of threads behind `set_num_threads`.
        vars(threads._current).clear()


def test_padding_rows_change_nothing(folder: Path) -> None:
    """Padded to a multiple of 8 rows, a step's own rows and their K/V have the same bits."""
    runner = runner_of(folder, "llama", "float32")
    plans = [plan_of([(20, 1), (300, 2)])]
    expected = outcome(runner, plans)
    runner.row_multiple = 8
    padded = outcome(runner, plans)
    assert_same_bits(padded[0], expected[0])
    padding = runner.pool.padding_page
    for plane, reference in zip(padded[1:], expected[1:], strict=True):
        assert_same_bits(plane[:padding], reference[:padding])


@pytest.mark.parametrize(("rows", "cached"), [(0, 0), (100, 0), (100, 200)])
def test_long_steps_call_attention_by_layer(
    folder: Path, rows: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 64 rows, or FUSED_MAX_MACS multiply-adds of weights and keys: here those of 100 rows."""
    runner, most = runner_of(folder, "llama", "float32"), max(64, rows)
    spec, layers = spec_of(runner.model, torch.float32), runner.pool.layout.num_layers
    keys = 2 * layers * spec.num_heads * spec.head_dim * (cached + most)
    work = rows * (num_weights(folder / "llama") + keys)
    monkeypatch.setattr("ramify.models.ops.cpu.layers.FUSED_MAX_MACS", work)
    calls = list[int]()
    run = runner.backend.run

    def recorded(plan: Any, layer: int, *args: Any) -> torch.Tensor:
        calls.append(layer)
        return run(plan, layer, *args)

    monkeypatch.setattr(runner.backend, "run", recorded)
    outcome(runner, [plan_of([(cached, most)])])
    assert not calls
    outcome(runner, [plan_of([(cached, most + 1)])])
    assert calls == [0, 1, 2]
    with torch.inference_mode():
        before, count = torch.get_num_threads(), len(calls)
        # Attention was planned for another number of threads.
        torch.set_num_threads(before + 1)
        try:
            runner.forward(plan_of([(0, 3)]))
        finally:
            torch.set_num_threads(before)
    assert len(calls) == 2 * count


def test_out_of_range_slots_and_positions_write_nothing(folder: Path) -> None:
    """Both are checked before the kernel runs."""
    runner = runner_of(folder, "llama", "float32")
    fused_attention = fused_attention_of(runner)
    assert fused_attention is not None
    plan = plan_of([(20, 2)])
    attention = PagedAttention(runner.backend, runner.pool, plan.batch, torch.arange(2) + 20)
    end = (NUM_PAGES + 1) * PAGE
    for slot in (-1, end):
        with pytest.raises(IndexError, match=f"slot {slot} is not in 0..{end - 1}"):
            fused_attention.step(runner.pool, attention.plan, np.array([0, slot]))
    positions = torch.tensor([20, runner.model.config.max_model_len])
    with torch.inference_mode(), pytest.raises(IndexError, match="positions must be in"):
        runner.model.forward(torch.tensor([3, 4]), ForwardStep(positions, attention))
    layers = range(runner.pool.layout.num_layers)
    assert not any(plane.any() for layer in layers for plane in runner.pool.planes(layer).values())


def test_supports_gives_the_reason_for_no(folder: Path) -> None:
    """Another backend, K/V dtype or page size; sinks that the spec has not; another number of layers."""
    runner = runner_of(folder, "llama", "float32")
    pool, backend = runner.pool, runner.backend
    none = [None] * pool.layout.num_layers
    assert isinstance(backend, CpuBackend)
    assert FusedAttention.supports(backend, pool, torch.float32, none) is None
    reason = FusedAttention.supports(backend, pool, torch.bfloat16, none)
    assert reason == "K/V in torch.float32 of a model in torch.bfloat16"
    blocked = BlockedBackend(backend.spec, torch.device("cpu"))
    assert (
        FusedAttention.supports(blocked, pool, torch.float32, none) == "BlockedBackend over KVPool"
    )
    assert fused_attention_of(runner_of(folder, "llama", "float32", kv_dtype=torch.int8)) is None
    bfloat16_pool = KVPool(pool.layout, 4, PAGE, dtype=torch.bfloat16)
    reason = FusedAttention.supports(backend, bfloat16_pool, torch.float32, none)
    assert reason == "K/V in torch.bfloat16 of a model in torch.float32"
    other_pages = KVPool(pool.layout, 4, 2 * PAGE)
    reason = FusedAttention.supports(backend, other_pages, torch.float32, none)
    assert reason is not None and "it must be contiguous, [pages, 8, " in reason
    sinks = [torch.zeros(backend.spec.num_heads)] * pool.layout.num_layers
    reason = FusedAttention.supports(backend, pool, torch.float32, sinks)
    assert reason is not None and "they must be None" in reason
    assert (
        FusedAttention.supports(backend, pool, torch.float32, none[1:]) == "2 layers over 3 of K/V"
    )


def test_a_replaced_model_pool_or_backend_is_used(folder: Path) -> None:
    """Same bits with another model or pool of the same kind; another backend is called by layer."""
    runner = runner_of(folder, "llama", "float32")
    plans = CASES["several"]
    expected = outcome(runner, plans)
    runner.model = runner_of(folder, "llama", "float32").model
    with_other_model = outcome(runner, plans)
    runner.pool = KVPool(runner.pool.layout, NUM_PAGES, PAGE)
    with_other_pool = outcome(runner, plans)
    for reference, other_model, other_pool in zip(
        expected, with_other_model, with_other_pool, strict=True
    ):
        assert_same_bits(reference, other_model)
        assert_same_bits(reference, other_pool)
    assert isinstance(runner.backend, CpuBackend)
    runner.backend = BlockedBackend(runner.backend.spec, torch.device("cpu"))
    assert fused_attention_of(runner) is None
    assert outcome(runner, plans)[0].isfinite().all()


def test_a_model_keeps_no_pool_alive(folder: Path) -> None:
    """A runner that is gone leaves nothing of its K/V behind, whatever else uses the model."""
    runner = runner_of(folder, "llama", "float32")
    outcome(runner, CASES["several"])
    layers, pool = layers_of(runner), weakref.ref(runner.pool)

    del runner
    gc.collect()

    assert pool() is None
    assert not layers._attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nonfinite_rows_are_found_whatever_their_sum(folder: Path, dtype: torch.dtype) -> None:
    """inf - inf is NaN, and large finite rows overflow when summed."""
    runner, most = runner_of(folder, "llama", "float32"), torch.finfo(dtype).max
    hidden = torch.zeros(5, 16, dtype=dtype)
    assert runner.nonfinite_rows(hidden) == []
    hidden[0], hidden[3] = most, most  # finite, but their sum is not
    assert runner.nonfinite_rows(hidden) == []
    hidden[1, 2], hidden[1, 3], hidden[4, 0] = torch.inf, -torch.inf, torch.nan
    assert runner.nonfinite_rows(hidden) == [1, 4]


def test_logits_of_some_rows_are_rows_of_all_logits(folder: Path) -> None:
    """Rows may come in any order and repeat."""
    runner = runner_of(folder, "llama", "float32")
    hidden = torch.randn(4, runner.model.config.hidden_size)
    everything = runner.logits(hidden, range(4))

    for rows in ([2], [3, 2, 1, 0], [0, 1, 2], [1, 1, 2, 3], (0, 1, 2, 3)):
        assert torch.equal(runner.logits(hidden, rows), everything[[*rows]])
