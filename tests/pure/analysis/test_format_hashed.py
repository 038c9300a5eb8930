"""Traces of hashed blocks."""

from __future__ import annotations

from ramify.analysis.formats.mooncake import MOONCAKE
from ramify.analysis.records import HashedPrompt
from tests.pure.analysis.log_rows import jsonl, read_rows

PUBLISHED = """
{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]}
{"timestamp": 27482, "input_length": 513, "output_length": 3, "hash_ids": [0, 46]}
"""


def test_a_published_row_has_seconds_and_blocks_of_512() -> None:
    """Timestamps are ms; the last block is partial; lengths are usage."""
    requests, quality = read_rows(MOONCAKE, jsonl(PUBLISHED))

    assert [request.start_s for request in requests] == [0.0, 27.482]
    assert requests[1].hashed == HashedPrompt(512, (0, 46), 513)
    assert (requests[0].usage.num_input, requests[0].usage.num_output) == (6758, 500)
    assert requests[0].usage.num_read is None
    assert all(MOONCAKE.is_row(value) for value in jsonl(PUBLISHED))
    assert not quality.notes
    assert [request.line for request in requests] == [1, 2]


def test_the_block_size_is_named_or_inferred() -> None:
    """`block_size` is obeyed; without it, a power of two that explains the number of ids."""
    named, _ = read_rows(
        MOONCAKE, [{"input_length": 100, "hash_ids": [1, 2], "block_size": 64, "timestamp": 0}]
    )
    inferred, quality = read_rows(
        MOONCAKE, [{"input_length": 100, "hash_ids": list(range(7)), "timestamp": 0}]
    )

    assert named[0].hashed == HashedPrompt(64, (1, 2), 100)
    assert inferred[0].hashed == HashedPrompt(16, tuple(range(7)), 100)
    assert quality.notes["block size 16 inferred"] == 1


def test_a_turn_with_a_delay_starts_after_the_previous_turn() -> None:
    """The start is an estimate, which a note tells; without an earlier time it is unknown."""
    rows = jsonl("""
{"session_id": "s", "timestamp": 1000, "input_length": 5, "hash_ids": [1]}
{"session_id": "s", "delay": 500, "input_length": 9, "hash_ids": [1]}
{"session_id": "t", "delay": 500, "input_length": 9, "hash_ids": [1]}
""")

    requests, quality = read_rows(MOONCAKE, rows)

    assert [request.start_s for request in requests] == [1.0, 1.5, None]
    assert [request.conversation for request in requests] == ["s", "s", "t"]
    assert quality.notes["start estimated as that of the previous turn + delay"] == 1


def test_text_input_is_the_prompt() -> None:
    """A row with text is read as text, without hashes."""
    [request], _ = read_rows(MOONCAKE, [{"timestamp": 5, "text_input": "What is it?"}])

    assert (request.segments[0].path, request.segments[0].text) == ("prompt", "What is it?")
    assert request.hashed is None


def test_bad_rows_are_told_with_line_and_reason() -> None:
    """Wrong types and ids of more than 64 bits; the other rows are read."""
    rows = [
        {"timestamp": 0, "input_length": 5, "hash_ids": [1]},
        {"timestamp": "soon", "input_length": 5, "hash_ids": [1]},
        {"timestamp": 0, "input_length": -5, "hash_ids": [1]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1, "x"]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1 << 64]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1], "block_size": 0},
        {"timestamp": float("nan"), "input_length": 5, "hash_ids": [1]},
        7,
    ]

    requests, quality = read_rows(MOONCAKE, rows)

    assert len(requests) == 1
    assert quality.bad_lines == [("log.jsonl", line) for line in range(2, 9)]
    assert "timestamp is 'soon', not a finite number" in quality.bad_reasons
