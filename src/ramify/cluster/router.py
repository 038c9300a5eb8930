"""`Router`: chooses the replica that ends a request soonest, by what each has cached and has to do.

Pure: time is an argument, messages come through `Mirrors`, nothing is sent. Nothing here can make an
answer wrong: a bad guess costs the time to compute a prefix that another replica has.

What a request costs, in seconds of the replica's own calibration `token_s` for each of

    1 * tokens to wait for: those that wait there, and those to compute
    + tokens to wait for, squared / (5 * mean tokens that a prompt computes): long waits hurt most
    + output tokens * requests beside it: each is a row of every step
    + Q * tokens to compute: Q requests that wait for a prompt, the mean of the replicas, wait longer
    + 2 * tokens to compute: the cache drops as many others
    + 2 * tokens that hit, if another replica is the home of the prefix: a copy stays cached

The home of a prefix is, of the replicas that have most of the prompt, the first by rendezvous
hashing. So copies of a hot prefix are used while its home has more to do, and are evicted afterwards.
Costs that are nearly equal go to the replica that was sent least work of late.

The bound: a replica gets nothing while its work is above 1.25 times the mean and one request, this one,
computed from nothing. Work is what waits and what is left to generate, in seconds. To send a request
elsewhere costs its tokens once more, so it cannot pay for a smaller difference. `request_bound` bounds
live requests likewise: more even, with fewer hits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from ramify.cache.key import HASH_BYTES
from ramify.cluster.decisions import (
    Alternative,
    Decision,
    LoadReport,
    Refusal,
    RouterCounters,
)
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.prefix_home import home_of
from ramify.cluster.prefixes_in_flight import Edge, PrefixesInFlight
from ramify.cluster.recent_work import RecentWork
from ramify.cluster.replica_work import ReplicaWork
from ramify.counts import counted
from ramify.errors import ConfigError

# Chosen with seeds 100 and 101 of generated traffic and the first half of Mooncake's conversation trace,
# 4 simulated replicas; the tables of `make bench-routing` are of other seeds and of the second half.
COPY_WEIGHT = 2.0  # with 1 conversations hit 1 point less, with 3 they wait longer and hit no more
LONG_WAIT = (
    5.0  # waits of as many prompts count twice: TTFT p99 of conversations 0.66 s without, 0.62 with
)
BOUND = 1.25  # see `Router`
# Costs this close are equal: calibrations of equal machines differ by a few percent from minute to
# minute, and the fastest would get every prompt that nobody has cached.
TIE = 1.05
FIRST_TOKEN_S = 1e-3  # before any replica has reported
FIRST_OUTPUT_TOKENS, FIRST_PROMPT_TOKENS = 128.0, 1024.0
SMOOTHING = (
    0.02  # weight of a finished request in the mean lengths of answers and of what prompts compute
)
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class _Reservation:
    replica: ReplicaWork
    num_tokens: int  # to compute
    cached_tokens: int
    noted: Edge | None  # of `PrefixesInFlight`
    is_decision: bool  # by `choose`: its end is counted
    is_unseen: bool = True
    is_computed: bool = False


class Router:
    """Decides where requests go. For one thread.

    Args:
        mirrors: of the replicas' caches; the caller feeds them.
        page_size: tokens in a page of every replica.
        bound: a replica with more work than this times the mean, and one request, gets none.
        request_bound: likewise of live requests, whatever their work; None: no such bound.
    """

    def __init__(
        self,
        mirrors: Mirrors,
        page_size: int,
        *,
        bound: float = BOUND,
        request_bound: float | None = None,
    ) -> None:
        for name, value in (("bound", bound), ("request_bound", request_bound)):
            if value is not None and not value >= 1:
                raise ConfigError(f"{name}={value} but it must be 1, the mean, or more")
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} but a page holds at least 1 token")
        self.mirrors, self.page_size = mirrors, page_size
        self.bound, self.request_bound = bound, request_bound
        self.counters = RouterCounters(Counter())
        self._replicas: dict[str, ReplicaWork] = {}
        self._open: dict[str, ReplicaWork] = {}  # those that are not drained
        self._silent: set[str] = set()  # names of those that have not reported how fast they are
        self._in_flight, self._recent = PrefixesInFlight(), RecentWork()
        self._reservations: dict[int, _Reservation] = {}
        self._num_reserved = 0  # ever; the number of the last reservation
        self._output_tokens, self._prompt_tokens = FIRST_OUTPUT_TOKENS, FIRST_PROMPT_TOKENS

    # -- replicas --------------------------------------------------------------------------

    def add(self, replica: str, identity: Hashable = None) -> None:
        """Send requests to a replica from now on; also one that was drained.

        Args:
            identity: what equal answers depend on; `choose` compares it.

        Raises:
            ConfigError: it is there, with requests in flight: `remove` it first.
        """
        before = self._replicas.get(replica)
        if before is not None and before.reservations:
            raise ConfigError(
                f"replica {replica!r} has {counted(len(before.reservations), 'request')} in flight; remove it "
                "and resume them before it joins again"
            )
        self._replicas[replica] = ReplicaWork(replica, identity)
        self._silent.add(replica)
        self._recent.join(replica)
        self._in_flight.join(replica)
        self._find_open()

    def drain(self, replica: str) -> None:
        """Send no more requests to a replica; those in flight go on."""
        self._replicas[replica].is_draining = True
        self._find_open()

    def remove(self, replica: str) -> list[int]:
        """Forget a replica; returns the reservations that it had, which are released."""
        lost = self._replicas.pop(replica, None)
        if lost is None:
            return []
        reservations = sorted(lost.reservations)
        for number in reservations:
            self._release(number)
        self._silent.discard(replica)
        self._recent.leave(replica)
        self._in_flight.leave(replica)
        self._find_open()
        return reservations

    def _find_open(self) -> None:
        self._open = {
            name: state for name, state in self._replicas.items() if not state.is_draining
        }

    def load(self, replica: str, load: LoadReport) -> None:
        """Take a replica's report, which includes every request that was `admitted` before."""
        state = self._replicas.get(replica)
        if state is None:
            return
        state.report(load)
        if load.token_s:
            self._silent.discard(replica)
        else:
            self._silent.add(replica)

    def queue_s(self, replica: str) -> float:
        """Seconds of work that a replica has before a further request; 0 if it is not there."""
        state = self._replicas.get(replica)
        return 0.0 if state is None else self._queue_s(state)

    def queues(self) -> dict[str, tuple[float, int]]:
        """Seconds of computing that wait at each replica, and its requests, by name."""
        return {
            name: (self._queue_s(state), int(state.num_requests))
            for name, state in self._replicas.items()
        }

    @property
    def num_in_flight(self) -> int:
        """Reservations that have not ended."""
        return len(self._reservations)

    # -- requests --------------------------------------------------------------------------

    def choose(
        self,
        page_hashes: bytes,
        num_tokens: int,
        *,
        other_hashes: Sequence[bytes] = (),
        max_tokens: int | None = None,
        identity: Hashable = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        """Choose a replica for a prompt, and reserve its work there.

        Args:
            page_hashes: of the prompt's whole pages; packed, 16 bytes each.
            other_hashes: of the same pages at replicas with other weights, whose namespace is another.
            num_tokens: of the prompt, and of what was generated before a resumption.
            max_tokens: of the answer, if that is limited.
            identity: only replicas with an equal one; None: any.
            exclude: names of replicas that must not get it.
            beyond_limits: also a replica whose queue is full, if all are.
        """
        able = self._able(identity, exclude)
        default_s = self._default_token_s(able)
        within = self._within_bounds(able, num_tokens, default_s)
        if not within:
            if not (beyond_limits and able):
                return self._refuse(able)
            within = able
        cached = self._cached(page_hashes, other_hashes, num_tokens)
        in_flight = self._hits(self._in_flight.match(page_hashes), num_tokens)
        expected = dict(cached)
        for name, tokens in in_flight.items():
            if tokens > expected.get(name, 0):
                expected[name] = tokens
        home = self._home(expected, page_hashes)
        output_tokens = self._output_tokens
        if max_tokens is not None:
            output_tokens = min(output_tokens, max_tokens)
        costs = self._costs_s(within, expected, home, float(num_tokens), output_tokens, default_s)
        chosen, cost_s = self._least(within, costs)
        hit = expected.get(chosen.name, 0)
        alternative = self._alternative(able, within, cached, hit)
        reason = self._reason(chosen, cached, in_flight, able, alternative)
        self._prompt_tokens += SMOOTHING * (max(1, num_tokens - hit) - self._prompt_tokens)
        number = self._reserve(
            chosen, page_hashes, num_tokens - hit, hit, output_tokens, is_decision=True
        )
        counts = self.counters.num_decisions
        counts[reason] = counts.get(reason, 0) + 1
        return Decision(chosen.name, reason, number, hit, cost_s, alternative)

    def assign(
        self,
        replica: str,
        page_hashes: bytes,
        num_tokens: int,
        *,
        other_hashes: Sequence[bytes] = (),
    ) -> Decision | Refusal:
        """Reserve the work of a prompt at a given replica, to warm its cache. It refuses, if it is full.

        The work counts there as any other. Counters and the mean lengths that costs depend on are of
        `choose` alone: nobody has asked for the prompt, and its answer is thrown away.

        Args:
            page_hashes, other_hashes, num_tokens: see `choose`.
        """
        state = self._open.get(replica)
        if state is None:
            return Refusal("no replica", MIN_RETRY_S)
        hit = self._cached(page_hashes, other_hashes, num_tokens).get(replica, 0)
        number = self._reserve(
            state, page_hashes, num_tokens - hit, hit, output_tokens=0.0, is_decision=False
        )
        return Decision(replica, "assigned", number, hit)

    def admitted(self, reservation: int) -> None:
        """The replica has the request: its next `load` includes it."""
        request = self._reservations.get(reservation)
        if request is not None and request.is_unseen:
            request.is_unseen = False
            request.replica.count_unseen(-1, -request.num_tokens)

    def first_token(self, reservation: int) -> None:
        """The prompt is computed: what follows is in the replica's events."""
        request = self._reservations.get(reservation)
        if request is not None and not request.is_computed:
            request.is_computed = True
            self._in_flight.remove(request.replica.name, request.noted)

    def finished(
        self, reservation: int, num_output: int = 0, cached_tokens: int | None = None
    ) -> None:
        """The request has ended.

        Args:
            num_output: tokens of its answer; of several answers, the mean.
            cached_tokens: of its prompt, that had hit; None: not known. Counted in whole pages, as
                the prediction is: mirrors know no more.
        """
        request = self._release(reservation)
        if request is None or not request.is_decision:
            return
        if num_output:
            self._output_tokens += SMOOTHING * (num_output - self._output_tokens)
        if cached_tokens is not None:
            cached_tokens = cached_tokens // self.page_size * self.page_size
            self.counters.predicted_tokens += request.cached_tokens
            self.counters.cached_tokens += cached_tokens
            self.counters.wrong_tokens += abs(request.cached_tokens - cached_tokens)

    def failed(self, reservation: int) -> None:
        """The request was refused or aborted, or its replica is gone."""
        self._release(reservation)

    # -- inside ----------------------------------------------------------------------------

    def _able(self, identity: Hashable, exclude: Collection[str]) -> Sequence[ReplicaWork]:
        """The replicas that may get a request; see `choose`."""
        able = [*self._open.values()]
        if identity is not None:
            able = [state for state in able if state.identity == identity]
        if exclude and not self._replicas.keys().isdisjoint(exclude):
            able = [state for state in able if state.name not in exclude]
        return able

    def _cached(
        self, page_hashes: bytes, other_hashes: Sequence[bytes], num_tokens: int
    ) -> dict[str, int]:
        """Tokens of a prompt that are cached, by replica."""
        pages = self.mirrors.match(page_hashes)
        for hashes in other_hashes:
            # No replica has both: it drops its pages with its weights.
            pages |= self.mirrors.match(hashes)
        return self._hits(pages, num_tokens)

    def _hits(self, pages: dict[str, int], num_tokens: int) -> dict[str, int]:
        """Tokens of hits by replica; the last token of a prompt is computed in any case."""
        most, size = max(0, num_tokens - 1) // self.page_size, self.page_size
        # What a replica has cached that is away or drained is of no use.
        present = self._open
        return {
            # `min` would be a call for each of a hundred replicas.
            name: (count if count < most else most) * size  # noqa: FURB136
            for name, count in pages.items()
            if name in present
        }

    def _within_bounds(
        self, able: Sequence[ReplicaWork], num_tokens: int, default_s: float
    ) -> Sequence[ReplicaWork]:
        """Those that may get a request; if all of them are full, none."""
        if not able:
            return []
        output_tokens = self._output_tokens
        work_s = [
            (state.token_s or default_s)
            * (state.waiting_tokens + state.num_requests * output_tokens)
            for state in able
        ]
        limit_s, own_tokens = self.bound * sum(work_s) / len(able), num_tokens + output_tokens
        within = [
            state
            for state, seconds in zip(able, work_s, strict=True)
            if seconds <= limit_s + (state.token_s or default_s) * own_tokens and not state.is_full
        ]
        if self.request_bound is not None:
            total = sum([state.num_requests for state in able])
            limit = self.request_bound * total / len(able) + 1
            within = [state for state in within if state.num_requests <= limit]
        return within or [state for state in able if not state.is_full]

    def _home(self, expected: dict[str, int], page_hashes: bytes) -> str:
        """The home of the longest prefix that replicas have; nobody's without a prefix."""
        most = max(expected.values(), default=0)
        if not most:
            return ""
        holders = [name for name, tokens in expected.items() if tokens == most]
        if len(holders) == 1:
            return holders[0]
        end = most // self.page_size * HASH_BYTES
        return home_of(page_hashes[end - HASH_BYTES : end], holders)

    def _costs_s(
        self,
        states: Sequence[ReplicaWork],
        expected: dict[str, int],
        home: str,
        num_tokens: float,
        output_tokens: float,
        default_s: float,
    ) -> list[float]:
        """See the module."""
        prompt_tokens = self._prompt_tokens
        queue = sum([state.waiting_tokens for state in states]) / len(states) / prompt_tokens
        weight, long_wait = COPY_WEIGHT + queue, 1 / (LONG_WAIT * prompt_tokens)
        holders = [self._open[name] for name in expected]
        for state in holders:
            state.hit_tokens = float(expected[state.name])
            state.copied_tokens = 0.0 if state.name == home else state.hit_tokens
        costs = [
            (
                (wait := state.waiting_tokens + (compute := num_tokens - state.hit_tokens))
                + wait * wait * long_wait
                + weight * compute
                + state.num_requests * output_tokens
                + COPY_WEIGHT * state.copied_tokens
            )
            * (state.token_s or default_s)
            for state in states
        ]
        for state in holders:
            state.hit_tokens = state.copied_tokens = 0.0
        return costs

    def _least(
        self, states: Sequence[ReplicaWork], costs: Sequence[float]
    ) -> tuple[ReplicaWork, float]:
        """The replica with the least cost, and that cost. Ties rotate: the least recent work first."""
        most = min(costs) * TIE
        ties = [at for at, cost in enumerate(costs) if cost <= most]
        at = ties[0]
        if len(ties) > 1:
            recent = self._recent.of
            at = min(ties, key=lambda at: recent(states[at].name))
        return states[at], costs[at]

    def _default_token_s(self, states: Sequence[ReplicaWork]) -> float:
        """For replicas that have not reported yet."""
        if not self._silent:
            return 0.0
        reported = [state.token_s for state in states if state.token_s]
        return sum(reported) / len(reported) if reported else FIRST_TOKEN_S

    def _queue_s(self, state: ReplicaWork) -> float:
        token_s = state.token_s or self._default_token_s([*self._replicas.values()])
        return token_s * state.waiting_tokens

    def _refuse(self, full: Sequence[ReplicaWork]) -> Refusal:
        reason, retry_s = "no replica", MIN_RETRY_S
        if full:
            # A place in a queue is free when the first of its requests has been computed.
            reason = "full"
            retry_s = min(self._queue_s(state) / max(1, state.num_waiting) for state in full)
        return Refusal(reason, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s)))

    def _reserve(
        self,
        state: ReplicaWork,
        page_hashes: bytes,
        to_compute: int,
        hit: int,
        output_tokens: float,
        *,
        is_decision: bool,
    ) -> int:
        self._num_reserved += 1
        number = self._num_reserved
        self._recent.add(state.name, to_compute + output_tokens)
        noted = self._in_flight.add(state.name, page_hashes)
        self._reservations[number] = _Reservation(state, to_compute, hit, noted, is_decision)
        state.reservations.add(number)
        state.count_unseen(1, to_compute)
        return number

    def _alternative(
        self,
        able: Sequence[ReplicaWork],
        within: Sequence[ReplicaWork],
        cached: dict[str, int],
        hit: int,
    ) -> Alternative | None:
        """The replica with the longest cached prefix, if it has more than the chosen one."""
        longer = {name for name, tokens in cached.items() if tokens > hit}
        states = [state for state in able if state.name in longer] if longer else []
        if not states:
            return None
        best = max(states, key=lambda state: cached[state.name])
        reason = "full" if best.is_full else "queue" if best in within else "bound"
        return Alternative(best.name, cached[best.name], self._queue_s(best), reason)

    def _reason(
        self,
        state: ReplicaWork,
        cached: dict[str, int],
        in_flight: dict[str, int],
        able: Sequence[ReplicaWork],
        alternative: Alternative | None,
    ) -> str:
        if len(able) == 1:
            return "only"
        if alternative is not None:
            return "spill"
        own = cached.get(state.name, 0)
        if in_flight.get(state.name, 0) > own:
            return "in flight"
        if own:
            return "cached"
        if self.mirrors.are_known([other.name for other in able]):
            return "least work"
        return "unknown cache"

    def _release(self, number: int) -> _Reservation | None:
        request = self._reservations.get(number)
        if request is None:
            return None
        self.admitted(number)
        self.first_token(number)
        request.replica.reservations.discard(number)
        del self._reservations[number]
        return request
