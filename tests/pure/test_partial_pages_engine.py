"""Part of a cached page in the engine: what is computed, counted and explained, and what a failure gets."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.pure.engine_bench import Bench, expected
from tests.pure.whole_steps import WholeSteps


def ask(bench: Bench, prompt: Sequence[int], num_new: int = 8) -> RequestOutput:
    """Answer a prompt alone; the answer is that of an engine without a cache."""
    key = bench.add(prompt, max_tokens=num_new, ignore_eos=True)
    output = bench.run()[key]
    assert list(output.token_ids) == expected(prompt, num_new, ends=())
    return output


@pytest.mark.parametrize(("is_on", "num_read"), [(True, 45), (False, 32)])
def test_a_question_with_another_ending_is_computed_from_there(is_on: bool, num_read: int) -> None:
    """Of a page of 16 the 13 tokens before the difference are copied, and count as read everywhere."""
    bench = Bench(page_size=16, options={"partial_pages": is_on})
    prompt = [1 + at % 40 for at in range(50)]
    ask(bench, prompt)
    before = bench.device.num_computed_tokens

    output = ask(bench, [*prompt[:45], 47, 48, 49], num_new=1)

    assert output.usage.cached_tokens == output.cache.read_tokens == num_read
    assert output.cache.computed_tokens == 48 - num_read
    assert bench.device.num_computed_tokens - before == 48 - num_read
    stats = bench.core.stats().cache
    assert (stats.hit_tokens, stats.copied_tokens) == (num_read, num_read - 32)
    assert stats.ideal_hit_tokens == num_read


def test_the_explanation_says_what_the_request_then_reads() -> None:
    """`llm.cache.explain`, before and with the request: the same tokens, whole pages and copied."""
    bench = Bench(page_size=16)
    llm = LLM.from_core(bench.core)
    prompt = [1 + at % 40 for at in range(50)]
    [first] = llm.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))
    other = [*prompt[:45], 47, 48, 49]

    explanation = llm.cache.explain(other)
    [output] = llm.generate([other], SamplingParams(max_tokens=1))

    assert (explanation.hit_tokens, explanation.copied_tokens) == (32, 13)
    assert explanation.read_tokens == output.usage.cached_tokens == 45
    assert (llm.cache.explain(prompt).reason, llm.cache.explain(prompt).read_tokens) == (
        "page_tail",
        48,
    )
    whole = llm.cache.explain([*prompt, *first.token_ids[:10]])
    assert (whole.reason, whole.read_tokens) == ("hit", 59)


def test_a_tenant_reads_no_page_of_another_in_part() -> None:
    """Neither tenants nor salts see where they agree with each other's prompts."""
    bench = Bench(page_size=16)
    llm = LLM.from_core(bench.core)
    prompt, params = [1 + at % 40 for at in range(50)], SamplingParams(max_tokens=1)
    llm.generate([prompt], params, tenant="a", salt="s")
    other = [*prompt[:45], 47]

    read = [
        llm.generate([other], params, tenant=tenant, salt=salt)[0].usage.cached_tokens
        for tenant, salt in (("b", "s"), ("a", ""), ("", ""), ("a", "s"))
    ]

    assert read == [0, 0, 0, 45]


class FailingCopies(WholeSteps):
    """An executor whose first copies raise, after they have spoiled the target."""

    def __init__(self, inner: FakeExecutor, *, times: int) -> None:
        self.inner, self.times = inner, times

    def execute(self, plan: StepPlan) -> StepResult:
        return self.inner.execute(plan)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self.times:
            self.times -= 1
            self.inner.zero_pages([target for _, target in pairs])
            raise RuntimeError("no copy")
        self.inner.copy_pages(pairs)


def test_a_copy_that_fails_is_a_step_that_fails() -> None:
    """It is rolled back and tried again; nothing stays pinned, and the answer is right."""
    bench = Bench(page_size=16)
    prompt = [1 + at % 40 for at in range(50)]
    ask(bench, prompt)
    bench.core.executor = FailingCopies(bench.device, times=1)

    output = ask(bench, [*prompt[:45], 47, 48])

    assert output.usage.cached_tokens == 45
    assert bench.core.recovery.counts.failed_steps == 1
    assert bench.core.stats().cache.copied_tokens == 13
    bench.assert_nothing_leaked()


class Damaged(WholeSteps):
    """An executor in which a page is damaged: who reads it, or a copy of it, has no finite logits."""

    def __init__(self, inner: FakeExecutor, page: int) -> None:
        self.inner, self.damaged = inner, {page}

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.inner.execute(plan)
        failed: dict[int, str] = {}
        for index, name in enumerate(plan.request_ids):
            if self.damaged & set(plan.batch.block_table[index].tolist()):
                failed[name] = "not finite"
                result.sampled.pop(name, None)
        return replace(result, failed=failed)

    def zero_pages(self, pages: Sequence[int]) -> None:
        self.damaged -= set(pages)
        self.inner.zero_pages(pages)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.damaged |= {target for source, target in pairs if source in self.damaged}
        self.inner.copy_pages(pairs)


@pytest.mark.parametrize("num_common", [10, 45])
def test_a_damaged_page_that_was_copied_is_suspect_too(num_common: int) -> None:
    """The request is computed apart, gets its answer, and the page leaves the cache."""
    bench = Bench(page_size=16)
    prompt = [1 + at % 40 for at in range(50)]
    ask(bench, prompt)
    [source] = bench.core.cache.acquire(bench.core.namespaces.key(array("i", prompt))).pages[
        num_common // 16 : num_common // 16 + 1
    ]
    for lease in [*bench.core.cache._registry.live()]:
        bench.core.cache.release(lease)
    bench.core.executor = Damaged(bench.device, source)

    output = ask(bench, [*prompt[:num_common], 47, 48])

    assert output.error is None
    assert bench.core.recovery.counts.evicted_suspect_pages > 0
    assert bench.core.cache.is_free(source)
    bench.assert_nothing_leaked()


@settings(max_examples=examples(200))
@given(
    page_size=st.sampled_from([2, 3, 8, 16]),
    pool_pages=st.integers(0, 30),
    max_batch_tokens=st.integers(1, 40),
    num_rows=st.integers(1, 4),
    window=st.sampled_from([None, None, 5, 20]),
    prompts=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(1, 3), max_size=6), st.integers(1, 9)),
        min_size=1,
        max_size=12,
    ),
)
def test_answers_are_right_under_pressure(
    page_size: int,
    pool_pages: int,
    max_batch_tokens: int,
    num_rows: int,
    window: int | None,
    prompts: list[tuple[int, list[int], int]],
) -> None:
    """Small pools, chunks inside pages, preemption, eviction and windows: each answer as without a cache."""
    stem = [1 + at % 40 for at in range(40)]
    longest = max(length + len(tail) + 1 + num_new for length, tail, num_new in prompts)
    num_pages = -(-longest // page_size) + 1 + pool_pages
    bench = Bench(
        num_pages * page_size,
        page_size,
        max_num_seqs=num_rows,
        max_batch_tokens=max_batch_tokens,
        window=window,
    )
    keys = {}
    for number, (length, tail, num_new) in enumerate(prompts):
        prompt = [*stem[:length], *tail, 49]
        keys[bench.add(prompt, max_tokens=num_new, ignore_eos=True)] = prompt, num_new
        if number % 3 == 2:
            bench.step()

    outputs = bench.run()

    for key, (prompt, num_new) in keys.items():
        assert list(outputs[key].token_ids) == expected(prompt, num_new, ends=())
    bench.assert_nothing_leaked()
