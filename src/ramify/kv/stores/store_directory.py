"""The directory of a disk tier: its lock, and one sub-directory for each identity.

DIR/                      0700
  lock                    flock; pid and start time, for the message to a second process
  import-<8 letters>/     an archive unpacked by `ramify cache import`, while it holds the lock
  <identity, 32 hex>/     identity.json, key (32 random bytes, 0600), removed.log, 00000007.seg
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import mmap
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ramify.counts import counted
from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import (
    BLOCK_BYTES,
    O_DIRECT,
    FileOps,
    OsFileOps,
    read_exactly,
    write_fully,
)
from ramify.kv.stores.page_names import KEY_BYTES
from ramify.kv.stores.segment import number_of
from ramify.kv.stores.segment_writer import ForeignSegment
from ramify.kv.stores.store_identity import StoreIdentity
from ramify.reasons import reason_of

logger = logging.getLogger(__name__)

IDENTITY_FILE, KEY_FILE, LOCK_FILE, PROBE_FILE = "identity.json", "key", "lock", "probe"
IMPORT_PREFIX = "import-"
_IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
# As `tempfile.mkdtemp` draws them.
_IMPORT_NAME = re.compile(IMPORT_PREFIX + "[a-z0-9_]{8}")
# A directory of one of several engines; see `ramify.cluster.tier_shares`.
_REPLICA_NAME = re.compile(r"replica-[0-9]{1,4}")
# What a new ext4 file system has.
_EMPTY_DISK_NAME = "lost+found"
_MAX_SMALL_FILE_BYTES = 1 << 20
_NAMED_FIELDS = 3


@dataclass(frozen=True, slots=True)
class IdentityDirectory:
    """A sub-directory with pages of one identity, as `ramify cache ls` shows it."""

    path: Path
    # None: identity.json is missing or damaged.
    identity: StoreIdentity | None
    num_segments: int
    allocated_bytes: int
    modified_s: float


class StoreDirectory:
    """A directory, locked for writing, with the sub-directory of one identity.

    Args:
        read_only: takes no lock and changes nothing; the sub-directory may be missing.
        lock_fd: of `lock_directory`, if the caller has it; closed by `release`.

    Raises:
        ConfigError: it cannot be used: not writable, somebody else's, held by another process, or on
            a file system without locks.
    """

    def __init__(
        self,
        ops: FileOps,
        root: Path,
        identity: StoreIdentity,
        *,
        read_only: bool,
        lock_fd: int | None = None,
    ) -> None:
        self._ops, self.root, self.identity = ops, root, identity
        self.path = root / identity.digest.hex()
        self._lock_fd = -1
        if read_only:
            if not root.is_dir():
                raise ConfigError(f"the cache directory {root} does not exist; leave out read-only")
            # A directory that cannot be listed may still have a sub-directory that can be read.
            with suppress(OSError):
                check_has_no_replicas(root, os.listdir(root))  # noqa: PTH208 - names, not paths
            key = self._read_key()
            self.has_key = key is not None
            # Until there is one, no page is found under the names that this one gives.
            self.key = key or secrets.token_bytes(KEY_BYTES)
            return
        if lock_fd is None:
            self._create_root()
            self._lock_fd = lock_directory(ops, root)
            delete_unpacked(root)
        else:
            self._lock_fd = lock_fd
        try:
            self.key, self.has_key = self._prepare(), True
        except ConfigError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise ConfigError(
                f"the cache directory {root} cannot be written: {reason_of(error, root)}; give it to this user, or "
                "choose another --cache-dir"
            ) from error

    def release(self) -> None:
        """Give the lock back."""
        if self._lock_fd >= 0:
            with suppress(OSError):
                self._ops.close(self._lock_fd)
            self._lock_fd = -1

    def check_lock(self) -> str:
        """Why this process is no longer the one writer; empty: it is."""
        path = self.root / LOCK_FILE
        # A disk that does not say is no reason to stop: writes show their own errors.
        with suppress(OSError):
            if not self._ops.is_at(self._lock_fd, path):
                return f"{path} was removed, so that another process may write there; start again"
        return ""

    def find_key(self) -> bool:
        """Look again for the key of a directory that had none; whether it has one.

        Raises:
            ConfigError: it is there and cannot be read.
        """
        key = self._read_key()
        if key is None:
            return False
        self.key, self.has_key = key, True
        return True

    def _create_root(self) -> None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self.root.stat().st_uid
            names = os.listdir(self.root)  # noqa: PTH208 - names, not paths
        except OSError as error:
            raise ConfigError(
                f"the cache directory {self.root} cannot be used: {reason_of(error, self.root)}; choose another --cache-dir"
            ) from error
        if os.geteuid() not in {0, owner}:
            raise ConfigError(
                f"the cache directory {self.root} belongs to user {owner}, this is user "
                f"{os.geteuid()}; choose another --cache-dir"
            )
        check_is_cache_directory(self.root, names)

    def _prepare(self) -> bytes:
        """Create what is missing of the sub-directory; returns its key."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        # Else it is missing, or a crash cut it.
        if _stored_identity(self._ops, self.path) != self.identity:
            stored = {
                "fields": dict(self.identity.fields),
                "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            }
            self._write(IDENTITY_FILE, json.dumps(stored, indent=1).encode())
        key = self._read_key()
        if key is None:
            key = secrets.token_bytes(KEY_BYTES)
            self._write(KEY_FILE, key)
        self._ops.sync_directory(self.path)
        self._ops.sync_directory(self.root)
        return key

    def _read_key(self) -> bytes | None:
        """The key; None: there is none, or it was never written whole.

        Raises:
            ConfigError: it is there and cannot be read: another key would void every page.
        """
        path = self.path / KEY_FILE
        try:
            if self._ops.size(path).num_bytes != KEY_BYTES:
                return None
            fd = self._ops.open(path, os.O_RDONLY)
            try:
                content = read_exactly(self._ops, fd, KEY_BYTES, 0)
            finally:
                self._ops.close(fd)
            if len(content) != KEY_BYTES:
                raise OSError(errno.EIO, f"{len(content)} of {KEY_BYTES} bytes were read")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(
                f"the key of the pages, {path}, cannot be read: {reason_of(error, path)}; start again once it can, "
                "or delete it to start without pages"
            ) from error
        return content

    def _write(self, name: str, content: bytes) -> None:
        fd = self._ops.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_fully(self._ops, fd, [content], 0)
            self._ops.datasync(fd)
        finally:
            self._ops.close(fd)

    def segment_paths(self) -> list[Path]:
        """The files of this identity's segments, by number."""
        if not self.path.is_dir():
            return []
        return [
            self.path / name for name in self._ops.names(self.path) if number_of(name) is not None
        ]

    def delete_segments(self) -> None:
        """Delete every segment of this identity.

        Raises:
            OSError: one could not be deleted.
        """
        for path in self.segment_paths():
            self._ops.unlink(path)
        self._ops.sync_directory(self.path)

    def foreign_segments(self) -> list[ForeignSegment]:
        """Segments of other identities, oldest first."""
        dated = []
        for directory in identity_paths(self.root):
            if directory != self.path:
                for name in self._ops.names(directory):
                    if number_of(name) is not None:
                        size = self._ops.size(directory / name)
                        segment = ForeignSegment(directory / name, size.allocated_bytes)
                        dated.append((size.modified_s, segment))
        return [segment for _, segment in sorted(dated, key=lambda item: item[0])]

    def unlisted_segments(self, paths: Sequence[Path]) -> list[ForeignSegment]:
        """Files of this identity whose pages are not listed, with what they occupy (0: not known)."""
        segments = []
        for path in paths:
            allocated_bytes = 0
            with suppress(OSError):
                allocated_bytes = self._ops.size(path).allocated_bytes
            segments.append(ForeignSegment(path, allocated_bytes))
        return segments

    def nearest_difference(self) -> str:
        """The fields in which the most similar other directory differs, in words; empty: no other."""
        others = [
            directory.identity
            for directory in list_identities(self._ops, self.root)
            if directory.path != self.path and directory.identity and directory.num_segments
        ]
        if not others:
            return ""
        nearest = min(others, key=lambda other: len(self.identity.differing(other)))
        names = self.identity.differing(nearest)
        parts = [
            f"{name} is {self.identity.fields.get(name)!r} here and {nearest.fields.get(name)!r} there"
            for name in names[:_NAMED_FIELDS]
        ]
        if len(names) > _NAMED_FIELDS:
            parts.append(f"and {counted(len(names) - _NAMED_FIELDS, 'more field')}")
        return "; ".join(parts)

    def supports_direct(self) -> bool:
        """Whether reads may bypass the page cache: write, sync and read a probe back with O_DIRECT.

        Raises:
            ConfigError: what was written is not what is read.
        """
        path = self.path / PROBE_FILE
        content = secrets.token_bytes(BLOCK_BYTES)
        block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        try:
            self._write(PROBE_FILE, content)
            if not O_DIRECT:
                return False
            fd = self._ops.open(path, os.O_RDONLY | O_DIRECT)
            try:
                count = self._ops.read(fd, [block], 0)
            finally:
                self._ops.close(fd)
        except OSError:
            return False
        finally:
            with suppress(OSError):
                self._ops.unlink(path)
        if count == BLOCK_BYTES and bytes(block) != content:
            raise ConfigError(
                f"the file system of {self.root} does not read back what was written; use another one"
            )
        return count == BLOCK_BYTES


def check_is_cache_directory(root: Path, names: Sequence[str]) -> None:
    """Refuse a directory with files of somebody else.

    Raises:
        ConfigError: it has files, and none of them is a cache directory's lock.
    """
    check_has_no_replicas(root, names)
    others = [name for name in names if name != _EMPTY_DISK_NAME]
    if others and LOCK_FILE not in names:
        raise ConfigError(
            f"the directory {root} has files ({others[0]}, ...) and is no cache directory; "
            "name an empty or a new directory"
        )


def check_has_no_replicas(root: Path, names: Sequence[str]) -> None:
    """Refuse a directory below which each of several engines has its own.

    Raises:
        ConfigError: it is one; names a directory below it.
    """
    replicas = sorted(name for name in names if _REPLICA_NAME.fullmatch(name))
    if replicas and LOCK_FILE not in names:
        raise ConfigError(
            f"the directory {root} has a cache directory for each of its engines ({len(replicas)}); name one "
            f"of them, as {root / replicas[0]}"
        )


def delete_unpacked(root: Path) -> None:
    """Delete what killed imports have left in a directory that the caller has locked.

    An import holds the lock as long as its files are there, so no live one is hit.
    """
    with suppress(OSError):
        for path in root.iterdir():
            if _IMPORT_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                logger.warning("%s is what an import that was killed has left; deleted", path)
                shutil.rmtree(path, ignore_errors=True)


def check_unlocked(root: Path) -> None:
    """Refuse a cache directory that another process writes, before a model loads; it need not exist.

    Raises:
        ConfigError: see `lock_directory`.
    """
    if (root / LOCK_FILE).is_file():
        ops = OsFileOps()
        ops.close(_locked(ops, root))


def lock_directory(ops: FileOps, root: Path) -> int:
    """Lock a directory for writing; returns the descriptor that holds the lock.

    Raises:
        ConfigError: another process holds it, or the file system has no locks.
    """
    fd = _locked(ops, root)
    # The lock holds without its text: on a full disk pages are still read.
    with suppress(OSError):
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        ops.truncate(fd, 0)
        write_fully(ops, fd, [f"process {os.getpid()}, started {started}\n".encode()], 0)
    return fd


def _locked(ops: FileOps, root: Path) -> int:
    path = root / LOCK_FILE
    try:
        fd = ops.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ConfigError(
            f"the cache directory {root} cannot be written: {reason_of(error, root)}; choose another --cache-dir, "
            "or read its pages with --cache-dir-readonly"
        ) from error
    try:
        if not ops.lock(fd):
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            raise ConfigError(
                f"the cache directory {root} is in use by {holder}; stop it, choose another "
                "--cache-dir, or share its pages with --cache-dir-readonly"
            )
    except OSError as error:
        ops.close(fd)
        raise ConfigError(
            f"the file system of {root} has no locks ({reason_of(error)}); put --cache-dir on a local disk"
        ) from error
    except ConfigError:
        ops.close(fd)
        raise
    return fd


def read_small_file(ops: FileOps, path: Path) -> bytes | None:
    """The content of a file of at most 1 MiB; None: it is missing, unreadable or larger."""
    try:
        size = ops.size(path).num_bytes
        if size > _MAX_SMALL_FILE_BYTES:
            return None
        fd = ops.open(path, os.O_RDONLY)
        try:
            return read_exactly(ops, fd, size, 0)
        finally:
            ops.close(fd)
    except OSError:
        return None


def identity_paths(root: Path) -> list[Path]:
    """The sub-directories of identities."""
    return sorted(
        path for path in root.iterdir() if _IDENTITY_NAME.fullmatch(path.name) and path.is_dir()
    )


def list_identities(ops: FileOps, root: Path) -> list[IdentityDirectory]:
    """Every identity's sub-directory, with its size; a server may delete files meanwhile."""
    directories = []
    for path in identity_paths(root):
        sizes = []
        for name in ops.names(path):
            if number_of(name) is not None:
                with suppress(FileNotFoundError):
                    sizes.append(ops.size(path / name))
        directories.append(
            IdentityDirectory(
                path,
                _stored_identity(ops, path),
                len(sizes),
                sum(size.allocated_bytes for size in sizes),
                max((size.modified_s for size in sizes), default=0.0),
            )
        )
    return directories


def _stored_identity(ops: FileOps, path: Path) -> StoreIdentity | None:
    content = read_small_file(ops, path / IDENTITY_FILE)
    try:
        fields = json.loads(content or b"")["fields"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return StoreIdentity(
        {str(name): value for name, value in fields.items() if isinstance(value, str | int | bool)}
    )
