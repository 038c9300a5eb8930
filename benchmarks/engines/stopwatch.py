"""Time per part of an engine step, measured around every public call of four classes.

Time inside a nested measured call counts towards the nested call's part only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Seconds by part of the engine. Replaces methods of classes: use a separate process."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._own: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0
        self.num_steps = 0

    @classmethod
    def of_engine(cls, core: Any) -> Stopwatch:
        """Measure the cache, planner, scheduler and executor of an engine."""
        watch = cls()
        watch.measure("cache", type(core.cache))
        watch.measure("planner", type(core.planner))
        watch.measure("scheduler", type(core.scheduler))
        watch.measure("execute", type(core.executor), steps=True)
        return watch

    def measure(self, part: str, kind: type, *, steps: bool = False) -> None:
        """Count the public methods and properties of a class towards a part."""
        for name, value in list(vars(kind).items()):
            if name.startswith("_"):
                continue
            if isinstance(value, property) and value.fget is not None:
                setattr(kind, name, property(self._timed(part, value.fget), value.fset))
            elif callable(value) and not isinstance(value, type):
                setattr(kind, name, self._timed(part, value, step=steps and name == "begin"))

    def reset(self) -> None:
        """Set all times and the step count to zero."""
        self._own, self.num_steps = {}, 0

    def spent(self, total: float) -> dict[str, float]:
        """Seconds by part; `other` is the rest of `total`."""
        seconds = {name: self._own.get(name, 0.0) for name in PARTS}
        return seconds | {"other": total - sum(seconds.values())}

    def _timed(self, part: str, call: Callable[..., Any], *, step: bool = False) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **named: Any) -> Any:
            self.num_steps += step
            self._switch(part)
            try:
                return call(*args, **named)
            finally:
                self._back()

        return timed

    def _switch(self, part: str) -> None:
        now = self._clock()
        if self._open:
            self._charge(now)
        self._open.append(part)
        self._since = now

    def _back(self) -> None:
        now = self._clock()
        self._charge(now)
        self._open.pop()
        self._since = now

    def _charge(self, now: float) -> None:
        part = self._open[-1]
        self._own[part] = self._own.get(part, 0.0) + now - self._since


PARTS = ("cache", "planner", "scheduler", "execute")
