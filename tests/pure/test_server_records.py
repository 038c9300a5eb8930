"""What changed since an earlier request, and how long requests are remembered."""

from array import array
from dataclasses import replace

import pytest

from ramify.server.prompt_renderer import PromptSegment, RenderedPrompt
from ramify.server.request_history import (
    HistoryEntry,
    PromptDifference,
    RequestHistory,
    canonical_json,
    first_difference,
)

IDS = array("i", range(100))
SEGMENTS = (
    PromptSegment("tools[0]", 2, 10),
    PromptSegment("messages[0].content", 12, 30),
    PromptSegment("messages[1].content", 32, 60),
)
OLD = HistoryEntry(
    model="m",
    options={"text_format": "null"},
    tools=(canonical_json({"name": "a"}), canonical_json({"name": "b"})),
    system="s",
    messages=(canonical_json("x"), canonical_json("y")),
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
        ({"messages": (*OLD.messages, canonical_json("z"))}, None),
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
            {"messages": (OLD.messages[0], canonical_json("w")), "prompt": changed_at(40)},
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
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert canonical_json([1, 2]) != canonical_json([2, 1])


def test_records_are_bounded_and_expire() -> None:
    """In number, in tokens and in age; nobody sees another tenant's."""
    time = [0.0]
    store = RequestHistory(max_entries=3, max_tokens=250, ttl_s=10.0, clock=lambda: time[0])
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
    store = RequestHistory(max_entries=20, max_tokens=10**6, ttl_s=10.0, clock=lambda: 0.0)
    store.put("a", "1", OLD)
    for number in range(50):
        store.put("b", str(number), OLD)

    assert store.get("a", "1") is OLD
    assert len(store) == 20
    assert store.get("b", "49") is OLD
