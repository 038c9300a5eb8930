"""Work on a disk tier while no server uses it: verify, export, import and purge."""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.page_names import KEY_BYTES
from ramify.kv.stores.payload_codec import cache_key_tag
from ramify.kv.stores.removal_log import FILE_NAME as REMOVAL_FILE
from ramify.kv.stores.segment import number_of
from ramify.kv.stores.segment_options import SegmentOptions, identity_of
from ramify.kv.stores.segment_writer import FULL
from ramify.kv.stores.segments import SegmentStore
from ramify.kv.stores.store_directory import (
    IDENTITY_FILE,
    IMPORT_PREFIX,
    KEY_FILE,
    IdentityDirectory,
    check_has_no_replicas,
    check_is_cache_directory,
    delete_unpacked,
    list_identities,
    lock_directory,
)
from ramify.reasons import reason_of

# Fields of an identity that the store adds to the caller's.
_OWN_FIELDS = frozenset({"page_bytes", "segment_bytes", "file_format", "encryption"})
_UNLIMITED_BYTES = 1 << 62
# Buffers and preallocated files have the sizes that an identity names: one from elsewhere is bounded.
MAX_SEGMENT_BYTES = 1 << 30
_MAX_MEMBER_BYTES = MAX_SEGMENT_BYTES
_MEMBER = re.compile(r"[0-9a-f]{32}/[A-Za-z0-9.]+")
_OTHER_FILES = frozenset({IDENTITY_FILE, KEY_FILE, REMOVAL_FILE})


@dataclass(frozen=True, slots=True)
class PageReport:
    """Pages that were read, and those of them that were damaged or refused."""

    num_pages: int
    num_damaged: int


def identities(root: Path) -> list[IdentityDirectory]:
    """Every identity in a cache directory.

    Raises:
        ConfigError: there is no such directory, or each of several engines has one below it.
    """
    if not root.is_dir():
        raise ConfigError(f"there is no directory {root}; name one that --cache-dir was set to")
    check_has_no_replicas(root, os.listdir(root))  # noqa: PTH208 - names, not paths
    return list_identities(OsFileOps(), root)


def choose(root: Path, identity: str | None) -> IdentityDirectory:
    """The identity whose digest begins so; None: the only one.

    Raises:
        ConfigError: none or several match.
    """
    matching = [item for item in identities(root) if item.path.name.startswith(identity or "")]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(item.path.name for item in matching) or "none"
    what = f"--identity {identity}" if identity else "the directory"
    raise ConfigError(
        f"{what} matches {len(matching)} identities of {root} ({listed}); name one with --identity"
    )


@contextmanager
def opened(
    directory: IdentityDirectory, *, cache_key: bytes | None, read_only: bool
) -> Iterator[SegmentStore]:
    """The store of an identity that is on disk.

    Raises:
        ConfigError: its identity cannot be read, it needs another cache key, or a server holds it.
    """
    store = SegmentStore(_options(directory, cache_key=cache_key, read_only=read_only))
    with closing(store):
        yield store


def _options(
    directory: IdentityDirectory, *, cache_key: bytes | None, read_only: bool
) -> SegmentOptions:
    fields = dict(directory.identity.fields) if directory.identity else {}
    page_bytes, segment_bytes = fields.get("page_bytes"), fields.get("segment_bytes")
    if not isinstance(page_bytes, int) or not isinstance(segment_bytes, int):
        raise ConfigError(
            f"{directory.path}/{IDENTITY_FILE} is damaged; remove the directory with: ramify cache "
            f"purge --identity {directory.path.name}"
        )
    if not 1 <= page_bytes <= segment_bytes <= MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"{directory.path}/{IDENTITY_FILE} has page_bytes {page_bytes} and segment_bytes "
            f"{segment_bytes}; a page has 1 byte or more, a segment at most {MAX_SEGMENT_BYTES}"
        )
    encryption = "none" if cache_key is None else cache_key_tag(cache_key)
    if fields.get("encryption") != encryption:
        raise ConfigError(
            f"the pages in {directory.path} have encryption {fields.get('encryption')!r}, the key "
            f"given is {encryption!r}; pass the --cache-key that they were written with"
        )
    options = SegmentOptions(
        directory=directory.path.parent,
        identity={name: value for name, value in fields.items() if name not in _OWN_FIELDS},
        page_bytes=page_bytes,
        budget_bytes=_UNLIMITED_BYTES,
        segment_bytes=segment_bytes,
        read_only=read_only,
        cache_key=cache_key,
    )
    if identity_of(options).digest.hex() != directory.path.name:
        raise ConfigError(f"{directory.path}/{IDENTITY_FILE} does not belong to this directory")
    return options


def verify(store: SegmentStore) -> PageReport:
    """Read and verify every page; damaged ones are removed unless the store is read-only."""
    damaged = []
    count = 0
    for name, header, _ in store.scan():
        count += 1
        if header is None:
            damaged.append(name)
    if damaged and not store.options.read_only:
        store.remove_names(damaged)
    return PageReport(count, len(damaged))


def export(directory: IdentityDirectory, archive: Path) -> int:
    """Write an identity's files to a tar file, readable by its owner only; returns their number.

    The archive has the directory's key of names: whoever has it can test guesses of what was cached.

    Raises:
        ConfigError: a server holds the directory, or the archive is there already.
    """
    lock = lock_directory(OsFileOps(), directory.path.parent)
    try:
        fd = os.open(archive, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
                names = [name for name in sorted(os.listdir(directory.path)) if _is_ours(name)]  # noqa: PTH208
                for name in names:
                    tar.add(directory.path / name, f"{directory.path.name}/{name}", recursive=False)
        except BaseException:
            # A part of an archive would only stand in the way of the next one.
            archive.unlink(missing_ok=True)
            raise
        return len(names)
    except OSError as error:
        raise ConfigError(f"{archive} cannot be written: {reason_of(error, archive)}") from error
    finally:
        os.close(lock)


def _is_ours(name: str) -> bool:
    return name in _OTHER_FILES or number_of(name) is not None


def import_archive(archive: Path, root: Path, *, cache_key: bytes | None) -> PageReport:
    """Copy the pages of an exported identity that verify; those that are there already are kept.

    Raises:
        ConfigError: the archive is none of `export`, or the directory is no cache directory, has this
            identity under another key of names, or is held by a server.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_is_cache_directory(root, os.listdir(root))  # noqa: PTH208 - names, not paths
    except OSError as error:
        raise ConfigError(
            f"the cache directory {root} cannot be used: {reason_of(error, root)}; choose another --cache-dir"
        ) from error
    # First of all: no unpacking for a directory that a server holds, and whoever gets the lock next
    # may delete what a killed import has left.
    lock = lock_directory(OsFileOps(), root)
    try:
        delete_unpacked(root)
        with tempfile.TemporaryDirectory(prefix=IMPORT_PREFIX, dir=root) as name:
            return _import_unpacked(archive, Path(name), root, cache_key, lock)
    finally:
        # The lock of the target is another descriptor of the same open file.
        os.close(lock)


def _import_unpacked(
    archive: Path, unpacked: Path, root: Path, cache_key: bytes | None, lock: int
) -> PageReport:
    _unpack(archive, unpacked)
    source = choose(unpacked, None)
    options = _options(source, cache_key=cache_key, read_only=True)
    _copy_key(source.path, root / source.path.name)
    target_options = replace(
        options, directory=root, budget_bytes=_UNLIMITED_BYTES, read_only=False
    )
    count = refused = 0
    with (
        closing(SegmentStore(options)) as reader,
        closing(SegmentStore(target_options, lock_fd=os.dup(lock))) as target,
    ):
        for _, header, page in reader.scan():
            count += 1
            refused += header is None or not target.put_record(header, page)
    return PageReport(count, refused)


def _unpack(archive: Path, directory: Path) -> None:
    """Unpack the files of one identity; nothing else, and nothing elsewhere."""
    try:
        with tarfile.open(archive, "r:") as tar:
            for member in tar:
                name = member.name.partition("/")[2]
                if not member.isfile() or not _MEMBER.fullmatch(member.name) or not _is_ours(name):
                    raise ConfigError(f"{archive} has {member.name!r}, which no export has")
                if member.issparse():
                    raise ConfigError(f"{archive} has {member.name!r} with holes, as no export has")
                if member.size > _MAX_MEMBER_BYTES:
                    raise ConfigError(
                        f"{archive} has {member.name!r} of {member.size} bytes; at most "
                        f"{_MAX_MEMBER_BYTES} are possible"
                    )
                content = tar.extractfile(member)
                assert content is not None
                path = directory / member.name
                path.parent.mkdir(mode=0o700, exist_ok=True)
                with content, path.open("xb") as file:
                    while block := content.read(1 << 20):
                        file.write(block)
    except (OSError, tarfile.TarError) as error:
        if isinstance(error, OSError) and error.errno in FULL:
            raise ConfigError(
                f"{directory.parent} has no room to unpack {archive} ({reason_of(error)}): free as many bytes as "
                "the archive has, beside those of its pages, or name another --cache-dir"
            ) from error
        raise ConfigError(f"{archive} cannot be read: {reason_of(error, archive)}") from error


def _copy_key(source: Path, target: Path) -> None:
    """Give a new identity the archive's key; an existing one must have the same."""
    try:
        key = (source / KEY_FILE).read_bytes()
    except FileNotFoundError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"the archive has a key file of {len(key)} bytes, {KEY_BYTES} are needed to find its "
            "pages; export them again"
        )
    path = target / KEY_FILE
    if path.exists():
        if path.read_bytes() != key:
            raise ConfigError(
                f"{target} has this identity under another key of names, so its pages cannot be "
                "told apart from the archive's; import into an empty directory"
            )
        return
    target.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, key)
    os.close(fd)


def purge_identity(directory: IdentityDirectory) -> int:
    """Delete an identity's directory, durably; returns the bytes of its segments.

    Raises:
        ConfigError: a server holds the directory.
    """
    ops = OsFileOps()
    lock = lock_directory(ops, directory.path.parent)
    try:
        for path in directory.path.iterdir():
            path.unlink()
        ops.sync_directory(directory.path)
        directory.path.rmdir()
        ops.sync_directory(directory.path.parent)
    finally:
        os.close(lock)
    return directory.allocated_bytes


def purge_older(directory: IdentityDirectory, days: float) -> int:
    """Delete segments that were last written more than so many days ago, durably; returns how many.

    Raises:
        ConfigError: a server holds the directory.
    """
    before = time.time() - days * 86400
    ops = OsFileOps()
    lock = lock_directory(ops, directory.path.parent)
    try:
        old = [
            path
            for path in directory.path.iterdir()
            if number_of(path.name) is not None and path.stat().st_mtime < before
        ]
        for path in old:
            path.unlink()
        ops.sync_directory(directory.path)
    finally:
        os.close(lock)
    return len(old)


def purge_tenant(store: SegmentStore, tenant: str) -> int:
    """Remove the pages that a tenant wrote first; returns how many.

    They are never served again; their bytes stay on disk until their segments are deleted.
    """
    return store.remove_names(store.names_of_tenant(tenant.encode()))
