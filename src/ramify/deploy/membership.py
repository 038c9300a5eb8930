"""`Membership`: keeps the replicas of a `ClusterLLM` those that a launcher names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ramify.cluster.client import ClusterLLM
from ramify.cluster.credentials import Credentials
from ramify.cluster.routes import CacheRoutes
from ramify.errors import RamifyError

logger = logging.getLogger(__name__)

PERIOD_S = 0.5  # between two meetings


@dataclass(frozen=True, slots=True)
class Member:
    """An engine that takes requests, and the secret that it wants to be shown."""

    name: str
    address: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Roster:
    """The engines that there are.

    Args:
        is_complete: whether others are gone; else some have not answered.
    """

    members: Sequence[Member]
    is_complete: bool = True


class MeetError(RamifyError):
    """The launcher cannot say which engines there are; the text says why."""


# By name of an engine: seconds of computing that wait there, and its requests.
Work = Mapping[str, tuple[float, int]]
# Gives the engines their work as this server knows it, and returns who they are.
Meet = Callable[[Work], Awaitable[Roster]]


class Membership:
    """Adds engines to a client that have come, and removes those that have gone.

    Args:
        routes: of the client.
        meet: may raise `MeetError`: then the members stay as they are.
        credentials: of this server, to which the secret of each engine is added.
    """

    def __init__(
        self,
        client: ClusterLLM,
        routes: CacheRoutes,
        meet: Meet,
        *,
        credentials: Credentials | None = None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._client, self._routes, self._meet = client, routes, meet
        self._credentials, self._period_s = credentials or Credentials(), period_s
        self._names: set[str] = set()
        self._last_error = ""

    async def keep(self) -> None:
        """Meet until cancelled."""
        while True:
            try:
                await self.update()
            except MeetError as error:
                if str(error) != self._last_error:
                    level = logging.WARNING if self._names else logging.INFO
                    logger.log(level, "the engines cannot be listed: %s", error)
                self._last_error = str(error)
            except Exception:
                # Without it engines would come and go unseen.
                logger.exception("the engines were not looked at, by a bug")
            else:
                self._last_error = ""
            await asyncio.sleep(self._period_s)

    async def update(self) -> None:
        """Meet once.

        Raises:
            MeetError: nobody says which engines there are.
        """
        roster = await self._meet(self._routes.queues())
        names = {member.name for member in roster.members}
        for member in roster.members:
            if member.name not in self._names:
                logger.info("engine %s has come, at %s", member.name, member.address)
                self._names.add(member.name)
                shown = replace(self._credentials, secret=member.secret)
                self._client.add(member.name, member.address, shown)
        for name in self._names - names if roster.is_complete else ():
            logger.info("engine %s goes", name)
            self._names.remove(name)
            self._client.remove(name)
