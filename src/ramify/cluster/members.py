"""`Members`: the replicas of a client by name, and the tasks that keep it connected to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ramify.cluster.credentials import Credentials
from ramify.cluster.merging import MAX_REPLICAS
from ramify.cluster.remote_replica import Cluster, RemoteReplica
from ramify.errors import ConfigError

RETRY_AFTER_S = 1.0  # while there is no replica


class Members:
    """Connects to each replica until it is removed and has ended. For one event loop.

    Args:
        cluster: what the replicas report to.
        gone: gets the name of a replica that was removed, once its connection has ended.
        link_options: of `Link`.
    """

    def __init__(
        self,
        cluster: Cluster,
        credentials: Credentials,
        gone: Callable[[str], None],
        **link_options: Any,
    ) -> None:
        self._cluster, self._credentials, self._gone = cluster, credentials, gone
        self._link_options = link_options
        self.replicas: dict[str, RemoteReplica] = {}
        self._num_slots = 0  # ever given to replicas
        self._is_started = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def numbers(self) -> dict[str, int]:
        """The number of each replica, for clients."""
        return {name: replica.slot for name, replica in self.replicas.items()}

    @property
    def has_ready(self) -> bool:
        """Whether a replica takes requests."""
        return any(replica.is_ready for replica in self.replicas.values())

    def why_not_ready(self) -> str:
        """What is known of each replica that takes no requests."""
        return "; ".join(
            f"{name}: {replica.last_error or 'not connected yet'}"
            for name, replica in self.replicas.items()
            if not replica.is_ready
        )

    def namespaces(self) -> list[bytes]:
        """Those of the replicas' caches, each once."""
        welcomes = [replica.welcome for replica in self.replicas.values()]
        return [*dict.fromkeys(welcome.namespace for welcome in welcomes if welcome is not None)]

    def add(self, name: str, address: str, credentials: Credentials | None = None) -> None:
        """Connect to a replica until `remove`.

        A replica with this name that is here, or is leaving, stays: its next connection is to `address`.

        Raises:
            ConfigError: there are `MAX_REPLICAS`.
        """
        shown = credentials or self._credentials
        replica = self.replicas.get(name)
        if replica is None:
            self.replicas[name] = replica = self._make(name, address, shown)
            if self._is_started:
                self._connect(replica)
        else:
            replica.move(address, shown)
        replica.is_leaving = False

    def remove(self, name: str) -> None:
        """Connect no more to a replica; its present connection goes on until it ends."""
        self.replicas[name].leave()

    def start(self) -> None:
        """Connect to all."""
        self._is_started = True
        for replica in self.replicas.values():
            self._connect(replica)

    async def all_refused(self) -> None:
        """Wait until every replica has refused this server once, or was refused."""
        for replica in [*self.replicas.values()]:
            await replica.was_refused.wait()

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = set()

    def _make(self, name: str, address: str, credentials: Credentials) -> RemoteReplica:
        if len(self.replicas) >= MAX_REPLICAS:
            raise ConfigError(
                f"{name} would be replica {len(self.replicas) + 1} of one server, and the most are "
                f"{MAX_REPLICAS}; start another server for it"
            )
        slots = {replica.slot for replica in self.replicas.values()}
        # In turn, so that the pins of a replica that has left are not soon those of another one.
        while (slot := self._num_slots % MAX_REPLICAS) in slots:
            self._num_slots += 1
        self._num_slots += 1
        return RemoteReplica(name, slot, address, self._cluster, credentials, **self._link_options)

    def _connect(self, replica: RemoteReplica) -> None:
        task = asyncio.ensure_future(self._keep_connected(replica))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_connected(self, replica: RemoteReplica) -> None:
        await replica.keep_connected()
        del self.replicas[replica.name]
        self._gone(replica.name)
