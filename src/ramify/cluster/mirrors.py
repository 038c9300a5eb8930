"""`Mirrors`: what each replica has cached, from its events, snapshots and digests.

A mirror that is behind costs time, never correctness: a router only guesses with it. Pure: no socket,
no clock of its own, neither torch nor gRPC.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Protocol

from ramify.cache.key import HASH_BYTES
from ramify.cluster.page_index import PageIndex

MAX_DOUBLINGS = 5  # of the interval between two snapshots that fail


class CacheChange(Protocol):
    """A `CacheEvent`, or its form on a wire."""

    @property
    def sequence(self) -> int:
        """Without gaps."""
        ...

    @property
    def kind(self) -> str:
        """One of "stored", "removed", "split" and "cleared"."""
        ...

    @property
    def start(self) -> int:
        """Pages before the run."""
        ...

    @property
    def hashes(self) -> bytes:
        """Page hashes, packed."""
        ...


class SnapshotPart(Protocol):
    """A `SnapshotChunk`, or its form on a wire."""

    @property
    def sequence(self) -> int:
        """Of the last event that the snapshot includes."""
        ...

    @property
    def number(self) -> int:
        """Of the part, from 0."""
        ...

    @property
    def runs(self) -> Sequence[CacheChange]:
        """Stored runs."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether the snapshot ends here."""
        ...

    @property
    def digest(self) -> bytes:
        """XOR of all page hashes of the snapshot."""
        ...


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What to ask a replica for. Its parts come back with `number`."""

    replica: str
    incarnation: int
    number: int


@dataclass(slots=True)
class MirrorCounters:
    """Messages that were not simply applied, since the mirrors were made."""

    num_late: int = 0  # of an earlier incarnation, doubled, or overtaken by later ones
    num_gaps: int = 0  # events were lost
    num_mismatches: int = 0  # a digest differed, though no event was lost
    num_asked: int = 0  # snapshots; also the number of the last request
    num_snapshots: int = 0  # complete and right
    num_failed_snapshots: int = 0


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that a replica was asked for."""

    number: int
    asked_s: float
    next_part: int = 0
    seen_part: int = 0  # `next_part` when its progress was last looked at
    sequence: int = 0
    digest: int = 0  # of the parts so far
    # What was removed after the moment of the snapshot: parts still to come have it.
    removed: set[int] = field(default_factory=set)
    is_cleared: bool = False  # everything was


@dataclass(slots=True)
class _Mirror:
    """One replica's cache."""

    name: str
    incarnation: int
    column: int
    previous_column: int | None = None  # until the snapshot that replaces it is complete
    sequence: int = 0
    digest: int = 0
    is_complete: bool = False  # a snapshot was applied, and every event since
    is_away: bool = False  # not connected
    snapshot: _Snapshot | None = None
    last_asked_s: float = float("-inf")
    num_failures: int = 0  # of snapshots, one after the other

    @property
    def follows(self) -> bool:
        """Whether `digest` is that of the cache at `sequence`."""
        return self.is_complete or (self.snapshot is not None and self.snapshot.next_part > 0)


class Mirrors:
    """One index for all replicas; per replica a sequence, an incarnation and a digest.

    Args:
        stride: keep every stride-th page of a prompt, for large clusters.
        is_windowed: the caches release pages outside a sliding window; see `PageIndex.match_last`.
        snapshot_timeout_s: without a further part, a snapshot is asked for again.
        snapshot_interval_s: between two snapshots of a replica; doubles with each that fails.
    """

    def __init__(
        self,
        *,
        stride: int = 1,
        is_windowed: bool = False,
        snapshot_timeout_s: float = 10.0,
        snapshot_interval_s: float = 1.0,
    ) -> None:
        self.index = PageIndex(stride)
        self.counters = MirrorCounters()
        self._is_windowed = is_windowed
        self._timeout_s, self._interval_s = snapshot_timeout_s, snapshot_interval_s
        self._mirrors: dict[str, _Mirror] = {}
        self._names: dict[int, str] = {}  # by column
        self._columns = 0  # bit mask of those in use

    # -- replicas --------------------------------------------------------------------------

    def add(self, replica: str, incarnation: int) -> None:
        """Begin to mirror a replica that is connected, or go on after its connection was lost."""
        mirror = self._mirrors.get(replica)
        if mirror is None or mirror.incarnation != incarnation:
            self.remove(replica)
            self._mirrors[replica] = mirror = _Mirror(replica, incarnation, -1)
            self._take_column(mirror)
        mirror.is_complete, mirror.snapshot, mirror.is_away = False, None, False

    def leave(self, replica: str) -> None:
        """Ask for nothing until `add`, since the connection has ended; what was cached stays."""
        mirror = self._mirrors.get(replica)
        if mirror is not None:
            if mirror.snapshot is not None:
                self._fail_snapshot(mirror)
            mirror.is_complete, mirror.is_away = False, True

    def remove(self, replica: str) -> None:
        """End the mirror of a replica, if there is one."""
        mirror = self._mirrors.pop(replica, None)
        if mirror is not None:
            self._drop_previous(mirror)
            self._drop_column(mirror.column)

    def is_known(self, replica: str) -> bool:
        """Whether the mirror is the replica's cache, as of its last message."""
        mirror = self._mirrors.get(replica)
        return mirror is not None and mirror.is_complete

    def are_known(self, replicas: Iterable[str]) -> bool:
        """Whether all of the mirrors are; see `is_known`."""
        get = self._mirrors.get
        for replica in replicas:
            mirror = get(replica)
            if mirror is None or not mirror.is_complete:
                return False
        return True

    def num_pages(self, replica: str) -> int:
        """Pages that the index holds for a replica, of every stride-th; 0 for an unknown one."""
        mirror = self._mirrors.get(replica)
        return 0 if mirror is None else self.index.num_entries(mirror.column)

    # -- messages --------------------------------------------------------------------------

    def apply(self, replica: str, incarnation: int, events: Iterable[CacheChange]) -> None:
        """Apply events in order. A gap asks for a snapshot; the events after it are applied still."""
        mirror = self._current(replica, incarnation)
        if mirror is None:
            return
        for event in events:
            if event.sequence <= mirror.sequence:
                self.counters.num_late += 1
                continue
            if event.sequence != mirror.sequence + 1:
                self.counters.num_gaps += mirror.follows
                self._lose(mirror)
            mirror.sequence = event.sequence
            self._apply_event(mirror, event)

    def snapshot(self, replica: str, incarnation: int, request: int, part: SnapshotPart) -> None:
        """Apply a part of the snapshot that was asked for with number `request`."""
        mirror = self._current(replica, incarnation)
        if mirror is None:
            return
        snapshot = mirror.snapshot
        if snapshot is None or snapshot.number != request or part.number < snapshot.next_part:
            self.counters.num_late += 1
            return
        if part.number > snapshot.next_part:
            self._fail_snapshot(mirror)
            return
        if not part.number:
            if part.sequence < mirror.sequence:
                # Later events came before it, and would be lost with the old content.
                self._fail_snapshot(mirror)
                return
            self._begin_snapshot(mirror, snapshot, part)
        elif part.sequence != snapshot.sequence:
            self._fail_snapshot(mirror)
            return
        snapshot.next_part += 1
        for run in part.runs:
            snapshot.digest ^= _xor_hashes(run.hashes)
            if not snapshot.is_cleared:
                keys = self.index.keys(run.start, run.hashes)
                if snapshot.removed:
                    keys = [key for key in keys if key not in snapshot.removed]
                self.index.store(mirror.column, keys)
        if part.is_last:
            self._end_snapshot(mirror, snapshot, part)

    def digest(self, replica: str, incarnation: int, sequence: int, digest: bytes) -> None:
        """Compare with a replica's digest after its event `sequence`; asks for a snapshot if it differs."""
        mirror = self._current(replica, incarnation)
        if mirror is None or not mirror.follows or sequence < mirror.sequence:
            return
        if sequence > mirror.sequence:
            self.counters.num_gaps += 1
            self._lose(mirror)
        elif int.from_bytes(digest, "big") != mirror.digest:
            self.counters.num_mismatches += 1
            self._lose(mirror)

    def due_snapshots(self, now: float) -> list[SnapshotRequest]:
        """The snapshots to ask for now; at most one is in flight for each replica."""
        due = []
        for mirror in self._mirrors.values():
            if mirror.is_complete or mirror.is_away:
                continue
            snapshot = mirror.snapshot
            if snapshot is not None:
                if snapshot.next_part > snapshot.seen_part:
                    snapshot.seen_part, snapshot.asked_s = snapshot.next_part, now
                if now - snapshot.asked_s < self._timeout_s:
                    continue
                self._fail_snapshot(mirror)
            interval_s = self._interval_s * 2 ** min(mirror.num_failures, MAX_DOUBLINGS)
            if now - mirror.last_asked_s < interval_s:
                continue
            self.counters.num_asked += 1
            number = self.counters.num_asked
            mirror.snapshot, mirror.last_asked_s = _Snapshot(number, now), now
            due.append(SnapshotRequest(mirror.name, mirror.incarnation, number))
        return due

    # -- finding ---------------------------------------------------------------------------

    def match(self, page_hashes: bytes) -> dict[str, int]:
        """How many leading pages of a prompt each replica has; replicas with none are left out.

        Args:
            page_hashes: packed, 16 bytes each.
        """
        index = self.index
        find = index.match_last if self._is_windowed else index.match_prefixes
        names, by_column = self._names, find(page_hashes, self._columns)
        pages = {names[column]: num_pages for column, num_pages in by_column.items()}
        if len(pages) < len(by_column):  # a snapshot is about to replace the content of a column
            for column, num_pages in by_column.items():
                pages[names[column]] = max(num_pages, pages[names[column]])
        return pages

    # -- inside ----------------------------------------------------------------------------

    def _current(self, replica: str, incarnation: int) -> _Mirror | None:
        mirror = self._mirrors.get(replica)
        if mirror is None or mirror.incarnation != incarnation:
            self.counters.num_late += 1
            return None
        return mirror

    def _apply_event(self, mirror: _Mirror, event: CacheChange) -> None:
        snapshot = mirror.snapshot
        if event.kind == "cleared":
            self._clear(mirror)
            return
        if event.kind == "split":
            return
        hashes = event.hashes
        mirror.digest ^= _xor_hashes(hashes)
        keys = self.index.keys(event.start, hashes)
        if event.kind == "stored":
            self.index.store(mirror.column, keys)
        else:
            self.index.remove(mirror.column, keys)
            if mirror.previous_column is not None:
                self.index.remove(mirror.previous_column, keys)
            if snapshot is not None and snapshot.next_part:
                snapshot.removed.update(keys)

    def _clear(self, mirror: _Mirror) -> None:
        self._drop_previous(mirror)
        self._drop_column(mirror.column)
        self._take_column(mirror)
        mirror.digest = 0
        if mirror.snapshot is not None and mirror.snapshot.next_part:
            mirror.snapshot.is_cleared = True

    def _lose(self, mirror: _Mirror) -> None:
        """The mirror is a guess until the next snapshot."""
        mirror.is_complete = False
        if mirror.snapshot is not None and mirror.snapshot.next_part:
            self._fail_snapshot(mirror)

    def _begin_snapshot(self, mirror: _Mirror, snapshot: _Snapshot, part: SnapshotPart) -> None:
        # The old content still guides the router, and goes when the new content is complete.
        self._drop_previous(mirror)
        mirror.previous_column = mirror.column
        self._take_column(mirror)
        mirror.sequence = snapshot.sequence = part.sequence
        mirror.digest = int.from_bytes(part.digest, "big")
        mirror.is_complete = False

    def _end_snapshot(self, mirror: _Mirror, snapshot: _Snapshot, part: SnapshotPart) -> None:
        if snapshot.digest != int.from_bytes(part.digest, "big"):
            self._fail_snapshot(mirror)
            return
        self.counters.num_snapshots += 1
        self._drop_previous(mirror)
        mirror.snapshot, mirror.is_complete, mirror.num_failures = None, True, 0

    def _fail_snapshot(self, mirror: _Mirror) -> None:
        self.counters.num_failed_snapshots += 1
        mirror.num_failures += 1
        mirror.snapshot, mirror.is_complete = None, False

    def _take_column(self, mirror: _Mirror) -> None:
        mirror.column = self.index.add_column()
        self._names[mirror.column] = mirror.name
        self._columns |= 1 << mirror.column

    def _drop_column(self, column: int) -> None:
        del self._names[column]
        self._columns &= ~(1 << column)
        self.index.drop_column(column)

    def _drop_previous(self, mirror: _Mirror) -> None:
        if mirror.previous_column is not None:
            self._drop_column(mirror.previous_column)
            mirror.previous_column = None


def _xor_hashes(hashes: bytes) -> int:
    """The XOR of packed hashes, as the integer that their digest is."""
    if len(hashes) == HASH_BYTES:
        return int.from_bytes(hashes, "big")
    halves = memoryview(hashes).cast("Q")
    even, odd = reduce(xor, halves[::2].tolist(), 0), reduce(xor, halves[1::2].tolist(), 0)
    packed = even.to_bytes(8, sys.byteorder) + odd.to_bytes(8, sys.byteorder)
    return int.from_bytes(packed, "big")
