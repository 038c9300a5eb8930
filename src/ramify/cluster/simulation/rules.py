"""Rules of routing: ours, and those of other routers as they are documented."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Protocol

import msgspec

from ramify.cache import CacheEvent
from ramify.cluster.decisions import Decision, Load
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.router import Router
from ramify.cluster.simulation.replicas import CHUNK_TOKENS, SimulatedReplica, SimulatedRequest
from ramify.cluster.step_reports import run_of

REPORT_S = 0.02  # from a change in a replica until the router knows it


class Rule(Protocol):
    """Chooses a replica for each request, and hears what happens to it."""

    def choose(self, request: SimulatedRequest, now_s: float) -> SimulatedReplica:
        """The replica that serves a request."""
        ...

    def changed(self, replica: SimulatedReplica, now_s: float) -> None:
        """A replica began or ended something."""
        del now_s
        replica.feed.take()

    def computed(self, request: SimulatedRequest) -> None:
        """A prompt is computed."""

    def finished(self, request: SimulatedRequest) -> None:
        """An answer is complete."""


class RoundRobin(Rule):
    """Each replica in turn."""

    def __init__(self, replicas: Sequence[SimulatedReplica], page_size: int) -> None:
        del page_size
        self._replicas = replicas

    def choose(self, request: SimulatedRequest, now_s: float) -> SimulatedReplica:
        """See `Rule`."""
        del now_s
        return self._replicas[request.number % len(self._replicas)]


class FirstPageHash(Rule):
    """Consistent (rendezvous) hashing of the first page of a prompt."""

    def __init__(self, replicas: Sequence[SimulatedReplica], page_size: int) -> None:
        del page_size
        self._replicas = replicas

    def choose(self, request: SimulatedRequest, now_s: float) -> SimulatedReplica:
        """See `Rule`."""
        del now_s
        first = request.prompt.prefix(1).atoms
        return max(
            self._replicas,
            key=lambda replica: blake2b(first + replica.name.encode(), digest_size=8).digest(),
        )


class PrefixTreeOfRequests(Rule):
    """A tree of past requests, as SGLang's gateway keeps it, with its defaults.

    The shortest queue if the longest has 64 requests more and 1.5 times as many; else the replica
    whose requests share most, if that is more than 0.3 of the prompt; else the one with the smallest
    tree. The tree is never trimmed.
    """

    threshold, absolute, relative = 0.3, 64, 1.5

    def __init__(self, replicas: Sequence[SimulatedReplica], page_size: int) -> None:
        del page_size
        self._replicas = replicas
        self._masks: dict[int, int] = {}  # page → bit mask of replicas
        self._sizes = [0] * len(replicas)

    def choose(self, request: SimulatedRequest, now_s: float) -> SimulatedReplica:
        """See `Rule`."""
        del now_s
        pages = request.prompt.tokens().tolist()
        at = self._place(pages)
        for page in pages:
            mask = self._masks.get(page, 0)
            if not mask >> at & 1:
                self._masks[page] = mask | 1 << at
                self._sizes[at] += 1
        return self._replicas[at]

    def _place(self, pages: list[int]) -> int:
        counts = [replica.num_requests for replica in self._replicas]
        most, least = max(counts), min(counts)
        if most - least > self.absolute and most > self.relative * least:
            return counts.index(least)
        holders, depth = self._longest(pages)
        if depth > self.threshold * len(pages):
            return holders[0]
        return self._sizes.index(min(self._sizes))

    def _longest(self, pages: list[int]) -> tuple[list[int], int]:
        """The replicas that share most pages with past requests, and how many."""
        mask, depth = 0, 0
        for page in pages:
            held = self._masks.get(page, 0) & (mask or -1)
            if not held:
                break
            mask, depth = held, depth + 1
        return [at for at in range(len(self._replicas)) if mask >> at & 1], depth


class RayPrefixAffinity(PrefixTreeOfRequests):
    """Ray's PrefixCacheAffinityRouter with its defaults: 10 % of the prompt, no limit of imbalance.

    Of the replicas that share most, the shorter queue of two drawn ones.
    """

    def _place(self, pages: list[int]) -> int:
        holders, depth = self._longest(pages)
        if not pages or depth < 0.1 * len(pages):
            least = min(self._sizes)
            holders = [at for at, size in enumerate(self._sizes) if size == least]
        rng = random.Random(len(self._masks))  # noqa: S311 - the same in every run
        drawn = rng.sample(holders, min(2, len(holders)))
        return min(drawn, key=lambda at: self._replicas[at].num_requests)


@dataclass(frozen=True, slots=True)
class _Report:
    """What a replica tells the router at once."""

    arrival_s: float  # at the router
    replica: str
    events: list[CacheEvent]
    admitted: list[int]  # reservations, as below
    computed: list[int]
    finished: list[SimulatedRequest]
    load: Load
    computing_since_s: float
    computing_tokens: int  # of the prompt under way, which later steps make fewer


class RamifyRouter(Rule):
    """The router of this package, fed by the replicas' reports, `REPORT_S` late."""

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        page_size: int,
        *,
        stride: int = 1,
        request_bound: float | None = None,
    ) -> None:
        self.mirrors = Mirrors(stride=stride)
        self.router = Router(self.mirrors, page_size, request_bound=request_bound)
        self._replicas = {replica.name: replica for replica in replicas}
        self._reports: deque[_Report] = deque()
        self._sent: dict[str, list[int]] = {replica.name: [] for replica in replicas}
        self._computed: list[int] = []
        self._finished: list[SimulatedRequest] = []
        self._long_prompts: dict[str, _Report] = {}  # of several steps
        self._encoder = msgspec.msgpack.Encoder()
        self.num_events = self.event_bytes = 0
        for number, replica in enumerate(replicas):
            self.mirrors.add(replica.name, number)
            self.router.add(replica.name)
            self.router.load(replica.name, replica.load())
        for snapshot in self.mirrors.due_snapshots(0.0):
            chunks = self._replicas[snapshot.replica].feed.snapshot_chunks()
            self.mirrors.snapshot(
                snapshot.replica, snapshot.incarnation, snapshot.number, next(chunks)
            )
        self._incarnations = {replica.name: number for number, replica in enumerate(replicas)}

    def choose(self, request: SimulatedRequest, now_s: float) -> SimulatedReplica:
        """See `Rule`."""
        self.take_reports(now_s)
        hashes = request.prompt.packed_hashes(1)
        decision = self.router.choose(hashes, request.num_tokens)
        assert isinstance(decision, Decision)
        request.reservation = decision.reservation
        self._sent[decision.replica].append(decision.reservation)
        return self._replicas[decision.replica]

    def computed(self, request: SimulatedRequest) -> None:
        """See `Rule`."""
        self._computed.append(request.reservation)

    def finished(self, request: SimulatedRequest) -> None:
        """See `Rule`."""
        self._finished.append(request)

    def changed(self, replica: SimulatedReplica, now_s: float) -> None:
        """See `Rule`."""
        name, events = replica.name, replica.feed.take()
        self.num_events += len(events)
        for event in events:
            self.event_bytes += len(self._encoder.encode(run_of(event)))
        report = _Report(
            now_s + REPORT_S,
            name,
            events,
            self._sent[name],
            self._computed,
            self._finished,
            replica.load(),
            replica.computing_since_s,
            replica.computing_tokens,
        )
        self._reports.append(report)
        self._sent[name], self._computed, self._finished = [], [], []

    def take_reports(self, now_s: float) -> None:
        """Apply the reports that have arrived."""
        router = self.router
        while self._reports and self._reports[0].arrival_s <= now_s:
            report = self._reports.popleft()
            for reservation in report.admitted:
                router.admitted(reservation)
            for reservation in report.computed:
                router.first_token(reservation)
            for request in report.finished:
                router.finished(request.reservation, request.num_output, request.num_hit)
            self.mirrors.apply(report.replica, self._incarnations[report.replica], report.events)
            router.load(report.replica, report.load)
            self._long_prompts.pop(report.replica, None)
            if report.computing_tokens > CHUNK_TOKENS and report.load.token_s:
                self._long_prompts[report.replica] = report
        for name, report in self._long_prompts.items():
            seconds = now_s - REPORT_S - report.computing_since_s
            num_steps = int(seconds / (report.load.token_s * CHUNK_TOKENS))
            if num_steps > 0:
                num_done = min(num_steps * CHUNK_TOKENS, report.computing_tokens)
                left = report.load.tokens_waiting - num_done
                router.load(name, replace(report.load, tokens_waiting=left))


RULES: dict[str, Callable[[Sequence[SimulatedReplica], int], Rule]] = {
    "ramify": RamifyRouter,
    "ramify (stride 8)": partial(RamifyRouter, stride=8),
    "ramify (requests bounded)": partial(RamifyRouter, request_bound=1.25),
    "round robin": RoundRobin,
    "first page": FirstPageHash,
    "tree of requests": PrefixTreeOfRequests,
    "ray affinity": RayPrefixAffinity,
}
