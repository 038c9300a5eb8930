"""Batch invariance of linears, row operations and decoders; the probe that checks it and its store."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ramify.attention.exactness import (
    PROBE_ROW_COUNTS,
    Exactness,
    ProbeStore,
    batch_variant_row_counts,
    machine_key,
    row_by_row,
)
from ramify.errors import ConfigError
from ramify.models.decoders.decoder import Decoder
from ramify.models.loader import load_model
from ramify.models.ops.functional import rms_norm, silu_and_mul
from ramify.models.ops.probe import probe_row_op, sample_rows
from ramify.models.ops.protocol import ForwardStep
from ramify.models.ops.torch_linear import (
    TORCH_LINEARS,
    TorchLinear,
    choose_torch_linear,
    strategy_supports,
)
from ramify.testing import write_tiny_checkpoint
from tests.cpu.tiny_models import ops_of

SHAPES = [(100, 64), (64, 100), (45, 67), (300, 64), (1, 33), (513, 130)]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unpadded_differs(weight: Tensor) -> bool:
    """Whether plain F.linear with this weight is batch-variant on this machine."""
    rows = random(521, weight.shape[1], dtype=weight.dtype)
    return bool(batch_variant_row_counts(TorchLinear(weight, strategy="plain"), rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("strategy", TORCH_LINEARS)
def test_every_strategy_computes_the_same_product(
    strategy: str, with_bias: bool, dtype: torch.dtype
) -> None:
    """Strategies agree within rounding, and refuse weights that they do not support."""
    for shape in SHAPES:
        weight = random(*shape, dtype=dtype)
        bias = random(shape[0], dtype=dtype, seed=1) if with_bias else None
        reason = strategy_supports(strategy, weight)
        if reason is not None:
            with pytest.raises(ConfigError, match="cannot be used here"):
                TorchLinear(weight, bias, strategy=strategy)
            continue
        linear = TorchLinear(weight, bias, strategy=strategy)
        for num_rows in (0, 1, 7, 16, 33):
            x = random(num_rows, shape[1], dtype=dtype, seed=2)
            expected = F.linear(x, weight, bias)
            y = linear(x)
            assert y.shape == expected.shape
            assert y.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert torch.allclose(y.float(), expected.float(), tolerance, 20 * tolerance)


def test_an_unknown_strategy_is_refused() -> None:
    """The message lists the known strategies."""
    with pytest.raises(ConfigError, match="onednn, padded, blocks, row_by_row, plain"):
        TorchLinear(random(4, 4), strategy="magic")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_linear_is_batch_invariant(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """No row count and no place of a row changes a bit, for other data than the probe's too."""
    weight = random(*shape, dtype=dtype)

    linear, verdict = choose_torch_linear(weight, None, exact=True, store=ProbeStore(None))

    rows = random(530, shape[1], dtype=dtype, seed=5)
    assert (
        batch_variant_row_counts(linear, rows, (*PROBE_ROW_COUNTS, 48, 65, 90, 200, 384, 511)) == ()
    )
    assert verdict.strategy == linear.strategy
    assert verdict.shape == shape
    assert verdict.reason


def test_the_probe_catches_skipped_padding() -> None:
    """Plain float32 F.linear fails the probe; the next candidate is chosen."""
    weight = random(100, 64)
    if not unpadded_differs(weight):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")

    linear, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain", "padded")
    )

    assert linear.strategy == "padded"
    assert "plain: rows differ at" in verdict.reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_serve_a_gemm_that_depends_on_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As torch's bfloat16 GEMM with AMX: calls of one shape are what remains but for single rows."""
    linear_of_torch = F.linear

    def gemm(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_of_torch(x, matrix, bias) * (1 + x.shape[0] / 1024)

    monkeypatch.setattr(F, "linear", gemm)
    weight = random(100, 64, dtype=dtype)

    linear, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain", "padded", "blocks")
    )

    assert linear.strategy == "blocks"
    assert "padded: rows differ at" in verdict.reason
    assert batch_variant_row_counts(linear, random(521, 64, dtype=dtype), PROBE_ROW_COUNTS) == ()


@pytest.mark.parametrize("shift", [None, 0.0, 200.0])
@pytest.mark.parametrize("shape", [(80, 60), (154, 60), (1024, 60), (1024, 96)])
def test_the_probe_sees_the_last_bit_of_a_sum_behind_bfloat16(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], shift: float | None
) -> None:
    """One row alone is summed in another order: one random output in 10,000 or more shows it."""

    def gemm(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        sums = (x.double() @ matrix.double().T).float()
        if len(x) == 1:
            half = x.shape[1] // 2
            parts = zip(x.float().split(half, 1), matrix.float().split(half, 1), strict=True)
            sums = torch.stack([a @ b.T for a, b in parts]).sum(0)
        return (sums if bias is None else sums + bias).bfloat16()

    monkeypatch.setattr(F, "linear", gemm)
    bias = None if shift is None else shift + random(shape[0], dtype=torch.bfloat16)

    linear, verdict = choose_torch_linear(
        random(*shape, dtype=torch.bfloat16),
        bias,
        exact=True,
        store=ProbeStore(None),
        candidates=("plain", "blocks"),
    )

    zeros = linear(torch.zeros(1, shape[1], dtype=torch.bfloat16))[0]
    assert torch.equal(zeros, torch.zeros_like(zeros) if bias is None else bias)
    assert verdict.strategy == "blocks"
    assert "plain: rows differ at 1 rows" in verdict.reason


def test_a_weight_that_is_not_finite_is_probed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN does not blind the probe to the other outputs."""
    linear_of_torch = F.linear

    def gemm(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return linear_of_torch(x, matrix, bias) * (1 + x.shape[0] / 128)

    monkeypatch.setattr(F, "linear", gemm)
    weight = random(100, 64, dtype=torch.bfloat16)
    weight[3, 5] = torch.nan

    _, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain",)
    )

    assert verdict.strategy == "row_by_row"


def test_row_by_row_is_the_last_resort() -> None:
    """If every candidate fails the probe, row_by_row is chosen, which is invariant by construction."""
    weight = random(100, 64)
    if not unpadded_differs(weight):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")

    linear, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain",)
    )

    assert linear.strategy == verdict.strategy == "row_by_row"
    assert batch_variant_row_counts(linear, random(521, 64)) == ()


@pytest.mark.filterwarnings("ignore:TF32")  # torch warns when the flags are restored
def test_without_onednn_the_next_strategy_is_chosen() -> None:
    """With oneDNN switched off the choice is still batch-invariant, and the reason names oneDNN."""
    weight = random(100, 64)

    with torch.backends.mkldnn.flags(enabled=False):
        linear, verdict = choose_torch_linear(
            weight, None, exact=True, store=ProbeStore(None), candidates=("onednn", "padded")
        )
        differing = batch_variant_row_counts(linear, random(521, 64))

    assert linear.strategy != "onednn"
    assert "oneDNN" in verdict.reason
    assert differing == ()


def attend_to_itself(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A row-wise stand-in for attention, so that only the decoder is tested."""
    return q + k.repeat_interleave(2, 1) * 0.5 + v.repeat_interleave(2, 1)


def run_in_steps(model: Decoder, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Hidden rows and logits of all tokens, `step` rows at a time."""
    hidden, logits = [], []
    with torch.inference_mode():
        for start in range(0, len(tokens), step):
            chunk = tokens[start : start + step]
            positions = torch.arange(start, start + len(chunk))
            hidden.append(model.forward(chunk, ForwardStep(positions, attend_to_itself)))
            logits.append(model.logits(hidden[-1]))
    return torch.cat(hidden), torch.cat(logits)


@pytest.mark.parametrize("ops", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"hidden_size": 60, "head_dim": 10, "intermediate_size": 77, "vocab_size": 291}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_size": 68}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 18, "hidden_size": 76}),
    ],
)
def test_the_decoder_is_batch_invariant(
    tmp_path: Path, family: Any, overrides: dict[str, Any], dtype: Any, ops: str
) -> None:
    """Hidden rows and logits have the same bits in steps of any size, odd widths included."""
    path = write_tiny_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    model = load_model(path, dtype=dtype, ops=ops, store=ProbeStore(None))
    tokens = torch.randint(0, 290, (141,), generator=torch.Generator().manual_seed(3))
    hidden, logits = run_in_steps(model, tokens, 141)

    for step in (1, 2, 3, 5, 7, 8, 9, 11, 16, 31, 64, 100):
        result = run_in_steps(model, tokens, step)

        assert torch.equal(result[0], hidden), f"{step} rows at a time"
        assert torch.equal(result[1], logits), f"{step} rows at a time"


def test_the_test_above_fails_with_plain_linears(tmp_path: Path) -> None:
    """Fault injection: plain float32 F.linear gives other bits in larger steps."""
    if not unpadded_differs(random(100, 64)):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    model = load_model(path, store=ProbeStore(None), ops=ops_of("plain"))
    tokens = torch.arange(60) + 100

    batched, single = run_in_steps(model, tokens, 60), run_in_steps(model, tokens, 1)

    assert not torch.equal(batched[1], single[1])
    assert torch.allclose(batched[1], single[1], rtol=1e-3, atol=1e-3)
    forced = [verdict for verdict in model.exactness() if verdict.operation == "linear"]
    assert {verdict.strategy for verdict in forced} == {"plain"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 33, 60, 77, 100, 130])
def test_row_operations_are_batch_invariant(width: int, dtype: torch.dtype) -> None:
    """silu_and_mul and rms_norm as `probe_row_op` returns them, batched or row by row."""
    weight = random(width, dtype=dtype)
    operations: list[tuple[str, Callable[..., Tensor], int]] = [
        ("silu_mul", silu_and_mul, 2),
        ("rms_norm", lambda x: rms_norm(x, weight, 1e-6), 1),
    ]
    for name, op, num_args in operations:
        samples = tuple(sample_rows(width, dtype=dtype) + i for i in range(num_args))

        chosen, verdict = probe_row_op(
            name, op, (width,), dtype, partial(tuple, samples), exact=True, store=ProbeStore(None)
        )

        batched = chosen(*samples)
        single = torch.cat(
            [chosen(*(sample[i : i + 1] for sample in samples)) for i in range(len(batched))]
        )
        assert torch.equal(batched, single), verdict


def test_silu_is_silu() -> None:
    """`silu_and_mul` equals torch's silu within rounding, for large gates of both signs too."""
    gate = torch.tensor([-200.0, -100.0, -20.0, -1.0, -0.0, 0.0, 1e-8, 1.0, 20.0, 200.0])

    y = silu_and_mul(gate, torch.ones(10))

    assert torch.allclose(y, F.silu(gate), rtol=1e-6, atol=1e-30)


def test_a_batch_variant_operation_runs_row_by_row() -> None:
    """`batch_variant_row_counts` returns the counts that differ; row by row none does."""

    def faulty(x: Tensor) -> Tensor:
        return x * (1.0 if len(x) % 4 == 0 else 1.0000001)

    rows = random(12, 5)

    assert batch_variant_row_counts(faulty, rows, (1, 2, 4, 8, 9)) == (1, 2, 9)
    assert batch_variant_row_counts(row_by_row(faulty), rows, (1, 2, 4, 8, 9)) == ()
    chosen, verdict = probe_row_op(
        "faulty",
        faulty,
        (5,),
        torch.float32,
        lambda: (sample_rows(5, dtype=torch.float32),),
        exact=True,
        store=ProbeStore(None),
    )
    assert verdict.strategy == "row_by_row"
    assert torch.equal(chosen(rows), row_by_row(faulty)(rows))
    assert chosen(rows[:0]).shape == (0, 5)


def test_the_place_of_a_row_matters_too() -> None:
    """A fault that depends on the place of a row, not on the number of rows, is detected."""

    def faulty(x: Tensor) -> Tensor:
        return x + torch.arange(len(x))[:, None]

    assert 1 in batch_variant_row_counts(faulty, random(12, 5), (1, 4))


def test_nan_and_signed_zero_are_compared_by_their_bits() -> None:
    """NaN equals NaN; -0 differs from 0."""
    nan = torch.full((12, 2), torch.nan)

    assert batch_variant_row_counts(lambda x: x, nan, (1, 4)) == ()
    assert batch_variant_row_counts(
        lambda x: x * (0 if len(x) > 4 else -0.0), random(12, 2).abs(), (1,)
    )


def verdict_of(store: ProbeStore, answer: str, strategies: tuple[str, ...] = ("a", "b")) -> str:
    """The store's verdict about an operation whose probe would choose `answer`."""
    probed: Callable[[], tuple[str, str]] = lambda: (answer, "tried")  # noqa: E731
    return store.verdict("op", (3, 4), torch.float32, probed, strategies=strategies).strategy


def test_verdicts_are_stored(tmp_path: Path) -> None:
    """A second store reads the first's verdict; the key has machine, operation, shape and dtype."""
    path = tmp_path / "deep" / "exactness.json"

    assert verdict_of(ProbeStore(path), "a") == "a"
    assert verdict_of(ProbeStore(path), "b") == "a"
    entries = json.loads(path.read_text())
    assert list(entries) == [f"{machine_key()} | op 3x4 float32 of a b"]
    assert list(path.parent.iterdir()) == [path]  # no temporary file is left


def test_a_stored_strategy_that_is_not_a_candidate_is_ignored(tmp_path: Path) -> None:
    """The operation is probed again among the present candidates."""
    path = tmp_path / "exactness.json"
    verdict_of(ProbeStore(path), "a")

    assert verdict_of(ProbeStore(path), "b", strategies=("b", "c")) == "b"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"x": 1}', b'{"x": {"shape": "ab"}}', b"null", b'"text"'],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    """The probe runs again and the file is rewritten."""
    path = tmp_path / "exactness.json"
    path.write_bytes(content)

    assert verdict_of(ProbeStore(path), "b") == "b"
    assert verdict_of(ProbeStore(path), "a") == "b"


def test_an_unwritable_file_is_no_error(tmp_path: Path) -> None:
    """Verdicts stay in memory: a read-only home costs a probe per start, nothing else."""
    (tmp_path / "blocked").write_text("a file where a directory should be")
    store = ProbeStore(tmp_path / "blocked" / "exactness.json")

    assert verdict_of(store, "a") == "a"
    assert verdict_of(store, "b") == "a"


def test_stores_share_a_file(tmp_path: Path) -> None:
    """Writing keeps the verdicts that another process wrote meanwhile."""
    path = tmp_path / "exactness.json"
    store, other_store = ProbeStore(path), ProbeStore(path)

    def probe_operation(store: ProbeStore, operation: str) -> Exactness:
        probe: Callable[[], tuple[str, str]] = lambda: ("a", operation)  # noqa: E731
        return store.verdict(operation, (1,), torch.float32, probe, strategies=("a",))

    probe_operation(store, "first")
    probe_operation(other_store, "second")

    assert len(json.loads(path.read_text())) == 2


def test_the_default_file_is_below_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_CACHE_HOME is honoured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    verdict_of(ProbeStore.default(), "a")

    assert (tmp_path / "ramify" / "exactness.json").is_file()


def test_the_verdict_of_a_constant_matrix_is_not_stored(tmp_path: Path) -> None:
    """Every strategy passes the probe on zeros."""
    store = ProbeStore(tmp_path / "exactness.json")

    choose_torch_linear(torch.zeros(64, 64), None, exact=True, store=store)

    assert not (tmp_path / "exactness.json").exists()


def test_exact_false_probes_nothing(tmp_path: Path) -> None:
    """No verdict is stored; the reason of each operation is `exact=False`."""
    path = write_tiny_checkpoint(tmp_path / "model", "qwen3", tokenizer=False)

    model = load_model(path, exact=False, store=ProbeStore(tmp_path / "exactness.json"))

    assert not (tmp_path / "exactness.json").exists()
    assert {entry.reason for entry in model.exactness()} == {"exact=False"}
