"""Panics of compiled libraries as errors of the request that met them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from ramify.errors import LibraryPanicError, shortened

P = ParamSpec("P")
T = TypeVar("T")


class PanicGuard:
    """Raises LibraryPanicError for a panic in a `with` block, or in a function that it decorates.

    Written out, because `contextlib` makes a generator for each call: as long as decoding a token.
    """

    def __init__(self, library: str) -> None:
        self._library = library

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._raise_if_panic(error)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function with every call guarded."""

        @wraps(function)
        def guarded(*args: P.args, **options: P.kwargs) -> T:
            try:
                return function(*args, **options)
            except BaseException as error:
                self._raise_if_panic(error)
                raise

        return guarded

    def _raise_if_panic(self, error: BaseException) -> None:
        # The class is made anew in each compiled library: it has no common base to name.
        if type(error).__name__ == "PanicException" and not isinstance(error, Exception):
            reason = str(error).strip().partition("\n")[0]
            raise LibraryPanicError(self._library, shortened(reason)) from error


def panics_as_errors(library: str) -> PanicGuard:
    """Raise LibraryPanicError for a panic in the block, or in the function that this decorates.

    Rust's panics arrive as a PanicException, which no `except Exception` catches. Everything else,
    KeyboardInterrupt and SystemExit too, passes.

    Args:
        library: whose code may panic, for the message.
    """
    return PanicGuard(library)
