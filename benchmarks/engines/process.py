"""Age and memory of a process, as Linux counts them."""

from __future__ import annotations

import os
import time
from pathlib import Path


def age_s() -> float:
    """Seconds since this process began, to a clock tick."""
    # The name, in brackets, may hold spaces; 20 fields after its end is the start, in ticks since boot.
    fields = Path("/proc/self/stat").read_text("ascii").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def peak_memory(process: str = "self") -> int:
    """Largest resident memory in bytes of a process so far, by its number; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("ascii").splitlines()
    except FileNotFoundError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM")), 0)
