"""`TierClaim`: a cache directory of its own for an engine whose place and name a launcher chooses.

Below the directory that all engines are given there is `replica-0`, `replica-1`, …, as for replicas of
`ramify serve`. Whoever holds the lock of `owner` in one of them may use it; the system frees the lock
when the process ends, however that happens. So the engine that takes the place of another one finds
the other's directory free, and its pages there.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ramify.errors import ConfigError
from ramify.kv.stores.file_ops import OsFileOps
from ramify.kv.stores.store_directory import LOCK_FILE, list_identities
from ramify.reasons import reason_of

OWNER_FILE = "owner"
# More engines than any machine has.
MAX_DIRECTORIES = 1024
_NAME = re.compile(r"replica-(0|[1-9][0-9]{0,3})")


@dataclass(slots=True)
class TierClaim:
    """A directory that no other engine claims until `release`, or the end of this process."""

    directory: Path
    _fd: int

    def release(self) -> None:
        """Give the directory back. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def claim_directory(root: Path) -> TierClaim:
    """Claim a directory below `root`: of those that nobody uses the one written last, else a new one.

    Raises:
        ConfigError: there is no room for it, or it cannot be locked.
    """
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in _by_last_write(root):
            if (claim := _try_claim(directory)) is not None:
                return claim
        for number in range(MAX_DIRECTORIES):
            directory = root / f"replica-{number}"
            if not directory.exists() and (claim := _try_claim(directory)) is not None:
                return claim
    except OSError as error:
        raise ConfigError(
            f"the cache directory {root} cannot be used: {reason_of(error, root)}; name a directory on a local disk, "
            "which this user can write"
        ) from error
    raise ConfigError(
        f"the cache directory {root} has {MAX_DIRECTORIES} directories of engines, all in use; delete "
        "those that no engine uses"
    )


def _by_last_write(root: Path) -> list[Path]:
    """The directories of engines, the one with the newest pages first."""
    dated = []
    for directory in root.iterdir():
        match = _NAME.fullmatch(directory.name)
        if match and directory.is_dir():
            identities = list_identities(OsFileOps(), directory)
            written_s = max((identity.modified_s for identity in identities), default=0.0)
            dated.append((-written_s, int(match[1]), directory))
    return [directory for _, _, directory in sorted(dated)]


def _try_claim(directory: Path) -> TierClaim | None:
    """Claim a directory; None: an engine uses it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    # A directory with files is a store's only if it has this one.
    (directory / LOCK_FILE).touch(mode=0o600)
    fd = _lock(directory / OWNER_FILE)
    if fd is None:
        return None
    # An engine that nobody claimed for, as of `ramify serve`; or one whose claimant was killed, and which ends.
    # Whoever wants the store's lock in this moment is refused, as it would be by the engine of this claim.
    try:
        store_fd = _lock(directory / LOCK_FILE)
    except OSError:
        os.close(fd)
        raise
    if store_fd is None:
        os.close(fd)
        return None
    os.close(store_fd)
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()}\n".encode(), 0)
    return TierClaim(directory, fd)


def _lock(path: Path) -> int | None:
    """Lock a file; returns the descriptor that holds the lock, or None: another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:
        os.close(fd)
        raise
    return fd
