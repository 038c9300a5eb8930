"""Freed memory given back to the system while a checkpoint loads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim_heap() -> None:
    """Give freed pages of glibc's heap back; without effect elsewhere.

    glibc keeps what temporary matrices leave between blocks in use: 0.7 GB after 1.1 B weights.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    # musl has none.
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
