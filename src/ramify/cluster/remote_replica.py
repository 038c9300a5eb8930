"""`RemoteReplica`: one replica as a `ClusterLLM` sees it, through one connection after the other."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from ramify.cluster.codecs import decode_error, decode_result
from ramify.cluster.credentials import Credentials
from ramify.cluster.link import Link, LinkError, RefusedError
from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.wire import (
    MAX_CALLS,
    Abort,
    Call,
    Draining,
    FromReplica,
    Hello,
    ReplaceWeights,
    Return,
    SnapshotPart,
    Step,
    TakeSnapshot,
    Welcome,
    WireError,
)
from ramify.engine.cache_admin.calls import EngineCall
from ramify.engine.context import EngineStats
from ramify.errors import ReplicaLostError

logger = logging.getLogger(__name__)

LEAVING = "this server ends"
MIN_RETRY_S, MAX_RETRY_S = 0.05, 5.0  # between tries to connect
REFUSED_RETRY_S = 30.0  # whoever has started it may start it anew, as it should be


class Cluster(Protocol):
    """What a replica reports to; `ClusterLLM`."""

    def hello(self) -> Hello:
        """What a replica must equal."""
        ...

    def check_welcome(self, welcome: Welcome) -> str | None:
        """Why a replica cannot join; None if it can."""
        ...

    def joined(self, replica: RemoteReplica) -> None:
        """A connection has begun."""
        ...

    def left(self, replica: RemoteReplica, requests: list[RemoteRequest], reason: str) -> None:
        """The connection has ended; these requests were live."""
        ...

    def draining(self, replica: RemoteReplica) -> None:
        """The replica takes no new requests."""
        ...

    def step(self, replica: RemoteReplica, step: Step) -> None:
        """What changed at the replica."""
        ...

    def snapshot(self, replica: RemoteReplica, part: SnapshotPart) -> None:
        """Some of the pages that the replica has cached."""
        ...


class RemoteReplica:
    """Keeps a connection to one replica; its live requests and calls end with the connection.

    Args:
        name: in metrics, logs and explanations.
        slot: its number, for ids of pins.
    """

    def __init__(
        self,
        name: str,
        slot: int,
        address: str,
        cluster: Cluster,
        credentials: Credentials,
        **link_options: Any,
    ) -> None:
        self.name, self.slot, self.address = name, slot, address
        self._cluster, self._credentials, self._link_options = cluster, credentials, link_options
        self.welcome: Welcome | None = None  # while it is connected
        self.last_error: str | None = None
        self.is_draining = False
        self.num_starts = 0  # different engines that have connected
        self._incarnation: int | None = None  # of the last one
        self.is_updating = False  # it drains to take requests again with other weights
        self.is_leaving = False  # not connected to again
        self.last_stats: EngineStats | None = None  # that the connected engine has answered
        self.requests: dict[int, RemoteRequest] = {}
        self._link: Link | None = None
        self._has_moved = asyncio.Event()
        self.was_refused = asyncio.Event()
        self._keys = count()
        self._calls: dict[int, tuple[Any, asyncio.Future[Any]]] = {}  # sent, not answered
        self._call_permits = asyncio.Semaphore(MAX_CALLS)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.welcome is not None and not self.is_draining

    async def keep_connected(self) -> None:
        """Connect, serve, and connect again, until it leaves; seldom while it is refused."""
        retry_s = MIN_RETRY_S
        while not self.is_leaving:
            try:
                await self._connect()
            except RefusedError as error:
                self.is_updating = False
                self._log(str(error))
                self.was_refused.set()
                await self._pause(REFUSED_RETRY_S)
            except LinkError as error:
                self.is_updating = False
                self._log(str(error))
                await self._pause(retry_s)
                retry_s = min(MAX_RETRY_S, 2 * retry_s)
            except Exception:
                # A message that is well formed but impossible ends its connection, not the attempts.
                self.is_updating = False
                logger.exception("replica %s: its connection has ended by a bug", self.name)
                await self._pause(retry_s)
                retry_s = min(MAX_RETRY_S, 2 * retry_s)
            else:
                retry_s = MIN_RETRY_S
                await self._pause(retry_s)

    def move(self, address: str, credentials: Credentials | None = None) -> None:
        """Connect to this address from the next try on, which is made at once if none is running.

        Args:
            credentials: to be shown there; None: those of before.
        """
        self.address, self._credentials = address, credentials or self._credentials
        self._has_moved.set()

    def leave(self) -> None:
        """Let `keep_connected` return when the connection ends, or at once if there is none."""
        self.is_leaving = True
        self._has_moved.set()

    async def _pause(self, pause_s: float) -> None:
        """Sleep, until `move` at most."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_moved.wait(), pause_s)
        self._has_moved.clear()

    def _log(self, text: str) -> None:
        if text != self.last_error:
            logger.warning("replica %s: %s", self.name, text)
        self.last_error = text

    async def _connect(self) -> None:
        link = Link(self.address, self._handle, self._credentials, **self._link_options)
        welcome = await link.open(self._cluster.hello())
        reason = self._cluster.check_welcome(welcome)
        if reason is not None:
            await link.close()
            raise RefusedError(reason)
        self._link, self.welcome, self.last_error = link, welcome, None
        self.is_draining = self.is_updating = False
        logger.info("replica %s: connected, %016x", self.name, welcome.incarnation)
        self.num_starts += welcome.incarnation != self._incarnation
        self._incarnation = welcome.incarnation
        reason = LEAVING
        try:
            self._cluster.joined(self)
            reason = await link.run()
        except Exception as error:
            reason = f"a bug here: {type(error).__name__}: {error}"
            await link.close()
            raise
        finally:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        requests, self.requests = [*self.requests.values()], {}
        calls, self._calls = [*self._calls.values()], {}
        self.welcome, self._link, self.last_stats = None, None, None
        if reason != LEAVING:
            self._log(reason)
        for _, future in calls:
            self._call_permits.release()
            if not future.done():
                error = ReplicaLostError(
                    f"replica {self.name} has gone before it answered: {reason}"
                )
                future.set_exception(error)
        self._cluster.left(self, requests, reason)

    # -- sending -----------------------------------------------------------------------------

    def add(self, request: RemoteRequest) -> None:
        """Send a request.

        Raises:
            WireError: it is too large for a message.
        """
        assert self._link is not None, "not connected"
        request.key = next(self._keys)
        self._link.send(request.message(request.key))
        self.requests[request.key] = request

    def abort(self, request: RemoteRequest, *, wants_end: bool) -> None:
        """End a request that is live here."""
        key = request.key
        if self._link is None or self.requests.get(key) is not request:
            return
        self._link.send(Abort(key, wants_end))
        if not wants_end:
            del self.requests[key]

    async def call(self, call: EngineCall[Any]) -> Any:
        """Run a call there.

        Raises:
            ReplicaLostError: the connection ends before the answer; also what the call raises.
        """
        key = next(self._keys)
        return await self._answer(key, Call(key, call), call)  # type: ignore[arg-type]

    async def replace_weights(self, model: str, expected: str = "") -> None:
        """Let it replace its weights; returns when they are installed, before it is connected again.

        Args:
            expected: see `Replica.replace_weights`.

        Raises:
            ReplicaLostError: the connection ends before; also what `Replica.replace_weights` raises.
        """
        key = next(self._keys)
        await self._answer(key, ReplaceWeights(key, model, expected), None)

    async def _answer(self, key: int, message: Call | ReplaceWeights, call: Any) -> Any:
        """Send a message that a `Return` answers, and wait for it."""
        await self._call_permits.acquire()
        try:
            if self._link is None:
                raise ReplicaLostError(f"replica {self.name} is not connected")
            self._link.send(message)
        except Exception:
            self._call_permits.release()
            raise
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # Until it is answered, even if nobody waits any more: it runs there.
        self._calls[key] = call, future
        return await future

    def take_snapshot(self, message: TakeSnapshot) -> None:
        """Ask for all cached pages."""
        if self._link is not None:
            self._link.send(message)

    def disconnect(self, reason: str) -> None:
        """End the connection; another one is made."""
        if self._link is not None:
            self._link.end(reason)

    # -- receiving ---------------------------------------------------------------------------

    def _handle(self, message: FromReplica) -> None:
        match message:
            case Step():
                self._cluster.step(self, message)
            case SnapshotPart():
                self._cluster.snapshot(self, message)
            case Return():
                self._finish_call(message)
            case Draining():
                logger.info("replica %s: draining", self.name)
                self.is_draining, self.is_updating = True, message.is_update
                self._cluster.draining(self)
            case _:
                self.disconnect(f"a {type(message).__name__} after the hello")

    def _finish_call(self, message: Return) -> None:
        call, future = self._calls.pop(message.key, (None, None))
        if future is None:
            return
        self._call_permits.release()
        if future.done():
            return
        try:
            if message.error is not None:
                future.set_exception(decode_error(message.error))
            elif call is None:
                future.set_result(None)
            else:
                future.set_result(decode_result(call, message.value))
        except WireError as error:
            future.set_exception(error)
        except Exception as error:
            # Else its caller would wait for ever.
            future.set_exception(WireError(f"the answer to a call is broken: {error}"))
            raise
