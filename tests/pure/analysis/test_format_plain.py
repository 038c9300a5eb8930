"""Plain prompts and token ids."""

from __future__ import annotations

from ramify.analysis.readers.engines.token_ids import TOKEN_IDS
from ramify.analysis.readers.plain import PLAIN
from ramify.analysis.records import TextForm
from tests.pure.analysis.log_rows import read_rows


def test_each_line_of_text_is_a_prompt() -> None:
    """Empty lines are counted and are no requests."""
    requests, quality = read_rows(PLAIN, ["Who built Rome?", "", "Who built Genoa?"])

    assert [(item.line, item.segments[0].text) for item in requests] == [
        (1, "Who built Rome?"),
        (3, "Who built Genoa?"),
    ]
    assert quality.skipped["empty line"] == 1


def test_token_ids_are_read_from_arrays_and_objects() -> None:
    """All spellings give the same segment."""
    rows = [[1, 2, 300], {"token_ids": [1, 2, 300]}, {"prompt_token_ids": [1, 2, 300]}]

    requests, _ = read_rows(TOKEN_IDS, rows)

    assert all(TOKEN_IDS.is_row(row) for row in rows)
    assert {(item.segments[0].text, item.segments[0].form) for item in requests} == {
        ("1 2 300", TextForm.TOKENS)
    }


def test_bad_token_ids_are_told() -> None:
    """Negative, too large, no integer, no ids at all."""
    rows = [[1, -2], [1 << 63], [1, "2"], {"ids": [1]}, "text", []]

    requests, quality = read_rows(TOKEN_IDS, rows)

    assert not requests
    assert [line for _, line in quality.bad_lines] == [1, 2, 3, 4, 5]
    assert quality.skipped["empty prompt"] == 1
