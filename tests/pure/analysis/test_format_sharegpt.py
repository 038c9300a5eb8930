"""ShareGPT conversations."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.reader import ReadQuality, Row
from ramify.analysis.readers.transcripts.sharegpt import SHAREGPT
from tests.pure.analysis.log_rows import read_rows

ROW = {
    "id": "x",
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
        {"from": "human", "value": "Why?"},
        {"from": "gpt", "value": "Because"},
    ],
}


def test_each_turn_of_the_human_is_a_request() -> None:
    """With the history before it, the answer as output, and the previous request as parent."""
    first, second = read_rows(SHAREGPT, [ROW])[0]

    assert SHAREGPT.is_row(ROW)
    assert [(item.path, item.label, item.text) for item in second.segments] == [
        ("system", "", "Be brief."),
        ("messages[0]", "user", "Hi"),
        ("messages[1]", "assistant", "Hello"),
        ("messages[2]", "user", "Why?"),
    ]
    assert [(item.line, item.index, item.conversation) for item in (first, second)] == [
        (1, 0, "x"),
        (1, 1, "x"),
    ]
    assert (first.parent_id, second.parent_id) == (None, first.request_id)
    assert [segment.text for segment in second.output] == ["Because"]


def test_conversations_on_one_line_have_different_indices() -> None:
    """An array that is a single line."""
    reader = SHAREGPT.reader(ReadQuality())

    requests = [
        request for index in range(2) for request in reader.feed(Row("f", 1, ROW, index=index))
    ]

    assert [request.index for request in requests] == [0, 1, 2, 3]


def test_bad_turns_are_told() -> None:
    """An unknown speaker, a missing value, no list; a conversation without a question is skipped."""
    rows = [
        {"conversations": [{"from": "ghost", "value": "boo"}]},
        {"conversations": [{"from": "human"}]},
        {"conversations": "none"},
        {"conversations": [{"from": "gpt", "value": "Hello"}]},
    ]

    requests, quality = read_rows(SHAREGPT, rows)

    assert not requests
    assert [line for _, line in quality.bad_lines] == [1, 2, 3]
    assert quality.skipped["conversation without a human's turn"] == 1


TURNS = st.lists(
    st.tuples(st.sampled_from(["human", "gpt", "system", "tool"]), st.text(max_size=5)), max_size=12
)


@given(TURNS)
def test_prompts_of_a_conversation_are_prefixes_of_each_other(turns: list[tuple[str, str]]) -> None:
    """Each request continues the one before it."""
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}

    requests, _ = read_rows(SHAREGPT, [row])

    for shorter, longer in pairwise(requests):
        assert len(shorter.segments) < len(longer.segments)
        assert longer.segments[: len(shorter.segments)] == shorter.segments
        assert longer.parent_id == shorter.request_id
