"""What a disk tier makes of the directory that it finds at its start."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.page_store import WriteOutcome
from ramify.kv.stores.store_directory import IDENTITY_FILE, list_identities
from tests.pure.file_faults import FailingOps, always, nth
from tests.pure.store_cases import (
    SEGMENT_BYTES,
    crash,
    hits,
    opened,
    put,
    segment_files,
    slots_per_segment,
)

PER_SEGMENT = slots_per_segment()
NOBODY = 65534


def test_on_a_full_disk_a_start_reads_its_pages(tmp_path: Path) -> None:
    """Not even the lock's text can be written: the start goes on, pages are read, none is taken."""
    store = opened(tmp_path)
    put(store, range(PER_SEGMENT))
    store.close()
    ops = FailingOps(always("write allocate truncate", errno.ENOSPC))

    store = opened(tmp_path, ops=ops)

    assert hits(store, range(PER_SEGMENT)) == list(range(PER_SEGMENT))
    assert put(store, [100]) == [WriteOutcome.REFUSED]
    with pytest.raises(ConfigError, match="in use by"):
        opened(tmp_path)


def test_a_new_file_system_is_an_empty_directory(tmp_path: Path) -> None:
    """`lost+found` is nobody's; any other file is somebody's."""
    for name in ("disk", "home"):
        (tmp_path / name / "lost+found").mkdir(parents=True)
    (tmp_path / "home" / "thesis.txt").touch()

    assert put(opened(tmp_path / "disk"), [1]) == [WriteOutcome.WRITTEN]
    with pytest.raises(ConfigError, match="thesis"):
        opened(tmp_path / "home")


@pytest.mark.parametrize("read_only", [True, False])
def test_a_start_that_fails_leaves_no_file_open(tmp_path: Path, read_only: bool) -> None:
    """The segment that a crash left open has been read when the directory cannot be listed."""
    store = opened(tmp_path)
    put(store, range(3))
    crash(store)
    ops = FailingOps(nth("names", 1, errno.EIO))

    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path, ops=ops, read_only=read_only)

    assert ops.calls["read"] > 3 and not ops.open_fds
    assert hits(opened(tmp_path), range(3)) == [0, 1, 2]


def test_a_lower_budget_holds_before_anything_is_written(tmp_path: Path) -> None:
    """A start with a lower budget deletes segments, least recently used first, though pages are only read."""
    store = opened(tmp_path, budget_bytes=8 * SEGMENT_BYTES)
    put(store, range(6 * PER_SEGMENT))
    store.close()

    store = opened(tmp_path, budget_bytes=3 * SEGMENT_BYTES)
    store.maintain()

    used = sum(path.stat().st_blocks * 512 for path in segment_files(tmp_path))
    assert 2 * SEGMENT_BYTES < used <= 3 * SEGMENT_BYTES
    newest = range(4 * PER_SEGMENT, 6 * PER_SEGMENT)
    assert hits(store, newest) == list(newest)
    assert store.counts().evicted_pages == 6 * PER_SEGMENT - store.counts().num_pages


def test_a_process_whose_lock_was_removed_writes_no_more(tmp_path: Path) -> None:
    """Another one may have taken its place: what that writes stays, and the first one goes on reading."""
    first = opened(tmp_path)
    put(first, range(5))
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").touch()
    second = opened(tmp_path)
    put(second, range(10, 15))

    refused = put(first, range(20, 25))
    first.maintain()
    first.close()
    put(second, range(15, 18))
    second.close()

    assert set(refused) == {WriteOutcome.REFUSED}
    assert "lock was removed" in first.counts().writing_off
    assert hits(opened(tmp_path), range(30)) == [*range(5), *range(10, 18)]


def test_no_page_is_acknowledged_in_a_directory_that_was_deleted(tmp_path: Path) -> None:
    """Its open files would take pages that no restart finds."""
    store = opened(tmp_path / "cache")
    put(store, range(5))
    shutil.rmtree(tmp_path / "cache")

    assert set(put(store, range(5, 9))) == {WriteOutcome.REFUSED}
    store.close()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("content", [b"", b'{"fields": {"wei'])
def test_an_identity_that_a_crash_cut_is_written_again(tmp_path: Path, content: bytes) -> None:
    """Tools need it; the pages are found with and without."""
    store = opened(tmp_path)
    put(store, range(3))
    store.close()
    next(tmp_path.glob(f"*/{IDENTITY_FILE}")).write_bytes(content)

    store = opened(tmp_path)

    assert hits(store, range(3)) == [0, 1, 2]
    [listed] = list_identities(OsFileOps(), tmp_path)
    assert listed.identity == store._directory.identity


@contextmanager
def directory_as_nobody(mode: int, owner: int) -> Iterator[Path]:
    """A directory below one that everybody may enter, seen by a user without rights."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    root = Path(tempfile.mkdtemp())
    directory = root / "pages"
    directory.mkdir()
    os.chown(directory, owner, owner)
    directory.chmod(mode)
    root.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield directory
    finally:
        os.seteuid(0)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("mode", "owner", "reason"),
    [
        (0o777, 0, f"belongs to user 0, this is user {NOBODY}"),
        (0o500, NOBODY, "cannot be written.*choose another --cache-dir, or read its pages"),
        (0o000, NOBODY, "cannot be used.*choose another"),
    ],
)
def test_a_directory_of_somebody_else_is_refused(mode: int, owner: int, reason: str) -> None:
    """Not ours, not writable, not readable: refused at the start with the reason and the way out."""
    with directory_as_nobody(mode, owner) as directory, pytest.raises(ConfigError, match=reason):
        opened(directory)
