"""`PageStore`: the protocol of a store of K/V pages, and the outcomes of its calls.

A page is `page_bytes` bytes: all planes of all layers in layout order. It is named by its hash, as
`CacheKey.page_hashes` gives it, which covers the namespace and every token up to the page's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ramify.cache.key import HASH_BYTES
from ramify.errors import ConfigError, StoreUnavailableError

__all__ = ["HASH_BYTES", "PageKey", "PageStore", "ReadOutcome", "StoreCounts", "StoreUnavailableError",
           "WriteOutcome", "check_call"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageKey:
    """Names of one page: its hash, that of the page before it, and whose page it is.

    Args:
        hash: of the page.
        parent: hash of the page before; for a first page, the hash of the namespace.
        tenant: whose prompt wrote the page first; stores keep a keyed hash of it, for `purge`.
    """

    hash: bytes
    parent: bytes
    tenant: bytes = b""


class ReadOutcome(Enum):
    """What `get_many` found of a page. Only after HIT do the bytes in `into` mean anything."""

    HIT = "hit"
    ABSENT = "absent"
    # Checksum, header, parent or length disagree, or the record is torn.
    CORRUPT = "corrupt"
    IO_ERROR = "io_error"
    # The deadline passed before the page was read.
    LATE = "late"

    def __bool__(self) -> bool:
        return self is ReadOutcome.HIT


class WriteOutcome(Enum):
    """What `put_many` made of a page."""

    # On disk: survives the end of this process, not yet a loss of power.
    WRITTEN = "written"
    PRESENT = "present"
    # The store takes no page at present (disk full, read only, failed fsync): see `StoreCounts`.
    REFUSED = "refused"
    LATE = "late"

    def __bool__(self) -> bool:
        return self in {WriteOutcome.WRITTEN, WriteOutcome.PRESENT}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCounts:
    """Figures of a store. Totals since it was opened, except where noted."""

    # At present.
    num_pages: int
    used_bytes: int
    budget_bytes: int
    # Why the store takes no page at present; empty: it does.
    writing_off: str = ""
    # Why the store answers no call at present; empty: it does.
    unavailable: str = ""

    written_pages: int = 0
    # Of those, and of what an earlier process left unsynced: pages that survive a loss of power.
    durable_pages: int = 0
    hit_pages: int = 0
    absent_pages: int = 0
    late_pages: int = 0
    refused_pages: int = 0
    evicted_pages: int = 0
    # Hot pages that were copied on when their segment was evicted.
    copied_pages: int = 0
    removed_pages: int = 0
    # By kind: "corrupt", "io_error", "timeout", "connection", ...
    errors: tuple[tuple[str, int], ...] = ()


class PageStore(Protocol):
    """Pages by hash, outside the pool. May lose any page at any time, never returns a wrong one.

    Synchronous; several threads may call at the same time. `deadline` is a value of
    `time.monotonic()`: pages not started by then are LATE. It does not interrupt a system call that
    does not return. The only exception of a call is StoreUnavailableError, and ConfigError for arguments
    that no caller may pass (a buffer of another size).
    """

    # Kind of the store, for metrics: "host", "disk", "remote".
    tier: str
    page_bytes: int

    def has_many(self, hashes: Sequence[bytes], *, deadline: float) -> list[bool]:
        """Whether each page is listed. A page that is listed may still fail to be read.

        Raises:
            StoreUnavailableError: closed, or out of reach.
        """
        ...

    def were_evicted(self, hashes: Sequence[bytes]) -> list[bool]:
        """Whether each page made room for others since the store was opened, as far as it remembers.

        For explanations: no call of another process, and nothing is raised.
        """
        ...

    def get_many(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], *, deadline: float
    ) -> list[ReadOutcome]:
        """Read and verify pages; the outcome of each.

        A page that is not a HIT is removed from the index first, so that it is not tried twice
        (except when LATE).

        Args:
            into: a writable buffer of `page_bytes` bytes for each key, format "B". Its content is
                undefined unless the outcome is HIT.

        Raises:
            StoreUnavailableError: closed, or out of reach.
        """
        ...

    def read_any(self, into: Sequence[memoryview], *, deadline: float) -> int:
        """Read pages of the store's own choice, so that the caller can time it; returns how many.

        Fewer where the store has no page, or `deadline` has passed. Counts and moves no page.

        Args:
            into: as in `get_many`; what it holds afterwards is undefined.

        Raises:
            StoreUnavailableError: closed, or out of reach.
        """
        ...

    def put_many(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, deadline: float
    ) -> list[WriteOutcome]:
        """Write pages, in order; the outcome of each.

        Args:
            pages: a buffer of `page_bytes` bytes for each key, format "B". The caller may reuse it
                once the call has returned.

        Raises:
            StoreUnavailableError: closed, or out of reach.
        """
        ...

    def remove_many(self, hashes: Sequence[bytes], *, deadline: float) -> int:
        """Remove pages for good, so that no restart brings them back; returns how many were listed.

        Raises:
            StoreUnavailableError: closed, or out of reach: the caller must not use the store for these
                pages again.
        """
        ...

    def clear(self, *, deadline: float) -> int:
        """Remove every page of this identity for good; returns how many were listed.

        Raises:
            StoreUnavailableError: closed, out of reach, or pages could not be deleted.
        """
        ...

    def maintain(self) -> None:
        """Do what is due: fsync, try again to write or to connect. Called about once a second.

        By the thread that calls `put_many`, whether or not there are pages to put. Raises nothing.
        """
        ...

    def counts(self) -> StoreCounts:
        """The figures at present. Blocks no call of others."""
        ...

    def close(self) -> None:
        """Make every written page durable and release files and connections; a second call does nothing."""
        ...


def check_call(keys: Sequence[object], buffers: Sequence[memoryview], page_bytes: int) -> None:
    """Refuse a call whose buffers do not fit its keys.

    Raises:
        ConfigError: their numbers differ, or a buffer has another size than a page.
    """
    if len(keys) != len(buffers):
        raise ConfigError(f"{len(keys)} pages with {len(buffers)} buffers: pass one for each page")
    for buffer in buffers:
        if buffer.nbytes != page_bytes or not buffer.c_contiguous:
            raise ConfigError(
                f"a buffer of {buffer.nbytes} bytes for a page of {page_bytes}: pass contiguous "
                "buffers of exactly one page"
            )
