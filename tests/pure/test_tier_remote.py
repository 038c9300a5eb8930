"""An engine with a store beyond a network: looked up without waiting for it, written beside the disk."""

import pytest

from ramify.cache.tier_look_ups import (
    MAX_WAIT_S,
    MIN_SAMPLES,
    LookUpTable,
    wait_s,
)
from ramify.kv.stores.memory import FaultyStore, StoreFaults
from ramify.kv.stores.page_store import PageStore, ReadOutcome
from ramify.outputs import TierMiss
from ramify.testing import FakeExecutor
from tests.pure.engine_bench import expected
from tests.pure.test_tiering import PAGE, A, B, C, _hashes
from tests.pure.tier_bench import TierBench, memory_tier

PAGE_BYTES = FakeExecutor(1, PAGE).page_bytes


def remote(faults: StoreFaults | None = None) -> PageStore:
    """A shared store with room for everything."""
    return FaultyStore(memory_tier("remote", 256, PAGE_BYTES), faults or StoreFaults())


def written_by_another(store: PageStore, *prompts: list[int]) -> PageStore:
    """The store after another engine has answered these prompts and closed."""
    other = TierBench(stores=[store], pool_tokens=256)
    for prompt in prompts:
        other.answer(prompt)
    other.core.close()
    return store


def test_an_engine_reads_what_another_one_wrote() -> None:
    """Its first prompt is looked up, loaded, and counted as read from this tier."""
    bench = TierBench(stores=[written_by_another(remote(), A)])

    request = bench.answer(A, max_tokens=3)

    assert bench.outputs[request].token_ids == tuple(expected(A, 3, ends=()))
    assert bench.outputs[request].cache.tier_tokens == {"remote": 32}
    assert bench.tiering.counts.look_ups == 1


def test_a_page_on_disk_is_not_looked_up_on_the_server() -> None:
    """Tiers in order: the server is asked for what follows the pages of the disk, and no more."""
    disk = written_by_another(memory_tier("disk", 256, PAGE_BYTES), A[:13])
    bench = TierBench(stores=[disk, written_by_another(remote(), A)], works_in_wait=False)

    request = bench.add(A, max_tokens=1, ignore_eos=True)

    [look_up] = bench.mover.look_ups
    assert list(look_up.hashes) == _hashes(bench, A)[3:8]
    bench.mover.works_in_wait = True
    bench.run()
    assert bench.outputs[request].cache.tier_tokens == {"disk": 12, "remote": 20}


def test_a_prompt_whose_pages_are_on_disk_asks_the_server_nothing() -> None:
    """No round trip where none is needed."""
    disk = written_by_another(memory_tier("disk", 256, PAGE_BYTES), A)
    bench = TierBench(stores=[disk, written_by_another(remote(), A)])

    bench.answer(A)

    assert (bench.tiering.counts.look_ups, bench.tiering.counts.loaded) == (0, {"disk": 8})


def test_others_go_on_while_a_request_waits_for_the_answer() -> None:
    """A request that waits for the server is passed over."""
    bench = TierBench(stores=[written_by_another(remote(), A)], works_in_wait=False)
    waiting = bench.add(A, max_tokens=1, ignore_eos=True)
    # Shorter than a page: there is nothing to look up.
    other = bench.add(B[:4], max_tokens=2, ignore_eos=True)

    while other not in bench.outputs:
        bench.step()

    assert waiting not in bench.outputs
    bench.mover.works_in_wait = True
    bench.run()
    assert bench.read_tokens(waiting) == 32


def test_a_server_that_does_not_answer_costs_a_bounded_wait() -> None:
    """The request computes, says that nobody knew, and the pages that come late are no harm."""
    bench = TierBench(
        stores=[written_by_another(remote(), A)], works_in_wait=False, step_s=MAX_WAIT_S
    )

    request = bench.answer(A, max_tokens=2)
    bench.settle()

    assert bench.outputs[request].token_ids == tuple(expected(A, 2, ends=()))
    assert bench.read_tokens(request) == 0
    assert bench.explanations[request].tier_miss == TierMiss("remote", "unanswered", 0, 32)
    assert bench.tiering.counts.look_ups_late == 1
    assert bench.time <= 5 * MAX_WAIT_S


def test_the_time_of_a_request_in_the_queue_does_not_count() -> None:
    """Behind others it waits anyway: an answer that comes before its turn is in time."""
    bench = TierBench(
        stores=[written_by_another(remote(), A)],
        works_in_wait=False,
        step_s=MAX_WAIT_S,
        max_num_seqs=1,
    )
    bench.add(B[:4], max_tokens=10, ignore_eos=True)
    bench.step()
    queued = bench.add(A, max_tokens=1, ignore_eos=True)
    for _ in range(6):
        bench.step()

    bench.mover.run_look_up()
    bench.mover.works_in_wait = True
    bench.run()

    assert bench.read_tokens(queued) == 32
    assert bench.tiering.counts.look_ups_late == 0


def test_a_server_that_is_always_late_is_not_waited_for_until_it_is_faster() -> None:
    """After a few late answers a request computes at once, and asks all the same."""
    bench = TierBench(stores=[written_by_another(remote(), A, B, C)])
    bench.mover.answer_s = 0.2
    for number in range(MIN_SAMPLES):
        bench.answer([number] * 9)

    slow = bench.answer(B)
    bench.mover.answer_s = 0.001
    for number in range(MIN_SAMPLES + 2):
        bench.answer([20 + number] * 9)
        bench.settle()
    fast = bench.answer(C)

    assert bench.explanations[slow].tier_miss == TierMiss("remote", "unanswered", 0, 44)
    assert bench.outputs[fast].cache.tier_tokens == {"remote": 44}


def test_a_server_that_is_gone_is_not_asked_and_used_again_when_it_is_back() -> None:
    """Its breaker is open: no request waits for it, no page is copied for it."""
    faults = StoreFaults()
    bench = TierBench(stores=[written_by_another(remote(faults), A)])
    faults.unavailable = "connection refused"

    first = bench.answer(A)
    bench.answer(A)
    bench.settle()
    assert (bench.read_tokens(first), bench.tiering.counts.look_ups) == (0, 0)
    assert bench.tiering.counts.queued == 0
    faults.unavailable = ""
    bench.core.cache.clear()
    bench.settle()
    again = bench.answer(B)
    bench.answer(B)
    bench.settle()

    assert bench.read_tokens(again) == 0
    assert bench.tiering.counts.written["remote"] == 11


@pytest.mark.parametrize(
    "outcome", [ReadOutcome.CORRUPT, ReadOutcome.IO_ERROR, ReadOutcome.ABSENT, ReadOutcome.LATE]
)
def test_a_page_that_the_server_lists_and_does_not_give_is_computed(outcome: ReadOutcome) -> None:
    """The pages before it are used; the miss names the tier and the reason."""
    faults = StoreFaults()
    bench = TierBench(stores=[written_by_another(remote(faults), A)])
    faults.reads = {_hashes(bench, A)[5]: outcome}

    request = bench.answer(A, max_tokens=3)

    assert bench.outputs[request].token_ids == tuple(expected(A, 3, ends=()))
    assert bench.read_tokens(request) == 5 * PAGE
    miss = bench.explanations[request].tier_miss
    assert miss is not None
    assert (miss.tier, miss.reason, miss.begin) == ("remote", outcome.value, 5 * PAGE)


def test_a_page_goes_to_the_server_at_its_second_use_once() -> None:
    """As to the disk; a third use copies nothing."""
    store = remote()
    bench = TierBench(stores=[store])
    bench.answer(A)
    bench.settle()
    assert store.counts().num_pages == 0

    bench.answer(A)
    bench.settle()
    num_queued = bench.tiering.counts.queued
    bench.answer(A)
    bench.settle()

    assert store.counts().num_pages == 8
    assert (num_queued, bench.tiering.counts.queued) == (8, 8)


def test_pages_of_another_engine_are_not_sent_again() -> None:
    """What was loaded from the server is there."""
    bench = TierBench(stores=[written_by_another(remote(), A)])

    bench.answer(A)
    bench.answer(A)
    bench.settle()

    assert bench.tiering.counts.queued == 0


def test_pages_are_sent_again_to_a_server_that_has_failed() -> None:
    """It may have lost everything: what it had is not believed any more."""
    faults = StoreFaults()
    store = remote(faults)
    bench = TierBench(stores=[store], pool_tokens=256)
    bench.answer(A)
    bench.answer(A)
    bench.settle()
    bench.answer(B)
    bench.mover.works_in_wait = False
    bench.answer(B)
    faults.unavailable = "connection reset"
    bench.settle()
    faults.unavailable = ""
    store.clear(deadline=0.0)

    bench.answer(A)
    bench.settle()

    assert bench.tiering.counts.not_written > 0
    assert store.counts().num_pages == 8


def test_a_server_that_takes_its_time_keeps_no_page_from_the_disk() -> None:
    """It holds a quarter of the buffers at most; what finds no room there is on disk."""
    bench = TierBench(
        disk_pages=256,
        remote_pages=256,
        staging_bytes=32 * PAGE_BYTES,
        pool_tokens=256,
    )
    bench.answer(B)
    bench.mover.works_in_wait = False

    bench.answer(B)
    bench.core.tend_tiers()

    tiers = [next(iter(write.tiers)) for write in bench.mover.writes]  # type: ignore[union-attr]
    assert tiers.count("remote") == 8
    assert tiers.count("disk") == 11
    bench.settle()
    assert (bench.num_stored("disk"), bench.num_stored("remote")) == (11, 11)


def test_evicted_pages_go_to_the_disk_and_to_the_server() -> None:
    """By the same rule."""
    bench = TierBench(disk_pages=256, remote_pages=256)

    for prompt in (A, B, C):
        bench.answer(prompt)
        bench.settle()

    assert bench.num_stored("remote") == bench.num_stored("disk") > 0


def test_what_is_cleared_leaves_the_server_and_is_not_believed_to_be_there() -> None:
    """A page that is computed again is written again."""
    bench = TierBench(disk_pages=0, remote_pages=256)
    bench.answer(A)
    bench.answer(A)
    bench.settle()

    bench.core.clear_tiers()
    bench.core.cache.clear()
    bench.settle()
    assert bench.num_stored("remote") == 0
    bench.answer(A)
    bench.answer(A)
    bench.settle()

    assert bench.num_stored("remote") == 8


def test_a_removal_that_the_server_does_not_hear_of_turns_no_other_tier_off() -> None:
    """The store owes it; the disk is read on."""
    faults = StoreFaults()
    disk = memory_tier("disk", 256, PAGE_BYTES)
    bench = TierBench(stores=[disk, remote(faults)])
    faults.unavailable = "gone"

    bench.core.clear_tiers()
    bench.settle()
    for prompt in (A, B, C):
        bench.answer(prompt)
        bench.settle()
    again = bench.answer(A)

    assert bench.tiering.reading_off == ""
    assert bench.outputs[again].cache.tier_tokens == {"disk": 32}


def test_an_aborted_request_waits_for_no_answer() -> None:
    """Its answer comes to nobody."""
    bench = TierBench(stores=[written_by_another(remote(), A)], works_in_wait=False)
    request_id = bench.add(A, max_tokens=1)
    assert bench.mover.look_ups

    bench.abort(request_id)
    bench.settle()

    assert bench.tiering.counts.loads == 0
    assert bench.tiering.num_buffers_in_use == 0


def test_a_request_is_asked_for_once() -> None:
    """A page that the server lacks is not asked about at every step."""
    bench = TierBench(stores=[written_by_another(remote(), A[:13])], max_batch_tokens=8)

    request = bench.answer(A)

    assert bench.read_tokens(request) == 12
    assert bench.tiering.counts.look_ups == 1


def test_the_wait_for_an_answer_is_a_share_of_computing() -> None:
    """Within two bounds."""
    assert [wait_s(seconds) for seconds in (0.001, 0.5, 10.0)] == [0.005, 0.025, 0.05]


def test_a_late_answer_is_kept_for_the_request() -> None:
    """It waits no longer, and the pages that it lists may still be loaded."""
    table = LookUpTable[str]()
    table.begin("request", 2, 5, 1.0)
    assert table.take_late(100.0, table.waiting()) == []
    assert table.limit_of("request") == 1.0
    table.begin_wait("request", 101.0)
    assert table.limit_of("request") is None
    assert table.take_late(100.5, table.waiting()) == []
    assert table.take_late(101.0, table.waiting()) == [("request", 2, 5)]

    assert not table.answered("request", [b"page"])
    assert table.lists("request", b"page")
    assert [table.may_ask("request", page) for page in (2, 4, 5)] == [False, False, True]
    table.check()
    table.forget("request")
    assert not table.lists("request", b"page")
    assert table.may_ask("request", 2)
