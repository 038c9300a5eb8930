"""Containers that the cyclic garbage collector does not traverse: the columns of the tree."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

Container = TypeVar("Container")


def _untracker() -> Callable[[object], None]:
    """CPython's own `PyObject_GC_UnTrack`, where it can be had."""
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
    """Take a list or dict of numbers and bytes off the collector's books.

    Reading and writing an entry of a list takes a fifth or less of what an `array` takes. But in
    every full collection a list is traversed, and what it holds, too: milliseconds for a million
    entries. What holds numbers, bytes and views of bytes is part of no cycle, so that nothing is
    lost by not looking at it. (Anything that refers back to it would never be collected.)
    """
    _untrack(container)
    return container
