"""Compiled grammars are kept per tenant, bounded and evicted fairly; compilers take turns."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.logits import grammar_cache
from ramify.engine.logits.grammar_cache import CompilePermits, GrammarCache, V
from ramify.params import StructuredOutput

TENANTS = ("a", "b", "c")


def spec_of(number: int) -> StructuredOutput:
    """Formats of different lengths, 1 to 40 characters."""
    return StructuredOutput(regex=chr(97 + number % 26) * (1 + number * 13 % 40))


def specs_of(cache: GrammarCache[V], tenant: str) -> list[StructuredOutput]:
    """Specs of a tenant's cached grammars, least recently used first."""
    grammars = cache._tenants.get(tenant)
    return [] if grammars is None else list(grammars.by_spec)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches."""
    for name, limit in {
        "MAX_CACHED": 8,
        "MAX_CACHED_PER_TENANT": 5,
        "MAX_CACHED_CHARS": 150,
        "MAX_CACHED_CHARS_PER_TENANT": 90,
    }.items():
        monkeypatch.setattr(grammar_cache, name, limit)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 25), st.booleans()), max_size=80
    )
)
def test_the_cache_is_bounded_and_private(calls: list[tuple[str, int, bool]]) -> None:
    """All limits hold after each call, a tenant finds only its own, and the newest is always kept."""
    cache: GrammarCache[tuple[str, int]] = GrammarCache()
    put = set[tuple[str, int]]()
    for tenant, number, is_put in calls:
        if is_put:
            cache.put(tenant, spec_of(number), (tenant, number))
            put.add((tenant, number))
            assert cache.get(tenant, spec_of(number)) == (tenant, number)
        else:
            value = cache.get(tenant, spec_of(number))
            assert value is None or (value == (tenant, number) and value in put)
        sizes = {name: [spec.num_chars for spec in specs_of(cache, name)] for name in TENANTS}
        assert sum(map(len, sizes.values())) == len(cache) <= 8
        assert sum(map(sum, sizes.values())) <= 150
        assert all(len(chars) <= 5 and sum(chars) <= 90 for chars in sizes.values())


def test_the_tenant_with_the_most_loses_its_oldest() -> None:
    """A tenant that fills the cache evicts its own grammars, the least recently used first."""
    cache: GrammarCache[int] = GrammarCache()
    specs = [StructuredOutput(regex=letter) for letter in "abcdefgh"]
    for number, spec in enumerate(specs[:3]):
        cache.put("quiet", spec, number)
    for number, spec in enumerate(specs[:5]):
        cache.put("busy", spec, number)
    cache.get("busy", specs[0])

    cache.put("new", specs[0], 0)

    assert specs_of(cache, "quiet") == specs[:3]
    assert specs_of(cache, "busy") == [specs[2], specs[3], specs[4], specs[0]]


def test_a_tenant_that_compiles_without_end_leaves_room_for_others() -> None:
    """Of one tenant, only so many compile at once; others come before its further ones."""
    permits = CompilePermits()
    for _ in range(grammar_cache.MAX_COMPILING_PER_TENANT):
        assert permits.acquire("busy", 0)
    assert not permits.acquire("busy", 0.01)
    order: list[str] = []

    def compile_as(tenant: str) -> None:
        assert permits.acquire(tenant, 30)
        order.append(tenant)
        permits.release(tenant)

    further = threading.Thread(target=compile_as, args=("busy",))
    further.start()
    compile_as("quiet")
    assert order == ["quiet"]

    permits.release("busy")
    further.join()
    assert order == ["quiet", "busy"]
    permits.release("busy")


def test_no_more_than_all_permits_are_given() -> None:
    """Tenants together compile at most MAX_COMPILING at once, and a permit given back is used."""
    permits = CompilePermits()
    names = [f"tenant {number}" for number in range(grammar_cache.MAX_COMPILING)]
    assert all(permits.acquire(name, 0) for name in names)
    assert not permits.acquire("late", 0.01)
    permits.release(names[0])
    assert permits.acquire("late", 0)
