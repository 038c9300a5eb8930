"""What changed since an earlier request, and how long requests are remembered."""

from array import array
from dataclasses import replace

import pytest

from ramify.server.prompts import Prompt, Segment
from ramify.server.records import Change, Record, RecordStore, canonical, first_change

IDS = array("i", range(100))
SEGMENTS = (
    Segment("tools[0]", 2, 10),
    Segment("messages[0].content", 12, 30),
    Segment("messages[1].content", 32, 60),
)
OLD = Record(
    model="m",
    options={"text_format": "null"},
    tools=(canonical({"name": "a"}), canonical({"name": "b"})),
    system="s",
    messages=(canonical("x"), canonical("y")),
    prompt=Prompt(IDS, "", SEGMENTS, (), 90),
)


def changed_at(place: int) -> Prompt:
    ids = IDS[:]
    ids[place] = -1 if place < 0 else 9999
    return Prompt(ids, "", SEGMENTS, (), 90)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, None),
        ({"messages": (*OLD.messages, canonical("z"))}, None),
        ({"model": "n"}, Change("model", "model", 0, 90)),
        (
            {"tools": OLD.tools[::-1], "prompt": changed_at(4)},
            Change("tools", "tools[0]", 4, 86),
        ),
        ({"tools": OLD.tools[:1], "prompt": changed_at(9)}, Change("tools", "tools[1]", 9, 81)),
        ({"system": "t", "prompt": changed_at(11)}, Change("system", "system", 11, 79)),
        (
            {"messages": (OLD.messages[0], canonical("w")), "prompt": changed_at(40)},
            Change("messages", "messages[1].content", 40, 50),
        ),
        (
            {"messages": OLD.messages[:1], "prompt": changed_at(31)},
            Change("messages", "messages[1]", 31, 59),
        ),
        ({"options": {"text_format": "1"}}, Change("text_format", "text_format", 100, 0)),
    ],
)
def test_the_first_change_in_the_order_of_a_prompt(
    change: dict[str, object], expected: Change | None
) -> None:
    """Added messages are none; the place is that of the first part that differs."""
    assert first_change(OLD, replace(OLD, **change)) == expected  # type: ignore[arg-type]


def test_the_order_of_keys_is_no_change_that_of_tools_is() -> None:
    """JSON objects have no order, lists have."""
    assert canonical({"a": 1, "b": 2}) == canonical({"b": 2, "a": 1})
    assert canonical([1, 2]) != canonical([2, 1])


def test_records_are_bounded_and_expire() -> None:
    """In number, in tokens and in age; nobody sees another tenant's."""
    time = [0.0]
    store = RecordStore(max_records=3, max_tokens=250, ttl_s=10.0, clock=lambda: time[0])
    store.put("a", "1", OLD)
    store.put("b", "1", OLD)
    assert store.get("a", "1") is OLD
    assert store.get("c", "1") is None

    store.put("a", "2", OLD)
    assert (store.get("a", "1"), len(store)) == (None, 2)  # 300 tokens were too many

    time[0] = 10.0
    assert store.get("a", "2") is None
    assert len(store) == 0
    assert not store.forget("a", "2")


def test_one_tenant_does_not_flush_anothers_records() -> None:
    """Whoever has most gives way."""
    store = RecordStore(max_records=20, max_tokens=10**6, ttl_s=10.0, clock=lambda: 0.0)
    store.put("a", "1", OLD)
    for number in range(50):
        store.put("b", str(number), OLD)

    assert store.get("a", "1") is OLD
    assert len(store) == 20
    assert store.get("b", "49") is OLD
