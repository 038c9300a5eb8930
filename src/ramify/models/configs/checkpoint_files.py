"""`read_checkpoint_file`: the bytes of a checkpoint's file, if it is a file of a sensible size."""

from __future__ import annotations

import stat
from pathlib import Path

from ramify.errors import CheckpointError

# The largest of real checkpoints: an index of 9 MB, a tokenizer of 34 MB, a template of 30 kB.
MAX_JSON_BYTES = 128 << 20
MAX_TOKENIZER_BYTES = 512 << 20
MAX_TEMPLATE_BYTES = 4 << 20
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read_checkpoint_file(path: Path, max_bytes: int) -> bytes:
    """The contents of a file.

    Raises:
        CheckpointError: see `check_checkpoint_file`.
        OSError: it is missing or cannot be read.
    """
    num_bytes = check_checkpoint_file(path, max_bytes)
    with path.open("rb") as file:
        return file.read(num_bytes)


def check_checkpoint_file(path: Path, max_bytes: int | None = None) -> int:
    """Check, without opening it, that a path leads to a file; returns its size in bytes.

    Raises:
        CheckpointError: it is a device, a named pipe or the like, which reading may never end, or it has
            more than `max_bytes`, sparse or not.
        OSError: there is nothing.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise CheckpointError(f"{path} is {kind}, not a file; download it again")
    if max_bytes is not None and status.st_size > max_bytes:
        raise CheckpointError(
            f"{path} has {status.st_size:,} bytes, but at most {max_bytes:,} are read; download it again"
        )
    return status.st_size
