"""Sessions: an ended one's own pages are evicted before all others; pages of others are untouched."""

from array import array
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.cache import POLICIES, CacheKey, Evicted, Lease, PrefixCache
from ramify.cache import session_table as table
from ramify.cache.maintenance import reset
from ramify.cache.session_table import Session
from ramify.cache.sessions import end_session, open_session
from tests.budget import examples

Prompt = tuple[int, ...]  # one token a page; a prefix names its last page
Identity = tuple[str, str, int]  # tenant, name, and how often this name has been ended before


@dataclass(eq=False)
class Running:
    """A request between its publication and its release."""

    lease: Lease
    prompt: Prompt
    session: Session | None
    identity: Identity | None


@dataclass
class Model:
    """Who has used each page since it was computed, kept in a dict: the oracle."""

    cache: PrefixCache
    users: dict[Prompt, set[Identity | None]] = field(default_factory=dict)
    resident: set[Prompt] = field(default_factory=set)
    ended: set[Prompt] = field(default_factory=set)  # pages whose session has ended
    generation: Counter[tuple[str, str]] = field(default_factory=Counter)
    alive: set[tuple[str, str]] = field(default_factory=set)
    running: list[Running] = field(default_factory=list)
    evicted: list[Evicted] = field(default_factory=list)

    def pinned(self) -> set[Prompt]:
        return {
            request.prompt[:end]
            for request in self.running
            for end in range(1, len(request.prompt) + 1)
        }

    def begin(self, prompt: Prompt, who: tuple[str, str] | None) -> None:
        session = None if who is None else open_session(self.cache, *who)
        identity = None if who is None else (*who, self.generation[who])
        if who is not None:
            self.alive.add(who)
        lease = self.cache.acquire(CacheKey([*prompt, 99]))
        hit = prompt[: lease.num_tokens]
        on_path = {hit[:end] for end in range(1, len(hit) + 1)}
        num_new = min(len(prompt) - len(hit), self.cache.num_available)
        prompt = prompt[: len(hit) + num_new]
        pages = self.cache.reserve(num_new)
        self.note_evictions(self.pinned() | on_path)
        lease = self.cache.publish(lease, CacheKey(list(prompt)), pages)
        self.resident |= {prompt[:end] for end in range(1, len(prompt) + 1)}
        self.running.append(Running(lease, prompt, session, identity))

    def end_request(self, number: int) -> None:
        request = self.running.pop(number % len(self.running))
        self.cache.release(request.lease, session=request.session)
        for end in range(1, len(request.prompt) + 1):
            page = request.prompt[:end]
            if page in self.ended:
                self.users[page] = set()
                self.ended.discard(page)
            self.users.setdefault(page, set()).add(request.identity)
        if (
            request.identity is not None
            and request.identity[2] < self.generation[request.identity[:2]]
        ):
            self.hasten(request.identity)

    def end_session(self, who: tuple[str, str]) -> None:
        identity = (*who, self.generation[who])
        num_pages = end_session(self.cache, *who)
        if who not in self.alive:
            assert num_pages is None
            return
        self.alive.remove(who)
        self.generation[who] += 1
        assert num_pages == len(self.hasten(identity) & self.resident)

    def hasten(self, identity: Identity) -> set[Prompt]:
        own = {page for page, users in self.users.items() if users == {identity}} - self.ended
        self.ended |= own
        return own

    def note_evictions(self, pinned: set[Prompt]) -> None:
        """Pages of ended sessions go first, with a reason of their own."""
        for run in self.evicted:
            atoms = array("i")
            atoms.frombytes(run.atoms)
            path = self.path_of(run, tuple(atoms))
            for page in reversed(path):
                is_ended = page in self.ended
                assert run.reason == ("session_ended" if is_ended else "capacity")
                assert is_ended or not (self.ended & self.resident) - pinned
                self.resident.remove(page)
        self.evicted.clear()

    def path_of(self, run: Evicted, tail: Prompt) -> list[Prompt]:
        """The pages of a run; tokens tell where they are, since each prompt position has its own."""
        [last] = {
            page
            for page in self.resident
            if len(page) == run.start + len(tail) and page[run.start :] == tail
        }
        return [last[:end] for end in range(run.start + 1, len(last) + 1)]


def prompts() -> st.SearchStrategy[Prompt]:
    """Paths of a tree with three branches at each of six pages; equal tokens mean equal paths."""
    branches = st.lists(st.integers(0, 2), min_size=1, max_size=6)

    def of(path: list[int]) -> Prompt:
        tokens, number = list[int](), 0
        for depth, branch in enumerate(path):
            number = number * 3 + branch
            tokens.append(1000 * (depth + 1) + number)
        return tuple(tokens)

    return branches.map(of)


NAMES = st.sampled_from([("a", "x"), ("a", "y"), ("b", "x")])
STEPS = st.one_of(
    st.tuples(st.just("begin"), prompts(), st.none() | NAMES),
    st.tuples(st.just("end_request"), st.integers(0, 3)),
    st.tuples(st.just("end_session"), NAMES),
)


@settings(max_examples=examples(150))
@given(st.sampled_from(sorted(POLICIES)), st.integers(6, 14), st.lists(STEPS, max_size=40))
def test_an_ended_session_loses_just_its_own_pages_first(
    policy: str, num_pages: int, steps: list[tuple]
) -> None:
    """The number of pages that an end hastens, and every eviction, are those of the oracle."""
    cache = PrefixCache(num_pages, 1, policy=policy, ghost_pages=10**6, log_every=0)
    model = Model(cache)
    cache.observe_evictions(model.evicted.append)
    num_requests = Counter[object]()
    for name, *arguments in steps:
        if name == "begin":
            num_requests[arguments[1]] += 1
            if num_requests[arguments[1]] < table.MAX_BRANCHES and len(model.running) < 4:
                model.begin(*arguments)
        elif name == "end_session":
            model.end_session(*arguments)
        elif model.running:
            model.end_request(*arguments)
        cache.check()
        assert cache.stats().num_sessions == len(model.alive)


def serve(cache: PrefixCache, prompt: list[int], session: Session | None = None) -> int:
    """Compute a prompt, one token a page; returns how many pages it hit."""
    lease = cache.acquire(CacheKey([*prompt, 99]))
    num_hit = lease.num_tokens
    pages = cache.reserve(len(prompt) - num_hit)
    cache.release(cache.publish(lease, CacheKey(prompt), pages), session=session)
    return num_hit


def test_the_explanation_names_the_end_of_the_session() -> None:
    """A prompt whose pages went first since their session was ended is told so."""
    now_s = 100.0
    cache = PrefixCache(6, 1, clock=lambda: now_s)
    serve(cache, [1, 2, 3], open_session(cache, "", "done"))
    serve(cache, [4, 5, 6])
    assert end_session(cache, "", "done") == 3

    now_s = 103.0
    serve(cache, [7, 8, 9])

    why = cache.explain(CacheKey([1, 2, 3, 99]))
    assert (why.reason, why.evicted_by) == ("evicted", "session_ended")
    assert "evicted 0.0 s ago (evicted first: its session was ended), idle for 3.0 s" in str(why)
    assert cache.stats().evictions["session_ended"] == 3
    assert serve(cache, [4, 5, 6]) == 3


def test_a_tenant_cannot_end_the_session_of_another() -> None:
    """The same name is another session, also where a name looks like a tenant's beginning."""
    cache = PrefixCache(8, 1)
    serve(cache, [1, 2], open_session(cache, "acme", "chat"))

    for tenant, name in (("", "chat"), ("evil", "chat"), ("acm", "echat"), ("", "acmechat")):
        assert end_session(cache, tenant, name) is None
    assert end_session(cache, "acme", "chat") == 2


def test_a_shared_page_keeps_its_recency() -> None:
    """Of an ended session, the pages that another or no session has used stay in their order."""
    cache = PrefixCache(8, 1, policy="lru")
    serve(cache, [1, 2, 3], open_session(cache, "", "a"))
    serve(cache, [1, 2, 4], open_session(cache, "", "b"))
    serve(cache, [1, 5])

    assert end_session(cache, "", "a") == 1  # [1, 2] is b's too
    assert end_session(cache, "", "b") == 1


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many sessions the least recently used is forgotten, and any after an hour."""
    now_s = 0.0
    cache = PrefixCache(8, 1, clock=lambda: now_s)
    monkeypatch.setattr(table, "MAX_SESSIONS", 3)
    for name in "abc":
        open_session(cache, "", name)
    open_session(cache, "", "a")
    open_session(cache, "", "d")

    assert cache.stats().num_sessions == 3
    assert [end_session(cache, "", name) for name in "ab"] == [0, None]
    now_s = table.IDLE_S + 1
    assert cache.stats().num_sessions == 0
    assert end_session(cache, "", "c") is None
    assert cache.stats().ended_sessions == 1


def test_a_session_has_a_limit_of_branches() -> None:
    """The newest branches go first when it ends; older ones keep their recency."""
    cache = PrefixCache(64, 1)
    session = open_session(cache, "", "a")
    for token in range(table.MAX_BRANCHES + 4):
        serve(cache, [1, 100 + token], session)

    assert len(session.branches) == table.MAX_BRANCHES
    assert end_session(cache, "", "a") == 1 + table.MAX_BRANCHES
    cache.check()


def test_a_branch_outlives_the_nodes_at_its_end() -> None:
    """When the last pages of a session are forgotten, those above still go first."""
    cache = PrefixCache(4, 1, ghost_pages=0)
    session = open_session(cache, "", "a")
    serve(cache, [1, 2], session)
    serve(cache, [1, 2, 3], session)

    assert cache.evict(1) == 1
    assert end_session(cache, "", "a") == 2
    cache.check()


def test_a_session_ends_while_its_request_runs() -> None:
    """Its pages follow when the request ends, unless another session has used them by then."""
    cache = PrefixCache(8, 1)
    session = open_session(cache, "", "a")
    leases = [cache.acquire(CacheKey([token, 2, 99])) for token in (1, 3)]
    leases = [
        cache.publish(lease, CacheKey([token, 2]), cache.reserve(2))
        for lease, token in zip(leases, (1, 3), strict=True)
    ]
    assert end_session(cache, "", "a") == 0

    cache.release(leases[0], session=session)
    serve(cache, [3, 2], open_session(cache, "", "b"))
    cache.release(leases[1], session=session)

    serve(cache, [5, 6, 7, 8, 9, 10])
    assert cache.stats().evictions["session_ended"] == 2
    assert serve(cache, [3, 2]) == 2


def test_sessions_outlive_a_rebuild() -> None:
    """After `reset` a session is alive and owns nothing; its number is nobody else's."""
    cache = PrefixCache(8, 1)
    old = open_session(cache, "", "a")
    serve(cache, [1, 2], old)

    reset(cache)
    serve(cache, [1, 2], open_session(cache, "", "b"))

    assert open_session(cache, "", "a") is old
    assert end_session(cache, "", "a") == 0
    assert end_session(cache, "", "b") == 2
