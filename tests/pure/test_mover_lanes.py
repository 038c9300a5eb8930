"""Threads of their own for a store beyond a network: what is slow there holds up nothing here."""

import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from ramify.kv.mover_jobs import LookedUp, PageLookUp, PageWrite, Removal, Removed, Result, Written
from ramify.kv.mover_lanes import MoverLanes
from ramify.kv.stores.memory import FaultyStore, StoreFaults
from tests.pure.test_offload import LIMIT_S, PAGE_BYTES, key, page, results_of
from tests.pure.tier_bench import memory_tier


class Setup:
    """A disk and a remote tier in memory; calls of the remote one wait for `gate` where it is slow."""

    def __init__(self) -> None:
        self.disk = memory_tier("disk", 64, PAGE_BYTES)
        self.remote = memory_tier("remote", 64, PAGE_BYTES)
        self.gate, self.faults = threading.Event(), StoreFaults()
        self.mover = MoverLanes([self.disk, FaultyStore(self.remote, self.faults)], ["remote"])

    def make_slow(self) -> None:
        def wait(seconds: float) -> None:
            self.gate.wait(LIMIT_S)

        self.faults.wait, self.faults.call_s = wait, 1.0

    def write(self, number: int, tier: str) -> None:
        self.mover.write(deque([PageWrite(key(number), number, page(number), frozenset([tier]))]))

    def look_up(self, *numbers: int) -> PageLookUp:
        hashes = tuple(key(number).hash for number in numbers)
        begin_s = time.monotonic()
        job = PageLookUp("remote", hashes, begin_s, begin_s + LIMIT_S)
        self.mover.read(job)
        return job

    def results(self, count: int) -> list[Result]:
        return results_of(self.mover, count)


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.gate.set()
    assert setup.mover.close(LIMIT_S)


def test_a_slow_server_holds_up_no_write_to_the_disk(setup: Setup) -> None:
    """The disk's page is written while the server's call does not return."""
    setup.make_slow()
    setup.write(1, "remote")
    setup.write(2, "disk")

    [written] = setup.results(1)

    assert isinstance(written, Written)
    assert written.write.tiers == {"disk"}
    setup.gate.set()
    [written] = setup.results(1)
    assert isinstance(written, Written)
    assert written.outcomes["remote"]


def test_a_look_up_says_which_pages_are_there(setup: Setup) -> None:
    """A store that does not answer is told from one that has nothing."""
    setup.write(1, "remote")
    setup.results(1)

    job = setup.look_up(1, 2)
    [answer] = setup.results(1)
    setup.faults.unavailable = "gone"
    setup.look_up(1, 2)
    [no_answer] = setup.results(1)

    assert isinstance(answer, LookedUp)
    assert (answer.look_up, answer.listed) == (job, (True, False))
    assert isinstance(no_answer, LookedUp)
    assert no_answer.listed is None


def test_a_removal_ends_when_every_lane_has_carried_it_out(setup: Setup) -> None:
    """One result, with the stores that failed; in each lane behind the writes before it."""
    setup.write(1, "disk")
    setup.write(1, "remote")
    setup.results(2)
    setup.make_slow()
    removal = Removal((key(1).hash,))
    setup.mover.remove(removal)
    setup.write(2, "disk")

    # The disk's lane is past the removal, the other one is not.
    [written] = setup.results(1)
    assert isinstance(written, Written)
    assert setup.disk.has_many([key(1).hash], deadline=0.0) == [False]
    setup.gate.set()
    [removed] = setup.results(1)
    assert isinstance(removed, Removed)
    assert (removed.removal, removed.failed) == (removal, ())
    assert setup.remote.counts().num_pages == 0


def test_a_removal_names_the_store_that_may_still_have_the_pages(setup: Setup) -> None:
    """One lane fails, the other one does not."""
    setup.faults.unavailable = "gone"
    setup.mover.remove(Removal(None))

    [removed] = setup.results(1)

    assert isinstance(removed, Removed)
    assert removed.failed == ("remote",)


def test_a_server_that_does_not_answer_keeps_the_disk_from_no_close() -> None:
    """Within the limit the disk's store is closed; that the other one is not is said."""
    setup = Setup()
    setup.make_slow()
    setup.write(1, "remote")

    was_closed = setup.mover.close(0.2)

    assert not was_closed
    assert setup.disk.counts().unavailable == "closed"
    setup.gate.set()
    assert setup.mover.close(LIMIT_S)
