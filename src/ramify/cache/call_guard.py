"""`CallGuard`: lets one thread at a time into a cache and all that works on it; refuses others.

A cache, its planner and its engine share one guard, so that a step of the engine is one call: no
other thread gets between two of its calls on the cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import Concatenate, Final, NoReturn, ParamSpec, Protocol, TypeVar

from ramify.errors import ConcurrentCallError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

UNNAMED: Final = -1  # in place of the identifier of the thread that is inside a hot method


class CallGuard:
    """The thread that is inside now, and its outermost call.

    A thread that is inside may enter again: a planner calls its cache, a callback calls back. An
    object may pass from thread to thread, as long as their calls do not overlap.

    The hot methods of `PrefixCache` do in their bodies what `guarded` does, without asking for the
    identifier of the thread: that alone costs them 2 %.

    CPython switches threads, and raises KeyboardInterrupt, at calls and in loops only. Between a
    test of `thread`, the assignment and the `try` after it there must be neither.
    """

    __slots__ = ("call", "thread")

    def __init__(self) -> None:
        self.thread = 0  # identifier of the thread that is inside; 0: none
        self.call = ""  # its outermost call; empty for `UNNAMED`

    def enter(self, call: str) -> None:
        """Let this thread in, which is not inside; a `finally` must set `thread` and `call` back.

        Raises:
            ConcurrentCallError: another thread is inside; nothing has changed.
        """
        caller = get_ident()
        if self.thread:
            self.refuse(call)
        self.thread, self.call = caller, call

    def require(self, call: str) -> None:
        """Raise ConcurrentCallError unless this thread is inside. Call it only if some thread is."""
        if self.thread != get_ident():
            self.refuse(call)

    def callback(self, observer: Callable[[T], None]) -> Callable[[T], None]:
        """An observer that hot methods call: it may call back, since this thread is inside."""

        def call(argument: T) -> None:
            outer, self.thread = self.thread, get_ident()
            try:
                observer(argument)
            finally:
                self.thread = outer

        return call

    def refuse(self, call: str) -> NoReturn:
        """Raise ConcurrentCallError: this thread made `call` while another thread is inside."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        raise ConcurrentCallError(
            call,
            names.get(get_ident(), "?"),
            f"{self.call}()" if self.call else "a call of PrefixCache",
            names.get(self.thread, "?"),
        )


class Guarded(Protocol):
    """An object that lets one thread at a time in."""

    @property
    def guard(self) -> CallGuard:
        """The guard, shared with all objects that change the same state."""


G = TypeVar("G", bound=Guarded)


def guarded(function: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """Decorate a method, or a function over a guarded object: calls enter the object's guard."""
    name = function.__qualname__

    @wraps(function)
    def call(owner: G, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard, caller = owner.guard, get_ident()
        if guard.thread:
            if guard.thread != caller:
                guard.refuse(name)
            return function(owner, *args, **kwargs)
        guard.thread, guard.call = caller, name
        try:
            return function(owner, *args, **kwargs)
        finally:  # no method `leave`: an interrupt at its beginning would keep the thread inside
            guard.thread, guard.call = 0, ""

    return call
