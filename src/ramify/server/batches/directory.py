"""The directory of batches: a lock, a folder for each tenant, files that are whole or not there.

DIR/                       0700
  lock                     flock: one server writes here
  <tenant's hash, 32 hex>/
    <id>                   bytes of a file: an upload, requests of a batch, results
    <id>.json              the record of a file or batch; a file is there for clients once this is
    <id>.new               a record that is being written
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ramify.errors import ConfigError
from ramify.reasons import reason_of
from ramify.server.errors import ApiError

RECORD, NEW = ".json", ".new"
RECORD_BYTES = 4096  # of the disk, for each file beside its bytes
RETRY_S = 60
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full(error: OSError) -> bool:
    """Whether a call failed because the disk has no room."""
    return error.errno in _FULL


def disk_error(error: OSError) -> ApiError | OSError:
    """What to raise for a call that failed: 503 for a disk that is full, else the error itself."""
    if not is_full(error):
        return error
    return ApiError(
        503,
        "the disk of the server's batch directory is full; try again later",
        code="no_disk_space",
        retry_after_s=RETRY_S,
    )


class BatchDirectory:
    """The files below `--batch-dir`. Calls block: event loops call them in a thread.

    Raises:
        ConfigError: the directory cannot be made or written, or another server uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"the batch directory {path} cannot be written: {reason_of(error, path)}"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ConfigError(
                f"another server uses the batch directory {path}; give each its own --batch-dir"
            ) from error

    def close(self) -> None:
        """Let another server use the directory."""
        os.close(self._lock)

    def folder(self, tenant: str) -> Path:
        """A tenant's folder, by hash: names of tenants may be any text."""
        name = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return self.path / name

    def file(self, tenant: str, name: str) -> Path:
        """The path of a file's bytes."""
        return self.folder(tenant) / name

    def folders(self) -> Iterator[Path]:
        """The folders of all tenants."""
        for path in sorted(self.path.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield path

    def create(self, tenant: str, name: str) -> int:
        """Create a file for its bytes; returns the descriptor.

        Raises:
            OSError: it is there, or the disk failed.
        """
        folder = self.folder(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write_record(self, tenant: str, name: str, record: bytes) -> None:
        """Put a record in place of its last version; both are whole whenever the power goes.

        Raises:
            OSError: the disk failed; the last version is still there.
        """
        folder = self.folder(tenant)
        folder.mkdir(mode=0o700, exist_ok=True)
        new = folder / (name + NEW)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, record)
            os.fsync(handle)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise
        finally:
            os.close(handle)
        new.rename(folder / (name + RECORD))
        sync_folder(folder)

    def remove(self, tenant: str, *names: str) -> None:
        """Remove files with their records; those that are not there are no error.

        The record goes first: a file without a record is removed at the next start.
        """
        folder = self.folder(tenant)
        for name in names:
            for path in (folder / (name + RECORD), folder / name):
                with suppress(FileNotFoundError):
                    path.unlink()
        if folder.is_dir():
            sync_folder(folder)


def write_all(handle: int, data: bytes | bytearray) -> None:
    """Write all bytes at a descriptor's position."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class DiskSpace:
    """Bytes that the files of all tenants have, and their limits.

    Args:
        max_bytes: of all tenants.
        max_tenant_bytes: of each.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int) -> None:
        self._max_bytes, self._max_tenant_bytes = max_bytes, max_tenant_bytes
        self.num_bytes = 0
        self._by_tenant: dict[str, int] = {}

    def bytes_of(self, tenant: str) -> int:
        """Bytes of a tenant's files."""
        return self._by_tenant.get(tenant, 0)

    def has_room(self, tenant: str, num_bytes: int) -> bool:
        """Whether files of a tenant may have as many more bytes."""
        return (
            self.num_bytes + num_bytes <= self._max_bytes
            and self.bytes_of(tenant) + num_bytes <= self._max_tenant_bytes
        )

    def reserve(self, tenant: str, num_bytes: int) -> None:
        """Count bytes that are about to be written; `release` follows when they are removed.

        Raises:
            ApiError: 413, the tenant has too many; 503, all have. Nothing is counted.
        """
        if not self.has_room(tenant, num_bytes):
            own, limit = self.bytes_of(tenant), self._max_tenant_bytes
            if own + num_bytes > limit:
                raise ApiError(
                    413,
                    f"your files and batches have {own} bytes, the limit is {limit}; delete some",
                    code="storage_limit_exceeded",
                )
            raise ApiError(
                503,
                "the files and batches of all callers fill the server's --batch-disk; try again later",
                code="no_disk_space",
                retry_after_s=RETRY_S,
            )
        self.count(tenant, num_bytes)

    def count(self, tenant: str, num_bytes: int) -> None:
        """Count bytes whatever the limits are; a negative number takes them back."""
        self.num_bytes += num_bytes
        left = self.bytes_of(tenant) + num_bytes
        if left > 0:
            self._by_tenant[tenant] = left
        else:
            self._by_tenant.pop(tenant, None)
