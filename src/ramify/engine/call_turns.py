"""`CallTurns`: serialises the calls of several threads on one engine; none interrupts another."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from threading import Lock, get_ident
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from ramify.cache.call_guard import CallGuard

P = ParamSpec("P")
R = TypeVar("R")


class CallTurns:
    """The queue of calls that may wait for each other, in the order in which they came.

    Args:
        guard: of the engine; a call is inside from its first line to its last.

    A call from a callback of the running call does not wait for it. A callback that waits for
    another thread's call deadlocks.
    """

    def __init__(self, guard: CallGuard) -> None:
        self._guard = guard
        self._loop = CallGuard()
        self._running = Lock()
        self._last = Lock()  # of the newest call, which holds it until it has ended

    def run(self, name: str, call: Callable[[], R]) -> R:
        """Return `call()`, run when the calls before it have ended.

        Raises:
            ConcurrentCallError: another thread uses the engine or its cache directly.
        """
        guard = self._guard
        if guard.thread == get_ident():
            return call()
        mine = Lock()
        with mine:
            previous, self._last = self._last, mine
            with previous:  # a plain lock could be taken again and again by one busy thread
                pass
            # `previous` gives the order only: an interrupted wait lets the next call go on too soon.
            with self._running:
                guard.enter(name)
                try:
                    return call()
                finally:
                    guard.thread, guard.call = 0, ""

    def run_in_loop(self, name: str, call: Callable[[], R]) -> R:
        """`run`, but refused while another thread is in `run_in_loop`.

        Two threads that step would take each other's outputs, even one after the other.

        Raises:
            ConcurrentCallError: see above.
        """
        loop = self._loop
        if self._guard.thread == get_ident():
            return call()
        loop.enter(name)
        try:
            return self.run(name, call)
        finally:
            loop.thread, loop.call = 0, ""


class TakesTurns(Protocol):
    """An object over an engine; its calls take turns with those of the engine's other objects."""

    @property
    def turns(self) -> CallTurns:
        """`EngineCore.turns`."""


S = TypeVar("S", bound=TakesTurns)


def whole_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method that may wait for other threads' calls: see `CallTurns.run`."""
    name = method.__qualname__

    @wraps(method)
    def call(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return owner.turns.run(name, partial(method, owner, *args, **kwargs))

    return call


def loop_call(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a method of an `add_request` and `step` loop: see `CallTurns.run_in_loop`."""
    name = method.__qualname__

    @wraps(method)
    def call(owner: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return owner.turns.run_in_loop(name, partial(method, owner, *args, **kwargs))

    return call
