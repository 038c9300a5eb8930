"""Lists and dicts that the cyclic garbage collector skips: the columns of the tree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

Container = TypeVar("Container")


def _untracker() -> Callable[[object], None]:
    """CPython's `PyObject_GC_UnTrack`; elsewhere a function that does nothing."""
    if sys.implementation.name == "cpython":
        try:
            import ctypes

            kind = ctypes.PYFUNCTYPE(None, ctypes.py_object)
            return kind(("PyObject_GC_UnTrack", ctypes.pythonapi))
        except (ImportError, AttributeError, OSError):
            pass
    return lambda _: None


_untrack = _untracker()


def untracked(container: Container) -> Container:
    """Hide a list or dict of numbers and bytes from the garbage collector; returns it.

    A list is five times as fast to read and write as an `array`, but every full collection traverses
    it: milliseconds for a million entries. Numbers, bytes and views of bytes are part of no cycle, so
    that nothing is lost. Store nothing else: a reference back to the container would never be freed.
    """
    _untrack(container)
    return container
