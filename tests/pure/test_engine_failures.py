"""Steps that fail and requests that are withdrawn: callers are told, nothing leaks."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import OutOfPagesError, StepFailedError, UnknownRequestError
from ramify.outputs import FinishReason
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, expected
from tests.pure.whole_steps import WholeSteps


def test_a_step_that_fails_once_is_tried_again() -> None:
    """The callers see nothing of it: same tokens, no error, however often it happens."""
    bench = Bench(fail_at={0, 4, 9, 14})
    keys = [bench.add([7] * 9 + [at], max_tokens=6, ignore_eos=True) for at in (1, 2)]
    first = bench.step()
    assert first == []

    late = bench.add([7] * 9 + [3], max_tokens=3, ignore_eos=True)
    outputs = bench.run()

    for key, last, count in (*zip(keys, (1, 2), (6, 6), strict=True), (late, 3, 3)):
        assert list(outputs[key].token_ids) == expected([7] * 9 + [last], count, ends=())
    assert bench.device.num_erased_pages > 0


class Refusing(WholeSteps):
    """An executor that fails every step in which a certain token is computed."""

    def __init__(self, inner: FakeExecutor, token: int) -> None:
        self.inner, self.token = inner, token

    def execute(self, plan: StepPlan) -> StepResult:
        if self.token in plan.token_ids:
            raise FloatingPointError("that token again")
        return self.inner.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("pool_tokens", [4096, 40])
def test_a_request_that_always_fails_takes_nobody_with_it(pool_tokens: int) -> None:
    """Its batch mates, and those that were running before it came, get their answers."""
    bench = Bench(pool_tokens, next_token=never_49)
    bench.core.executor = Refusing(bench.device, token=49)
    early = bench.add([4] * 9, max_tokens=20)
    bench.step()
    prompts = {bench.add([start] * 9, max_tokens=6): [start] * 9 for start in (1, 2, 3)}
    bad = bench.add([5, 49, 5], max_tokens=6)

    outputs = bench.run()

    assert outputs[bad].finish_reason is FinishReason.ERROR
    for key, context in {**prompts, early: [4] * 9}.items():
        for token in outputs[key].token_ids:
            assert token == never_49(context)
            context.append(token)
        assert len(outputs[key].token_ids) == (20 if key == early else 6)


def test_a_suspect_makes_room_when_one_other_runs() -> None:
    """A pool that both fill: the one that is tried alone preempts the other, and both end."""
    bench = Bench(8, 1, max_batch_tokens=2, max_num_seqs=3, fail_at={3})
    first = bench.add([1], max_tokens=5, ignore_eos=True)
    second = bench.add([0, 2, 2, 0, 2, 2], max_tokens=2, ignore_eos=True)

    outputs = bench.run()

    assert list(outputs[first].token_ids) == expected([1], 5, ends=())
    assert list(outputs[second].token_ids) == expected([0, 2, 2, 0, 2, 2], 2, ends=())


def test_leases_from_outside_only_delay_the_engine() -> None:
    """Somebody pins the whole pool through the cache: step says so, and goes on afterwards."""
    bench = Bench(16, 4, max_num_seqs=2)
    pages = bench.core.cache.reserve(4)
    key = bench.add([1] * 9, max_tokens=3, ignore_eos=True)
    with pytest.raises(OutOfPagesError):
        bench.core.step()

    bench.core.cache.give_back(pages)

    assert list(bench.run()[key].token_ids) == expected([1] * 9, 3, ends=())


def never_49(context: Sequence[int]) -> int:
    return 1 + (7 * sum(context) + len(context)) % 40


def test_a_report_tells_of_the_step_that_counted() -> None:
    """Who shared in a step that failed, and led in the next, computed its prompt."""
    bench = Bench(fail_at={0})
    first, second = (bench.add([7] * 12, max_tokens=1) for _ in range(2))
    bench.step()
    bench.abort(first)

    report = bench.run()[second].cache

    assert (report.read_tokens, report.shared_tokens, report.computed_tokens) == (0, 0, 12)
    assert report.recomputed_tokens == 0


def test_a_step_that_fails_twice_ends_its_requests() -> None:
    """Once with others, once alone: it is told why; the others are served, and no page leaks."""
    bench = Bench(max_num_seqs=2, fail_at={0, 1})
    doomed = [bench.add([1] * 6, max_tokens=3)]
    others = [bench.add([at] * 6, max_tokens=3, ignore_eos=True) for at in (3, 4)]
    bench.step()
    events = bench.step()

    assert [event.request_id for event in events if event.output is not None] == doomed
    outputs = bench.run()
    for key in doomed:
        output = outputs[key]
        assert output.finish_reason is FinishReason.ERROR
        assert isinstance(output.error, StepFailedError)
        assert "2 failed steps, the limit is 2" in str(output.error)
        assert "RuntimeError: asked to fail" in str(output.error)
        assert isinstance(output.error.__cause__, RuntimeError)
    for key, start in zip(others, (3, 4), strict=True):
        assert list(outputs[key].token_ids) == expected([start] * 6, 3, ends=())
        assert outputs[key].error is None


def test_a_failed_step_leaves_warm_what_was_computed_before() -> None:
    """A decode step fails: the prompt is read from the cache in the second try."""
    bench = Bench(page_size=2, fail_at={3})
    key = bench.add([7] * 20, max_tokens=8, ignore_eos=True)

    output = bench.run()[key]

    assert list(output.token_ids) == expected([7] * 20, 8, ends=())
    assert output.cache.recomputed_tokens <= 2
    assert bench.device.num_computed_tokens <= 20 + 7 + 2


def test_an_interrupt_leaves_the_engine_whole() -> None:
    """Ctrl-C inside a forward pass reaches the caller; whoever goes on gets every answer."""
    bench = Bench(fail_at={0, 2}, error=KeyboardInterrupt())
    prompts = [[7] * 9 + [at] for at in (1, 2, 3)]
    keys = [bench.add(prompt, max_tokens=5, ignore_eos=True) for prompt in prompts]

    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.check()
    bench.step()
    with pytest.raises(KeyboardInterrupt):
        bench.step()
    bench.check()
    outputs = bench.run()

    for key, prompt in zip(keys, prompts, strict=True):
        assert list(outputs[key].token_ids) == expected(prompt, 5, ends=())


# -- aborts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(8))
def test_a_request_may_be_aborted_at_any_point(steps: int) -> None:
    """Waiting, following, in the middle of its prompt, decoding: it ends, others are not touched."""
    for victim in range(3):
        bench = Bench(400, 4, max_num_seqs=2, max_batch_tokens=8)
        prompts = [[7] * 17 + [at] for at in (1, 2, 3)]
        keys = [bench.add(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
        for _ in range(steps):
            bench.step()
        if keys[victim] in bench.outputs:
            continue

        bench.abort(keys[victim])

        assert bench.outputs[keys[victim]].finish_reason is FinishReason.ABORT
        with pytest.raises(UnknownRequestError, match="has ended or never existed"):
            bench.core.abort(keys[victim])
        outputs = bench.run()
        for key, prompt in zip(keys, prompts, strict=True):
            if key != keys[victim]:
                assert list(outputs[key].token_ids) == expected(prompt, 4, ends=())


def test_what_an_aborted_request_computed_stays_warm() -> None:
    """The next one reads it."""
    bench = Bench(4096, 4, max_batch_tokens=16)
    key = bench.add([7] * 40, max_tokens=4)
    bench.step()
    bench.step()
    bench.abort(key)

    other = bench.add([7] * 40, max_tokens=1)
    output = bench.run()[other]

    assert output.cache.read_tokens == 32


class Tainting(WholeSteps):
    """An executor after whose steps the K/V of a request is not finite while a token is known."""

    def __init__(self, inner: FakeExecutor, token: int, *, times: int) -> None:
        self.inner, self.token, self.times = inner, token, times

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        bounds = plan.batch.cu_seqlens_q
        failed: dict[int, str] = {}
        for index, name in enumerate(plan.request_ids):
            ids = plan.token_ids[bounds[index] : bounds[index + 1]]
            if self.times and self.token in ids:
                self.times -= 1
                failed[name] = "not finite"
                result.sampled.pop(name, None)
        return replace(result, failed=failed)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("times", [1, 99])
def test_a_tainted_leader_fails_with_its_followers_and_nobody_else(times: int) -> None:
    """Whoever attached to its pages computes them anew; the others keep what the step gave them."""
    bench = Bench(next_token=never_49)
    stem = [49, *range(1, 12)]
    bench.core.executor = Tainting(bench.device, token=49, times=times)
    leader = bench.add([*stem, 1], max_tokens=4, ignore_eos=True)
    follower = bench.add([*stem, 2], max_tokens=4, ignore_eos=True)
    other = bench.add([7] * 9, max_tokens=4, ignore_eos=True)

    events = bench.step()
    outputs = bench.run()

    assert [event.request_id for event in events] == [other]
    assert outputs[other].error is None
    for name, last in ((leader, 1), (follower, 2)):
        assert (outputs[name].error is None) == (times == 1)
        context = [*stem, last]
        for token in outputs[name].token_ids:
            assert token == never_49(context)
            context.append(token)
    assert bench.device.num_erased_pages > 0
    bench.assert_nothing_leaked()


def test_a_request_that_goes_on_apart_is_still_its_tenants() -> None:
    """What it computes without the suspect pages is dropped with all that the tenant has cached."""
    bench = Bench()
    llm = LLM.from_core(bench.core)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    llm.generate([[7] * 19 + [1]], params, tenant="a", salt="s")
    bench.core.executor = Tainting(bench.device, token=49, times=1)
    [output] = llm.generate([[7] * 19 + [49]], params, tenant="a", salt="s")
    assert output.error is None
    assert bench.core.recovery.counts.evicted_suspect_pages > 0

    llm.cache.clear(tenant="a", salt="s")

    assert llm.cache.stats().cached_pages == 0
