"""`MoverLanes`: a mover whose stores beyond a network have threads of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from ramify.kv.mover_jobs import PageWrite, ReaderJob, Removal, Removed, Result
from ramify.kv.offload import MoverThreads, ResultQueue
from ramify.kv.stores.page_store import PageStore


class MoverLanes:
    """Threads for the stores of this machine, and others for each store beyond a network.

    A slow server holds up neither the writes to the disk nor the reads from it. The tiers of a write
    are of one lane. A removal is carried out in every lane, each in the order of its writes.

    Args:
        stores: of all tiers.
        distant: the tiers beyond a network.
    """

    def __init__(self, stores: Sequence[PageStore], distant: Collection[str]) -> None:
        self._results = ResultQueue()
        here = [store for store in stores if store.tier not in distant]
        groups = [here, *([store] for store in stores if store.tier in distant)]
        self._lanes = [MoverThreads(group, self._results) for group in groups if group]
        self._lane_of = {
            store.tier: lane
            for lane, group in zip(self._lanes, filter(None, groups), strict=True)
            for store in group
        }
        # Lanes that have still to carry out a removal, and the tiers that failed.
        self._removals: dict[Removal, tuple[int, list[str]]] = {}

    def write(self, waiting: deque[PageWrite]) -> None:
        """See `Mover.write`."""
        self._lane_of[next(iter(waiting[0].tiers))].write(waiting)

    def remove(self, removal: Removal) -> None:
        """See `Mover.remove`."""
        if not self._lanes:
            self._results.put([Removed(removal, ())])
            return
        self._removals[removal] = len(self._lanes), []
        for lane in self._lanes:
            lane.remove(removal)

    def read(self, job: ReaderJob) -> None:
        """See `Mover.read`."""
        self._lane_of[job.tier].read(job)

    def take_results(self) -> Iterator[Result]:
        """See `Mover.take_results`; a removal has ended once every lane has carried it out."""
        for result in self._results.take():
            if not isinstance(result, Removed) or result.removal not in self._removals:
                yield result
                continue
            num_left, failed = self._removals.pop(result.removal)
            failed = [*failed, *result.failed]
            if num_left > 1:
                self._removals[result.removal] = num_left - 1, failed
            else:
                yield Removed(result.removal, tuple(failed))

    def wait(self, timeout_s: float) -> bool:
        """See `Mover.wait`."""
        return self._results.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """See `Mover.close`."""
        end_s = time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.begin_close()
        # Each is waited for: `all` alone would stop at the first that is late.
        were_closed = [lane.close(end_s - time.monotonic()) for lane in self._lanes]
        return all(were_closed)
