"""`Router`: chooses the replica that ends a request soonest, by what each has cached and has to do.

Pure: time is an argument, messages come through `Mirrors`, nothing is sent. Nothing here can make an
answer wrong: a bad guess costs the time to compute a prefix that another replica has.

The seconds that a request waits, and makes others wait, as far as replicas differ in it:

    cost = token_s * (tokens waiting + 4 * tokens to compute + output tokens * requests beside it)

`token_s` is the replica's own calibration. Tokens waiting are those of its last report and of
requests that were sent there since. Tokens to compute count four times: for this request, for those
that come after it, and for the cached pages that theirs replace. A decoding request takes one row of each step, so every request beside it delays
each of its output tokens by `token_s`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from ramify.cluster.decisions import (
    Alternative,
    Decision,
    LoadReport,
    Refusal,
    RouterCounters,
)
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.prefixes_in_flight import PrefixesInFlight
from ramify.errors import ConfigError

# Of tokens to compute; see above. On the Mooncake conversation trace, 4 simulated replicas, 4 hits 8.1 %
# where 2 hits 7.0 %, and the 99th percentile of the time to first token is 12.6 s, not 13.4 s.
COMPUTE_WEIGHT = 4
BOUND = 1.25  # see `Router`
# Costs this close are equal: calibrations of equal machines differ by a few percent from minute to
# minute, and the fastest would get every prompt that nobody has cached.
TIE = 1.05
FIRST_TOKEN_S = 1e-3  # before any replica has reported
FIRST_OUTPUT_TOKENS = 128.0
SMOOTHING = 0.02  # weight of a finished request in the mean length of answers
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    identity: Hashable
    is_draining: bool = False
    # Sums of the last report and of the reservations that it does not include:
    waiting_tokens: int = 0
    num_requests: int = 0
    num_waiting: int = 0
    num_unseen: int = 0  # of these reservations
    unseen_tokens: int = 0
    token_s: float = 0.0  # 0: not reported yet
    max_waiting: int = 0
    reservations: set[int] = field(default_factory=set)

    @property
    def is_full(self) -> bool:
        """Whether it would refuse a request."""
        return 0 < self.max_waiting <= self.num_waiting

    def count_unseen(self, num_requests: int, num_tokens: int) -> None:
        """Add reservations that the last report does not include; negative: it does, or they ended."""
        self.num_unseen += num_requests
        self.num_requests += num_requests
        self.num_waiting += num_requests
        self.unseen_tokens += num_tokens
        self.waiting_tokens += num_tokens


@dataclass(slots=True, eq=False)
class _Reservation:
    replica: _Replica
    num_tokens: int  # to compute
    cached_tokens: int
    noted: tuple[bytes, ...]  # of `PrefixesInFlight`
    is_unseen: bool = True
    is_computed: bool = False


class Router:
    """Decides where requests go. For one thread.

    Args:
        mirrors: of the replicas' caches; the caller feeds them.
        page_size: tokens in a page of every replica.
        bound: a replica with more requests than this times the mean, and one, gets none. A higher
            bound keeps more sessions where their cache is, and lets single replicas have more to do.
    """

    def __init__(self, mirrors: Mirrors, page_size: int, *, bound: float = BOUND) -> None:
        if not bound >= 1:
            raise ConfigError(f"bound={bound} but it must be 1, the mean, or more")
        if page_size < 1:
            raise ConfigError(f"page_size={page_size} but a page holds at least 1 token")
        self.mirrors, self.page_size, self.bound = mirrors, page_size, bound
        self.counters = RouterCounters(Counter(), Counter())
        self._replicas: dict[str, _Replica] = {}
        self._in_flight = PrefixesInFlight()
        self._reservations: dict[int, _Reservation] = {}
        self._num_reserved = 0  # ever; the number of the last reservation
        self._output_tokens = FIRST_OUTPUT_TOKENS

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
                f"replica {replica!r} has {len(before.reservations)} requests in flight; remove it "
                "and resume them before it joins again"
            )
        self._replicas[replica] = _Replica(replica, identity)

    def drain(self, replica: str) -> None:
        """Send no more requests to a replica; those in flight go on."""
        self._replicas[replica].is_draining = True

    def remove(self, replica: str) -> list[int]:
        """Forget a replica; returns the reservations that it had, which are released."""
        lost = self._replicas.pop(replica, None)
        if lost is None:
            return []
        reservations = sorted(lost.reservations)
        for number in reservations:
            self._release(number)
        return reservations

    def load(self, replica: str, load: LoadReport) -> None:
        """Take a replica's report, which includes every request that was `admitted` before."""
        state = self._replicas.get(replica)
        if state is None:
            return
        state.waiting_tokens = load.tokens_waiting + state.unseen_tokens
        state.num_waiting = load.num_waiting + state.num_unseen
        state.num_requests = load.num_running + state.num_waiting
        state.token_s, state.max_waiting = load.token_s, load.max_waiting

    def queue_s(self, replica: str) -> float:
        """Seconds of work that a replica has before a further request; 0 if it is not there."""
        state = self._replicas.get(replica)
        return 0.0 if state is None else self._queue_s(state)

    def queues(self) -> dict[str, tuple[float, int]]:
        """Seconds of computing that wait at each replica, and its requests, by name."""
        first_token_s = self._mean_token_s([*self._replicas.values()])
        return {
            name: ((state.token_s or first_token_s) * state.waiting_tokens, state.num_requests)
            for name, state in self._replicas.items()
        }

    @property
    def num_in_flight(self) -> int:
        """Reservations that have not ended."""
        return len(self._reservations)

    # -- requests --------------------------------------------------------------------------

    def choose(
        self,
        page_hashes: Sequence[bytes],
        num_tokens: int,
        *,
        other_hashes: Sequence[Sequence[bytes]] = (),
        max_tokens: int | None = None,
        identity: Hashable = None,
        exclude: Collection[str] = (),
        beyond_limits: bool = False,
    ) -> Decision | Refusal:
        """Choose a replica for a prompt, and reserve its work there.

        Args:
            page_hashes: of the prompt's whole pages.
            other_hashes: of the same pages at replicas with other weights, whose namespace is another.
            num_tokens: of the prompt, and of what was generated before a resumption.
            max_tokens: of the answer, if that is limited.
            identity: only replicas with an equal one; None: any.
            exclude: names of replicas that must not get it.
            beyond_limits: also a replica whose queue is full, if all are.
        """
        able = [
            state
            for state in self._replicas.values()
            if not state.is_draining
            and (identity is None or state.identity == identity)
            and (not exclude or state.name not in exclude)
        ]
        total = sum([state.num_requests for state in able])
        limit = self.bound * total / len(able) + 1 if able else 0.0
        within = [state for state in able if state.num_requests <= limit and not state.is_full]
        if not within:
            within = [state for state in able if not state.is_full]
            if not within:
                if not (beyond_limits and able):
                    return self._refuse(able)
                within = able
        pages = self.mirrors.match(page_hashes)
        for hashes in other_hashes:
            # No replica has both: it drops its pages with its weights.
            pages |= self.mirrors.match(hashes)
        cached = self._hits(pages, num_tokens)
        in_flight = self._hits(self._in_flight.match(page_hashes), num_tokens)
        expected = dict(cached)
        for name, tokens in in_flight.items():
            expected[name] = max(tokens, expected.get(name, 0))
        at, cost_s = self._least_cost(within, expected, num_tokens, max_tokens)
        chosen = within[at]
        hit = expected.get(chosen.name, 0)
        alternative = self._alternative(able, cached, hit, limit)
        reason = self._reason(chosen, cached, in_flight, able, alternative)
        number = self._reserve(chosen, page_hashes, num_tokens, hit)
        counts = self.counters.num_decisions
        counts[reason] = counts.get(reason, 0) + 1
        return Decision(chosen.name, reason, number, hit, cost_s, alternative)

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
            num_output: tokens of its answer.
            cached_tokens: of its prompt, that had hit; None: not known.
        """
        request = self._release(reservation)
        if request is None:
            return
        if num_output:
            self._output_tokens += SMOOTHING * (num_output - self._output_tokens)
        if cached_tokens is not None:
            self.counters.predicted_tokens += request.cached_tokens
            self.counters.cached_tokens += cached_tokens
            self.counters.wrong_tokens += abs(request.cached_tokens - cached_tokens)

    def failed(self, reservation: int) -> None:
        """The request was refused or aborted, or its replica is gone."""
        self._release(reservation)

    # -- inside ----------------------------------------------------------------------------

    def _hits(self, pages: dict[str, int], num_tokens: int) -> dict[str, int]:
        """Tokens of hits; the last token of a prompt is computed in any case."""
        most, size = max(0, num_tokens - 1) // self.page_size, self.page_size
        return {name: min(count, most) * size for name, count in pages.items()}

    def _least_cost(
        self,
        states: Sequence[_Replica],
        expected: dict[str, int],
        num_tokens: int,
        max_tokens: int | None,
    ) -> tuple[int, float]:
        """The place of the replica with the least cost, and that cost."""
        output_tokens = self._output_tokens
        if max_tokens is not None:
            output_tokens = min(output_tokens, max_tokens)
        first_token_s, get = self._mean_token_s(states), expected.get
        costs = [
            (state.token_s or first_token_s)
            * (
                state.waiting_tokens
                + COMPUTE_WEIGHT * (num_tokens - get(state.name, 0))
                + state.num_requests * output_tokens
            )
            for state in states
        ]
        least = min(costs) * TIE
        # Ties rotate: the first in an order that begins at another replica each time.
        turn = self._num_reserved % len(costs)
        for at in range(turn, len(costs)):
            if costs[at] <= least:
                return at, costs[at]
        at = next(at for at in range(turn) if costs[at] <= least)
        return at, costs[at]

    def _mean_token_s(self, states: Sequence[_Replica]) -> float:
        """For replicas that have not reported yet."""
        reported = [state.token_s for state in states if state.token_s]
        return sum(reported) / len(reported) if reported else FIRST_TOKEN_S

    def _queue_s(self, state: _Replica) -> float:
        return state.token_s * state.waiting_tokens

    def _refuse(self, full: Sequence[_Replica]) -> Refusal:
        reason, retry_s = "no replica", MIN_RETRY_S
        if full:
            # A place in a queue is free when the first of its requests has been computed.
            reason = "full"
            retry_s = min(self._queue_s(state) / max(1, state.num_waiting) for state in full)
        self.counters.num_refusals[reason] = self.counters.num_refusals.get(reason, 0) + 1
        return Refusal(reason, min(MAX_RETRY_S, max(MIN_RETRY_S, retry_s)))

    def _reserve(
        self, state: _Replica, page_hashes: Sequence[bytes], num_tokens: int, hit: int
    ) -> int:
        self._num_reserved += 1
        number = self._num_reserved
        noted = self._in_flight.add(state.name, page_hashes)
        self._reservations[number] = _Reservation(state, num_tokens - hit, hit, noted)
        state.reservations.add(number)
        state.count_unseen(1, num_tokens - hit)
        return number

    def _alternative(
        self, able: Sequence[_Replica], cached: dict[str, int], hit: int, limit: float
    ) -> Alternative | None:
        """The replica with the longest cached prefix, if it has more than the chosen one."""
        names = [name for name, tokens in cached.items() if tokens > hit]
        states = [state for state in able if state.name in names] if names else []
        if not states:
            return None
        best = max(states, key=lambda state: cached[state.name])
        reason = "full" if best.is_full else "bound" if best.num_requests > limit else "queue"
        return Alternative(best.name, cached[best.name], self._queue_s(best), reason)

    def _reason(
        self,
        state: _Replica,
        cached: dict[str, int],
        in_flight: dict[str, int],
        able: Sequence[_Replica],
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
        if all(self.mirrors.is_known(other.name) for other in able):
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
