"""Every request ends however often steps fail, and a faulty request fails alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ramify.engine.logits.logits_processors import LogitsProcessor
from ramify.engine.request import Request
from ramify.engine.speculation.drafter import accepts_drafts
from ramify.engine.step import StepPlan, StepResult
from ramify.params import SamplingParams, StructuredOutput
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, expected
from tests.pure.test_engine_repair import (
    Cramped,
    Raising,
    assert_answered,
    miscount_what_is_evictable,
    served,
)
from tests.pure.whole_steps import WholeSteps

GUESSED = np.array([0b00000110], np.uint8)


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix_cache": False}, {"page_size": 128}, {"max_batch_tokens": 64}],
    ids=str,
)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_memory_that_stays_short_delays_and_does_not_stop(
    options: dict[str, Any], logprobs: int | None
) -> None:
    """A prompt of 200 tokens is answered although every step of more than 4 tokens fails."""
    bench = Bench(**{"pool_tokens": 4096, "page_size": 4, "max_batch_tokens": 8, **options})
    bench.core.executor = Cramped(bench.device, 4, times=10**9)
    prompt = [3] * 200
    key = bench.add(prompt, max_tokens=2, ignore_eos=True, prompt_logprobs=logprobs)
    for _ in range(400):
        bench.step()
    assert bench.outputs[key].error is None
    assert list(bench.outputs[key].token_ids) == expected(prompt, 2, ends=())
    bench.assert_nothing_leaked()


def test_steps_grow_again_as_fast_as_before_once_all_was_well_for_long() -> None:
    """The step limit doubles after 16 good steps, 32 after a second failure, later 16 again."""
    bench = Bench(max_batch_tokens=8)
    scheduler = bench.core.scheduler

    def grown(max_tokens: int) -> int:
        """Fail one step, then count the good steps until the step limit is 8 tokens again."""
        bench.run()
        bench.core.executor = Cramped(bench.device, 4, times=1)
        bench.add([len(bench.outputs)] * 9, max_tokens=max_tokens, ignore_eos=True)
        bench.step()
        assert scheduler.max_batch_tokens == 4
        count = 0
        while scheduler.max_batch_tokens < 8:
            bench.step()
            count += 1
        return count

    assert grown(18) == 16
    assert grown(40) == 32
    bench.add([9], max_tokens=100, ignore_eos=True)
    assert grown(18) == 16


class Poisoned(Raising):
    """Executor that raises for every step that contains request `bad`."""

    bad = -1

    def execute(self, plan: StepPlan) -> StepResult:
        if self.bad in plan.request_ids:
            raise RuntimeError("poison")
        return self.inner.execute(plan)


@pytest.mark.parametrize("erasures", [0, 1])
def test_who_poisons_steps_fails_alone_even_when_they_cannot_be_put_back(erasures: int) -> None:
    """Only the request that fails steps fails, also if a failed step cannot be rolled back."""
    bench = Bench()
    device = Poisoned(bench.device, RuntimeError("gone"), erasures=erasures)
    bench.core.executor = device
    prompts = served(bench, steps=0)
    device.bad = bench.add([9] * 5, max_tokens=3)
    assert_answered(bench, prompts)
    assert "poison" in str(bench.outputs[device.bad].error)


class _BrokenMatcher:
    def advance(self, output_ids: Sequence[int]) -> bool:
        return False

    def token_bitmasks(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[Any]:
        raise RuntimeError("matcher is broken")


def test_who_breaks_the_making_of_steps_fails_alone() -> None:
    """A request whose grammar matcher raises fails, and every other request is answered."""
    bench = Bench()
    bench.core.lifecycle.grammar_compiler = lambda spec, tenant: _BrokenMatcher()
    prompts = served(bench, steps=0)
    bad = bench.add([9] * 5, max_tokens=3, structured=StructuredOutput(regex="a+"))
    assert_answered(bench, prompts)
    assert "matcher is broken" in str(bench.outputs[bad].error)


class _Raising:
    """Drafter that raises while request `bad` runs."""

    bad = -1

    def propose(self, running: Sequence[Request]) -> Iterator[tuple[Request, tuple[int, ...]]]:
        for request in running:
            if request.id == self.bad:
                raise RuntimeError("no guess")
            if accepts_drafts(request):
                yield request, ()

    def verified(self, request: Request, num_accepted: int) -> None: ...


def test_a_drafter_that_raises_costs_guesses_alone() -> None:
    """All requests are answered although the drafter raises, and the engine is not rebuilt."""
    drafter = _Raising()
    bench = Bench(drafter=drafter, max_batch_tokens=16)
    prompts = served(bench, steps=0)
    drafter.bad = bench.add([9] * 200, max_tokens=7, ignore_eos=True)
    assert_answered(bench, {**prompts, drafter.bad: [9] * 200})
    assert bench.core.recovery.counts.rebuilds == 0


def test_scheduling_that_raises_again_and_again_ends_with_whom_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that makes the scheduler raise fails, though a step succeeds after each repair."""
    bench = Bench(max_batch_tokens=16)
    prompts = served(bench, steps=0)
    bad = bench.add([9] * 200, max_tokens=3, ignore_eos=True)
    reset = bench.core.context.reset

    def sabotage() -> None:
        scheduler = bench.core.scheduler
        schedule = scheduler.schedule

        def broken() -> Any:
            if any(request.id == bad for request in scheduler.running):
                raise RuntimeError("cannot schedule this")
            return schedule()

        monkeypatch.setattr(scheduler, "schedule", broken)

    def reset_and_sabotage() -> None:
        reset()
        sabotage()

    sabotage()
    monkeypatch.setattr(bench.core.context, "reset", reset_and_sabotage)
    for _ in range(500):
        bench.step()
    assert "cannot schedule this" in str(bench.outputs[bad].error)
    assert_answered(bench, prompts)


class _Damaged(WholeSteps):
    """Executor that fails requests that read a page in `pages`, until `zero_pages` erases it."""

    def __init__(self, inner: FakeExecutor) -> None:
        self.inner, self.pages = inner, set[int]()

    def execute(self, plan: StepPlan) -> StepResult:
        result, failed = self.inner.execute(plan), dict[int, str]()
        for i, key in enumerate(plan.request_ids):
            slots = plan.batch.kv_slots(i)[: plan.batch.num_cached[i]]
            if self.pages & {int(slot) // 4 for slot in slots}:
                failed[key] = "not finite"
                result.sampled.pop(key, None)
        return replace(result, failed=failed)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.pages -= set(pages)
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_damage_may_strike_a_request_more_than_once(times: int) -> None:
    """A request that reads damaged K/V repeatedly computes it anew and gives the right answer."""
    bench = Bench(4096, 4)
    device = _Damaged(bench.device)
    bench.core.executor = device
    bench.add([1] * 30, max_tokens=1, ignore_eos=True)
    bench.run()
    prompt = [1] * 30 + [2]
    key = bench.add(prompt, max_tokens=40, ignore_eos=True)
    for _ in range(times):
        for _ in range(5):
            bench.step()
        row = bench.core.scheduler.running[0].sequence.row
        assert row is not None
        device.pages.add(bench.core.table.pages(row)[1])
    bench.run()
    assert list(bench.outputs[key].token_ids) == expected(prompt, 40, ends=())
    assert bench.core.recovery.counts.failed_requests == times
    bench.assert_nothing_leaked()


def test_a_branch_keeps_its_turn_through_a_repair() -> None:
    """After a repair, a waiting branch still ends although newer requests keep arriving."""
    bench = Bench(4096, 4, max_num_seqs=1, max_batch_tokens=64)
    for i in range(40):
        bench.add([1 + i, 1] * 200, max_tokens=1, ignore_eos=True)
    bench.run()
    key = bench.add([5, 6, 7], n=2, max_tokens=6, ignore_eos=True)
    while not any(request.is_finished for request in bench.core.live):
        bench.step()
    miscount_what_is_evictable(bench)
    assert not bench.core.recovery.audit()
    for i in range(40):
        bench.add([11, i, 3], max_tokens=1, ignore_eos=True)
        bench.step()
    assert key in bench.outputs


@pytest.mark.parametrize("num_tenants", [10, 150])
def test_a_long_prompt_ends_however_many_tenants_there_are(num_tenants: int) -> None:
    """A long prompt of a late tenant ends although 10 or 150 other tenants keep sending."""
    bench = Bench(4096, 4, max_num_seqs=4, max_batch_tokens=64)
    count = 0

    def more() -> None:
        nonlocal count
        while len(bench.core.scheduler.waiting) < 4:
            digits = [4, count % 40, count // 40 % 40, count // 1600 % 40]
            bench.add(digits * 15, max_tokens=1, tenant=f"t{count % num_tenants}", ignore_eos=True)
            count += 1

    for _ in range(50):
        more()
        bench.step()
    late = bench.add([3] * 600, max_tokens=1, tenant="late", ignore_eos=True)
    for _ in range(1500):
        more()
        bench.step()
        if late in bench.outputs:
            break
    assert late in bench.outputs


def test_a_guess_that_leads_to_a_dead_end_is_the_last_row_that_is_drawn() -> None:
    """Masks end at the draft token after which grammar and `allowed_token_ids` leave no token."""

    class Narrow:
        def advance(self, output_ids: Sequence[int]) -> bool:
            return False

        def token_bitmasks(self, output_ids: Sequence[int], draft: Sequence[int]) -> list[Any]:
            wanted = [GUESSED, GUESSED, np.array([0b00010000], np.uint8), GUESSED]
            return wanted[: len(draft) + 1]

    params = SamplingParams(allowed_token_ids=(1, 2), structured=StructuredOutput(regex="a"))
    shaper = LogitsProcessor(
        (5,), params, stop_token_ids=frozenset(), vocab_size=8, matcher=Narrow()
    )
    for draft, rows in (((), 1), ((1,), 2), ((1, 1), 2), ((1, 1, 1), 2)):
        masks = shaper.for_step((), draft).token_bitmasks
        assert masks is not None
        assert len(masks) == rows
        assert all(mask is not None and mask.any() for mask in masks)
