"""Rows do not depend on their neighbours, and the probe finds out where they would."""

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
from ramify.models.loader import Decoder, load_model
from ramify.models.ops.functional import rms_norm, silu_and_mul
from ramify.models.ops.probe import probe_row_op, sample_rows
from ramify.models.ops.torch_linear import (
    TORCH_LINEARS,
    Linear,
    choose_torch_linear,
    strategy_order,
    strategy_supports,
)
from ramify.testing import write_tiny_checkpoint

SHAPES = [(100, 64), (64, 100), (45, 67), (300, 64), (1, 33), (513, 130)]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unpadded_differs(weight: Tensor) -> bool:
    """Whether F.linear as it is gives the rows of this weight other bits in other company."""
    rows = random(521, weight.shape[1], dtype=weight.dtype)
    return bool(batch_variant_row_counts(Linear(weight, strategy="plain"), rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("strategy", TORCH_LINEARS)
def test_every_strategy_computes_the_same_product(
    strategy: str, with_bias: bool, dtype: torch.dtype
) -> None:
    """They differ in bits at most."""
    for shape in SHAPES:
        weight = random(*shape, dtype=dtype)
        bias = random(shape[0], dtype=dtype, seed=1) if with_bias else None
        reason = strategy_supports(strategy, weight)
        if reason is not None:
            with pytest.raises(ConfigError, match="cannot be used here"):
                Linear(weight, bias, strategy=strategy)
            continue
        linear = Linear(weight, bias, strategy=strategy)
        for num_rows in (0, 1, 7, 16, 33):
            x = random(num_rows, shape[1], dtype=dtype, seed=2)
            expected = F.linear(x, weight, bias)
            found = linear(x)
            assert found.shape == expected.shape
            assert found.dtype == dtype
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            assert torch.allclose(found.float(), expected.float(), tolerance, 20 * tolerance)


def test_an_unknown_strategy_is_refused() -> None:
    """The message lists those there are."""
    with pytest.raises(ConfigError, match="packed_gemm, onednn, padded, row_by_row, plain"):
        Linear(random(4, 4), strategy="magic")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_linear_treats_rows_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Whatever was chosen: no row count and no place changes a bit, also for other data."""
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
    """Plain float32 F.linear is found out and passed over for the next candidate."""
    weight = random(100, 64)
    if not unpadded_differs(weight):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")

    linear, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain", "padded")
    )

    assert linear.strategy == "padded"
    assert "plain: rows differ at" in verdict.reason


def test_row_by_row_is_the_last_resort() -> None:
    """If every candidate fails, the strategy that cannot fail is taken."""
    weight = random(100, 64)
    if not unpadded_differs(weight):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")

    linear, verdict = choose_torch_linear(
        weight, None, exact=True, store=ProbeStore(None), candidates=("plain",)
    )

    assert linear.strategy == verdict.strategy == "row_by_row"
    assert batch_variant_row_counts(linear, random(521, 64)) == ()


@pytest.mark.filterwarnings("ignore:TF32")  # what torch says when the flags are restored
def test_without_packing_something_else_is_found() -> None:
    """A torch whose oneDNN is switched off still runs exactly, and the report says why."""
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
    """A stand-in whose rows are independent by themselves, so that only the model is tried."""
    return q + k.repeat_interleave(2, 1) * 0.5 + v.repeat_interleave(2, 1)


def run_in_steps(model: Decoder, tokens: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Hidden rows and logits of all tokens, `step` rows at a time."""
    hidden, logits = [], []
    with torch.inference_mode():
        for start in range(0, len(tokens), step):
            some = tokens[start : start + step]
            positions = torch.arange(start, start + len(some))
            hidden.append(model.forward(some, positions, attend_to_itself))
            logits.append(model.logits(hidden[-1]))
    return torch.cat(hidden), torch.cat(logits)


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
def test_the_decoder_treats_rows_alone(
    tmp_path: Path, family: Any, overrides: dict[str, Any], dtype: Any
) -> None:
    """Hidden rows and logits have the same bits in steps of any size, at odd widths too."""
    path = write_tiny_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    model = load_model(path, dtype=dtype, store=ProbeStore(None))
    tokens = torch.randint(0, 290, (141,), generator=torch.Generator().manual_seed(3))
    hidden, logits = run_in_steps(model, tokens, 141)

    for step in (1, 2, 3, 5, 7, 8, 9, 11, 16, 31, 64, 100):
        found = run_in_steps(model, tokens, step)

        assert torch.equal(found[0], hidden), f"{step} rows at a time"
        assert torch.equal(found[1], logits), f"{step} rows at a time"


def test_the_fault_of_skipped_padding_would_be_seen(tmp_path: Path) -> None:
    """The test above has teeth: with plain F.linear it fails."""
    if not unpadded_differs(random(100, 64)):
        pytest.skip("float32 F.linear is row-independent on this machine: there is no fault")
    path = write_tiny_checkpoint(tmp_path, "llama", tokenizer=False)
    model = load_model(path, store=ProbeStore(None), linear_strategy="plain")
    tokens = torch.arange(60) + 100

    together, alone = run_in_steps(model, tokens, 60), run_in_steps(model, tokens, 1)

    assert not torch.equal(together[1], alone[1])
    assert torch.allclose(together[1], alone[1], rtol=1e-3, atol=1e-3)
    forced = [e for e in model.exactness() if e.operation == "linear"]
    assert {e.strategy for e in forced} == {"plain"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 31, 33, 60, 77, 100, 130])
def test_elementwise_forms_treat_rows_alone(width: int, dtype: torch.dtype) -> None:
    """The forms chosen here pass without the row-by-row fallback, or with it."""
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

        together = chosen(*samples)
        alone = torch.cat([chosen(*(s[i : i + 1] for s in samples)) for i in range(len(together))])
        assert torch.equal(together, alone), verdict


def test_silu_is_silu() -> None:
    """The row-independent form has the values of torch's own, far out too."""
    gate = torch.tensor([-200.0, -100.0, -20.0, -1.0, -0.0, 0.0, 1e-8, 1.0, 20.0, 200.0])

    found = silu_and_mul(gate, torch.ones(10))

    assert torch.allclose(found, F.silu(gate), rtol=1e-6, atol=1e-30)


def test_an_operation_that_looks_at_its_company_is_found_out() -> None:
    """`batch_variant_row_counts` names the counts; the slow path makes the operation safe."""

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
    """A fault that depends on where a row stands, not on how many there are, is seen."""

    def faulty(x: Tensor) -> Tensor:
        return x + torch.arange(len(x))[:, None]

    assert 1 in batch_variant_row_counts(faulty, random(12, 5), (1, 4))


def test_nan_and_signed_zero_are_compared_by_their_bits() -> None:
    """NaN equals itself; -0 is not 0."""
    nan = torch.full((12, 2), torch.nan)

    assert batch_variant_row_counts(lambda x: x, nan, (1, 4)) == ()
    assert batch_variant_row_counts(
        lambda x: x * (0 if len(x) > 4 else -0.0), random(12, 2).abs(), (1,)
    )


def verdict_of(store: ProbeStore, answer: str, strategies: tuple[str, ...] = ("a", "b")) -> str:
    """What the store says about one operation; `answer` is what a probe would find."""
    probed: Callable[[], tuple[str, str]] = lambda: (answer, "tried")  # noqa: E731
    return store.verdict("op", (3, 4), torch.float32, probed, strategies=strategies).strategy


def test_verdicts_are_remembered(tmp_path: Path) -> None:
    """One process probes, the next one reads; another shape or thread count is another question."""
    path = tmp_path / "deep" / "exactness.json"

    assert verdict_of(ProbeStore(path), "a") == "a"
    assert verdict_of(ProbeStore(path), "b") == "a"
    entries = json.loads(path.read_text())
    assert list(entries) == [f"{machine_key()} | op 3x4 float32 of a b"]
    assert list(path.parent.iterdir()) == [path]  # no scratch file is left


def test_a_remembered_strategy_that_is_no_candidate_is_dropped(tmp_path: Path) -> None:
    """A verdict from elsewhere cannot bring in what cannot be used here."""
    path = tmp_path / "exactness.json"
    verdict_of(ProbeStore(path), "a")

    assert verdict_of(ProbeStore(path), "b", strategies=("b", "c")) == "b"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"x": 1}', b'{"x": {"shape": "ab"}}', b"null", b'"text"'],
)
def test_a_damaged_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    """The probe runs again and the file is made anew."""
    path = tmp_path / "exactness.json"
    path.write_bytes(content)

    assert verdict_of(ProbeStore(path), "b") == "b"
    assert verdict_of(ProbeStore(path), "a") == "b"


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """A read-only home costs a probe per start, nothing else."""
    (tmp_path / "blocked").write_text("a file where a directory should be")
    store = ProbeStore(tmp_path / "blocked" / "exactness.json")

    assert verdict_of(store, "a") == "a"
    assert verdict_of(store, "b") == "a"


def test_stores_share_a_file(tmp_path: Path) -> None:
    """Writing keeps what another process wrote in between."""
    path = tmp_path / "exactness.json"
    one, two = ProbeStore(path), ProbeStore(path)

    def ask(store: ProbeStore, operation: str) -> Exactness:
        probe: Callable[[], tuple[str, str]] = lambda: ("a", operation)  # noqa: E731
        return store.verdict(operation, (1,), torch.float32, probe, strategies=("a",))

    ask(one, "first")
    ask(two, "second")

    assert len(json.loads(path.read_text())) == 2


def test_the_default_file_is_below_the_cache_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XDG_CACHE_HOME is honoured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    verdict_of(ProbeStore.default(), "a")

    assert (tmp_path / "ramify" / "exactness.json").is_file()


@pytest.mark.parametrize(
    ("dtype", "dots", "tiles", "expected"),
    [
        (torch.float32, True, True, ("packed_gemm", "onednn", "padded")),
        (torch.bfloat16, False, False, ("packed_gemm", "plain")),
        (torch.bfloat16, True, False, ("packed_gemm", "onednn", "plain")),
        (torch.bfloat16, True, True, ("onednn", "packed_gemm", "plain")),
    ],
)
def test_what_a_processor_has_decides_what_is_tried_first(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    dots: bool,
    tiles: bool,
    expected: tuple[str, ...],
) -> None:
    """Our kernels, but where there is AMX; oneDNN's in bfloat16 where it has instructions for it."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: dots, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles, raising=False)

    assert strategy_order(torch.zeros(8, 8, dtype=dtype)) == expected


def test_a_matrix_without_structure_teaches_nothing(tmp_path: Path) -> None:
    """All strategies agree on zeros, so nothing about them is written down."""
    store = ProbeStore(tmp_path / "exactness.json")

    choose_torch_linear(torch.zeros(64, 64), None, exact=True, store=store)

    assert not (tmp_path / "exactness.json").exists()


def test_nothing_is_probed_when_exactness_is_not_asked_for(tmp_path: Path) -> None:
    """`exact=False` starts at once and says so."""
    path = write_tiny_checkpoint(tmp_path / "model", "qwen3", tokenizer=False)

    model = load_model(path, exact=False, store=ProbeStore(tmp_path / "exactness.json"))

    assert not (tmp_path / "exactness.json").exists()
    assert {entry.reason for entry in model.exactness()} == {"exact=False"}


@pytest.mark.parametrize(
    ("strategy", "operations"),
    [
        (
            "packed_gemm",
            {
                "linear",
                "rms_norm + linear",
                "rms_norm + linear + silu_mul",
                "qk_norm + rope",
            },
        ),
        ("padded", {"linear", "rms_norm", "qk_norm", "rope", "silu_mul"}),
    ],
)
def test_the_report_names_every_operation(
    tmp_path: Path, strategy: str, operations: set[str]
) -> None:
    """`ramify info` shows what this returns: what one kernel does is one operation."""
    reason = strategy_supports(strategy, torch.zeros(8, 8))
    if reason is not None:
        pytest.skip(f"no {strategy} linears: {reason}")
    path = write_tiny_checkpoint(tmp_path, "qwen3", tokenizer=False)

    report = load_model(path, store=ProbeStore(None), linear_strategy=strategy).exactness()

    assert {entry.operation for entry in report} == operations
    assert all(entry.dtype == "float32" and entry.reason for entry in report)
