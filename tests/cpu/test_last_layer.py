"""Behind the K/V of the last layer, rows that nothing is drawn from are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ramify.attention.backends.blocked import BlockedBackend
from ramify.attention.backends.cpu import CpuBackend
from ramify.engine.execution import runner as runners
from ramify.engine.execution.local_executor import LocalExecutor
from ramify.engine.execution.runner import ModelRunner
from ramify.engine.step import SampleSpec, StepPlan
from ramify.models.dense import DenseDecoder
from ramify.models.loader import load_model
from ramify.params import SamplingParams
from tests.cpu.test_fused_attention import outcome, plan_of, runner_of
from tests.cpu.test_fused_layers import decoder, ids, one_by_one
from tests.cpu.tiny_models import DENSE

pytest.importorskip("numba", reason="the kernels need the extra ramify[cpu]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("last")


class Wanting:
    """Something like attention, row by row, that keeps what it was given."""

    def __init__(self, rows: list[int] | None, *, spoilt: int | None = None) -> None:
        if rows is not None:
            self.output_rows = torch.tensor(rows, dtype=torch.int64)
        self.given: list[tuple[Tensor, ...]] = []
        self._spoilt = spoilt

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self._spoilt is not None and layer == 2:
            v[self._spoilt, 0, 0] = torch.inf
        self.given.append((q.clone(), k.clone(), v.clone()))
        group = q.shape[1] // k.shape[1]
        wide = [one[:1].repeat_interleave(group, 1) for one in (k, v)]
        return q * 0.5 + wide[0] * (layer + 1) + wide[1]


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", DENSE)
def test_rows_that_are_wanted_are_those_of_a_pass_of_all(
    folder: Path, family: str, dtype: str, chained: bool
) -> None:
    """And K and V of every row; the last layer is asked for the others' attention no more."""
    model = decoder(folder, family, dtype)

    def run(*args: Any) -> Tensor:
        return model.forward(*args) if chained else one_by_one(model, *args)

    for num_rows, rows in ((97, [3, 4, 90]), (200, [199]), (70, []), (5, [0, 1, 2, 3, 4])):
        every, some = Wanting(None), Wanting(rows)
        expected = run(*ids(model, num_rows), every)

        found = run(*ids(model, num_rows), some)

        assert torch.equal(found[rows], expected[rows])
        assert found.isfinite().all()
        for layer, (one, other) in enumerate(zip(some.given, every.given, strict=True)):
            assert torch.equal(one[1], other[1])
            assert torch.equal(one[2], other[2])
            assert torch.equal(one[0], other[0][rows] if layer == 2 else other[0])


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_row_left_in_the_cache_shows_if_it_is_not_finite(
    folder: Path, dtype: str, chained: bool
) -> None:
    """Nothing else of the last layer would tell."""
    model = decoder(folder, "llama", dtype)
    args = (*ids(model, 80), Wanting([79], spoilt=40))

    found = model.forward(*args) if chained else one_by_one(model, *args)

    broken = (~found.isfinite().all(-1)).nonzero()[:, 0].tolist()
    assert broken == [40]


def test_a_model_of_one_layer_has_its_positions_looked_at(folder: Path) -> None:
    """The last layer is the first one, too."""
    model = decoder(folder, "llama", "float32")
    assert model._fused_layers is not None
    only = type(model._fused_layers)(
        model._fused_layers._layers[:1],
        num_heads=model._fused_layers._num_heads,
        head_dim=model._fused_layers._head_dim,
    )
    _, positions = ids(model, 6)
    hidden = torch.randn(6, model.config.hidden_size)
    expected = only.run(hidden.clone(), positions, Wanting(None))

    found = only.run(hidden.clone(), positions, Wanting([2]))

    assert torch.equal(found[2], expected[2])
    positions[4] = model.config.max_model_len
    with pytest.raises(IndexError, match="positions must be in"):
        only.run(hidden, positions, Wanting([2]))


def drawing(plan: StepPlan, drawn: list[tuple[int, int]]) -> StepPlan:
    """With draws of requests (which, how many guesses) behind their last rows."""
    ends = plan.batch.cu_seqlens_q[1:].tolist()
    draws = [
        SampleSpec(seq, ends[seq] - 1 - num_drafts, 0, SamplingParams(), 0, None, (0,) * num_drafts)
        for seq, num_drafts in drawn
    ]
    return replace(plan, samples=tuple(draws), all_rows=False)


CASES: dict[str, list[StepPlan]] = {
    "nothing is drawn": [drawing(plan_of([(0, 300)]), [])],
    "the end of a prompt": [
        drawing(plan_of([(0, 300)]), []),
        drawing(plan_of([(300, 210)]), [(0, 0)]),
    ],
    "decodes beside a chunk": [
        drawing(plan_of([(20, 1), (0, 300), (600, 1), (13, 70)]), [(0, 0), (2, 0), (3, 0)])
    ],
    "guesses beside a chunk": [drawing(plan_of([(20, 4), (0, 200), (300, 1)]), [(0, 3), (2, 0)])],
    "a shared prefix": [drawing(plan_of([(512, 40)] * 4, shared=512), [(0, 0), (1, 0), (3, 0)])],
    "somebody draws twice": [drawing(plan_of([(0, 90), (5, 2)]), [(0, 0), (0, 0), (1, 1)])],
}


@pytest.mark.parametrize("backend", ["blocks, inline", "blocks", "blocked"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_drawn_from_are_those_of_the_whole_step(
    folder: Path, case: str, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And all of K/V; attention of the last layer has the rows of the draws alone."""
    runner = runner_of(folder, "qwen3", dtype)
    if backend == "blocked":
        assert isinstance(runner.backend, CpuBackend)
        runner.backend = BlockedBackend(runner.backend.spec, torch.device("cpu"))
    elif backend == "blocks":
        runner._inline = None
    plans = CASES[case]
    whole = outcome(runner, [replace(plan, all_rows=True) for plan in plans])
    asked = listen(runner, monkeypatch)

    found = outcome(runner, plans)

    for plan, one, other in zip(plans, found, whole, strict=False):
        rows = sorted({d.row + i for d in plan.samples for i in range(len(d.draft) + 1)})
        assert torch.equal(one[rows], other[rows])
        assert one.isfinite().all()
        assert asked.pop(0) == (plan.batch.positions[rows].tolist() or None)
    assert not asked
    for one, other in zip(found[len(plans) :], whole[len(plans) :], strict=True):
        assert torch.equal(one, other)


def listen(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[list[int] | None]:
    """Positions of the rows of each step's last attention; None if there was none."""
    found: list[list[int] | None] = []
    ending, forward = runners.select_rows, runner.forward

    def watched(*args: Any) -> Any:
        batch = ending(*args)
        found[-1] = batch.positions.tolist()
        return batch

    def step(plan: StepPlan) -> Tensor:
        found.append(None)
        return forward(plan)

    monkeypatch.setattr(runners, "select_rows", watched)
    monkeypatch.setattr(runner, "forward", step)
    return found


def test_few_rows_are_not_worth_it_and_a_step_made_by_hand_is_whole(folder: Path) -> None:
    runner, plan = runner_of(folder, "llama", "float32"), plan_of([(0, 70), (300, 1)])
    assert plan.all_rows
    few = drawing(plan_of([(0, 60), (300, 1)]), [(1, 0)])
    for each in (plan, few):
        assert runner.output_rows(each) is None
    rows = runner.output_rows(drawing(plan, [(1, 0)]))
    assert rows is not None
    assert rows.tolist() == [70]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_also_where_rows_need_not_be_exact(folder: Path, dtype: str) -> None:
    """Operations of torch's own, layer by layer: close, and nothing left out of the K/V."""
    decoder(folder, "qwen3", dtype)
    model = load_model(folder / "qwen3", dtype=dtype, exact=False, linear_strategy="plain")
    assert isinstance(model, DenseDecoder)
    assert model._fused_layers is None
    for num_rows, rows in ((97, [3, 4, 90]), (70, [])):
        every, some = Wanting(None), Wanting(rows)
        expected = model.forward(*ids(model, num_rows), every)
        found = model.forward(*ids(model, num_rows), some)
        close = 1e-5 if dtype == "float32" else 5e-2
        torch.testing.assert_close(found[rows], expected[rows], rtol=close, atol=close)
        assert found.isfinite().all()
        assert [len(one[0]) for one in some.given] == [num_rows, num_rows, len(rows)]
        assert [len(one[1]) for one in some.given] == [num_rows] * 3


@pytest.mark.parametrize("num_tokens", [96, 99])
def test_rows_of_padding_and_rows_to_finish_do_not_meet(folder: Path, num_tokens: int) -> None:
    """Who needs padding computes all rows, also where none is needed for all of them."""
    runner = runner_of(folder, "llama", "float32")
    plan = drawing(plan_of([(0, num_tokens)]), [(0, 0)])
    assert runner.output_rows(plan) is not None
    runner.row_multiple = 16
    assert runner.output_rows(plan) is None
    expected = outcome(runner, [replace(plan, all_rows=True)])

    found = outcome(runner, [plan])

    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("seqs", [(0, 1, 2), (0, 2)])
def test_a_broken_row_is_told_of_whether_or_not_all_are_drawn_from(
    folder: Path, seqs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits tell of rows that are drawn from; hidden rows are looked at for the others."""
    runner = runner_of(folder, "llama", "bfloat16")
    plan = drawing(plan_of([(20, 1), (30, 1), (40, 1)]), [(seq, 0) for seq in seqs])
    sound = LocalExecutor(runner).execute(plan)
    assert sorted(sound.sampled) == list(seqs)
    assert not sound.failed
    forward = runner.forward

    def spoilt(plan: StepPlan) -> Tensor:
        hidden = forward(plan).clone()
        hidden[1, 3] = torch.inf
        return hidden

    monkeypatch.setattr(runner, "forward", spoilt)
    found = LocalExecutor(runner).execute(plan)

    assert list(found.failed) == [1]
    assert "the hidden state of request 1 at position 30 is not finite" in str(found.failed[1])
    assert found.sampled == {seq: sound.sampled[seq] for seq in seqs if seq != 1}
