"""Compiled grammars, an LRU cache for each tenant; permits to compile, shared fairly between tenants."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Generic, TypeVar

from ramify.params import StructuredOutput

MAX_CACHED = 256  # compiled grammars in all, including refused ones
MAX_CACHED_PER_TENANT = 64
MAX_CACHED_CHARS = 16_000_000  # of their specifications in all
MAX_CACHED_CHARS_PER_TENANT = 4_000_000
MAX_COMPILING = 4  # threads at once, including those past their deadline
MAX_COMPILING_PER_TENANT = 2

V = TypeVar("V")


class GrammarCache(Generic[V]):
    """The last used compiled grammars of each tenant. Not thread-safe.

    A tenant finds only what it compiled itself, so that no answer's time tells what others compile.
    When the cache is full, the tenant that takes most of it loses its least recently used grammar.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantGrammars[V]] = {}

    def __len__(self) -> int:
        return sum(len(grammars.by_spec) for grammars in self._tenants.values())

    def get(self, tenant: str, spec: StructuredOutput) -> V | None:
        """The grammar that this tenant compiled from `spec`, now its most recently used."""
        grammars = self._tenants.get(tenant)
        if grammars is None or spec not in grammars.by_spec:
            return None
        grammars.by_spec.move_to_end(spec)
        return grammars.by_spec[spec]

    def put(self, tenant: str, spec: StructuredOutput, value: V) -> None:
        """Keep a grammar, replacing that of the same `spec`, and evict until all limits hold."""
        grammars = self._tenants.setdefault(tenant, _TenantGrammars())
        if spec not in grammars.by_spec:
            grammars.num_chars += spec.num_chars
        grammars.by_spec[spec] = value
        grammars.by_spec.move_to_end(spec)
        while grammars.is_over(MAX_CACHED_PER_TENANT, MAX_CACHED_CHARS_PER_TENANT):
            grammars.evict()
        while len(self) > MAX_CACHED or self._num_chars > MAX_CACHED_CHARS:
            largest = max(self._tenants, key=lambda name: self._tenants[name].share)
            self._tenants[largest].evict()
            if not self._tenants[largest].by_spec:
                del self._tenants[largest]

    @property
    def _num_chars(self) -> int:
        return sum(grammars.num_chars for grammars in self._tenants.values())


class _TenantGrammars(Generic[V]):
    def __init__(self) -> None:
        self.by_spec: OrderedDict[StructuredOutput, V] = OrderedDict()
        self.num_chars = 0

    @property
    def share(self) -> float:
        """The larger of its shares of the two limits."""
        return max(len(self.by_spec) / MAX_CACHED, self.num_chars / MAX_CACHED_CHARS)

    def is_over(self, max_grammars: int, max_chars: int) -> bool:
        # The last one stays, so that the engine thread finds what was just compiled.
        num_grammars = len(self.by_spec)
        return num_grammars > max_grammars or (num_grammars > 1 and self.num_chars > max_chars)

    def evict(self) -> None:
        spec, _ = self.by_spec.popitem(last=False)
        self.num_chars -= spec.num_chars


class CompilePermits:
    """At most `MAX_COMPILING` compilations at once, and `MAX_COMPILING_PER_TENANT` of one tenant.

    Waiting tickets: first by running compilations of the tenant, then by arrival.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: dict[str, int] = {}
        self._waiting: list[object] = []  # tickets, in order of arrival
        self._tenants: dict[object, str] = {}

    def acquire(self, tenant: str, timeout_s: float) -> bool:
        """Wait for a permit; returns whether one came in time."""
        ticket, deadline = object(), time.monotonic() + timeout_s
        with self._changed:
            self._waiting.append(ticket)
            self._tenants[ticket] = tenant
            try:
                while self._next() is not ticket:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        if self._next() is ticket:
                            break
                        return False
                self._running[tenant] = self._running.get(tenant, 0) + 1
                return True
            finally:
                self._waiting.remove(ticket)
                del self._tenants[ticket]
                self._changed.notify_all()

    def release(self, tenant: str) -> None:
        """Give a permit back."""
        with self._changed:
            self._running[tenant] -= 1
            if not self._running[tenant]:
                del self._running[tenant]
            self._changed.notify_all()

    def _next(self) -> object | None:
        """The ticket whose turn it is; None if nobody may start."""
        if sum(self._running.values()) >= MAX_COMPILING:
            return None
        num_running = [self._running.get(self._tenants[ticket], 0) for ticket in self._waiting]
        fewest = min(num_running, default=MAX_COMPILING_PER_TENANT)
        if fewest >= MAX_COMPILING_PER_TENANT:
            return None
        return self._waiting[num_running.index(fewest)]
