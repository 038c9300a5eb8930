"""Panics of compiled libraries as errors of the request that met them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ramify.errors import LibraryPanicError, shortened


@contextmanager
def panics_as_errors(library: str) -> Iterator[None]:
    """Raise LibraryPanicError for a panic in the block, or in the function that this decorates.

    Rust's panics arrive as a PanicException, which no `except Exception` catches. Everything else,
    KeyboardInterrupt and SystemExit too, passes.

    Args:
        library: whose code may panic, for the message.
    """
    try:
        yield
    except BaseException as error:
        # The class is made anew in each compiled library: it has no common base to name.
        if type(error).__name__ != "PanicException" or isinstance(error, Exception):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise LibraryPanicError(library, shortened(reason)) from error
