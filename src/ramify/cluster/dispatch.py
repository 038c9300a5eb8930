"""`Dispatch`: the live requests of a `ClusterLLM`, the replicas that compute them, and who goes where."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import count
from typing import Any

from ramify.cluster.codecs import decode_error
from ramify.cluster.credentials import Credentials
from ramify.cluster.decisions import Decision, Refusal, placement_of
from ramify.cluster.members import RETRY_AFTER_S, Members
from ramify.cluster.parked_requests import FULL_WAIT_S, UPDATE_WAIT_S, ParkedRequests
from ramify.cluster.remote_replica import RemoteReplica
from ramify.cluster.remote_request import RemoteRequest
from ramify.cluster.routes import HotPrompt, Routes
from ramify.cluster.tenant_shares import TenantShares
from ramify.cluster.wire import (
    PROTOCOL_VERSION,
    Hello,
    Output,
    RemoteError,
    SnapshotPart,
    Step,
    Welcome,
    WireError,
)
from ramify.engine.serving.streams import Collector
from ramify.errors import (
    ClusterFullError,
    DrainingError,
    EngineStoppedError,
    InvalidParamsError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    UnknownRequestError,
)

logger = logging.getLogger(__name__)

MAX_RESUMPTIONS = 2  # of a request with delivered tokens
MAX_REROUTES = 8  # of one without
TICK_S = 1.0
# Of a replica that a request was refused by; another one may take it.
REFUSALS_OF_ONE = (DrainingError, EngineStoppedError, OverloadedError)


class Dispatch:
    """Every live request is at one replica, or is parked until one takes it. For one event loop.

    Args:
        addresses: host and port of each replica, by name.
        tokenizer_digest: that a replica must have; None: any.
        full_wait_s: for an answer that was cut off, until a replica has room for the rest.
        link_options: of `Link`.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        routes: Routes,
        credentials: Credentials,
        *,
        tokenizer_digest: str | None,
        full_wait_s: float = FULL_WAIT_S,
        **link_options: Any,
    ) -> None:
        self.routes = routes
        self.members = Members(self, credentials, routes.forgotten, **link_options)
        for name, address in addresses.items():
            self.members.add(name, address)
        self.replicas = self.members.replicas
        self.reference: Welcome | None = None  # of a replica that has joined
        self.num_resumptions = self.num_reroutes = 0
        self._tokenizer_digest = tokenizer_digest
        self.on_joined: Callable[[RemoteReplica], None] = _ignore
        self.on_left: Callable[[RemoteReplica], None] = _ignore
        self._has_joined = asyncio.Event()
        self._ticks: asyncio.Future[None] | None = None
        self._ids = count()
        self._live: dict[int, RemoteRequest] = {}
        self._by_collector: dict[Collector, RemoteRequest] = {}
        self._places: dict[int, tuple[RemoteReplica, int]] = {}  # by id: replica, reservation
        self.refusals: Counter[str] = Counter()  # requests that no replica took, by reason
        self._parked = ParkedRequests()
        self._tenants = TenantShares()
        self._full_wait_s = full_wait_s
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def start(self, timeout_s: float) -> None:
        """Connect to all replicas; returns when one has joined.

        Raises:
            NoReplicaError: none has joined in time, or all are refused; says why.
        """
        self._ticks = asyncio.ensure_future(self._tick())
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._has_joined.wait())]
        if self.replicas:  # else those that are added may fit
            waits.append(asyncio.ensure_future(self.members.all_refused()))
        self.members.start()
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not self._has_joined.is_set():
            raise NoReplicaError(RETRY_AFTER_S, self.members.why_not_ready())

    async def _tick(self) -> None:
        """Ask again for snapshots that did not come, and for a place for each parked request."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._ask_for_snapshots()
                for request, error in self._parked.in_order():
                    request.refused_by.clear()
                    self._place(request, error)
            except Exception:
                # Without it parked requests would wait for ever.
                logger.exception("requests that wait were not looked at, by a bug")

    async def close(self) -> None:
        """End all connections; live requests end as aborted."""
        # Before the connections, whose ends would send them elsewhere.
        for request in [*self._live.values()]:
            self._leave(request, wants_end=False)
            request.end_aborted(time.monotonic())
            self._forget(request)
        if self._ticks is not None:
            self._ticks.cancel()
            await asyncio.gather(self._ticks, return_exceptions=True)
        await self.members.close()

    async def wait_until_idle(self, timeout_s: float | None) -> bool:
        """Wait until no request is live; returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    # -- requests ----------------------------------------------------------------------------

    def next_id(self) -> int:
        """The id of a new request."""
        return next(self._ids)

    def submit(self, request: RemoteRequest, *, only: RemoteReplica | None = None) -> None:
        """Send a request to a replica; what comes of it goes to its collector.

        Args:
            only: the replica whose cache it warms; no other one takes it, and no metric of routing
                counts it.
        """
        self._live[request.id] = self._by_collector[request.collector] = request
        self._tenants.add(request)
        self._is_idle.clear()
        if only is not None:
            request.only = only.name
        self._place(request, NoReplicaError(RETRY_AFTER_S, self.members.why_not_ready()))

    def abandon(self, collector: Collector) -> None:
        """Nobody reads on: end the request of a collector, if it is live."""
        request = self._by_collector.get(collector)
        if request is not None:
            self._leave(request, wants_end=False)
            request.is_over = True
            self._forget(request)

    def abort(self, request_id: int) -> None:
        """End a live request; its reader gets an output with the finish reason `abort`.

        Raises:
            UnknownRequestError: no live request has this id.
        """
        request = self._live.get(request_id)
        if request is None or request.is_aborted:
            raise UnknownRequestError(request_id)
        request.is_aborted = True
        if request_id in self._places:
            self._leave(request, wants_end=True)
        else:
            request.end_aborted(time.monotonic())
            self._forget(request)

    def _leave(self, request: RemoteRequest, *, wants_end: bool) -> None:
        place = self._places.get(request.id)
        if place is not None:
            place[0].abort(request, wants_end=wants_end)

    def _forget(self, request: RemoteRequest) -> None:
        """Drop a request that has ended."""
        if self._live.pop(request.id, None) is not None:
            self._tenants.remove(request)
        self._by_collector.pop(request.collector, None)
        self._parked.remove(request)
        place = self._places.pop(request.id, None)
        if place is not None:
            report, cached = request.cache, None
            # After a resumption the report is that of another replica than this prediction.
            if report is not None and not request.num_resumptions:
                cached = report.read_tokens + report.shared_tokens
            # A replica counts each answer as a request.
            self.routes.finished(place[1], request.num_output // request.params.n, cached)
        if not self._live:
            self._is_idle.set()

    def _end(self, request: RemoteRequest, error: Exception) -> None:
        request.end_with_error(error, time.monotonic())
        self._forget(request)

    # -- placing -----------------------------------------------------------------------------

    def _place(self, request: RemoteRequest, last_error: Exception) -> bool:
        """Send a request to a replica; park it, or end it with `last_error`, if none can take it.

        Returns:
            whether a replica has got it.
        """
        self._parked.remove(request)
        others = {
            name
            for name, replica in self.replicas.items()
            if not (replica.is_ready and request.may_use(name) and request.fits(replica.welcome))
        }
        decision = self._choose(request, others | request.refused_by)
        if isinstance(decision, Refusal):
            if decision.reason == "full":
                last_error = ClusterFullError(len(self.replicas), decision.retry_after_s)
            wait_s = self._wait_s(request, last_error)
            if not self._parked.park(request, last_error, wait_s, time.monotonic()):
                self._reject(request, last_error)
            return False
        self._note(request, decision)
        replica = self.replicas[decision.replica]
        if not request.has_tokens:
            request.placement = placement_of(decision, self.members.numbers)
        self._places[request.id] = replica, decision.reservation
        self._count_move(request)
        request.begin(replica.welcome)
        try:
            replica.add(request)
        except WireError as error:
            refusal = InvalidParamsError("request", str(error), "one that fits into a message")
            self._end(request, refusal)
        return True

    def _note(self, request: RemoteRequest, decision: Decision) -> None:
        """Count the cached prefix of a request of a client, when it is placed first."""
        if request.only is not None or request.is_placed or not request.page_hashes:
            return
        request.is_placed = True
        best = decision.alternative
        num_shared = max(decision.cached_tokens, 0 if best is None else best.cached_tokens)
        prompt = HotPrompt(request.ids, request.options.tenant, request.options.salt)
        self.routes.note(request.page_hashes, num_shared, prompt)

    def _count_move(self, request: RemoteRequest) -> None:
        """Count a request that goes on at another replica than the one that has gone."""
        if not request.is_cut_off:
            return
        request.is_cut_off = False
        if request.has_tokens:
            self.num_resumptions += 1
        else:
            self.num_reroutes += 1

    def _reject(self, request: RemoteRequest, error: Exception) -> None:
        """End a request that no replica takes."""
        if request.only is None:
            reason = "full" if isinstance(error, OverloadedError) else "no replica"
            self.refusals[reason] += 1
        self._end(request, error)

    def _wait_s(self, request: RemoteRequest, error: Exception) -> float:
        """How long a request that no replica takes may wait; 0: its client has to send it again."""
        if isinstance(error, OverloadedError):
            # A client cannot ask again for the rest of an answer.
            return self._full_wait_s if request.has_tokens else 0.0
        is_updating = any(
            replica.is_updating and request.may_use(name) for name, replica in self.replicas.items()
        )
        return UPDATE_WAIT_S if is_updating and not request.has_tokens else 0.0

    def _place_parked(self) -> None:
        """Send parked requests to replicas in their order, up to the first that none takes."""
        for request, error in self._parked.in_order():
            if not self._place(request, error):
                return

    def _choose(self, request: RemoteRequest, others: Collection[str]) -> Decision | Refusal:
        if not self.replicas.keys() - others:
            return Refusal("no replica", RETRY_AFTER_S)
        num_tokens = len(request.ids) + request.num_output
        if request.only is not None:
            return self.routes.assign(request.only, request.page_hashes, num_tokens)
        choose = partial(
            self.routes.choose,
            request.page_hashes,
            num_tokens,
            max_tokens=request.params.max_tokens,
            exclude=others,
        )
        decision = choose()
        if isinstance(decision, Refusal) and decision.reason == "full":
            # One that is parked comes again.
            welcomes = [replica.welcome for replica in self.replicas.values()]
            if request.wait_until_s is None and self._tenants.has_share_left(request, welcomes):
                return choose(beyond_limits=True)
        return decision

    def _place_again(self, request: RemoteRequest, replica: RemoteReplica, reason: str) -> None:
        """A replica has gone: go on elsewhere."""
        self._give_up_place(request)
        if request.is_over:
            self._forget(request)
            return
        if request.is_aborted:
            request.end_aborted(time.monotonic())
            self._forget(request)
            return
        lost = ReplicaLostError(
            f"replica {replica.name} has gone ({reason}), and no other one can go on with this "
            "answer; send the request again"
        )
        request.is_cut_off = request.only is None
        if request.has_tokens:
            request.num_resumptions += 1
        else:
            request.num_reroutes += 1
        if request.num_resumptions > MAX_RESUMPTIONS or request.num_reroutes > MAX_REROUTES:
            self._end(request, lost)
        else:
            self._place(request, lost)

    def _give_up_place(self, request: RemoteRequest) -> None:
        place = self._places.pop(request.id, None)
        if place is not None:
            self.routes.failed(place[1])

    # -- what replicas report: `Cluster` -----------------------------------------------------

    def hello(self) -> Hello:
        """See `Cluster`."""
        page_size = None if self.reference is None else self.reference.config.page_size
        return Hello(PROTOCOL_VERSION, page_size, self._tokenizer_digest)

    def check_welcome(self, welcome: Welcome) -> str | None:
        """See `Cluster`: what routing and tokenising depend on must be equal."""
        first = self.reference or welcome
        digest = welcome.tokenizer_digest
        for name, there, here in (
            ("page_size", welcome.config.page_size, first.config.page_size),
            ("max_model_len", welcome.config.max_model_len, first.config.max_model_len),
            ("vocab_size", welcome.description.vocab_size, first.description.vocab_size),
            ("tokenizer_digest", digest, self._tokenizer_digest or digest),
        ):
            if there != here:
                return f"{name} is {there!r} at the replica and {here!r} here"
        return None

    def joined(self, replica: RemoteReplica) -> None:
        """See `Cluster`."""
        welcome = replica.welcome
        assert welcome is not None
        # The weights of all may be replaced in turn, here or where the replicas run.
        if self.reference is None or not any(
            other.welcome is not None and other.welcome.identity == self.reference.identity
            for other in self.replicas.values()
        ):
            self.reference = welcome
        mismatch = self.reference.identity.mismatch(welcome.identity)
        if mismatch is not None:
            logger.warning("replica %s computes other bits: %s", replica.name, mismatch)
        self.routes.joined(replica.name, welcome)
        self._has_joined.set()
        self._ask_for_snapshots()
        for request, _ in self._parked.in_order():
            request.refused_by.discard(replica.name)
        self._place_parked()
        self.on_joined(replica)

    def left(self, replica: RemoteReplica, requests: list[RemoteRequest], reason: str) -> None:
        """See `Cluster`: its requests go on elsewhere."""
        self.on_left(replica)
        for request in requests:
            self._give_up_place(request)
        self.routes.left(replica.name)
        for request in requests:
            self._place_again(request, replica, reason)

    def draining(self, replica: RemoteReplica) -> None:
        """See `Cluster`."""
        self.routes.draining(replica.name)

    def step(self, replica: RemoteReplica, step: Step) -> None:
        """See `Cluster`."""
        welcome = replica.welcome
        if welcome is None:
            return
        for key in step.accepted:
            request = replica.requests.get(key)
            if request is not None:
                self.routes.admitted(self._places[request.id][1])
                # After a death, those that were full before may have room.
                request.refused_by.clear()
                request.wait_until_s = None
                request.accept()
        for key, remote in step.refused:
            request = replica.requests.pop(key, None)
            if request is not None:
                self._refused(request, replica, remote)
        now_s = time.monotonic()
        for output in step.outputs:
            request = replica.requests.get(output.key)
            if request is not None:
                self._receive(request, replica, output, now_s)
        if step.runs or step.num_lost:
            self.routes.apply(replica.name, welcome.incarnation, step.runs, step.num_lost)
        if step.digest is not None:
            self.routes.digest(replica.name, welcome.incarnation, *step.digest)
        if step.load is not None:
            self.routes.load(replica.name, step.load)
        self._ask_for_snapshots()
        self._place_parked()

    def snapshot(self, replica: RemoteReplica, part: SnapshotPart) -> None:
        """See `Cluster`."""
        if replica.welcome is not None:
            self.routes.snapshot(replica.name, replica.welcome.incarnation, part)

    def _ask_for_snapshots(self) -> None:
        for name, message in self.routes.due_snapshots(time.monotonic()):
            self.replicas[name].take_snapshot(message)

    def _receive(
        self, request: RemoteRequest, replica: RemoteReplica, output: Output, now_s: float
    ) -> None:
        had_tokens = request.num_new > 0
        request.receive(output, now_s)
        if not had_tokens and request.num_new:
            self.routes.first_token(self._places[request.id][1])
        if request.is_over:
            del replica.requests[output.key]
            self._forget(request)

    def _refused(self, request: RemoteRequest, replica: RemoteReplica, remote: RemoteError) -> None:
        error = decode_error(remote)
        self._give_up_place(request)
        if request.is_aborted:  # the refusal has crossed the abort
            request.end_aborted(time.monotonic())
            self._forget(request)
        elif isinstance(error, REFUSALS_OF_ONE):
            request.refused_by.add(replica.name)
            self._place(request, error)
        else:
            self._end(request, error)


def _ignore(replica: RemoteReplica) -> None:
    """Nobody wants to know which replicas come and go."""
