"""`ConnectionLimit`: how many connections are open, from which addresses, and which are idle."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from ramify.errors import ConfigError

# The descriptor limit is raised to at most this: a scan over all connections takes under 1 ms.
MAX_DESCRIPTORS = 16_384
# Descriptors for everything else: checkpoint files, logs, records, lookups of names.
RESERVED_DESCRIPTORS = 128


class Connection(Protocol):
    """A connection that can be closed; its unsent output is flushed first."""

    def close_idle(self) -> None:
        """Close the connection, which has no request in progress."""


class ConnectionLimit:
    """Open connections, counted in all and by address.

    Args:
        max_connections: in all.
        max_per_address: of one client address; less than `max_connections`, so that one address
            leaves room for others.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self.max_connections, self.max_per_address = max_connections, max_per_address
        self.on_room: list[Callable[[], None]] = []
        self._addresses: dict[Connection, str] = {}
        self._num_open: Counter[str] = Counter()
        # Idle connections, the longest idle first: those without any request, and those after one.
        self._silent: dict[Connection, None] = {}
        self._kept_alive: dict[Connection, None] = {}

    @classmethod
    def of(
        cls, max_connections: int | None, max_per_address: int | None, *, num_descriptors: int
    ) -> ConnectionLimit:
        """Limits below the number of descriptors that this process may open.

        Args:
            max_connections: None: all descriptors but `RESERVED_DESCRIPTORS`.
            max_per_address: None: three quarters of the connections.

        Raises:
            ConfigError: more connections than descriptors allow, or more per address than in all.
        """
        available = num_descriptors - min(RESERVED_DESCRIPTORS, num_descriptors // 2)
        if max_connections is None:
            max_connections = available
        if max_connections > available:
            raise ConfigError(
                f"--max-connections {max_connections} needs more than the {num_descriptors} "
                f"descriptors of this process, which leave room for {available}; raise `ulimit -n`"
            )
        if max_per_address is None:
            max_per_address = max(1, max_connections * 3 // 4)
        if max_per_address > max_connections:
            raise ConfigError(
                f"--max-connections-per-address {max_per_address} is more than the "
                f"{max_connections} connections in all; give a larger --max-connections"
            )
        return cls(max_connections, max_per_address)

    @property
    def num_connections(self) -> int:
        """Open connections."""
        return len(self._addresses)

    @property
    def is_full(self) -> bool:
        """True if no further connection may be opened."""
        return len(self._addresses) >= self.max_connections

    def is_full_for(self, address: str) -> bool:
        """True if `address` has as many connections as one address may have."""
        return self._num_open[address] >= self.max_per_address

    def add(self, connection: Connection, address: str) -> None:
        """Count a connection; it is in use until `set_idle` says otherwise."""
        self._addresses[connection] = address
        self._num_open[address] += 1

    def remove(self, connection: Connection) -> None:
        """Forget a connection that is closed; nothing happens if it is not counted."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._num_open[address] -= 1
        if not self._num_open[address]:
            del self._num_open[address]
        self._silent.pop(connection, None)
        self._kept_alive.pop(connection, None)
        self._notify()

    def set_busy(self, connection: Connection) -> None:
        """Record that a request of a connection is in progress."""
        self._silent.pop(connection, None)
        self._kept_alive.pop(connection, None)

    def set_idle(self, connection: Connection, *, is_silent: bool) -> None:
        """Record that a connection has no request in progress.

        Args:
            is_silent: it has not sent a request yet.
        """
        if connection in self._addresses:
            (self._silent if is_silent else self._kept_alive).setdefault(connection)
            self._notify()

    def close_idle(self, limit: int, address: str | None = None) -> int:
        """Close at most `limit` idle connections, silent ones first; returns how many.

        Args:
            address: only connections from there; None: from any.
        """
        num_closed = 0
        for idle in (self._silent, self._kept_alive):
            for connection in list(idle):
                if num_closed == limit:
                    return num_closed
                if address is None or self._addresses[connection] == address:
                    del idle[connection]
                    connection.close_idle()
                    num_closed += 1
        return num_closed

    def _notify(self) -> None:
        for call in self.on_room:
            call()


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open descriptors to the hard one, up to `MAX_DESCRIPTORS`; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = soft == resource.RLIM_INFINITY
    if is_unlimited or soft >= MAX_DESCRIPTORS:
        return MAX_DESCRIPTORS
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted
