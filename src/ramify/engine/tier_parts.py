"""What the tiers of an engine are made of: the pool's device, stores, mover, staging buffers, counts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ramify.cache.staging import StagingLedger
from ramify.cache.tier_costs import StepModel, TierSpeed
from ramify.errors import StoreUnavailableError
from ramify.kv.mover_jobs import Removal
from ramify.kv.offload import Mover
from ramify.kv.stores.page_store import PageStore, StoreCounts
from ramify.outputs import TierMiss

STAGING_BYTES = 64 << 20
MIN_BUFFERS = 4
MAX_BUFFERS = 1024  # of tiny pages
READ_SHARE = 4  # 1 / READ_SHARE of the buffers is kept for reads
LOOKUP_LIMIT_S = 0.005
STUCK_S = 5.0


class PageDevice(Protocol):
    """Holds the pages of the pool; `kv.page_bytes.PageBytes`, and `testing.FakeExecutor`."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        ...

    def read_page(self, page: int, into: memoryview) -> None:
        """Copy a page of the pool into a buffer."""
        ...

    def write_page(self, page: int, data: memoryview) -> None:
        """Copy a buffer into a page of the pool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """What an engine needs for tiers.

    Args:
        device: of the pool.
        stores: fastest first; one per kind.
        mover: carries out jobs over the same stores.
        step_model: what computing takes.
        is_calibrated: the model holds as it is; else the engine's own steps correct it.
        read_only: tiers that get no pages.
        distant: the tier beyond a network, the last of `stores`: the engine's thread never waits for it,
            the mover's threads ask it. It remembers removals that it could not make, and makes them
            before it is read again. Empty: none.
        staging_bytes: of all buffers between pool and stores.
        stuck_s: a read may take so long beyond its request's patience, and as long again until it
            counts as stuck.
        reopen: the parts for other weights, once the mover is closed; None: the same serve all.
    """

    device: PageDevice
    stores: tuple[PageStore, ...]
    mover: Mover
    step_model: StepModel
    is_calibrated: bool = False
    read_only: frozenset[str] = frozenset()
    distant: str = ""
    staging_bytes: int = STAGING_BYTES
    stuck_s: float = STUCK_S
    reopen: Callable[[], TierParts] | None = None

    @property
    def near(self) -> tuple[PageStore, ...]:
        """The stores of this machine, fastest first."""
        return tuple(store for store in self.stores if store.tier != self.distant)

    @property
    def distant_store(self) -> PageStore | None:
        """The store beyond a network; None: there is none."""
        return next((store for store in self.stores if store.tier == self.distant), None)

    def eviction_of(self, page_hash: bytes, begin: int) -> TierMiss | None:
        """Which store of this machine had a page and evicted it; None: none remembers it.

        Args:
            begin: tokens of the prompt before the page.
        """
        for store in self.near:
            if store.were_evicted([page_hash])[0]:
                return TierMiss(store.tier, "evicted", begin, begin + 1)
        return None

    def listed(self, store: PageStore, hashes: Sequence[bytes]) -> list[bool]:
        """Which pages a store of this machine has; none if it does not answer."""
        try:
            return store.has_many(hashes, deadline=time.monotonic() + LOOKUP_LIMIT_S)
        except StoreUnavailableError:
            return [False] * len(hashes)


@dataclass(slots=True)
class TierCounts:
    """Pages since the engine was built, by what became of them."""

    queued: int = 0  # to the writer
    written: dict[str, int] = field(default_factory=dict)  # by tier; those it had included
    not_written: int = 0  # refused, or the store did not answer
    dropped: int = 0  # evicted while every staging buffer was in use
    loaded: dict[str, int] = field(default_factory=dict)  # by tier; published in the pool
    # By tier; it had them, and they were computed since that was sooner.
    computed: dict[str, int] = field(default_factory=dict)
    loads: int = 0
    loads_late: int = 0  # their requests computed, since that was sooner
    loads_refused: int = 0  # not begun, since computing was sooner
    read_errors: dict[str, int] = field(default_factory=dict)  # pages by `ReadOutcome`
    stuck_reads: int = 0
    look_ups: int = 0  # of the store beyond a network
    look_ups_late: int = 0  # their requests did not wait for the answer, or not to the end


@dataclass(frozen=True, slots=True)
class TierStats:
    """Figures of one tier; totals since its store was opened, except where noted."""

    pages: int  # now
    used_bytes: int  # now
    budget_bytes: int
    written_pages: int
    durable_pages: int  # of those written or found: they survive a loss of power
    loaded_pages: int  # into the pool, by this engine
    evicted_pages: int
    refused_pages: int  # not written: the disk is full, or cannot be written
    failed_reads: int  # pages whose checksum, length or read failed
    is_writable: int  # now: 1, or 0
    is_available: int  # now: 1, or 0
    computed_pages: int = 0  # that it had, and that this engine computed since that was sooner
    latency_s: float = 0.0  # of a load, now; 0: not measured
    bytes_per_s: float = 0.0  # of a load, now; 0: not measured
    pays_from_pages: int = (
        0  # now: loads of so many pages and more are sooner than computing; 0: none
    )
    errors: dict[str, int] = field(default_factory=dict)  # pages or calls, by kind

    @classmethod
    def of(
        cls,
        counts: StoreCounts,
        speed: TierSpeed,
        *,
        page_bytes: int,
        num_loaded: int,
        num_computed: int,
    ) -> TierStats:
        """The figures of a store whose pages were loaded, or computed instead, so many times."""
        return cls(
            pages=counts.num_pages,
            used_bytes=counts.used_bytes,
            budget_bytes=counts.budget_bytes,
            written_pages=counts.written_pages,
            durable_pages=counts.durable_pages,
            loaded_pages=num_loaded,
            evicted_pages=counts.evicted_pages,
            refused_pages=counts.refused_pages,
            failed_reads=sum(count for _, count in counts.errors),
            is_writable=int(not counts.writing_off),
            is_available=int(not counts.unavailable),
            computed_pages=num_computed,
            latency_s=speed.latency_s or 0.0,
            bytes_per_s=page_bytes / speed.page_s if speed.page_s else 0.0,
            pays_from_pages=speed.pays_from or 0,
            errors=dict(counts.errors),
        )


class PendingRemovals:
    """Removals that the writer has still to carry out: stores may still list their pages."""

    def __init__(self) -> None:
        self._removals: set[Removal] = set()
        # Removals of each page; under None those of all pages.
        self._num_removals: Counter[bytes | None] = Counter()

    @property
    def num_pages(self) -> int:
        """Pages of all removals; one of all pages counts as one."""
        return self._num_removals.total()

    def add(self, removal: Removal) -> None:
        """Wait for a removal."""
        self._removals.add(removal)
        self._num_removals.update(_pages_of(removal))

    def discard(self, removal: Removal) -> None:
        """A removal was carried out."""
        if removal in self._removals:
            self._removals.discard(removal)
            for page_hash in _pages_of(removal):
                self._num_removals[page_hash] -= 1
                if not self._num_removals[page_hash]:
                    del self._num_removals[page_hash]

    def clear(self) -> None:
        """Wait for none: the stores are others."""
        self._removals.clear()
        self._num_removals.clear()

    def has(self, page_hash: bytes) -> bool:
        """Whether a page is to be removed."""
        return page_hash in self._num_removals or None in self._num_removals


def _pages_of(removal: Removal) -> tuple[bytes | None, ...]:
    return (None,) if removal.hashes is None else removal.hashes


class StagingArea:
    """The staging buffers and their ledger.

    Args:
        page_bytes: of each buffer.
        staging_bytes: of all buffers; there are `MIN_BUFFERS` at least.
    """

    def __init__(self, page_bytes: int, staging_bytes: int) -> None:
        num_buffers = max(MIN_BUFFERS, min(MAX_BUFFERS, staging_bytes // page_bytes))
        self.ledger = StagingLedger(num_buffers, max(1, num_buffers // READ_SHARE))
        slab = memoryview(bytearray(num_buffers * page_bytes))
        self.views = [slab[at * page_bytes : (at + 1) * page_bytes] for at in range(num_buffers)]

    def free(self, buffers: Iterable[int]) -> None:
        """Take buffers back from their owners."""
        for buffer in buffers:
            self.ledger.free(buffer)
