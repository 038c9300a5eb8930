"""Last-layer pruning: beyond its K/V, the last layer is computed only for rows that are sampled from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention import paged
from ramify.attention.backends.blocked import BlockedBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import SampleSpec, StepPlan
from ramify.models.loader import load_model
from ramify.models.ops.cpu.layers import FusedLayers
from ramify.params import SamplingParams
from tests.cpu.test_fused_attention import call_attention_by_layer, outcome, plan_of, runner_of
from tests.cpu.test_fused_layers import LoopedOps, decoder, fused_layers_of, inputs
from tests.cpu.tiny_models import DENSE, ops_of
from tests.device_runner import step_executor
from tests.pure.whole_steps import run_step

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("last_layer")


class RecordingAttention:
    """A row-wise stand-in for attention that records q, k and v of each layer.

    Args:
        nonfinite_row: a row whose v becomes infinite in the last layer.
    """

    def __init__(self, *, nonfinite_row: int | None = None) -> None:
        self.calls: list[tuple[Tensor, ...]] = []
        self._nonfinite_row = nonfinite_row

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, rows: Tensor | None = None
    ) -> Tensor:
        if self._nonfinite_row is not None and layer == 2:
            v[self._nonfinite_row, 0, 0] = torch.inf
        assert len(q) == len(k if rows is None else rows)
        self.calls.append((q.clone(), k.clone(), v.clone()))
        group = q.shape[1] // k.shape[1]
        keys, values = (heads[:1].repeat_interleave(group, 1) for heads in (k, v))
        return q * 0.5 + keys * (layer + 1) + values


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DENSE)
def test_output_rows_equal_those_of_a_full_pass(
    folder: Path, family: str, dtype: str, fused: bool
) -> None:
    """So do K and V of every row; the last layer gets queries of the output rows only."""
    model = decoder(folder, family, dtype, "cpu" if fused else LoopedOps)
    for num_rows, rows in ((97, [3, 4, 90]), (200, [199]), (70, []), (5, [0, 1, 2, 3, 4])):
        full, pruned = RecordingAttention(), RecordingAttention()
        expected = model.forward(*inputs(model, num_rows, full))

        hidden = model.forward(*inputs(model, num_rows, pruned, rows))

        assert torch.equal(hidden[rows], expected[rows])
        assert hidden.isfinite().all()
        for layer, (call, reference) in enumerate(zip(pruned.calls, full.calls, strict=True)):
            assert torch.equal(call[1], reference[1])
            assert torch.equal(call[2], reference[2])
            assert torch.equal(call[0], reference[0][rows] if layer == 2 else reference[0])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pruned_row_with_nonfinite_kv_becomes_nan(folder: Path, dtype: str, fused: bool) -> None:
    """Its hidden row would show nothing otherwise, as the rest of the last layer is not computed."""
    model = decoder(folder, "llama", dtype, "cpu" if fused else LoopedOps)

    hidden = model.forward(*inputs(model, 80, RecordingAttention(nonfinite_row=40), [79]))

    nan_rows = (~hidden.isfinite().all(-1)).nonzero()[:, 0].tolist()
    assert nan_rows == [40]


def test_a_model_of_one_layer_checks_positions(folder: Path) -> None:
    """The pruned last layer is also the first, which checks positions."""
    model = decoder(folder, "llama", "float32")
    one_layer = FusedLayers(fused_layers_of(model)._layers[:1])
    _, full = inputs(model, 6, RecordingAttention())
    pruned = replace(full, output_rows=torch.tensor([2]))
    hidden = torch.randn(6, model.config.hidden_size)
    expected = one_layer(hidden.clone(), full)

    assert torch.equal(one_layer(hidden.clone(), pruned)[2], expected[2])
    full.positions[4] = model.config.max_model_len
    with pytest.raises(IndexError, match="positions must be in"):
        one_layer(hidden, pruned)


def sampling(plan: StepPlan, sampled: list[tuple[int, int]]) -> StepPlan:
    """The plan with samples of requests: (request, draft tokens), from the request's last rows."""
    ends = plan.batch.cu_seqlens_q[1:].tolist()
    samples = [
        SampleSpec(seq, ends[seq] - 1 - num_drafts, 0, SamplingParams(), 0, None, (0,) * num_drafts)
        for seq, num_drafts in sampled
    ]
    return replace(plan, samples=tuple(samples), all_rows=False)


CASES: dict[str, list[StepPlan]] = {
    "no sample": [sampling(plan_of([(0, 300)]), [])],
    "the end of a prompt": [
        sampling(plan_of([(0, 300)]), []),
        sampling(plan_of([(300, 210)]), [(0, 0)]),
    ],
    "decodes beside a chunk": [
        sampling(plan_of([(20, 1), (0, 300), (600, 1), (13, 70)]), [(0, 0), (2, 0), (3, 0)])
    ],
    "drafts beside a chunk": [sampling(plan_of([(20, 4), (0, 200), (300, 1)]), [(0, 3), (2, 0)])],
    "a shared prefix": [sampling(plan_of([(512, 40)] * 4, shared=512), [(0, 0), (1, 0), (3, 0)])],
    "a request samples twice": [sampling(plan_of([(0, 90), (5, 2)]), [(0, 0), (0, 0), (1, 1)])],
}


@pytest.mark.parametrize("backend", ["cpu, fused", "cpu, by layer", "blocked"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_sampled_rows_equal_those_of_a_full_step(
    folder: Path, case: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does all of K/V; the last layer's attention has the sampled rows only."""
    runner = runner_of(folder, "qwen3", dtype)
    if backend == "blocked":
        assert isinstance(runner.backend, CpuBackend)
        runner.backend = BlockedBackend(runner.backend.spec, torch.device("cpu"))
    elif backend == "cpu, by layer":
        call_attention_by_layer(runner)
    plans = CASES[case]
    full = outcome(runner, [replace(plan, all_rows=True) for plan in plans])
    last_positions = record_last_attention(runner, monkeypatch)

    pruned = outcome(runner, plans)

    for plan, hidden, expected in zip(plans, pruned, full, strict=False):
        rows = sorted(
            {sample.row + i for sample in plan.samples for i in range(len(sample.draft) + 1)}
        )
        assert torch.equal(hidden[rows], expected[rows])
        assert hidden.isfinite().all()
        assert last_positions.pop(0) == (plan.batch.positions[rows].tolist() or None)
    assert not last_positions
    for plane, expected in zip(pruned[len(plans) :], full[len(plans) :], strict=True):
        assert torch.equal(plane, expected)


def record_last_attention(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> list[list[int] | None]:
    """Positions of the rows of each step's pruned attention; None if there was none."""
    recorded: list[list[int] | None] = []
    select_rows, forward = paged.select_rows, runner.forward

    def recording_select_rows(*args: Any) -> Any:
        batch = select_rows(*args)
        recorded[-1] = batch.positions.tolist()
        return batch

    def recording_forward(plan: StepPlan) -> Tensor:
        recorded.append(None)
        return forward(plan)

    monkeypatch.setattr(paged, "select_rows", recording_select_rows)
    monkeypatch.setattr(runner, "forward", recording_forward)
    return recorded


def test_few_rows_are_not_pruned_and_a_hand_made_step_is_full(folder: Path) -> None:
    """Pruning starts at `min_pruned_rows`; a `StepPlan` without samples has `all_rows`."""
    runner, plan = runner_of(folder, "llama", "float32"), plan_of([(0, 70), (300, 1)])
    assert plan.all_rows
    few = sampling(plan_of([(0, 60), (300, 1)]), [(1, 0)])
    for unpruned in (plan, few):
        assert runner.output_rows(unpruned) is None
    rows = runner.output_rows(sampling(plan, [(1, 0)]))
    assert rows is not None
    assert rows.tolist() == [70]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pruning_with_plain_torch_operations(folder: Path, dtype: str) -> None:
    """exact=False, layer by layer: results are close, and K/V of every row is computed."""
    decoder(folder, "qwen3", dtype)
    model = load_model(folder / "qwen3", dtype=dtype, exact=False, ops=ops_of("plain"))
    for num_rows, rows in ((97, [3, 4, 90]), (70, [])):
        full, pruned = RecordingAttention(), RecordingAttention()
        expected = model.forward(*inputs(model, num_rows, full))
        hidden = model.forward(*inputs(model, num_rows, pruned, rows))
        tolerance = 1e-5 if dtype == "float32" else 5e-2
        torch.testing.assert_close(hidden[rows], expected[rows], rtol=tolerance, atol=tolerance)
        assert hidden.isfinite().all()
        assert [len(call[0]) for call in pruned.calls] == [num_rows, num_rows, len(rows)]
        assert [len(call[1]) for call in pruned.calls] == [num_rows] * 3


@pytest.mark.parametrize("num_tokens", [96, 99])
def test_a_runner_that_pads_does_not_prune(folder: Path, num_tokens: int) -> None:
    """With a row multiple every row is computed, also if the step is a multiple already."""
    runner = runner_of(folder, "llama", "float32")
    plan = sampling(plan_of([(0, num_tokens)]), [(0, 0)])
    assert runner.output_rows(plan) is not None
    runner.row_multiple = 16
    assert runner.output_rows(plan) is None
    expected = outcome(runner, [replace(plan, all_rows=True)])

    hidden = outcome(runner, [plan])

    assert torch.equal(hidden[0], expected[0])


@pytest.mark.parametrize("seqs", [(0, 1, 2), (0, 2)])
def test_a_nonfinite_row_fails_its_request_sampled_or_not(
    folder: Path, seqs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits show it for sampled rows; hidden rows are checked for the others."""
    runner = runner_of(folder, "llama", "bfloat16")
    plan = sampling(plan_of([(20, 1), (30, 1), (40, 1)]), [(seq, 0) for seq in seqs])
    sound = run_step(step_executor(runner), plan)
    assert sorted(sound.sampled) == list(seqs)
    assert not sound.failed
    forward = runner.forward

    def damaged(plan: StepPlan, late_ids: Tensor | None = None) -> Tensor:
        hidden = forward(plan, late_ids).clone()
        hidden[1, 3] = torch.inf
        return hidden

    monkeypatch.setattr(runner, "forward", damaged)
    result = run_step(step_executor(runner), plan)

    assert list(result.failed) == [1]
    assert "the hidden state of request 1 at position 30 is not finite" in result.failed[1]
    assert result.sampled == {seq: sound.sampled[seq] for seq in seqs if seq != 1}
