"""Recovery from damaged bookkeeping and from errors outside the forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ramify.cache import CacheKey
from ramify.engine.step import StepPlan, StepResult
from ramify.errors import (
    InvariantError,
    PinError,
    StepFailedError,
    StepMemoryError,
    UnknownRequestError,
)
from ramify.outputs import FinishReason
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, LetterDecoder, expected
from tests.pure.whole_steps import WholeSteps

STEM = [7] * 9


def served(bench: Bench, count: int = 4, *, steps: int = 2, **params: Any) -> dict[int, list[int]]:
    """Add requests with a common prefix and run `steps` steps; returns id → prompt."""
    prompts = {}
    for last in range(1, count + 1):
        prompt = [*STEM, last]
        prompts[bench.add(prompt, max_tokens=7, ignore_eos=True, **params)] = prompt
    for _ in range(steps):
        bench.step()
    return prompts


def assert_answered(bench: Bench, prompts: dict[int, list[int]]) -> None:
    outputs = bench.run()
    for key, prompt in prompts.items():
        assert outputs[key].error is None
        assert list(outputs[key].token_ids) == expected(prompt, 7, ends=())
    bench.assert_nothing_leaked()


def leak_a_page(bench: Bench) -> None:
    bench.core.cache._store.ledger._free.pop()


def free_a_page_twice(bench: Bench) -> None:
    free = bench.core.cache._store.ledger._free
    free.append(free[0])


def free_a_page_in_use(bench: Bench) -> None:
    row = bench.core.scheduler.running[0].sequence.row
    assert row is not None
    bench.core.cache._store.ledger._free.append(bench.core.table.pages(row)[0])


def lose_a_pin(bench: Bench) -> None:
    tree = bench.core.cache._tree
    tree.ref_count[next(node for node in tree.nodes() if tree.ref_count[node])] -= 1


def lose_an_edge(bench: Bench) -> None:
    tree = bench.core.cache._tree
    node = next(iter(tree.nodes()))
    tree.parent[node] = 0


def miscount_what_is_evictable(bench: Bench) -> None:
    bench.core.cache._store.num_evictable += 3


def swap_a_row(bench: Bench) -> None:
    row = bench.core.scheduler.running[0].sequence.row
    assert row is not None
    bench.core.table.array[row, 0] = 77


def forget_everybody(bench: Bench) -> None:
    assert not bench.core.scheduler.waiting
    bench.core.scheduler.running.clear()


DAMAGES = (
    leak_a_page,
    free_a_page_twice,
    free_a_page_in_use,
    lose_a_pin,
    lose_an_edge,
    miscount_what_is_evictable,
    swap_a_row,
    forget_everybody,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_check_repairs_what_it_finds(damage: Callable[[Bench], None]) -> None:
    """An audit that finds damage rebuilds the engine, and every live request is answered."""
    bench = Bench()
    prompts = served(bench)
    damage(bench)

    assert not bench.core.recovery.audit()

    counts = bench.core.recovery.counts
    assert (counts.audits, counts.mismatches, counts.rebuilds, counts.errors) == (1, 1, 1, 0)
    assert bench.core.recovery.audit()
    assert_answered(bench, prompts)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_of_the_steps_is_checked(share: float) -> None:
    """With `check_sample=1` the next step finds a leaked page; with 0 no step does."""
    bench = Bench(check_sample=share)
    prompts = served(bench)
    leak_a_page(bench)

    bench.core.step()

    assert bench.core.recovery.counts.mismatches == (share == 1.0)
    if share:
        prompts_left = {key: prompt for key, prompt in prompts.items() if key not in bench.outputs}
        assert prompts_left


def test_watchers_survive_a_repair() -> None:
    """Subscriptions and eviction observers survive a rebuild; pins do not."""
    bench = Bench(64, 4)
    prompts = served(bench, 1)
    bench.run()
    cache, evictions = bench.core.cache, list[object]()
    subscription = cache.subscribe()
    stop = cache.observe_evictions(evictions.append)
    pin = cache.pin(CacheKey(STEM), "somebody")
    before = cache.stats()
    subscription.take()
    miscount_what_is_evictable(bench)

    assert not bench.core.recovery.audit()

    assert [event.kind for event in subscription.take()] == ["cleared"]
    with pytest.raises(PinError):
        cache.unpin(pin.id)
    assert cache is bench.core.cache
    assert cache.stats().lookups == before.lookups
    assert cache.stats().free_pages == cache.num_pages
    more = served(bench, 1, steps=0)
    bench.run()
    assert {event.kind for event in subscription.take()} == {"stored"}
    cache.evict(1)
    assert evictions
    stop()
    evictions.clear()
    cache.evict(1)
    assert not evictions
    subscription.close()
    assert {*prompts, *more} == set(bench.outputs)


def test_repairs_for_ever_end_those_that_make_no_progress() -> None:
    """Eight rebuilds without a new token end the request with StepFailedError."""
    bench = Bench(4096, 4, max_batch_tokens=4, check_sample=1.0)
    key = bench.add([1] * 400, max_tokens=2)
    for _ in range(8):
        leak_a_page(bench)
        bench.step()

    error = bench.outputs[key].error
    assert isinstance(error, StepFailedError)
    assert "8 repairs of the engine without a new token, the limit is 8" in str(error)
    assert isinstance(error.__cause__, InvariantError)
    bench.assert_nothing_leaked()


# -- whatever raises outside a forward pass ------------------------------------------------


@dataclass
class Raising(WholeSteps):
    """An executor whose copies, erasures and eviction observer raise."""

    inner: FakeExecutor
    error: BaseException
    copies: int = 0  # that raise
    evictions: int = 0
    erasures: int = 0
    calls: list[str] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.inner.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        if self.erasures:
            self.erasures -= 1
            raise self.error
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.copies:
            self.copies -= 1
            self.calls.append("copy")
            raise self.error
        self.inner.copy_pages(pairs)

    def evicted(self, eviction: object) -> None:
        if self.evictions:
            self.evictions -= 1
            self.calls.append("evict")
            raise self.error


def stepped(bench: Bench) -> int:
    """Step until no request is left; returns the number of interrupts."""
    interrupts = 0
    while bench.core.has_unfinished:
        try:
            bench.step()
        except KeyboardInterrupt:
            interrupts += 1
            bench.check()
    return interrupts


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_copy_that_raises_loses_no_answer(error: BaseException, times: int) -> None:
    """A failed or interrupted page copy changes no answer of any branch."""
    bench = Bench(4096, 4)
    device = Raising(bench.device, error, copies=times)
    bench.core.executor = device
    key = bench.add([*STEM, 1], n=4, max_tokens=6, ignore_eos=True)
    other = bench.add([*STEM, 2], max_tokens=6, ignore_eos=True)

    interrupts = stepped(bench)

    assert interrupts == isinstance(error, KeyboardInterrupt)  # its branches need no copy then
    for answer in bench.outputs[key].completions:
        assert list(answer.token_ids) == expected([*STEM, 1], 6, ends=())
    assert list(bench.outputs[other].token_ids) == expected([*STEM, 2], 6, ends=())
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_what_raises_inside_a_plan_loses_no_request(error: BaseException) -> None:
    """An eviction observer that raises inside `plan` costs a rebuild and no answer."""
    bench = Bench(64, 4, max_num_seqs=4)
    device = Raising(bench.device, error)
    bench.core.cache.observe_evictions(device.evicted)
    bench.core.executor = device
    first = {bench.add([at] * 12, max_tokens=7, ignore_eos=True): [at] * 12 for at in (1, 2, 3, 4)}
    bench.run()
    more = {bench.add([at] * 12, max_tokens=7, ignore_eos=True): [at] * 12 for at in (5, 6, 8, 9)}
    device.evictions = 1

    interrupts = stepped(bench)

    assert device.calls == ["evict"]
    assert interrupts == isinstance(error, KeyboardInterrupt)
    assert bench.core.recovery.counts.rebuilds == 1
    assert_answered(bench, first | more)


class Stumbling(LetterDecoder):
    """A detokenizer that raises at one call, before or after it took the token."""

    calls = 0
    at: int = -1
    error: BaseException
    after = False

    def step(self, token_id: int) -> str:
        Stumbling.calls += 1
        stumbles = Stumbling.calls == Stumbling.at
        if stumbles and not Stumbling.after:
            raise Stumbling.error
        text = super().step(token_id)
        if stumbles:
            raise Stumbling.error
        return text


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 2, 5, 6, 14])
def test_an_interrupt_in_a_decoder_loses_no_text(at: int, after: bool) -> None:
    """An interrupted detokenizer emits each token, text and end exactly once."""
    plain = Bench()
    wanted = served(plain, 3, stop=("E", "XY"))
    plain.run()
    bench = Bench(text_decoder=Stumbling)
    Stumbling.calls, Stumbling.at, Stumbling.after = 0, at, after
    Stumbling.error = KeyboardInterrupt()
    prompts = served(bench, 3, steps=0, stop=("E", "XY"))

    assert stepped(bench) == 1

    for key in prompts:
        assert bench.outputs[key].completions == plain.outputs[key].completions
    assert wanted == prompts
    bench.assert_nothing_leaked()


def test_a_decoder_that_raises_ends_its_own_request() -> None:
    """An error in a detokenizer fails its own request only, without a rebuild."""
    bench = Bench(text_decoder=Stumbling)
    Stumbling.calls, Stumbling.at, Stumbling.after = 0, 5, False
    Stumbling.error = ValueError("no such letter")
    prompts = served(bench, 3, steps=0)

    outputs = bench.run()

    [failed] = [key for key in prompts if outputs[key].error is not None]
    assert outputs[failed].finish_reason is FinishReason.ERROR
    assert "no such letter" in str(outputs[failed].error)
    del prompts[failed]
    assert bench.core.recovery.counts.rebuilds == 0
    assert_answered(bench, prompts)


def test_erasing_pages_that_fails_is_a_repair() -> None:
    """A failed erasure after a failed step rebuilds the engine, and all requests are answered."""
    bench = Bench(fail_at={1})
    bench.core.executor = Raising(bench.device, RuntimeError("gone"), erasures=1)
    prompts = served(bench)

    assert bench.core.recovery.counts.rebuilds == 1
    assert_answered(bench, prompts)


def test_a_request_that_breaks_the_scheduler_is_found_and_told() -> None:
    """A request that always breaks the planner gets the error; the others are answered."""
    bench = Bench()
    prompts = served(bench)
    bad = bench.add([*STEM, 5], max_tokens=3)
    doomed = bench.core.lifecycle.requests[bad]
    doomed.namespace = 7  # type: ignore[assignment]
    doomed.reset_for_recompute()

    outputs = bench.run()

    assert isinstance(outputs[bad].error, StepFailedError)
    assert_answered(bench, prompts)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_an_abort_that_breaks_off_ends_the_request_once(error: BaseException) -> None:
    """An abort whose detokenizer raises ends the request exactly once."""

    class Torn(LetterDecoder):
        left = 1

        def finish(self) -> str:
            if Torn.left:
                Torn.left -= 1
                raise error
            return super().finish()

    bench = Bench(text_decoder=Torn)
    prompts = served(bench)
    victim = min(prompts)

    try:
        bench.abort(victim)
    except KeyboardInterrupt:
        bench.step()

    output = bench.outputs[victim]
    kind = FinishReason.ABORT if isinstance(error, KeyboardInterrupt) else FinishReason.ERROR
    assert output.finish_reason is kind
    with pytest.raises(UnknownRequestError):
        bench.core.abort(victim)
    del prompts[victim]
    assert_answered(bench, prompts)


def test_branches_can_be_aborted_when_the_first_answer_has_ended() -> None:
    """The request id aborts the other branches after the first answer has ended."""
    bench = Bench()
    key = bench.add([3, 1, 4], n=3, temperature=1.0, seed=1, max_tokens=400)
    while not any(request.is_finished for request in bench.core.live):
        bench.step()
    assert key not in bench.outputs

    bench.abort(key)

    reasons = [completion.finish_reason for completion in bench.outputs[key].completions]
    assert FinishReason.STOP in reasons
    assert FinishReason.ABORT in reasons
    bench.assert_nothing_leaked()


# -- out of memory -------------------------------------------------------------------------


@dataclass
class Cramped(WholeSteps):
    """An executor that runs out of memory above a number of tokens per step."""

    inner: FakeExecutor
    limit: int
    times: int = 1000
    sizes: list[int] = field(default_factory=list)

    def execute(self, plan: StepPlan) -> StepResult:
        self.sizes.append(plan.batch.num_tokens)
        if plan.batch.num_tokens > self.limit and self.times:
            self.times -= 1
            raise StepMemoryError(plan.batch.num_tokens, "can't allocate memory")
        return self.inner.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("limit", [1, 3, 9, 19])
def test_a_step_that_is_too_large_is_tried_in_halves(limit: int) -> None:
    """A step that runs out of memory is retried in halves, and no request fails."""
    bench = Bench(max_batch_tokens=64)
    bench.core.executor = device = Cramped(bench.device, limit)
    prompts = served(bench, 6, steps=0)

    assert_answered(bench, prompts)

    counts = bench.core.recovery.counts
    assert counts.out_of_memory == counts.failed_steps >= 1
    assert counts.errors == 0
    assert device.sizes[0] == 8 + 6 * 2  # two pages once, and what is behind them
    assert max(device.sizes[-10:]) <= 2 * limit


def test_steps_grow_again_when_memory_is_back() -> None:
    """The token limit returns to `max_batch_tokens` after memory is available again."""
    bench = Bench(max_batch_tokens=64)
    bench.core.executor = device = Cramped(bench.device, 4, times=4)
    bench.add([3] * 1500, max_tokens=2, ignore_eos=True)

    bench.run()

    assert device.sizes[:6] == [64, 32, 16, 8, 4, 4]
    assert max(device.sizes[20:]) == 64
    assert bench.core.scheduler.max_batch_tokens == 64
    assert bench.core.recovery.counts.out_of_memory == 4


def test_a_request_that_does_not_fit_alone_is_told_what_to_do() -> None:
    """A request that fails at 1 token per step gets an error that names the options to lower."""
    bench = Bench()
    bench.core.executor = Cramped(bench.device, 0)
    key = bench.add([1, 2, 3, 4], max_tokens=3)

    output = bench.run()[key]

    assert isinstance(output.error, StepFailedError)
    assert "a step of 1 token ran out of memory" in str(output.error)
    assert "smaller kv_cache_tokens, max_batch_tokens or max_model_len" in str(output.error)
    assert isinstance(output.error.__cause__, MemoryError)
    bench.assert_nothing_leaked()
