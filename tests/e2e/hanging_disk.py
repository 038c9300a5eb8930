"""`ramify` over a disk whose reads do not return once a file exists.

python -m tests.e2e.hanging_disk FILE serve MODEL …
"""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ramify.cli import app
from ramify.kv.stores import segments
from ramify.kv.stores.file_ops import OsFileOps

HANGS = Path(sys.argv[1])


class HangingOps(OsFileOps):
    """Reads that wait for ever."""

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        if HANGS.exists():
            threading.Event().wait()
        return super().read(fd, buffers, offset)

    def read_cached(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps; every read goes to the disk."""
        return 0


if __name__ == "__main__":
    # No option of a server chooses the calls of its disk.
    segments.OsFileOps = HangingOps  # type: ignore[attr-defined]
    app(sys.argv[2:])
