"""Where a router sends requests, why, and that nothing it reserves is left."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import CacheKey
from ramify.cluster.decisions import Alternative, Decision, Load, Refusal, RouterCounters
from ramify.cluster.mirrors import Mirrors
from ramify.cluster.prefix_home import home_of
from ramify.cluster.recent_work import HORIZON, RecentWork
from ramify.cluster.router import (
    BOUND,
    COPY_WEIGHT,
    FIRST_OUTPUT_TOKENS,
    FIRST_PROMPT_TOKENS,
    LONG_WAIT,
    Router,
)
from ramify.errors import ConfigError
from tests.budget import examples
from tests.pure.mirrored_replica import Replica, joined

PAGE = 2
IDLE = Load(0, 0, 0, token_s=0.01, step_s=0.02)


def idle_cost(num_tokens: int) -> float:
    """Seconds that tokens cost on an idle replica of `IDLE`'s calibration, without other requests."""
    long_wait = num_tokens**2 / (LONG_WAIT * FIRST_PROMPT_TOKENS)
    return IDLE.token_s * (num_tokens + long_wait + COPY_WEIGHT * num_tokens)


class Fleet:
    """A router over replicas with real caches, without a wire."""

    def __init__(self, names: str = "abc", num_pages: int = 512, **options) -> None:
        self.mirrors = Mirrors()
        self.router = Router(self.mirrors, PAGE, **options)
        self.replicas: dict[str, Replica] = {}
        for number, name in enumerate(names, 1):
            self.replicas[name] = joined(self.mirrors, name, number, num_pages)
            self.router.add(name)
            self.router.load(name, IDLE)

    def cache(self, name: str, prompt: range) -> None:
        """Compute a prompt on a replica."""
        replica, prompt_key = self.replicas[name], CacheKey(prompt)
        cache = replica.cache
        lease = cache.acquire(prompt_key)
        lease = cache.publish(
            lease, prompt_key, cache.reserve(len(prompt) // PAGE - len(lease.pages))
        )
        cache.release(lease)
        replica.message().deliver(self.mirrors)

    def choose(self, prompt: range, **options) -> Decision | Refusal:
        return self.router.choose(CacheKey(prompt).packed_hashes(PAGE), len(prompt), **options)

    def decide(self, prompt: range, **options) -> Decision:
        decision = self.choose(prompt, **options)
        assert isinstance(decision, Decision)
        return decision


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    """Of two replicas with a part of the prompt, the one with more gets it; the hit is predicted."""
    fleet = Fleet()
    fleet.cache("b", range(200))
    fleet.cache("c", range(100))

    decision = fleet.decide(range(220))

    assert (decision.replica, decision.reason, decision.cached_tokens) == ("b", "cached", 200)
    assert decision.alternative is None
    assert decision.cost_s == pytest.approx(idle_cost(20))


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole is expected to hit all pages but the last."""
    fleet = Fleet()
    fleet.cache("b", range(200))

    assert fleet.decide(range(200)).cached_tokens == 198


def test_a_prefix_in_flight_counts_as_cached() -> None:
    """Requests behind a long prompt follow it before it is computed, from the decision on."""
    fleet = Fleet()
    first = fleet.decide(range(400))

    second = fleet.decide(range(420))

    assert (second.replica, second.reason) == (first.replica, "in flight")
    assert 380 <= second.cached_tokens <= 400
    fleet.router.first_token(first.reservation)
    fleet.router.first_token(second.reservation)
    assert len(fleet.router._in_flight) == 0


def test_a_saturated_replica_spills_and_the_reason_says_so() -> None:
    """With 30 s of work before a prefix of 2 s, another replica computes it again.

    At 9 s it is the cost that decides, beyond the bound the request is not weighed at all.
    """
    for waiting, reason in ((3000, "bound"), (900, "queue")):
        fleet = Fleet()
        fleet.cache("b", range(200))
        fleet.router.load("a", Load(600, 0, 0, 0.01, 0.02))
        fleet.router.load("b", Load(waiting, 0, 0, 0.01, 0.02))

        decision = fleet.decide(range(220), max_tokens=1)

        assert (decision.replica, decision.reason, decision.cached_tokens) == ("c", "spill", 0)
        assert decision.alternative == Alternative("b", 200, waiting / 100, reason)


def test_a_hot_prefix_is_computed_on_further_replicas() -> None:
    """Requests for one prefix, all at once: no replica gets more than its share."""
    fleet = Fleet("abcd")
    fleet.cache("a", range(200))

    chosen = Counter(fleet.decide(range(220)).replica for _ in range(40))

    assert set(chosen) == set("abcd")
    assert max(chosen.values()) <= BOUND * 10 + 2


def test_ties_rotate() -> None:
    """Prompts that nobody has go to all replicas in turn, though one is 2 % faster."""
    fleet = Fleet("abcd")
    fleet.router.load("c", Load(0, 0, 0, 0.0098, 0.02))
    chosen = []
    for start in range(0, 8000, 1000):
        decision = fleet.decide(range(start, start + 100))
        fleet.router.finished(decision.reservation)
        chosen.append(decision.replica)

    assert chosen == list("abcd") * 2


def test_a_tie_goes_to_the_least_recent_work() -> None:
    """Of idle replicas without the prompt, the one that was sent least of late is chosen."""
    fleet = Fleet("abc")
    for start, num_tokens in ((0, 100), (1000, 500), (2000, 50), (3000, 20)):
        decision = fleet.decide(range(start, start + num_tokens))
        fleet.router.finished(decision.reservation)
        assert decision.replica == "abcc"[start // 1000]


def test_recent_work_has_no_more_output_than_a_request_may_have() -> None:
    """A prompt of 100 tokens for one more is less than one of 50 with an answer of any length."""
    fleet = Fleet("ab")
    for start, num_tokens, limit in ((0, 100, 1), (1000, 50, None)):
        decision = fleet.decide(range(start, start + num_tokens), max_tokens=limit)
        fleet.router.finished(decision.reservation)

    assert fleet.decide(range(2000, 2020)).replica == "a"


def test_recent_work_is_forgotten() -> None:
    """After `HORIZON` requests for each replica, work counts 1/e of what is added now."""
    recent = RecentWork()
    recent.join("a")
    recent.join("b")
    recent.add("a", 1000)
    for _ in range(2 * HORIZON):
        recent.add("b", 0)
    recent.add("b", 1000)

    assert recent.of("a") / recent.of("b") == pytest.approx(2.718**-1, rel=0.02)
    recent.join("c")
    assert recent.of("c") == pytest.approx((recent.of("a") + recent.of("b")) / 2)
    for _ in range(10_000):
        recent.add("a", 1)
    assert 1e-9 < recent.of("a") < 1e15
    recent.leave("c")
    recent.leave("c")


def test_of_equal_prefixes_the_home_is_used() -> None:
    """Prompts behind a prefix that all have go to its home, and elsewhere once that has more to do."""
    fleet = Fleet("abcd")
    for name in "abcd":
        fleet.cache(name, range(200))
    home = home_of(CacheKey(range(200)).page_hashes(PAGE)[-1], "abcd")
    chosen = []
    for start in range(1000, 7000, 1000):
        prompt = CacheKey([*range(200), *range(start, start + 20)])
        decision = fleet.router.choose(prompt.packed_hashes(PAGE), len(prompt))
        assert isinstance(decision, Decision)
        assert decision.cached_tokens == 200
        chosen.append(decision.replica)

    assert chosen[:3] == [home] * 3
    assert set(chosen[3:]) - {home}


def test_a_replica_that_drains_is_no_home() -> None:
    """Nor is one that is gone: of the others, one is the home, and its copy costs nothing."""
    for leave in (Router.drain, Router.remove):
        fleet = Fleet("abcd")
        for name in "abcd":
            fleet.cache(name, range(200))
        last_page = CacheKey(range(200)).page_hashes(PAGE)[-1]
        first = home_of(last_page, "abcd")
        leave(fleet.router, first)

        decision = fleet.decide(range(220))

        assert decision.replica == home_of(last_page, set("abcd") - {first})
        assert decision.cost_s == pytest.approx(idle_cost(20))
        assert decision.alternative is None


def test_homes_are_spread_and_stay_when_a_replica_leaves() -> None:
    """Each of four replicas is home of about a quarter of the prefixes; only a leaver's homes move."""
    hashes = [CacheKey([number]).page_hashes(1)[0] for number in range(2000)]
    before = [home_of(page_hash, "abcd") for page_hash in hashes]
    after = [home_of(page_hash, "abd") for page_hash in hashes]

    assert all(400 < count < 600 for count in Counter(before).values())
    assert all(new == old for new, old in zip(after, before, strict=True) if old != "c")
    assert "c" not in after


def test_a_bound_on_requests_is_an_option() -> None:
    """No replica gets a request above the bound and one, whatever it has cached."""
    for bound, most in ((None, 40), (1.25, 14)):
        fleet = Fleet("abcd", request_bound=bound)
        fleet.cache("a", range(200))
        chosen = Counter(fleet.decide(range(202), max_tokens=1).replica for _ in range(40))

        assert chosen["a"] <= most
        assert (chosen["a"] > 14) is (bound is None)


def test_a_slower_replica_gets_less() -> None:
    """Each replica's own calibration counts."""
    fleet = Fleet("ab")
    fleet.router.load("a", Load(0, 0, 0, 0.1, 0.2))

    assert [fleet.decide(range(at, at + 100)).replica for at in (0, 1000)] == ["b", "b"]


def test_decoding_requests_count() -> None:
    """Of two replicas without a queue, the one that decodes for fewer requests is chosen."""
    fleet = Fleet("ab")
    fleet.router.load("a", Load(0, 0, 1, 0.01, 0.02))

    first = fleet.decide(range(100))

    assert first.replica == "b"
    assert first.cost_s == pytest.approx(idle_cost(100))
    second = fleet.decide(range(1000, 1100), max_tokens=10)
    assert second.replica == "a"
    # One request decodes beside its 10 tokens; on average 50 tokens wait for a replica.
    queue = 50 / FIRST_PROMPT_TOKENS
    assert second.cost_s == pytest.approx(idle_cost(100) + 0.01 * (10 + queue * 100), rel=0.01)
    assert FIRST_OUTPUT_TOKENS > 10


def test_a_reservation_counts_from_the_decision_until_the_report_includes_it() -> None:
    """Before any report a second prompt goes elsewhere; a report of the first takes its place."""
    fleet = Fleet("ab")
    first = fleet.decide(range(100))
    assert fleet.decide(range(1000, 1100)).replica != first.replica
    state = fleet.router._replicas[first.replica]
    assert (state.num_unseen, state.unseen_tokens, state.num_requests) == (1, 100, 1)

    fleet.router.admitted(first.reservation)
    fleet.router.admitted(first.reservation)
    fleet.router.load(first.replica, Load(100, 1, 0, 0.01, 0.02))

    assert (state.num_unseen, state.unseen_tokens, state.num_requests) == (0, 0, 1)


def test_a_prompt_that_warms_a_replica_is_work_but_no_decision() -> None:
    """It waits at the replica that it is assigned to; counters and mean lengths stay as they are."""
    fleet = Fleet("ab")
    fleet.cache("a", range(200))
    router, prompt = fleet.router, CacheKey(range(220))
    means = router._output_tokens, router._prompt_tokens

    warm = router.assign("b", prompt.packed_hashes(PAGE), len(prompt))

    assert isinstance(warm, Decision)
    assert (warm.replica, warm.reason, warm.cached_tokens) == ("b", "assigned", 0)
    assert router.queue_s("b") == pytest.approx(220 * IDLE.token_s)
    assert set(router._in_flight.match(prompt.packed_hashes(PAGE))) == {"b"}
    router.finished(warm.reservation, 1, 200)
    assert (router._output_tokens, router._prompt_tokens) == means
    assert router.counters == RouterCounters({})
    assert (router.num_in_flight, router.queue_s("b")) == (0, 0)
    router.drain("b")
    assert router.assign("b", b"", 220) == Refusal("no replica", 1.0)
    assert router.assign("c", b"", 220) == Refusal("no replica", 1.0)


def test_drained_excluded_and_different_replicas_get_nothing() -> None:
    """A resumption stays with the identity of its first replica, and away from the dead one."""
    fleet = Fleet("")
    for number, (name, identity) in enumerate([("a", "x"), ("b", "x"), ("c", "y")], 1):
        fleet.replicas[name] = joined(fleet.mirrors, name, number, 512)
        fleet.router.add(name, identity)
    fleet.cache("c", range(200))

    assert fleet.decide(range(220), identity="x", exclude=["a"]).replica == "b"
    fleet.router.drain("c")
    assert fleet.decide(range(220)).replica != "c"
    assert fleet.choose(range(220), identity="y") == Refusal("no replica", 1.0)
    fleet.router.add("c", "z")
    assert fleet.decide(range(220), identity="z").reason == "only"


def test_all_full_is_refused_with_the_time_until_a_place_is_free() -> None:
    """Retry-After is from the replica with the shortest queue, 1 to 60 s; no replica is at once."""
    fleet = Fleet("ab")
    fleet.router.load("a", Load(4000, 4, 8, 0.01, 0.02, max_waiting=4))
    fleet.router.load("b", Load(8000, 4, 8, 0.01, 0.02, max_waiting=4))

    assert fleet.choose(range(100)) == Refusal("full", 10.0)
    fleet.router.load("b", Load(8000, 3, 8, 0.01, 0.02, max_waiting=4))
    assert fleet.decide(range(100)).replica == "b"
    assert isinstance(fleet.choose(range(100)), Refusal)
    assert Fleet("").choose(range(100)) == Refusal("no replica", 1.0)


def test_an_unknown_cache_is_no_miss() -> None:
    """Until every snapshot is complete, the reason says that a cache is not known."""
    fleet = Fleet("ab")
    fleet.mirrors.add("a", 1)

    assert fleet.decide(range(100)).reason == "unknown cache"
    assert Fleet("ab").decide(range(100)).reason == "least work"


def test_a_dead_replica_gives_its_reservations_back() -> None:
    """`remove` returns them, released; what comes for them later changes nothing."""
    fleet = Fleet("ab")
    numbers = [fleet.decide(range(at, at + 100)) for at in range(0, 8000, 1000)]
    lost = fleet.router.remove("a")

    assert lost == [decision.reservation for decision in numbers if decision.replica == "a"]
    for number in lost:
        fleet.router.admitted(number)
        fleet.router.first_token(number)
        fleet.router.finished(number)
        fleet.router.failed(number)
    fleet.router.load("a", IDLE)
    assert fleet.router.remove("a") == []
    assert fleet.router.num_in_flight == len(numbers) - len(lost)


def test_a_replica_with_requests_in_flight_does_not_join_twice() -> None:
    """`add` would forget them; the error says what to do."""
    fleet = Fleet("a")
    fleet.decide(range(100))

    with pytest.raises(ConfigError, match="'a' has 1 request in flight; remove it"):
        fleet.router.add("a")


def test_predictions_are_compared_with_what_hit() -> None:
    """Counters add up predicted and actual tokens of finished requests."""
    fleet = Fleet("ab")
    fleet.cache("a", range(100))
    for cached in (100, 90, None):
        fleet.router.finished(fleet.decide(range(110)).reservation, 5, cached)

    counters = fleet.router.counters
    assert (counters.predicted_tokens, counters.cached_tokens, counters.wrong_tokens) == (
        200,
        190,
        10,
    )


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32), num_replicas=st.integers(1, 6))
def test_no_decision_is_above_the_bound_and_every_reservation_ends(
    seed: int, num_replicas: int
) -> None:
    """Random requests end, fail, are reported or not; replicas drain, leave and come back."""
    random, names = Random(seed), "abcdef"[:num_replicas]
    fleet = Fleet(names)
    router, live = fleet.router, dict[int, str]()
    for _ in range(120):
        action = random.choice(
            ["choose"] * 5 + ["admitted", "first", "end", "load", "leave", "drain"]
        )
        if action == "choose":
            states = [replica for replica in router._replicas.values() if not replica.is_draining]
            work = {
                replica.name: (replica.token_s or 0.01)
                * (replica.waiting_tokens + replica.num_requests * router._output_tokens)
                for replica in states
            }
            start = random.choice([0, 0, 1000, random.randrange(10**6)])
            num_tokens = random.choice([1, 30, 200])
            own_s = 0.01 * (num_tokens + router._output_tokens)
            decision = fleet.choose(range(start, start + num_tokens))
            if isinstance(decision, Refusal):
                assert not [replica for replica in states if not replica.is_full]
                continue
            mean = sum(work.values()) / len(work)
            if not any(replica.max_waiting for replica in states):
                assert work[decision.replica] <= BOUND * mean + own_s + 1e-9
            live[decision.reservation] = decision.replica
        elif action == "load":
            name = random.choice(names)
            limit = random.choice([0, 0, 0, 3])
            router.load(name, Load(random.randrange(500), random.randrange(4), 2, 0.01, 0.1, limit))
        elif action == "leave":
            name = random.choice(names)
            assert router.remove(name) == sorted(number for number in live if live[number] == name)
            live = {number: replica for number, replica in live.items() if replica != name}
            router.add(name)
        elif action == "drain" and random.random() < 0.3:
            router.drain(random.choice(names))
        elif live:
            number = random.choice(list(live))
            if action == "admitted":
                router.admitted(number)
            elif action == "first":
                router.first_token(number)
            elif action == "end":
                del live[number]
                random.choice([router.finished, router.failed])(number)
        assert router.num_in_flight == len(live)
    for number in live:
        router.finished(number)

    assert (router.num_in_flight, len(router._in_flight)) == (0, 0)
    for state in router._replicas.values():
        assert (state.num_unseen, state.unseen_tokens, state.reservations) == (0, 0, set())


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_a_token(page_size: int) -> None:
    """A page size below 1 is refused."""
    with pytest.raises(ConfigError, match=f"page_size={page_size}"):
        Router(Mirrors(), page_size)


@pytest.mark.parametrize("bound", [0.9, float("nan")])
def test_a_bound_is_not_below_the_mean(bound: float) -> None:
    """With a bound below 1 no replica could take a request."""
    with pytest.raises(ConfigError, match=f"^bound={bound}"):
        Router(Mirrors(), PAGE, bound=bound)
    with pytest.raises(ConfigError, match=f"request_bound={bound}"):
        Router(Mirrors(), PAGE, request_bound=bound)


def test_the_router_loads_nothing_heavy() -> None:
    """Importing it loads neither torch nor gRPC nor Ray, nor the engine."""
    script = (
        "import sys, ramify.cluster.router; "
        "print([name for name in ('torch', 'grpc', 'ray', 'numpy', 'ramify.engine') if name in sys.modules])"
    )

    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"
