"""How much memory this process may still take."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that could be allocated now, the page cache included; a container's limit counts.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        most, now = _text(groups / limit).strip(), _text(groups / used).strip()
        if most.isdigit() and now.isdigit():
            free = min(free, max(0, int(most) - int(now)))
    return free


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
