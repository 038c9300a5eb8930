"""The jobs of a mover, and what comes of them: frozen values that threads hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from ramify.kv.stores.page_store import PageKey, ReadOutcome, WriteOutcome


@dataclass(frozen=True, slots=True, eq=False)
class PageWrite:
    """A page in a staging buffer, for the stores of these tiers."""

    key: PageKey
    buffer: int
    data: memoryview
    tiers: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False)
class PageRead:
    """Pages of one load to read from one store into staging buffers."""

    load: int
    pages: range  # of the load
    keys: tuple[PageKey, ...]
    buffers: tuple[int, ...]
    views: tuple[memoryview, ...]
    tier: str
    deadline: float  # of `time.monotonic`


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Measure the reads of one store, with pages of its own choice."""

    tier: str
    deadline: float  # of `time.monotonic`; no read begins later


@dataclass(frozen=True, slots=True, eq=False)
class PageLookUp:
    """Ask a store beyond a network which pages it lists."""

    tier: str
    hashes: tuple[bytes, ...]
    begin_s: float  # of `time.monotonic`
    deadline: float


@dataclass(frozen=True, slots=True, eq=False)
class Removal:
    """Remove pages from every store, for good; None: all pages."""

    hashes: tuple[bytes, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """A write has ended; its buffer is free."""

    write: PageWrite
    outcomes: dict[str, WriteOutcome]  # by tier; without the stores that did not answer
    cpu_s: float = 0.0  # processor time of the writer


@dataclass(frozen=True, slots=True, eq=False)
class ReadEnded:
    """A read has ended; its buffers are the load's, those of pages that are no HIT are free."""

    read: PageRead
    outcomes: tuple[ReadOutcome, ...]
    begin_s: float  # of the mover's clock, when a reader took it
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """A removal has ended. `failed` names the stores that may still have the pages."""

    removal: Removal
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ProbeEnded:
    """A probe has ended. `reads` has the pages and seconds of each read; none: there was no page."""

    probe: Probe
    reads: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, eq=False)
class LookedUp:
    """A look-up has ended."""

    look_up: PageLookUp
    listed: tuple[bool, ...] | None  # of each page; None: the store did not answer
    end_s: float  # of `time.monotonic`


ReaderJob = PageRead | Probe | PageLookUp
Result = Written | ReadEnded | Removed | ProbeEnded | LookedUp
