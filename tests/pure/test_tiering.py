"""An engine with cache tiers: what goes out, what comes back, and what never does."""

import random
from array import array

import pytest

from ramify.cache.key import CacheKey
from ramify.cache.sessions import end_session
from ramify.engine.tier_parts import STAGING_BYTES
from ramify.engine.tiering import MAX_REMOVED_PAGES
from ramify.engine.weight_reload import swap_weights
from ramify.kv.mover_jobs import Removal
from ramify.kv.stores.memory import FaultyStore, MemoryStore, StoreFaults
from ramify.kv.stores.page_store import ReadOutcome
from ramify.outputs import TierMiss
from ramify.params import SamplingParams
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import Bench, expected
from tests.pure.tier_bench import TierBench, memory_tier

PAGE = 4
A = [7] * 33
B = [9] * 45
C = [11] * 45


def test_an_evicted_prefix_comes_back_from_the_tier() -> None:
    """Prompt A leaves a pool of 16 pages for B and C; asked again, 8 of its pages are loaded."""
    bench = TierBench(host_pages=64, disk_pages=0)
    bench.answer(A)
    bench.answer(B)
    bench.answer(C)
    bench.settle()

    again = bench.answer(A, max_tokens=3)

    assert bench.outputs[again].token_ids == tuple(expected(A, 3, ends=()))
    assert bench.read_tokens(again) == 32
    assert bench.tiering.counts.loaded == {"host": 8}


def test_without_a_tier_the_same_prefix_is_computed_again() -> None:
    """The control of the test above."""
    bench = Bench(pool_tokens=64, max_model_len=256)
    for prompt in (A, B, C):
        bench.add(prompt, max_tokens=1, ignore_eos=True)
        bench.run()

    again = bench.add(A, max_tokens=3, ignore_eos=True)
    bench.run()

    assert bench.outputs[again].cache.read_tokens == 0


def test_an_engine_after_a_restart_reads_what_the_last_one_wrote() -> None:
    """What was in the pool when the engine closed is in the disk tier, used once or twice."""
    first = TierBench()
    first.answer(A)
    first.answer(B)
    first.core.close()
    assert first.mover.is_closed

    second = TierBench(stores=first.stores)
    again = second.answer(A, max_tokens=3)

    assert second.outputs[again].token_ids == tuple(expected(A, 3, ends=()))
    assert second.read_tokens(again) == 32


def test_a_page_goes_to_the_disk_at_its_second_use() -> None:
    """The hottest prefixes are never evicted: a crash must not lose them."""
    bench = TierBench()
    bench.answer(A)
    bench.settle()
    assert bench.num_stored("disk") == 0

    bench.answer(A)
    bench.settle()

    assert bench.num_stored("disk") == 8


def test_a_host_tier_gets_evicted_pages_only() -> None:
    """A copy in host memory of what is in the pool would take the place of another page."""
    bench = TierBench(host_pages=64)
    bench.answer(A)
    bench.answer(A)
    bench.settle()
    assert bench.num_stored("host") == 0

    bench.answer(B)
    bench.answer(C)
    bench.settle()

    assert bench.num_stored("host") >= 8


@pytest.mark.parametrize(
    "outcome", [ReadOutcome.CORRUPT, ReadOutcome.IO_ERROR, ReadOutcome.ABSENT, ReadOutcome.LATE]
)
def test_a_page_that_cannot_be_read_ends_the_load_before_it(outcome: ReadOutcome) -> None:
    """The pages before it are used, the request computes the rest, and the answer is the same."""
    faults = StoreFaults()
    page_bytes = FakeExecutor(1, PAGE).page_bytes
    store = FaultyStore(memory_tier("disk", 64, page_bytes), faults)
    first = TierBench(stores=[store])
    first.answer(A)
    first.core.close()
    second = TierBench(stores=[store])
    hashes = _hashes(second, A)
    faults.reads = {hashes[5]: outcome}

    again = second.answer(A, max_tokens=3)

    assert second.outputs[again].token_ids == tuple(expected(A, 3, ends=()))
    assert second.read_tokens(again) == 5 * PAGE
    miss = second.explanations[again].tier_miss
    assert miss is not None
    assert (miss.tier, miss.reason, miss.begin) == ("disk", outcome.value, 5 * PAGE)
    errors = {} if outcome is ReadOutcome.ABSENT else {outcome.value: 1}
    assert second.tiering.counts.read_errors == errors


def test_a_store_that_does_not_answer_is_a_miss() -> None:
    """No request gets an error because of a tier."""
    faults = StoreFaults()
    store = FaultyStore(memory_tier("disk", 64, FakeExecutor(1, PAGE).page_bytes), faults)
    bench = TierBench(stores=[store])
    bench.answer(A)
    faults.unavailable = "gone"

    for prompt in (B, C):
        bench.answer(prompt)
        bench.settle()
    again = bench.answer(A, max_tokens=2)

    assert bench.outputs[again].token_ids == tuple(expected(A, 2, ends=()))
    assert bench.tiering.counts.not_written > 0


def test_two_requests_wait_for_one_load() -> None:
    """A page is read once, however many prompts begin with it."""
    first = TierBench()
    first.answer(A)
    first.core.close()
    bench = TierBench(stores=first.stores)

    ids = [bench.add([*A, token], max_tokens=2, ignore_eos=True) for token in (1, 2)]
    bench.run()

    assert bench.tiering.counts.loads == 1
    assert [bench.read_tokens(request_id) for request_id in ids] == [32, 32]


def test_tokens_by_tier_are_those_of_the_prompt() -> None:
    """A prompt that leaves another one's load after three pages has read these from the tier."""
    long, short = [7] * 12 + [8] * 21, [7] * 12 + [5] * 9
    first = TierBench()
    first.answer(long)
    first.core.close()
    bench = TierBench(stores=first.stores)

    ids = [bench.add(prompt, max_tokens=2, ignore_eos=True) for prompt in (long, short)]
    bench.run()

    assert bench.tiering.counts.loads == 1
    tokens = [bench.outputs[request_id].cache.tier_tokens for request_id in ids]
    assert tokens == [{"disk": 32}, {"disk": 12}]


def test_a_late_load_lets_its_request_compute_and_its_pages_enter_as_warm() -> None:
    """A request waits for a load no longer than computing would take."""
    first = TierBench()
    first.answer(A)
    first.core.close()
    bench = TierBench(stores=first.stores, works_in_wait=False, step_s=1.0)

    late = bench.answer(A)
    assert bench.read_tokens(late) == 0
    assert bench.tiering.counts.loads_late == 1
    miss = bench.explanations[late].tier_miss
    assert miss is not None
    assert (miss.tier, miss.reason) == ("disk", "late")
    bench.core.cache.clear()
    bench.settle()

    again = bench.answer(A)
    assert bench.read_tokens(again) == 32


def test_a_prompt_that_is_computed_sooner_than_loaded_says_so() -> None:
    """The miss names the tier that had the next page; without one it names none."""
    first = TierBench()
    first.answer(A)
    first.core.close()
    bench = TierBench(stores=first.stores)
    bench.tiering.measurements.costs.probe_ended("disk", [(1, 100.0)])

    refused, unknown = bench.answer(A), bench.answer(B)

    assert bench.explanations[refused].tier_miss == TierMiss("disk", "slower", 0, 32)
    assert bench.explanations[unknown].tier_miss is None
    assert "the next page is on disk, computing was cheaper; " in str(bench.explanations[refused])


def test_a_page_that_a_tier_evicted_for_others_is_explained_so() -> None:
    """Written there, and gone since; a prompt that no tier ever had names none."""
    bench = TierBench(disk_pages=12)
    for prompt in (A, B, C):
        bench.answer(prompt)
        bench.answer(prompt)
        bench.settle()

    again, unknown = bench.answer(A), bench.answer([13] * 33)

    assert bench.explanations[again].tier_miss == TierMiss("disk", "evicted", 0, 1)
    assert "on disk, or was: evicted for others" in str(bench.explanations[again])
    assert bench.explanations[unknown].tier_miss is None


def test_an_aborted_request_leaves_no_buffer_behind() -> None:
    """Its load is dropped; what a reader still holds comes back when the read ends."""
    first = TierBench()
    first.answer(A)
    first.core.close()
    bench = TierBench(stores=first.stores, works_in_wait=False)
    request_id = bench.add(A, max_tokens=1)
    assert bench.mover.reads

    bench.abort(request_id)
    bench.settle()

    assert bench.tiering.num_buffers_in_use == 0
    assert bench.core.cache.stats().cached_pages == 0


def test_clear_empties_the_tiers_too() -> None:
    """`llm.cache.clear()` must not leave a copy that comes back."""
    bench = TierBench()
    bench.answer(A)
    bench.answer(A)
    bench.settle()
    assert bench.num_stored("disk") == 8

    bench.core.clear_tiers()
    bench.core.cache.clear()
    again = bench.answer(A)
    bench.settle()

    assert bench.read_tokens(again) == 0


def test_pages_that_a_predicate_evicts_leave_the_tiers() -> None:
    """An operator removes them, or their K/V is suspect."""
    bench = TierBench()
    bench.answer(A)
    bench.answer(A)
    bench.settle()

    bench.core.cache.evict_if(lambda node: True)
    bench.answer(B)
    bench.settle()

    assert bench.num_stored("disk") == 0


def test_removals_that_a_hanging_writer_leaves_waiting_have_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beyond it every page is removed in their place, and none is read before that is done."""
    bench = TierBench(works_in_wait=False)
    bench.answer(A)
    bench.answer(A)
    bench.settle()
    bench.answer(B)
    bench.answer(C)
    for salt in range(3):
        bench.tiering.remove_key(CacheKey([salt] * (MAX_REMOVED_PAGES * PAGE // 2)), 0)

    again = bench.answer(A, max_tokens=3)
    removals = [job for job in bench.mover.writes if isinstance(job, Removal)]
    bench.settle()

    assert [removal.hashes is None for removal in removals] == [False, False, True]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert bench.read_tokens(again) == 0
    assert bench.tiering.num_removed_pages == 0
    assert bench.outputs[again].token_ids == tuple(expected(A, 3, ends=()))


@pytest.mark.parametrize("num_uses", [1, 2])
def test_pages_of_an_ended_session_are_written_no_more_and_stay_where_they_are(
    num_uses: int,
) -> None:
    """Used once they are on no tier, and get on none; used twice they are there, and are read again."""
    bench = TierBench()
    for _ in range(num_uses):
        bench.core.add_request(A, _params(), session="s")
        while bench.core.has_unfinished:
            bench.core.step()
    bench.settle()
    end_session(bench.core.cache, "", "s")

    bench.answer(B)
    bench.answer(C)
    bench.settle()
    again = bench.answer(A, max_tokens=3)

    assert bench.core.cache.stats().evictions["session_ended"] == 8
    assert bench.read_tokens(again) == (0 if num_uses == 1 else 32)
    assert bench.outputs[again].token_ids == tuple(expected(A, 3, ends=()))


@pytest.mark.parametrize("staging_bytes", [0, STAGING_BYTES])  # 3 buffers for writes, or plenty
def test_the_pages_that_were_used_last_are_written_first_at_the_end(
    staging_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be no time for all; those of an ended session come behind all others."""
    monkeypatch.setattr("ramify.engine.tier_copies.LOOKED_UP", 4)
    bench = TierBench(pool_tokens=128, staging_bytes=staging_bytes)
    first, second, ended = [5] * 9, [6] * 9, [8] * 9
    branch = [*first[:4], *[7] * 5]
    for prompt in (first, second, branch, ended):
        bench.core.add_request(prompt, _params(), session="s" if prompt is ended else "")
        while bench.core.has_unfinished:
            bench.core.step()
    end_session(bench.core.cache, "", "s")

    assert bench.tiering.flush()

    [store] = bench.stores
    assert isinstance(store, MemoryStore)
    # The page that the branch shares was used twice, so that it is written before.
    in_order = [*_hashes(bench, branch), *_hashes(bench, second), _hashes(bench, first)[1]]
    assert [*store._pages] == [*in_order, *_hashes(bench, ended)]


def test_pages_that_a_tenants_share_evicts_come_back_from_the_tier() -> None:
    """They leave the pool for want of room, as any others do."""
    bench = TierBench()
    for prompt in (A, B):
        bench.core.add_request(prompt, _params(), tenant="ann", cache_share=0.5)
        while bench.core.has_unfinished:
            bench.core.step()
    bench.settle()
    evictions = bench.core.cache.stats().evictions

    again = bench.core.add_request(A, _params(), tenant="ann", cache_share=0.5)
    bench.tokens[again] = []
    bench.run()

    assert evictions["predicate"] > 0
    assert bench.read_tokens(again) == 32


def test_other_weights_never_read_the_pages_of_the_old_ones() -> None:
    """Pages of the old weights, in the pool or being read, are not used and not written."""
    bench = TierBench(works_in_wait=False)
    bench.answer(A)
    bench.answer(A)
    bench.settle()
    bench.answer(B)
    bench.answer(C)
    waiting = bench.add(A, max_tokens=2, ignore_eos=True)
    assert bench.mover.reads

    swap_weights(bench.core, lambda: b"other weights")
    bench.device.next_token = None
    bench.settle()
    bench.run()

    assert bench.read_tokens(waiting) == 0


def test_evictions_without_a_free_buffer_are_counted() -> None:
    """Copies never wait for the writer."""
    bench = TierBench(staging_bytes=1)
    bench.answer(A)
    bench.answer(B)

    bench.answer(C)

    assert bench.tiering.counts.dropped > 0
    assert bench.tiering.counts.queued > 0


def test_what_must_not_be_cached_reaches_no_tier() -> None:
    """Tokens beyond `max_shared` are private: nobody may find them on a disk."""
    bench = TierBench()
    for _ in range(2):
        bench.core.add_request(A, _params(), max_shared=8)
        while bench.core.has_unfinished:
            bench.core.step()
    bench.core.close()

    assert bench.num_stored("disk") == 2


def _params() -> SamplingParams:
    return SamplingParams(max_tokens=1, ignore_eos=True)


def _hashes(bench: TierBench, prompt: list[int]) -> list[bytes]:
    return bench.core.namespaces.key(array("i", prompt)).page_hashes(PAGE)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_a_pool_of_one_prompt_with_a_tier_hits_like_one_without_limit(
    page_size: int, window: int | None
) -> None:
    """Every page that was ever computed is read again, and holds its own K/V."""
    draw = random.Random(page_size)
    num_pages = -(-21 // page_size) + 2
    bench = TierBench(
        page_size=page_size,
        pool_tokens=num_pages * page_size,
        max_model_len=num_pages * page_size,
        max_batch_tokens=8,
        window=window,
    )
    seen: list[list[int]] = []
    for _ in range(60):
        stem = draw.choice(
            ["aaaaaaaaaaaa", "aaaaaaaabbbb", "aaaabbbbbbbbbbbb", "cccccccc", "ccccdd"]
        )
        text = stem + "".join(draw.choices("xyz", k=draw.randint(0, 3)))
        prompt = [ord(letter) % 50 for letter in text]
        request_id = bench.answer(prompt, max_tokens=2)
        bench.settle()
        if window is None:
            answer = expected(prompt, 2, ends=())
            assert list(bench.outputs[request_id].token_ids) == answer
            shared = max((_common(prompt[:-1], other) for other in seen), default=0)
            # Whole pages come back from the tier; part of a page is copied if it is in the pool.
            whole = shared // page_size * page_size
            assert whole <= bench.read_tokens(request_id) <= shared
            seen.append(prompt + answer[:-1])

    failures = bench.core.context.failures
    assert (failures.failed_steps, failures.rebuilds) == (0, 0)
    assert sum(bench.tiering.counts.loaded.values()) > 20


def _common(first: list[int], second: list[int]) -> int:
    pairs = list(zip(first, second, strict=False))
    return next((at for at, (left, right) in enumerate(pairs) if left != right), len(pairs))


def test_a_load_whose_prefix_was_evicted_meanwhile_is_dropped() -> None:
    """Its pages have no place in the tree any more; the request computes."""
    first = TierBench()
    first.answer(A)
    first.core.close()
    bench = TierBench(stores=first.stores, works_in_wait=False, step_s=1.0)
    bench.answer(A[:17])
    bench.settle()
    bench.tiering.measurements.costs.probe_ended("disk", [(1, 0.0)])
    late = bench.tiering.counts.loads
    request_id = bench.add(A, max_tokens=2, ignore_eos=True)
    assert [len(read.pages) for read in bench.mover.reads] == [4]
    bench.step_s = 0.0

    bench.core.cache.evict(16)
    bench.mover.run_read()
    bench.run()

    assert bench.tiering.counts.loads == late + 1
    assert bench.outputs[request_id].token_ids == tuple(expected(A, 2, ends=()))
    failures = bench.core.context.failures
    assert (failures.failed_steps, failures.rebuilds) == (0, 0)
