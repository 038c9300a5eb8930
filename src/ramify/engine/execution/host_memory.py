"""`free_memory`: bytes that this process may still allocate; `resident_memory`: bytes that it has."""

from __future__ import annotations

import os
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that could be allocated now: available memory, but within the cgroup's limit.

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
        limit_bytes, used_bytes = _text(groups / limit).strip(), _text(groups / used).strip()
        if limit_bytes.isdigit() and used_bytes.isdigit():
            free = min(free, max(0, int(limit_bytes) - int(used_bytes)))
    return free


def resident_memory(root: Path = Path("/")) -> int:
    """Bytes of this process in memory, mapped files included; 0 if the system does not say."""
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return ""
