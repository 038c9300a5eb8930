"""State machine of an engine with tiers: whatever the mover does and whenever, answers are right."""

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ramify.cache.key import CacheKey
from ramify.cache.sessions import end_session
from ramify.engine.weight_reload import swap_weights
from ramify.kv.stores.memory import FaultyStore, StoreFaults
from ramify.kv.stores.page_store import ReadOutcome
from ramify.testing import FakeExecutor
from tests.budget import examples
from tests.pure.engine_bench import expected
from tests.pure.tier_bench import TierBench, memory_tier

STEMS = ("aaaaaaaaaaaa", "aaaaaaaabbbb", "aaaabbbbbbbbbbbb", "cccccccc", "ccccdddddddd")
LONGEST = 21  # tokens of a stem, a tail and an answer
FAULTS = (ReadOutcome.CORRUPT, ReadOutcome.IO_ERROR, ReadOutcome.LATE, ReadOutcome.ABSENT)


class TierMachine(RuleBasedStateMachine):
    """Requests over a pool of a few pages, and tiers whose jobs end in any order, or fail.

    The device refuses to read a page that holds anything but the K/V of its own context, and each
    answer is compared with that of an engine without a cache.
    """

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_spare=st.integers(1, 4),
        sizes=st.sampled_from(
            [
                (0, 500, 0),
                (3, 500, 0),
                (200, 0, 0),
                (200, 5, 0),
                (0, 5, 0),
                (200, 500, 0),
                (0, 0, 500),
                (0, 5, 500),
                (3, 5, 9),
                (0, 500, 500),
            ]
        ),
        staging_pages=st.sampled_from([4, 6, 100]),
        window=st.sampled_from([None, None, 6]),
        step_s=st.sampled_from([0.0, 0.2, 1.0]),
    )
    def make(
        self,
        page_size: int,
        num_spare: int,
        sizes: tuple[int, int, int],
        staging_pages: int,
        window: int | None,
        step_s: float,
    ) -> None:
        page_bytes = FakeExecutor(1, page_size).page_bytes
        self.faults = StoreFaults()
        num_pages = -(-LONGEST // page_size) + num_spare
        self.stores = [
            FaultyStore(memory_tier(tier, count, page_bytes), self.faults)
            for tier, count in zip(("host", "disk", "remote"), sizes, strict=True)
            if count
        ]
        self.shape: dict[str, Any] = {
            "pool_tokens": num_pages * page_size,
            "page_size": page_size,
            "max_num_seqs": 4,
            "max_batch_tokens": 8,
            "max_model_len": num_pages * page_size,
            "window": window,
            "step_s": step_s,
            "staging_bytes": staging_pages * page_bytes,
        }
        self.numbers = itertools.count(1)
        self.prompts: dict[int, list[int]] = {}
        self.start()
        self.bench.mover.works_in_wait = True
        for stem in STEMS:  # the pool has no room for all: the first are in the tiers now
            self.a_request_comes(stem, "", "a")
            self.bench.run()
            self.bench.settle()
        self.bench.mover.works_in_wait = False

    def start(self) -> None:
        self.bench = TierBench(stores=[*self.stores], works_in_wait=False, **self.shape)
        self.longest = self.bench.core.config.max_model_len - 3
        self.prompts.clear()
        self.num_failed = self.num_rebuilt = 0

    def rarely(self) -> bool:
        """True once in eight rules; what empties the tiers must not come too often."""
        return next(self.numbers) % 8 == 0

    # -- requests ------------------------------------------------------------------------------

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.text("xyz", max_size=3),
        tenant=st.sampled_from("ab"),
        session=st.sampled_from(["", "s"]),
    )
    def a_request_comes(self, stem: str, tail: str, tenant: str, session: str = "") -> None:
        prompt = [ord(letter) % 50 for letter in stem + tail][: self.longest]
        request_id = self.bench.add(
            prompt, max_tokens=2, ignore_eos=True, tenant=tenant, session=session
        )
        self.prompts[request_id] = prompt

    @rule(tenant=st.sampled_from("ab"))
    def a_session_ends(self, tenant: str) -> None:
        end_session(self.bench.core.cache, tenant, "s")

    @rule(count=st.integers(1, 4))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.bench.core.has_unfinished:
                self.bench.step()

    @rule(number=st.integers(0, 7))
    def an_abort(self, number: int) -> None:
        live = [request.id for request in self.bench.core.live]
        if live:
            request_id = live[number % len(live)]
            self.bench.abort(request_id)
            del self.prompts[request_id]

    @rule()
    def a_step_fails(self) -> None:
        """Once; the requests of the step are computed again."""
        if self.bench.core.has_unfinished:
            number = self.bench.device.num_steps
            self.bench.device.fail_at = {number}
            self.bench.step()
            self.num_failed += self.bench.device.num_steps > number
            self.bench.device.fail_at = ()

    # -- the mover -----------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def writes_end(self, count: int) -> None:
        for _ in range(count):
            self.bench.mover.run_write()

    @rule()
    def a_look_up_ends(self) -> None:
        self.bench.mover.run_look_up()

    @rule(number=st.integers(0, 7))
    def a_read_ends(self, number: int) -> None:
        self.bench.mover.run_read(number)

    @precondition(lambda self: self.bench.mover.reads)
    @rule(number=st.integers(0, 40), outcome=st.sampled_from(FAULTS))
    def a_page_cannot_be_read(self, number: int, outcome: ReadOutcome) -> None:
        keys = [key for read in self.bench.mover.reads for key in read.keys]
        self.faults.reads[keys[number % len(keys)].hash] = outcome

    @rule()
    def pages_can_be_read_again(self) -> None:
        self.faults.reads.clear()

    @rule(is_gone=st.sampled_from([True, False, False]))
    def the_stores_go_and_come(self, is_gone: bool) -> None:
        self.faults.unavailable = "gone" if is_gone else ""

    @rule()
    def everything_ends_well(self) -> None:
        """The mover has caught up, and the live requests have their answers."""
        self.faults.unavailable = ""
        self.bench.mover.works_in_wait = True
        self.bench.run()
        self.bench.settle()
        self.bench.mover.works_in_wait = False

    @rule()
    def an_idle_moment(self) -> None:
        self.bench.core.tend_tiers()

    # -- the cache -----------------------------------------------------------------------------

    @rule(stem=st.sampled_from(STEMS))
    def an_operator_evicts(self, stem: str) -> None:
        """One prompt's pages, from the tiers too."""
        first = ord(stem[0]) % 50
        self.bench.core.cache.evict_if(lambda node: CacheKey(node.atoms).tokens()[0] == first)

    @precondition(lambda self: self.rarely())
    @rule()
    def the_cache_is_cleared(self) -> None:
        self.bench.core.clear_tiers()
        self.bench.core.cache.clear()

    @precondition(lambda self: self.rarely())
    @rule()
    def the_bookkeeping_is_rebuilt(self) -> None:
        self.bench.core.recovery.rebuild(RuntimeError("asked to rebuild"))
        self.num_rebuilt += 1

    @precondition(lambda self: self.rarely())
    @rule()
    def the_weights_are_replaced(self) -> None:
        """By others that answer the same, so that the oracle stays simple."""
        namespace = b"weights %d" % next(self.numbers)
        swap_weights(self.bench.core, lambda: namespace)

    @precondition(lambda self: self.rarely())
    @rule(is_orderly=st.booleans())
    def the_engine_restarts(self, is_orderly: bool) -> None:
        """Over the same stores; with `is_orderly` it was closed, else it was killed."""
        if is_orderly and not self.faults.unavailable:
            self.bench.mover.works_in_wait = True
            self.bench.core.close()
        else:
            self.bench.mover.kill()
        self.start()

    # -- what holds ----------------------------------------------------------------------------

    @invariant()
    def everything_has_one_owner(self) -> None:
        self.bench.check()
        failures = self.bench.core.context.failures
        assert (failures.failed_steps, failures.rebuilds) == (self.num_failed, self.num_rebuilt)

    @invariant()
    def answers_are_those_of_an_engine_without_a_cache(self) -> None:
        window = self.shape["window"]
        for request_id in [*self.bench.outputs]:
            if request_id in self.prompts:
                prompt, output = self.prompts.pop(request_id), self.bench.outputs[request_id]
                if output.error is not None:
                    assert "asked to" in str(output.error)
                elif window is None:
                    assert list(output.token_ids) == expected(prompt, 2, ends=())

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.faults.unavailable = ""
            self.bench.mover.works_in_wait = True
            self.bench.run()
            self.bench.settle()
            assert self.bench.tiering.num_buffers_in_use == 0
            self.everything_has_one_owner()
            self.answers_are_those_of_an_engine_without_a_cache()


def test_answers_are_right_and_nothing_leaks_whatever_the_tiers_do() -> None:
    """Evictions, loads, failures, restarts, new weights and rebuilds in any order."""
    run_state_machine_as_test(
        TierMachine,
        settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None),
    )
