"""`ClusterView`: the replicas of a `ClusterLLM` for metrics, statistics and explanations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramify.cluster.dispatch import Dispatch
from ramify.cluster.members import RETRY_AFTER_S
from ramify.cluster.merging import merged_branches, split_id, summed
from ramify.cluster.remote_replica import RemoteReplica
from ramify.engine.cache_admin import calls
from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView
from ramify.errors import ConfigError, NoReplicaError
from ramify.server.replicas import ClusterStats, ReplicaState, ReplicaStats, RoutingCounts


class ClusterView:
    """Reads what a `Dispatch` and its replicas know; it is a `Replicas`."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def states(self) -> Sequence[ReplicaState]:
        """See `Replicas`."""
        return [self._state(replica) for replica in self._dispatch.replicas.values()]

    def _state(self, replica: RemoteReplica) -> ReplicaState:
        mirror = self._dispatch.routes.mirror(replica.name)
        welcome = replica.welcome
        if welcome is None:
            state = "not connected"
        else:
            state = "draining" if replica.is_draining else "ready"
        return ReplicaState(
            replica.slot,
            replica.name,
            state,
            replica.last_error,
            None if welcome is None else welcome.incarnation,
            replica.num_starts,
            welcome is not None and mirror.is_known,
            mirror.num_pages,
            mirror.queue_s,
        )

    def counts(self) -> RoutingCounts:
        """See `Replicas`."""
        dispatch = self._dispatch
        return dispatch.routes.counts(
            dict(dispatch.refusals), dispatch.num_reroutes, dispatch.num_resumptions
        )

    async def stats(self, timeout_s: float) -> ClusterStats:
        """See `Replicas`."""
        # Taken now: a replica may leave while it is asked.
        connected = {
            replica: replica.welcome
            for replica in self._dispatch.replicas.values()
            if replica.welcome is not None
        }
        answers = await self._ask(calls.ReadStats(), timeout_s)
        replicas: dict[str, ReplicaStats] = {}
        for replica, welcome in connected.items():
            stats = answers.get(replica.name)
            if replica.welcome is welcome:
                # In a long step it answers late: what it had before is nearer to the truth than 0.
                replica.last_stats = stats = stats or replica.last_stats
            if stats is not None:
                replicas[replica.name] = ReplicaStats(
                    replica.slot, welcome.incarnation, welcome.config.max_num_seqs, stats
                )
        values = [replica.stats for replica in replicas.values()]
        return ClusterStats(replicas, summed(values) if values else None)

    async def cached_tokens(
        self, token_ids: Sequence[int], tenant: str, salt: str, timeout_s: float
    ) -> Mapping[str, int]:
        """See `Replicas`."""
        answers = await self._ask(calls.ExplainToTenant(token_ids, tenant, salt), timeout_s)
        return {
            name: 0 if explanation is None else explanation.read_tokens
            for name, explanation in answers.items()
        }

    async def branches(self, query: BranchQuery, timeout_s: float) -> BranchView:
        """See `Replicas`."""
        connected = [
            replica for replica in self._dispatch.replicas.values() if replica.welcome is not None
        ]
        if query.below:
            return await self._branches_below(query, connected, timeout_s)
        share = -(-query.max_nodes // max(1, len(connected)))
        answers = await self._ask(calls.ReadBranches(replace(query, max_nodes=share)), timeout_s)
        slots = {replica.name: replica.slot for replica in connected}
        results = [(slots[name], view) for name, view in answers.items() if name in slots]
        if not results:
            raise NoReplicaError(RETRY_AFTER_S, "none answers")
        return merged_branches(results)

    async def _branches_below(
        self, query: BranchQuery, connected: Sequence[RemoteReplica], timeout_s: float
    ) -> BranchView:
        """Branches of the replica that has the node."""
        local, slot = split_id(query.below)
        for replica in connected:
            if replica.slot == slot and local:
                call = calls.ReadBranches(replace(query, below=local))
                try:
                    async with asyncio.timeout(timeout_s):
                        return merged_branches([(slot, await replica.call(call))])
                except ConfigError:  # it names the node as the replica does
                    break
        raise ConfigError(
            f"node {query.below} is not in a cache; it was evicted, never was, or its engine has gone"
        )

    async def _ask(self, call: Any, timeout_s: float) -> dict[str, Any]:
        """The results of the connected replicas that answer in time, by name."""
        tasks = {
            replica.name: asyncio.ensure_future(replica.call(call))
            for replica in self._dispatch.replicas.values()
            if replica.welcome is not None
        }
        if not tasks:
            return {}
        try:
            await asyncio.wait(tasks.values(), timeout=timeout_s)
        finally:
            late = [task for task in tasks.values() if not task.done()]
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {
            name: task.result()
            for name, task in tasks.items()
            if not task.cancelled() and task.exception() is None
        }
