"""Digest of a checkpoint's content, computed once per file and remembered on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ramify.errors import CheckpointError
from ramify.models.configs.quantization.config import FILES_BESIDE
from ramify.models.gguf.container import is_gguf, part_paths
from ramify.reasons import reason_of

logger = logging.getLogger(__name__)

# Chunks are hashed by several threads: SHA-256 reaches 1.8 GB/s on one core, and releases the
# interpreter lock.
CHUNK_BYTES = 16 << 20
MAX_THREADS = 16
MAX_REMEMBERED = 1024  # files; the oldest entries are dropped


def checkpoint_files(path: Path) -> list[Path]:
    """The files of a checkpoint that hold weights, and say how they are quantised."""
    if is_gguf(path):
        return [*part_paths(path)]
    beside = [path / name for name in FILES_BESIDE if (path / name).is_file()]
    return [*sorted(path.glob("*.safetensors")), *beside]


def content_digest(files: Sequence[Path], store: DigestStore) -> str:
    """32 hexadecimal digits, a function of the files' bytes in this order; names do not count.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        try:
            digest.update(bytes.fromhex(store.digest_of(file)))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {reason_of(error, file)}") from error
    return digest.hexdigest()


class DigestStore:
    """Digests of files by device, inode, size and time of the last change, in a JSON file.

    If the file is corrupt or cannot be written, digests are computed again. Writes replace the file
    atomically, so that several processes can share it.

    Args:
        path: None remembers nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def digest_of(self, file: Path) -> str:
        """Digest of a file's bytes, 64 hexadecimal digits.

        Raises:
            OSError: the file cannot be read.
        """
        stat = file.stat()
        key = f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        entries = self._read()
        digest = entries.get(key)
        if digest is None:
            digest = entries[key] = _file_digest(file, stat.st_size)
            self._write({**self._read(), key: digest})
        return digest

    def _read(self) -> dict[str, str]:
        if self._path is None:
            return {}
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))
            if not all(len(bytes.fromhex(digest)) == 32 for digest in entries.values()):
                raise ValueError("a digest has another length")
            return dict(entries)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.info("ignoring the digests in %s: %s", self._path, error)
            return {}

    def _write(self, entries: dict[str, str]) -> None:
        if self._path is None:
            return
        kept = dict([*entries.items()][-MAX_REMEMBERED:])
        scratch: str | None = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, scratch = tempfile.mkstemp(dir=self._path.parent, prefix=".digests-")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(kept, file, indent=1)
            Path(scratch).replace(self._path)
        except OSError as error:
            logger.info("cannot write the digests to %s: %s", self._path, error)
            if scratch is not None:
                with contextlib.suppress(OSError):
                    Path(scratch).unlink()


def _file_digest(file: Path, num_bytes: int) -> str:
    """SHA-256 of the chunks' SHA-256; chunks are read and hashed by several threads."""

    def chunk_digest(start: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.sha256(stream.read(CHUNK_BYTES)).digest()

    starts = range(0, num_bytes, CHUNK_BYTES)
    num_threads = min(MAX_THREADS, os.cpu_count() or 1, max(1, len(starts)))
    whole = hashlib.sha256(num_bytes.to_bytes(8, "big"))
    with ThreadPoolExecutor(num_threads) as threads:
        for digest in threads.map(chunk_digest, starts):
            whole.update(digest)
    return whole.hexdigest()
