"""A segment store called by several threads at once."""

import math
import threading
from pathlib import Path

from ramify.kv.stores.page_store import ReadOutcome
from tests.pure.file_faults import FailingOps, no_fault
from tests.pure.store_cases import SEGMENT_BYTES, crash, get, hits, key, opened, page, put
from tests.pure.test_segment_faults import PER_SEGMENT, check_table


def test_a_read_that_does_not_return_stops_no_other_call(tmp_path: Path) -> None:
    """While one read hangs, others read, write, count and maintain; when it returns its page is right."""
    stuck, go_on = threading.Event(), threading.Event()
    ops = FailingOps(no_fault)
    store = opened(tmp_path, ops=ops)
    put(store, range(5))
    first = ops.calls["read"]

    def hang(kind: str, number: int) -> None:
        if (kind, number) == ("read", first):
            stuck.set()
            assert go_on.wait(60)

    ops.plan = hang
    outcomes: list[ReadOutcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(get(store, 0)))
    thread.start()
    assert stuck.wait(60)

    assert hits(store, range(1, 5)) == [1, 2, 3, 4]
    put(store, range(10, 10 + PER_SEGMENT))
    store.maintain()
    assert store.counts().num_pages == 5 + PER_SEGMENT
    store.close()
    go_on.set()
    thread.join(60)
    assert outcomes == [ReadOutcome.HIT] and not ops.open_fds


def test_readers_and_a_writer_that_evicts(tmp_path: Path) -> None:
    """Four readers beside a writer on a small budget: every hit is right, nothing raises."""
    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    failures: list[BaseException] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        try:
            while not stop.is_set():
                hits(store, range(seed, 600, 7))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for number in range(600):
        store.put_many([key(number)], [page(number)], deadline=math.inf)
    stop.set()
    for thread in threads:
        thread.join()

    assert not failures
    assert store.counts().hit_pages and store.counts().evicted_pages
    assert store.counts().errors == ()
    check_table(store)
    crash(store)
