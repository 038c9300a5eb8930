"""`AdminCalls`: calls about caches and pins, run on every replica; one result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ramify.cache.pins import Pin
from ramify.cluster.members import RETRY_AFTER_S, Members
from ramify.cluster.merging import merged, renumbered_pin, split_id
from ramify.cluster.remote_replica import RemoteReplica
from ramify.engine.cache_admin import calls
from ramify.errors import NoReplicaError, PinError, ReplicaLostError

logger = logging.getLogger(__name__)

# Calls after which nobody expects a replica to have what they name.
ERASING = (calls.ClearCache, calls.EvictAnswers, calls.EndPins, calls.UnpinPrefix)


class AdminCalls:
    """Runs calls of `cache_admin.calls` on the replicas that are connected."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def run(self, call: Any) -> Any:
        """Run a call on every replica; returns one result.

        A replica that dies meanwhile is left out. A prefix is pinned where most of it is cached.

        Raises:
            NoReplicaError: no replica is connected; also what the call raises.
        """
        if isinstance(call, calls.Unpin):
            return await self._unpin(call.pin_id)
        results = await self._run_everywhere(call)
        if isinstance(call, calls.PinPrefix):
            return await self._keep_longest(results)
        return merged(call, [(replica.slot, value) for replica, value in results])

    async def _run_everywhere(self, call: Any) -> list[tuple[RemoteReplica, Any]]:
        """The results of the replicas on which a call succeeds; its error if there is none.

        A check fails if it does anywhere. What fails on some replicas only is a line in the log; a
        prefix can be pinned where it is cached only.
        """
        replicas = [replica for replica in self._members.replicas.values() if replica.welcome]
        if not replicas:
            raise NoReplicaError(RETRY_AFTER_S, self._members.why_not_ready())
        values = await asyncio.gather(
            *(replica.call(call) for replica in replicas), return_exceptions=True
        )
        results = dict(zip(replicas, values, strict=True))
        errors = [value for value in values if isinstance(value, BaseException)]
        failures = [error for error in errors if not isinstance(error, ReplicaLostError)]
        if failures and isinstance(call, calls.CheckCache):
            raise failures[0]
        if len(errors) == len(values):
            raise errors[0]
        if isinstance(call, ERASING):
            self._log_missed(call, results)
        elif not isinstance(call, calls.PinPrefix):
            for replica, value in results.items():
                if value in failures:
                    logger.warning(
                        "replica %s: %s failed: %s", replica.name, type(call).__name__, value
                    )
        return [
            (replica, value)
            for replica, value in results.items()
            if not isinstance(value, BaseException)
        ]

    def _log_missed(self, call: Any, results: Mapping[RemoteReplica, Any]) -> None:
        """Log the replicas that have not erased what the others have."""
        errors = {key: value for key, value in results.items() if isinstance(value, BaseException)}
        missed = {replica.name: str(error) for replica, error in errors.items()}
        for name, replica in self._members.replicas.items():
            if replica not in results:
                missed[name] = replica.last_error or "not connected"
        for name, reason in missed.items():
            logger.warning(
                "%s was not run on replica %s (%s): unless its engine has ended, it has what the others "
                "have erased",
                type(call).__name__,
                name,
                reason,
            )

    async def _keep_longest(self, pins: Sequence[tuple[RemoteReplica, Pin]]) -> Pin:
        """End all pins but the one of most tokens."""
        best, pin = max(pins, key=lambda entry: len(entry[1].key))
        others = [(replica, other) for replica, other in pins if replica is not best]
        await asyncio.gather(
            *(replica.call(calls.Unpin(other.id)) for replica, other in others),
            return_exceptions=True,
        )
        return renumbered_pin(pin, best.slot)

    async def _unpin(self, pin_id: int) -> None:
        local, slot = split_id(pin_id)
        for replica in self._members.replicas.values():
            if replica.slot == slot and replica.welcome is not None:
                with suppress(PinError):
                    await replica.call(calls.Unpin(local))
                    return
        raise PinError(f"no such pin (id {pin_id}) here; it expired or was unpinned before")
