"""Weight reload: K/V computed with the old weights is never read again."""

import asyncio
from array import array
from typing import Any

import pytest

from ramify.cache import CacheKey
from ramify.engine.async_llm import AsyncLLM
from ramify.engine.core import EngineCore
from ramify.engine.llm import LLM
from ramify.engine.step import StepPlan, StepResult
from ramify.engine.weight_reload import swap_weights
from ramify.errors import OverloadedError
from ramify.outputs import RequestOutput
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.pure.async_bench import AsyncBench, run
from tests.pure.engine_bench import Bench, expected
from tests.pure.whole_steps import WholeSteps

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
EPOCH = b"new weights"


class Aging(WholeSteps):
    """A fake device that marks each slot with the weights that wrote it and checks every read."""

    def __init__(self, device: FakeExecutor) -> None:
        self.device, self.epoch = device, b""
        self.written: dict[int, bytes] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        batch = plan.batch
        for slot in batch.slot_mapping.tolist():
            self.written[slot] = self.epoch
        for seq in range(batch.num_seqs):
            for slot in batch.kv_slots(seq).tolist():
                assert self.written[slot] == self.epoch, "K/V of other weights is read"
        return self.device.execute(plan)

    def zero_pages(self, pages: Any) -> None:
        self.device.zero_pages(pages)

    def copy_pages(self, pairs: Any) -> None:
        size = self.device.page_size
        for source, target in pairs:
            for place in range(size):
                self.written[target * size + place] = self.written.get(source * size + place, b"")
        self.device.copy_pages(pairs)

    def swap(self) -> bytes:
        self.epoch += EPOCH
        return self.epoch


def aging(bench: Bench) -> Aging:
    device = Aging(bench.device)
    bench.core.executor = device
    return device


@pytest.mark.parametrize("num_steps", range(7))
@pytest.mark.parametrize("budget", [5, 512])
def test_live_requests_go_on_with_new_keys_and_values(num_steps: int, budget: int) -> None:
    """Requests in any state, of any tenant, recompute their K/V and keep their answers."""
    bench = Bench(max_batch_tokens=budget, max_num_seqs=4)
    device = aging(bench)
    first = bench.add(PROMPT, max_tokens=9, ignore_eos=True)
    bench.add(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    other = bench.core.add_request(
        PROMPT[::-1], SamplingParams(max_tokens=5, prompt_logprobs=1), tenant="a", salt="s"
    )
    bench.tokens[other] = []
    for _ in range(num_steps):
        bench.step()

    num_live = swap_weights(bench.core, device.swap)
    bench.check()
    bench.add(PROMPT, max_tokens=3, ignore_eos=True)
    outputs = bench.run()

    assert num_live <= 5
    assert list(outputs[first].token_ids) == expected(PROMPT, 9, ends=())
    assert list(outputs[other].token_ids) == expected(PROMPT[::-1], 5)
    bench.assert_nothing_leaked()


def test_no_prefix_is_found_across_epochs() -> None:
    """A prompt never hits pages of older weights, which stay cached until evicted."""
    bench = Bench()
    device = aging(bench)
    for _ in range(3):
        bench.add(PROMPT, max_tokens=1)
        computed = bench.core.num_computed_tokens
        bench.run()
        assert bench.core.num_computed_tokens == computed + len(PROMPT)
        old = bench.core.namespaces.base
        swap_weights(bench.core, device.swap)
        assert bench.core.cache.match(CacheKey(array("i", PROMPT), old)).num_tokens == 8

    assert bench.core.cache.stats().cached_pages == 6


def test_weights_that_cannot_be_put_in_change_nothing() -> None:
    """If loading the weights raises, live requests go on unchanged."""
    bench = Bench()
    request = bench.add(PROMPT, max_tokens=4, ignore_eos=True)
    bench.step()

    with pytest.raises(ZeroDivisionError):
        swap_weights(bench.core, lambda: bytes(1 // 0))
    bench.check()

    assert list(bench.run()[request].token_ids) == expected(PROMPT, 4, ends=())
    assert bench.core.namespaces.base == b""


def test_when_idle_means_after_the_requests_of_now_and_before_later_ones() -> None:
    """`call_when_idle` runs after the live requests and before those that arrive later."""
    made = AsyncBench(closed=True)
    device = Aging(made.bench.device)
    made.gate.device = device  # type: ignore[assignment]

    async def main(llm: AsyncLLM) -> None:
        async with llm:
            params = SamplingParams(max_tokens=20, ignore_eos=True)
            before = llm.stream(PROMPT, params)
            await before.accepted()
            await made.gate.arrive()

            def change(core: EngineCore) -> int:
                return swap_weights(core, device.swap)

            changed = asyncio.wrap_future(llm._engine_thread.call_when_idle(change))
            later = asyncio.create_task(llm.generate(PROMPT, params))
            await asyncio.sleep(0)
            made.gate.open()
            assert await changed == 0
            outputs = [await before.whole(), await later]
            assert outputs[1].cache.read_tokens == 0
            for output in outputs:
                assert list(output.token_ids) == expected(PROMPT, 20, ends=())

    run(main(made.llm))
    made.assert_nothing_left()


def test_whoever_waits_for_other_weights_waits_in_the_queue() -> None:
    """`max_waiting` holds during a reload: the excess of held-back requests is refused at once."""
    made = AsyncBench(closed=True, options={"max_waiting": 2})

    async def main(llm: AsyncLLM) -> None:
        async with llm:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            before = llm.stream(PROMPT, params)
            await before.accepted()
            await made.gate.arrive()
            changed = asyncio.wrap_future(llm._engine_thread.call_when_idle(lambda core: None))
            later = [asyncio.create_task(llm.generate(PROMPT, params)) for _ in range(4)]
            await asyncio.sleep(0)
            made.gate.open()
            results = await asyncio.gather(*later, return_exceptions=True)
            await changed
            await before.whole()
            assert [type(result) for result in results[2:]] == [OverloadedError] * 2
            for result in results[:2]:
                assert isinstance(result, RequestOutput)
                assert list(result.token_ids) == expected(PROMPT, 3, ends=())

    run(main(made.llm))
    made.assert_nothing_left()


def test_a_pin_may_expire_while_the_weights_change() -> None:
    """A pin that expires during the reload does not stop it."""
    for early in range(1, 5):
        bench = Bench()
        llm, core = LLM.from_core(bench.core), bench.core
        prompt = list(range(1, 13))
        llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
        now = [0.0]

        def clock(now: list[float] = now) -> float:
            now[0] += 1
            return now[0]

        core.cache._pin_table._clock = clock
        pin = llm.cache.pin(prompt, ttl_s=100.0)
        now[0] = pin.expires_s - early
        assert swap_weights(core, lambda: b"other weights") == 0
        assert not core.cache.pins()
        core.cache.check()
