"""What changed since an earlier request, and how long requests are remembered."""

from array import array
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.engine.text.tenant_lru import TenantLru
from ramify.server.history.expiring_store import ExpiringStore
from ramify.server.history.stored_requests import (
    HistoryEntry,
    PromptDifference,
    fingerprint,
    first_difference,
)
from ramify.server.prompts.renderer import PromptSegment, RenderedPrompt
from tests.budget import examples

IDS = array("i", range(100))
SEGMENTS = (
    PromptSegment("tools[0]", 2, 10),
    PromptSegment("messages[0].content", 12, 30),
    PromptSegment("messages[1].content", 32, 60),
)
OLD = HistoryEntry(
    model="m",
    options={"text_format": "null"},
    tools=(fingerprint({"name": "a"}), fingerprint({"name": "b"})),
    system="s",
    messages=(fingerprint("x"), fingerprint("y")),
    prompt=RenderedPrompt(IDS, "", SEGMENTS, (), 90),
)


def changed_at(place: int) -> RenderedPrompt:
    ids = IDS[:]
    ids[place] = -1 if place < 0 else 9999
    return RenderedPrompt(ids, "", SEGMENTS, (), 90)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"messages": (*OLD.messages, fingerprint("z"))}, None),
        ({"model": "n"}, PromptDifference("model", "model", 0, 90)),
        (
            {"tools": OLD.tools[::-1], "prompt": changed_at(4)},
            PromptDifference("tools", "tools[0]", 4, 86),
        ),
        (
            {"tools": OLD.tools[:1], "prompt": changed_at(9)},
            PromptDifference("tools", "tools[1]", 9, 81),
        ),
        ({"system": "t", "prompt": changed_at(11)}, PromptDifference("system", "system", 11, 79)),
        (
            {"messages": (OLD.messages[0], fingerprint("w")), "prompt": changed_at(40)},
            PromptDifference("messages", "messages[1].content", 40, 50),
        ),
        (
            {"messages": OLD.messages[:1], "prompt": changed_at(31)},
            PromptDifference("messages", "messages[1]", 31, 59),
        ),
        ({"options": {"text_format": "1"}}, PromptDifference("text_format", "text_format", 100, 0)),
    ],
)
def test_the_first_change_in_the_order_of_a_prompt(
    change: dict[str, object], expected: PromptDifference | None
) -> None:
    """Added messages are none; the place is that of the first part that differs."""
    assert first_difference(OLD, replace(OLD, **change)) == expected  # type: ignore[arg-type]


def test_the_order_of_keys_is_no_change_that_of_tools_is() -> None:
    """JSON objects have no order, lists have."""
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_records_are_bounded_and_expire() -> None:
    """In number, in bytes and in age; nobody sees another tenant's."""
    time = [0.0]
    old = OLD.without_text()
    size = old.num_bytes
    store: ExpiringStore[HistoryEntry] = ExpiringStore(
        max_entries=3, max_bytes=5 * size // 2, ttl_s=10.0, clock=lambda: time[0]
    )
    store.put("a", "1", old)
    store.put("b", "1", old)
    assert store.get("a", "1") == old
    assert store.get("c", "1") is None

    store.put("a", "2", old)
    assert (store.get("a", "1"), len(store), store.num_bytes) == (None, 2, 2 * size)

    time[0] = 10.0
    assert store.get("a", "2") is None
    store.put("c", "1", old)
    assert (len(store), store.num_bytes) == (1, size)
    assert not store.forget("a", "2")


def test_one_tenant_does_not_flush_anothers_records() -> None:
    """Whoever has most gives way."""
    store: ExpiringStore[HistoryEntry] = ExpiringStore(
        max_entries=20, ttl_s=10.0, clock=lambda: 0.0
    )
    store.put("a", "1", OLD)
    for number in range(50):
        store.put("b", str(number), OLD)

    assert store.get("a", "1") is not None
    assert len(store) == 20
    assert store.get("b", "49") is not None


@dataclass(frozen=True)
class Kept:
    """An answer of any size."""

    num_bytes: int


def test_what_is_larger_than_a_tenants_share_is_not_kept() -> None:
    """And nothing else is forgotten for it."""
    store: ExpiringStore[HistoryEntry] = ExpiringStore(max_tenant_bytes=10_000)
    store.put("a", "1", OLD)
    store.put("a", "2", replace(OLD, response=Kept(10_000)))

    assert store.get("a", "1") is not None
    assert store.get("a", "2") is None


def test_a_record_has_no_text() -> None:
    """A long description, message or template leaves only digests, whatever its length."""
    sizes = []
    for length in (10, 10**7):
        text = "x" * length
        entry = replace(
            OLD,
            options={"text_format": fingerprint({"description": text})},
            tools=(fingerprint({"description": text}),),
            messages=(fingerprint({"content": text}),),
            prompt=RenderedPrompt(IDS, text, SEGMENTS, (), 90),
        )
        sizes.append(entry.without_text().num_bytes)

    assert sizes[0] == sizes[1] < 5000


PUT = st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 60))


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(PUT, max_size=60), st.integers(20, 100), st.integers(10, 60), st.integers(1, 12))
def test_the_largest_tenant_gives_way(
    puts: list[tuple[str, int, int]], max_cost: int, max_tenant_cost: int, max_entries: int
) -> None:
    """The cache equals a plain list from which the same rule removes entries, recounted each time."""
    lru: TenantLru[int, int] = TenantLru(
        max_cost=max_cost, max_tenant_cost=max_tenant_cost, max_entries=max_entries
    )
    kept: list[tuple[str, int, int]] = []  # oldest first

    def cost(tenant: str) -> int:
        return sum(entry[2] for entry in kept if entry[0] == tenant)

    def drop_oldest(tenant: str) -> None:
        kept.remove(next(entry for entry in kept if entry[0] == tenant))

    for number, (tenant, key, size) in enumerate(puts):
        if number % 5 == 4:
            lru.pop(tenant, key)
            kept[:] = [entry for entry in kept if entry[:2] != (tenant, key)]
            continue
        before = {entry[:2] for entry in kept}
        dropped = lru.put(tenant, key, size, size)
        kept[:] = [entry for entry in kept if entry[:2] != (tenant, key)]
        if size <= min(max_cost, max_tenant_cost):
            kept.append((tenant, key, size))
            while cost(tenant) > max_tenant_cost:
                drop_oldest(tenant)
            while sum(entry[2] for entry in kept) > max_cost:
                drop_oldest(max("abc", key=lambda name: (cost(name), name)))
            while len(kept) > max_entries:
                owners = [entry[0] for entry in kept]
                drop_oldest(max(owners, key=lambda name: (owners.count(name), name)))
        assert {(t, k): lru.get(t, k) for t in "abc" for k in range(7)} == {
            (t, k): next((e[2] for e in kept if e[:2] == (t, k)), None)
            for t in "abc"
            for k in range(7)
        }
        assert len(lru) == len(kept)
        assert lru.cost == sum(entry[2] for entry in kept)
        gone = {(drop.tenant, drop.key) for drop in dropped} - {entry[:2] for entry in kept}
        assert gone == (before | {(tenant, key)}) - {entry[:2] for entry in kept}
    assert {t: lru._tenant_cost.get(t, 0) for t in "abc"} == {t: cost(t) for t in "abc"}
