"""`SegmentStore`: pages in segment files on disk, crash-safe; see `segment_format` for the files."""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ramify.counts import counted
from ramify.errors import ConfigError, StoreUnavailableError
from ramify.kv.stores.file_ops import FileOps, OsFileOps
from ramify.kv.stores.page_names import KEY_BYTES, PageNames
from ramify.kv.stores.page_store import (
    PageKey,
    ReadOutcome,
    StoreCounts,
    WriteOutcome,
    check_call,
)
from ramify.kv.stores.payload_codec import record_payload_bytes
from ramify.kv.stores.removal_log import RemovalLog
from ramify.kv.stores.segment_follower import SegmentFollower
from ramify.kv.stores.segment_format import Geometry, RecordHeader
from ramify.kv.stores.segment_listing import SegmentSearch
from ramify.kv.stores.segment_options import SegmentOptions, codec_of, identity_of
from ramify.kv.stores.segment_reader import SegmentReader
from ramify.kv.stores.segment_table import SegmentTable
from ramify.kv.stores.segment_writer import FULL, SegmentWriter
from ramify.kv.stores.store_directory import StoreDirectory
from ramify.reasons import reason_of

logger = logging.getLogger(__name__)

# A segment may have as many bytes as so many logs of removals before these are compacted: 1 MiB.
REMOVAL_LOG_SHARE = 256
# What is no error by kind in the totals.
_PLAIN_TOTALS = frozenset(
    {"written", "durable", "hit", "absent", "late", "late_writes", "refused", "evicted", "copied",
     "removed"}
)  # fmt: skip


class SegmentStore:
    """Pages on disk. Never returns a wrong page; what it acknowledged survives as WriteOutcome says.

    Args:
        lock_fd: the lock of the directory, if the caller has it; given back by `close`.

    Raises:
        ConfigError: the options or the directory cannot be used.
    """

    tier = "disk"

    def __init__(
        self,
        options: SegmentOptions,
        *,
        ops: FileOps | None = None,
        clock: Callable[[], float] = time.monotonic,
        lock_fd: int | None = None,
    ) -> None:
        ops = OsFileOps() if ops is None else ops
        codec = codec_of(options.cache_key)
        geometry = Geometry(record_payload_bytes(codec, options.page_bytes), options.segment_bytes)
        options.validate(geometry)
        self.page_bytes, self.options = options.page_bytes, options
        self._ops, self._codec, self._geometry, self._clock = ops, codec, geometry, clock
        # Serialises put, remove, maintain and close; reads take only the table's lock.
        self._write_lock = threading.Lock()
        self._unavailable = ""
        self._directory = StoreDirectory(
            ops,
            options.directory,
            identity_of(options),
            read_only=options.read_only,
            lock_fd=lock_fd,
        )
        try:
            self._open()
        except OSError as error:
            self._directory.release()
            raise ConfigError(
                f"the cache directory {options.directory} cannot be read: {reason_of(error, options.directory)}; choose another "
                "--cache-dir"
            ) from error
        except ConfigError:
            self._directory.release()
            raise

    def _open(self) -> None:
        options, directory = self.options, self._directory
        key = directory.key
        if options.cache_key is not None:
            key = hashlib.blake2b(key, key=options.cache_key, digest_size=KEY_BYTES).digest()
        self._names = PageNames(key)
        direct = not options.read_only and directory.supports_direct()
        self._table = SegmentTable()
        self._reader = SegmentReader(self._ops, self._geometry, self._codec, direct=direct)
        self._removals = RemovalLog(
            self._ops,
            directory.path,
            key,
            free_bytes=self._geometry.segment_bytes // REMOVAL_LOG_SHARE,
        )
        try:
            self._list_pages()
            self.start_report = self._describe_start(direct)
        except BaseException:
            # Segments without a footer have been read.
            self._reader.files.close()
            raise

    def _list_pages(self) -> None:
        ops, geometry = self._ops, self._geometry
        options, directory = self.options, self._directory
        self._search = SegmentSearch(
            ops,
            directory,
            geometry,
            self._table,
            self._reader,
            page_bytes=options.page_bytes,
            read_only=options.read_only,
        )
        listing = self._search.find(self._removals)
        self._table.load(listing.segments, listing.removed)
        if listing.has_hidden_pages:
            self._table.note_hidden()
        self._writer = SegmentWriter(
            ops,
            directory.path,
            geometry,
            directory.identity.digest,
            self._codec,
            self._table,
            self._reader,
            budget_bytes=options.budget_bytes,
            resume=listing.newest,
            first_number=listing.first_number,
            foreign=[]
            if options.read_only
            else [*directory.foreign_segments(), *directory.unlisted_segments(listing.unlisted)],
            clock=self._clock,
        )
        self._follower = SegmentFollower(
            ops, directory, geometry, self._table, self._reader, self._removals, self._clock
        )

    def _describe_start(self, direct: bool) -> str:
        _, num_pages, used_bytes = self._table.totals()
        where = f"disk tier in {self._directory.root}"
        how = "O_DIRECT" if direct else "the page cache"
        if num_pages:
            return f"{where}: {counted(num_pages, 'page')}, {used_bytes / 1e9:.2f} GB; cold reads by {how}"
        difference = self._directory.nearest_difference()
        reason = (
            f"the nearest pages are of another identity: {difference}" if difference else "empty"
        )
        return f"{where}: no pages of this identity ({reason}); cold reads by {how}"

    def has_many(self, hashes: Sequence[bytes], *, deadline: float) -> list[bool]:
        """See PageStore."""
        del deadline
        self._check_available()
        return self._table.contains_many(self._names.names(hashes))

    def were_evicted(self, hashes: Sequence[bytes]) -> list[bool]:
        """See PageStore."""
        return self._table.were_evicted(self._names.names(hashes))

    def get_many(
        self, keys: Sequence[PageKey], into: Sequence[memoryview], *, deadline: float
    ) -> list[ReadOutcome]:
        """See PageStore."""
        check_call(keys, into, self.page_bytes)
        self._check_available()
        return [self._get(key, page, deadline) for key, page in zip(keys, into, strict=True)]

    def _get(self, key: PageKey, page: memoryview, deadline: float) -> ReadOutcome:
        if self._clock() > deadline:
            self._table.count("late")
            return ReadOutcome.LATE
        name, parent_tag = self._names.name(key.hash), self._names.parent_tag(key.parent)
        outcome = ReadOutcome.ABSENT
        # A failed read removes its place; the page may have another, or have moved meanwhile.
        while (location := self._table.find(name)) is not None:
            segment, slot = location
            try:
                outcome = self._reader.read(segment, slot, name, parent_tag, page)
            except OSError as error:
                self._table.note_exhausted(name, segment, slot, error)
                return ReadOutcome.IO_ERROR
            self._table.note_read(name, segment, slot, outcome)
            if outcome:
                return outcome
        if outcome is ReadOutcome.ABSENT:
            self._table.count("absent")
        return outcome

    def read_any(self, into: Sequence[memoryview], *, deadline: float) -> int:
        """See PageStore. Consecutive records from a random one on, which the page cache may lack."""
        self._check_available()
        segments = [segment for segment in self._table.segments() if segment.num_used]
        if not segments:
            return 0
        segment = random.choice(segments)  # noqa: S311 - a sample, no secret
        first = random.randrange(max(1, segment.num_used - len(into) + 1))  # noqa: S311
        num_read = 0
        slots = range(first, min(first + len(into), segment.num_used))
        for slot, page in zip(slots, into, strict=False):
            if self._clock() > deadline:
                break
            num_read += self._reader.read_any(segment, slot, page) is not None
        return num_read

    def put_many(
        self, keys: Sequence[PageKey], pages: Sequence[memoryview], *, deadline: float
    ) -> list[WriteOutcome]:
        """See PageStore."""
        check_call(keys, pages, self.page_bytes)
        with self._write_lock:
            self._check_available()
            self._check_lock()
            outcomes = [
                self._put(key, page, deadline) for key, page in zip(keys, pages, strict=True)
            ]
            if not self.options.read_only:
                self._maintain_files()
        return outcomes

    def _put(self, key: PageKey, page: memoryview, deadline: float) -> WriteOutcome:
        if self._clock() > deadline:
            self._table.count("late_writes")
            return WriteOutcome.LATE
        name = self._names.name(key.hash)
        if self._table.find(name) is not None:
            return WriteOutcome.PRESENT
        if self.options.read_only or not self._writer.append(
            name, self._names.parent_tag(key.parent), self._names.tenant_tag(key.tenant), page
        ):
            self._table.count("refused")
            return WriteOutcome.REFUSED
        return WriteOutcome.WRITTEN

    def remove_many(self, hashes: Sequence[bytes], *, deadline: float) -> int:
        """See PageStore. Durable once it has returned."""
        del deadline
        return self.remove_names(self._names.names(hashes))

    def remove_names(self, names: Sequence[bytes]) -> int:
        """`remove_many` for names as they are stored: for tools, which know no hashes."""
        with self._write_lock:
            self._check_available()
            on_disk: list[bytes] = []
            if not self.options.read_only:
                # Seals what a killed process left open: then no record lies unlisted behind its end.
                self._writer.maintain()
                on_disk = self._table.on_disk(names)
            count = self._table.remove_many(names)
            self._table.count("removed", count)
            if not on_disk:
                return count
            # What is before the position must be on disk before the log says that it is void.
            self._writer.sync()
            try:
                self._record_removals(on_disk)
            except OSError as error:
                logger.warning(
                    "removed pages could not be recorded (%s): every page in %s is deleted",
                    error,
                    self._directory.path,
                )
                self._delete_all()
            return count

    def _record_removals(self, names: Sequence[bytes]) -> None:
        """Append to the removal log; on a full disk in place of the segments that would be evicted next.

        Raises:
            OSError: it cannot be written.
        """
        while True:
            try:
                self._removals.append(names, self._writer.position)
            except OSError as error:
                if error.errno not in FULL or not self._writer.evict_next():
                    raise
            else:
                return

    def scan(self) -> Iterator[tuple[bytes, RecordHeader | None, memoryview]]:
        """Read and verify every listed page: name, header (None: damaged), and the page until the next."""
        page = memoryview(bytearray(self.page_bytes))
        for segment in self._table.segments():
            for name, slot in self._table.pages_in(segment):
                header = self._reader.read_any(segment, slot, page)
                yield name, header if header is not None and header.name == name else None, page

    def put_record(self, header: RecordHeader, page: memoryview) -> bool:
        """Write a page under the name of a record of a store with the same key; False: refused."""
        with self._write_lock:
            self._check_available()
            is_listed = self._table.find(header.name) is not None
            return is_listed or self._writer.append(
                header.name, header.parent_tag, header.tenant_tag, page
            )

    def names_of_tenant(self, tenant: bytes) -> list[bytes]:
        """The names of the pages that a tenant wrote first."""
        tag = self._names.tenant_tag(tenant)
        return [name for name, header, _ in self.scan() if header and header.tenant_tag == tag]

    def clear(self, *, deadline: float) -> int:
        """See PageStore."""
        del deadline
        with self._write_lock:
            self._check_available()
            return self._delete_all()

    def _delete_all(self) -> int:
        segments, count = self._table.forget_all()
        self._table.count("removed", count)
        if self.options.read_only:
            return count
        try:
            self._writer.delete_all(segments)
        except StoreUnavailableError as error:
            self._unavailable = error.reason
            raise
        # No segment is left of which it speaks.
        with suppress(OSError):
            self._removals.discard()
        return count

    def maintain(self) -> None:
        """See PageStore."""
        with self._write_lock:
            if self._unavailable:
                return
            if not self.options.read_only:
                self._maintain_files()
            elif self._directory.has_key or self._open_late():
                self._follower.maintain()

    def _check_lock(self) -> None:
        # A page in a file that was deleted, or that another process writes, survives nothing.
        if not self.options.read_only and (reason := self._directory.check_lock()):
            self._writer.stop(reason)

    def _maintain_files(self) -> None:
        self._check_lock()
        self._writer.maintain()
        if self._removals.is_due:
            try:
                self._removals.compact(
                    lambda removed: self._search.voided(removed, self._writer.position)
                )
            except OSError as error:
                logger.warning(
                    "the log of removed pages in %s stays as long as it is: %s",
                    self._directory.path,
                    error,
                )

    def _open_late(self) -> bool:
        """Open the pages of a writer that made the directory after this reader; whether it has."""
        try:
            if self._directory.find_key():
                self._open()
        except (OSError, ConfigError) as error:
            self._directory.has_key = False  # tried again at the next call
            logger.warning("%s cannot be read: %s", self._directory.path, error)
        return self._directory.has_key

    def sync(self) -> bool:
        """Make every written page durable; False: that failed, and they are gone."""
        with self._write_lock:
            return self.options.read_only or self._writer.sync()

    def counts(self) -> StoreCounts:
        """See PageStore."""
        totals, num_pages, allocated_bytes = self._table.totals()
        errors = sorted(item for item in totals.items() if item[0] not in _PLAIN_TOTALS and item[1])
        return StoreCounts(
            num_pages=num_pages,
            used_bytes=allocated_bytes + self._writer.foreign_bytes,
            budget_bytes=self.options.budget_bytes,
            writing_off="read only" if self.options.read_only else self._writer.off_reason,
            unavailable=self._unavailable,
            written_pages=totals["written"],
            durable_pages=totals["durable"],
            hit_pages=totals["hit"],
            absent_pages=totals["absent"],
            late_pages=totals["late"] + totals["late_writes"],
            refused_pages=totals["refused"],
            evicted_pages=totals["evicted"],
            copied_pages=totals["copied"],
            removed_pages=totals["removed"],
            errors=tuple(errors),
        )

    def close(self) -> None:
        """See PageStore. Seals the active segment and gives the lock back."""
        with self._write_lock:
            if self._unavailable == "closed":
                return
            if not self._unavailable and not self.options.read_only:
                self._maintain_files()
                self._writer.close()
            self._unavailable = "closed"
            self._reader.files.close()
            self._directory.release()

    def _check_available(self) -> None:
        if self._unavailable:
            raise StoreUnavailableError(
                f"the disk tier in {self._directory.root}", self._unavailable
            )
