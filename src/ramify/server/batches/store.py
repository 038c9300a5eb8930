"""`BatchStore`: the files and batches of each tenant, on disk and by id."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from ramify.server.batches.directory import (
    NEW,
    RECORD,
    RECORD_BYTES,
    BatchDirectory,
    DiskSpace,
)
from ramify.server.batches.records import RECORD_NAME, BatchRecord, StoredFile
from ramify.server.errors import ApiError

logger = logging.getLogger(__name__)

MAX_FILES = 10_000  # of one tenant
MAX_BATCHES = 1_000  # of one tenant, ended ones included
R = TypeVar("R", StoredFile, BatchRecord)


def new_id(prefix: str) -> str:
    """An id that nobody can guess, as `file-…` and `batch_…`."""
    return prefix + secrets.token_hex(16)


def _remove_orphans(
    folder: Path, files: Sequence[StoredFile], batches: Sequence[BatchRecord]
) -> None:
    """Remove bytes that no record names, and records that were never whole."""
    known = {record.id for record in files}
    for batch in batches:
        known |= {batch.input_id, batch.output_id, batch.error_id}
    for path in list(folder.iterdir()):
        if RECORD_NAME.match(path.name) is None or path.suffix == RECORD:
            continue
        if path.suffix == NEW or path.name not in known:
            path.unlink()


class BatchStore:
    """Records of files and batches, in memory as on disk.

    For one event loop; the disk is written in threads, one record at a time.

    Args:
        directory: owned by this process.
        max_bytes, max_tenant_bytes: of the disk.
        clock: Unix seconds.
    """

    def __init__(
        self,
        directory: BatchDirectory,
        *,
        max_bytes: int,
        max_tenant_bytes: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.directory, self._clock = directory, clock
        self._writing = asyncio.Lock()
        self.space = DiskSpace(max_bytes, max_tenant_bytes)
        self._files: dict[str, dict[str, StoredFile]] = {}  # by tenant and id, oldest first
        self._batches: dict[str, dict[str, BatchRecord]] = {}
        for folder in directory.folders():
            self._load(folder)

    @classmethod
    def open(
        cls, path: Path | None, max_bytes: int, *, has_several_tenants: bool
    ) -> BatchStore | None:
        """The files and batches below a directory; None if there is no directory.

        Of several tenants each gets at most half of the bytes.

        Raises:
            ConfigError: the directory cannot be used.
        """
        if path is None:
            return None
        max_tenant_bytes = max_bytes // 2 if has_several_tenants else max_bytes
        return cls(BatchDirectory(path), max_bytes=max_bytes, max_tenant_bytes=max_tenant_bytes)

    @property
    def now(self) -> int:
        """Unix seconds."""
        return int(self._clock())

    def _load(self, folder: Path) -> None:
        """Read the records of a folder; remove what belongs to none: an upload that was cut off.

        If a record is damaged, nothing is removed: it may be that record's.
        """
        files: list[StoredFile] = []
        batches: list[BatchRecord] = []
        is_damaged = False
        for path in sorted(folder.glob("*" + RECORD)):
            try:
                if path.name.startswith("file"):
                    files.append(msgspec.json.decode(path.read_bytes(), type=StoredFile))
                else:
                    batches.append(msgspec.json.decode(path.read_bytes(), type=BatchRecord))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                logger.error("%s is damaged and left out: %s", path, type(error).__name__)
                is_damaged = True
        if not is_damaged:
            _remove_orphans(folder, files, batches)
        for file in sorted(files, key=lambda file: (file.created_at, file.id)):
            self._files.setdefault(file.tenant, {})[file.id] = file
            self.space.count(file.tenant, file.num_bytes + RECORD_BYTES)
        for batch in sorted(batches, key=lambda batch: (batch.created_at, batch.id)):
            self._batches.setdefault(batch.tenant, {})[batch.id] = batch
            self.space.count(batch.tenant, RECORD_BYTES + self._own_bytes(batch))

    def _own_bytes(self, batch: BatchRecord) -> int:
        """Bytes of a batch that no record of a file counts."""
        files = self._files.get(batch.tenant, {})
        names = {batch.input_id, batch.output_id, batch.error_id} - files.keys()
        paths = [self.directory.file(batch.tenant, name) for name in names]
        return sum(path.stat().st_size for path in paths if path.is_file())

    # -- files -------------------------------------------------------------------------------

    def files(self, tenant: str) -> list[StoredFile]:
        """A tenant's files that have not expired, oldest first."""
        return [file for file in self._files.get(tenant, {}).values() if not self._is_past(file)]

    def find_file(self, tenant: str, name: str) -> StoredFile | None:
        """A file of this tenant; None: there is none, or it has expired."""
        record = self._files.get(tenant, {}).get(name)
        return None if record is None or self._is_past(record) else record

    async def add_file(self, record: StoredFile) -> None:
        """Let clients see a file whose bytes are written and counted.

        Raises:
            OSError: the disk failed; there is no record.
        """
        await self._write(record)
        self._files.setdefault(record.tenant, {})[record.id] = record

    def check_room_for_file(self, tenant: str) -> None:
        """Raise ApiError 413 if a tenant has `MAX_FILES`."""
        if len(self._files.get(tenant, {})) >= MAX_FILES:
            raise ApiError(
                413,
                f"you have {MAX_FILES} files, which is the limit; delete some",
                code="storage_limit_exceeded",
            )

    async def remove_file(self, record: StoredFile) -> None:
        """Remove a file; nothing happens if it is gone already."""
        if self._files.get(record.tenant, {}).pop(record.id, None) is None:
            return
        async with self._writing:
            await asyncio.to_thread(self.directory.remove, record.tenant, record.id)
        self.space.count(record.tenant, -record.num_bytes - RECORD_BYTES)

    def user_of(self, record: StoredFile) -> BatchRecord | None:
        """An unfinished batch that reads or writes a file; None: no batch does."""
        for batch in self._batches.get(record.tenant, {}).values():
            names = (batch.input_id, batch.output_id, batch.error_id)
            if batch.is_unfinished and record.id in names:
                return batch
        return None

    # -- batches -----------------------------------------------------------------------------

    def batches(self, tenant: str) -> list[BatchRecord]:
        """A tenant's batches, oldest first."""
        return list(self._batches.get(tenant, {}).values())

    def find_batch(self, tenant: str, name: str) -> BatchRecord | None:
        """A batch of this tenant; None: there is none."""
        return self._batches.get(tenant, {}).get(name)

    def unfinished(self) -> list[BatchRecord]:
        """The batches of all tenants that have to go on, oldest first."""
        batches = [
            batch for own in self._batches.values() for batch in own.values() if batch.is_unfinished
        ]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id))

    async def add_batch(self, record: BatchRecord) -> None:
        """Begin a batch; forgets the oldest that has ended if the tenant has `MAX_BATCHES`.

        Raises:
            ApiError: 429, so many are unfinished; 413 or 503, there is no room.
            OSError: the disk failed; there is no batch.
        """
        own = self._batches.setdefault(record.tenant, {})
        if len(own) >= MAX_BATCHES:
            oldest = next((batch for batch in own.values() if not batch.is_unfinished), None)
            if oldest is None:
                raise ApiError(
                    429,
                    f"{len(own)} of your batches are unfinished; wait for some to end, or cancel some",
                    code="rate_limit_exceeded",
                )
            await self.remove_batch(oldest)
        self.space.reserve(record.tenant, RECORD_BYTES)
        try:
            await self._write(record)
        except OSError:
            self.space.count(record.tenant, -RECORD_BYTES)
            raise
        own[record.id] = record

    async def update_batch(self, record: BatchRecord) -> None:
        """Replace the record of a batch.

        Raises:
            OSError: the disk failed; the last record stands.
        """
        await self._write(record)
        self._batches[record.tenant][record.id] = record

    async def remove_batch(self, record: BatchRecord) -> None:
        """Forget a batch that has ended, with the bytes that belong to no file."""
        if self._batches.get(record.tenant, {}).pop(record.id, None) is None:
            return
        num_bytes = self._own_bytes(record)
        files = self._files.get(record.tenant, {})
        own = {record.input_id, record.output_id, record.error_id} - files.keys()
        async with self._writing:
            await asyncio.to_thread(self.directory.remove, record.tenant, record.id, *sorted(own))
        self.space.count(record.tenant, -num_bytes - RECORD_BYTES)

    async def _write(self, record: StoredFile | BatchRecord) -> None:
        data = msgspec.json.encode(record)
        async with self._writing:
            await asyncio.to_thread(self.directory.write_record, record.tenant, record.id, data)

    # -- expiry ------------------------------------------------------------------------------

    def _is_past(self, record: StoredFile) -> bool:
        return record.expires_at <= self._clock() and self.user_of(record) is None

    def _expired(self) -> Iterator[StoredFile | BatchRecord]:
        for files in self._files.values():
            yield from [file for file in files.values() if self._is_past(file)]
        for batches in self._batches.values():
            for batch in list(batches.values()):
                ended_at = batch.ended_at
                if ended_at is not None and ended_at + batch.output_s <= self._clock():
                    yield batch

    async def remove_expired(self) -> int:
        """Remove files and batches past their time; returns how many."""
        expired = list(self._expired())
        for record in expired:
            if isinstance(record, StoredFile):
                await self.remove_file(record)
            else:
                await self.remove_batch(record)
        return len(expired)
