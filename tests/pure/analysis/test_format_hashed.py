"""Traces of hashed blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ramify.analysis.corpus import Corpus
from ramify.analysis.reader import ReadQuality, Row
from ramify.analysis.readers.engines.ramify_record import NO_DURATION, RAMIFY_RECORD
from ramify.analysis.readers.traces.dynamo import DYNAMO
from ramify.analysis.readers.traces.hashed_traces import BAILIAN, MOONCAKE, WEKA
from ramify.analysis.readers.traces.lengths import LENGTHS, LENGTHS_ONLY
from ramify.analysis.records import HashedPrompt, VendorVerdict
from ramify.analysis.report.analyze import analyze
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


def test_full_blocks_only_and_single_rows_change_no_block_size() -> None:
    """Traces without the partial block, and a row that disagrees, which a note tells."""
    rows = [
        {"timestamp": 0, "input_length": 700, "hash_ids": [1]},
        {"timestamp": 0, "input_length": 1100, "hash_ids": [1, 2]},
        {"timestamp": 0, "input_length": 1100, "hash_ids": list(range(69))},
    ]

    requests, quality = read_rows(MOONCAKE, rows)

    assert [item.hashed and item.hashed.block_size for item in requests] == [512, 512, 512]
    assert quality.notes == {"hash_ids and input_length disagree": 1}


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


def test_messages_are_read_as_a_body() -> None:
    """The time is in ms as in all rows of the format."""
    row = {
        "timestamp": 2500, "session_id": "s", "output_length": 5,
        "messages": [{"role": "user", "content": "Hi"}],
    }  # fmt: skip

    [request], _ = read_rows(MOONCAKE, [row])

    assert MOONCAKE.is_row(row)
    assert (request.start_s, request.conversation) == (2.5, "s")
    assert [(item.path, item.text) for item in request.segments] == [("messages[0]", "Hi")]


def test_bad_rows_are_told_with_line_and_reason() -> None:
    """Wrong types; the other rows are read."""
    rows = [
        {"timestamp": 0, "input_length": 5, "hash_ids": [1]},
        {"timestamp": "soon", "input_length": 5, "hash_ids": [1]},
        {"timestamp": 0, "input_length": -5, "hash_ids": [1]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1, "x"]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1.5]},
        {"timestamp": 0, "input_length": 5, "hash_ids": [1], "block_size": 0},
        {"timestamp": float("nan"), "input_length": 5, "hash_ids": [1]},
        7,
    ]

    requests, quality = read_rows(MOONCAKE, rows)

    assert len(requests) == 1
    assert quality.bad_lines == [("log.jsonl", line) for line in range(2, 9)]
    assert "timestamp is 'soon', not a finite number" in quality.bad_reasons


ODD_IDS = (
    0,
    8,
    -1,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 2,
    1 << 64,
    -(1 << 63) - 1,
    10**40,
    "a",
    "9" * 30,
)


@pytest.mark.parametrize("text", [False, True])
def test_ids_may_be_any_integer_or_text(text: bool) -> None:
    """Equal ids stay equal and different ones different; every command can count with them."""
    kinds = (str,) if text else (int,)
    ids = [item for item in ODD_IDS if isinstance(item, kinds)]
    row = {"input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
    dynamo = {"trace_block_size": 512, "input_length": 512 * len(ids), "input_sequence_hashes": ids}
    rows = {
        MOONCAKE: row | {"timestamp": 0},
        BAILIAN: row | {"timestamp": 0, "chat_id": 1, "block_size": 512},
        RAMIFY_RECORD: row | {"timestamp": 0, "page_size": 512, "hit": 0},
        DYNAMO: {
            "schema": "dynamo.request.trace.v1", "event_type": "request_end",
            "request": {"request_id": "r", "model": "m", "replay": dynamo},
        },
        WEKA: {
            "id": "t", "block_size": 512, "hash_id_scope": "local",
            "requests": [{"t": 0.0, "type": "n", "in": 512 * len(ids), "out": 1, "hash_ids": ids}],
        },
    }  # fmt: skip

    for log_format, value in rows.items():
        requests, quality = read_rows(log_format, [value, value])

        assert not quality.bad_lines, log_format.name
        for request in requests:
            assert request.hashed is not None
            assert len(set(request.hashed.block_ids)) == len(ids)
            assert all(-(1 << 63) <= number < 1 << 63 for number in request.hashed.block_ids)
        corpus = Corpus()
        for request in requests:
            corpus.add(replace(request, conversation="c"))
        analysis = analyze(corpus, title="odd ids", provider="vllm")
        by_rule = analysis.rate("by_rule")
        assert analysis.lint.verdicts[-1].tokens.total == 512 * len(ids)
        if log_format in (MOONCAKE, BAILIAN, RAMIFY_RECORD):
            assert by_rule is not None and by_rule.num_read > 0


def test_agentic_rows_follow_their_header() -> None:
    """The header has the block size; ids are valid in a play; the earliest time is the start."""
    rows = jsonl("""
{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "hash_id_scope": "local", "source": {"format": "weka", "digest": "d"}}
{"request_id": "a", "play_id": "p", "session_id": "s", "model": "m", "input_length": 8, "output_length": 2, "hash_ids": [1, 2], "not_before_ms": 500, "recorded_api_time_ms": 250}
{"request_id": "b", "play_id": "p", "session_id": "s", "model": "m", "input_tokens": 8, "output_tokens": 2, "hash_ids": [1, 3], "not_before_ms": 900}
{"request_id": "c", "play_id": "q", "session_id": "t", "model": "m", "input_length": 8, "output_length": 2, "hash_ids": [1, 3], "not_before_ms": 900}
""")

    (first, second, third), quality = read_rows(MOONCAKE, rows)

    assert [request.line for request in (first, second, third)] == [2, 3, 4]
    assert (first.start_s, first.end_s, first.model) == (0.5, 0.75, "m")
    assert first.hashed and second.hashed and third.hashed
    assert first.hashed.block_size == 4
    assert first.hashed.block_ids[0] == second.hashed.block_ids[0] != third.hashed.block_ids[0]
    assert second.usage.num_input == 8
    assert quality.skipped["header"] == 1


def test_files_whose_ids_count_from_zero_share_nothing() -> None:
    """Equal numbers of two files are different blocks; a single file has no scope."""
    quality = ReadQuality()
    reader = MOONCAKE.reader(quality)
    row = {"timestamp": 0, "input_length": 5, "hash_ids": [0]}

    scopes = [next(reader.feed(Row(file, 1, row))).cache_scope for file in ("a", "b", "a")]

    assert scopes == ["", "b", ""]


def test_bailian_turns_belong_to_the_chat_of_the_first() -> None:
    """Seconds, blocks of 16 tokens, -1 is no parent."""
    rows = jsonl("""
{"chat_id": 55, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 17, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1089, 1090]}
{"chat_id": 159, "parent_chat_id": 55, "timestamp": 80.5, "input_length": 40, "output_length": 9, "type": "text", "turn": 2, "hash_ids": [1089, 1091, 1092]}
{"chat_id": 160, "parent_chat_id": 159, "timestamp": 99.0, "input_length": 41, "output_length": 9, "type": "text", "turn": 3, "hash_ids": [1089, 1091, 1093]}
{"chat_id": 7, "hash_ids": "none"}
""")

    requests, quality = read_rows(BAILIAN, rows)

    assert all(BAILIAN.is_row(row) and not MOONCAKE.is_row(row) for row in rows)
    assert [request.conversation for request in requests] == ["55", "55", "55"]
    assert [request.parent_id for request in requests] == [None, "55", "159"]
    assert requests[0].start_s == 61.114
    assert requests[0].hashed == HashedPrompt(16, (1089, 1090), 17)
    assert quality.bad_lines == [("log.jsonl", 4)]


WEKA_SESSION = {
    "id": "t1",
    "models": ["opus", "haiku"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 20,
    "requests": [
        {
            "t": 0.0,
            "type": "n",
            "model": "opus",
            "in": 130,
            "out": 9,
            "hash_ids": [1, 2, 3],
            "api_time": 1.5,
        },
        {
            "t": 10.0,
            "type": "subagent",
            "agent_id": "a",
            "subagent_type": "Explore",
            "status": "completed",
            "requests": [{"t": 0.5, "type": "s", "model": "haiku", "in": 64, "out": 1,
                          "hash_ids": [1], "ttft": 0.2}],
        },
        {"t": 20.0, "type": "n", "model": "opus", "in": 192, "out": 9, "hash_ids": [1, 2, 4]},
    ],
}  # fmt: skip


def test_weka_ids_are_valid_in_a_session_only() -> None:
    """The same session twice shares nothing; subagents share with their session."""
    requests, quality = read_rows(WEKA, [WEKA_SESSION, WEKA_SESSION])

    assert WEKA.is_row(WEKA_SESSION) and not MOONCAKE.is_row(WEKA_SESSION)
    assert [(request.line, request.index) for request in requests] == [
        (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)
    ]  # fmt: skip
    ids = [request.hashed.block_ids for request in requests if request.hashed]
    assert ids[0][:2] == ids[2][:2]
    assert ids[0][0] == ids[1][0]
    assert not set(ids[0]) & set(ids[3])
    assert [request.conversation for request in requests[:3]] == ["t1", "t1/a", "t1"]
    assert quality.notes["times count from the start of each session: sessions are laid over each "
                         "other"] == 2  # fmt: skip


def test_sessions_on_one_line_share_nothing() -> None:
    """An array of sessions without names that is a single line."""
    session = {name: value for name, value in WEKA_SESSION.items() if name != "id"}
    reader = WEKA.reader(ReadQuality())

    first, second = (list(reader.feed(Row("f", 1, session, index=index))) for index in range(2))

    assert first[0].hashed and second[0].hashed
    assert not set(first[0].hashed.block_ids) & set(second[0].hashed.block_ids)
    assert [item.index for item in (*first, *second)] == [0, 1, 2, 3, 4, 5]


def test_weka_times_of_subagents_may_count_from_their_own_start() -> None:
    """A first time before the spawn is relative to it; durations give the end."""
    requests, _ = read_rows(WEKA, [WEKA_SESSION])

    assert [request.start_s for request in requests] == [0.0, 10.5, 20.0]
    assert requests[0].end_s == 1.5
    assert requests[1].first_output_s == 10.7


def test_a_global_scope_shares_between_sessions() -> None:
    """Ids are taken as they are; another scope is an error."""
    requests, quality = read_rows(
        WEKA,
        [WEKA_SESSION | {"hash_id_scope": "global"}, WEKA_SESSION | {"hash_id_scope": "moon"}],
    )

    assert requests[0].hashed and requests[0].hashed.block_ids == (1, 2, 3)
    assert quality.bad_lines == [("log.jsonl", 2)]


DYNAMO_ROWS = """
{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1100, "agent_context": {"session_id": "s"}, "request": {"request_id": "r1", "model": "m", "request_received_ms": 1000, "ttft_ms": 40.0, "total_time_ms": 100.0, "output_tokens": 4, "cached_tokens": 2, "replay": {"trace_block_size": 2, "input_length": 3, "input_sequence_hashes": [11, 22]}}}
{"timestamp": 1, "event": {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1200}}
{"schema": "dynamo.request.trace.v1", "event_type": "request_payload", "event_time_unix_ms": 1000, "payload": {"request_id": "r2", "model": "m", "request": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, "payload_complete": true}}
{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1900, "request": {"request_id": "r2", "model": "m", "request_received_ms": 1500, "input_tokens": 9, "output_tokens": 4}}
"""


def test_dynamo_rows_of_a_request_are_joined() -> None:
    """Hashes and counts of the end, text of the payload; the line is that of the first row."""
    requests, quality = read_rows(DYNAMO, jsonl(DYNAMO_ROWS))

    assert all(DYNAMO.is_row(row) for row in jsonl(DYNAMO_ROWS))
    hashed, joined = sorted(requests, key=lambda request: request.line)
    assert hashed.hashed == HashedPrompt(2, (11, 22), 3)
    assert (hashed.start_s, hashed.first_output_s, hashed.end_s) == (1.0, 1.04, 1.1)
    assert (hashed.usage.num_input, hashed.usage.num_read) == (3, 2)
    assert hashed.conversation == "s"
    assert (joined.line, joined.segments[-1].text) == (3, "hi")
    assert (joined.start_s, joined.end_s, joined.usage.num_input) == (1.5, 1.9, 9)
    assert quality.skipped["event tool_end"] == 1


def test_traces_of_lengths_say_that_sharing_is_unknown() -> None:
    """BurstGPT, Azure, Mooncake without hashes, Copilot: counts and times, no prompt, a note."""
    rows = [
        {"TIMESTAMP": "2023-11-16 18:15:46.6805900", "ContextTokens": "374", "GeneratedTokens": "44"},
        {"Timestamp": "5", "Model": "ChatGPT", "Request tokens": "472", "Response tokens": "18",
         "Total tokens": "490", "Log Type": "Conversation log"},
        {"timestamp": 2500, "input_length": 7, "output_length": 3},
        {"session_id": "s", "date": "2026-03-01", "turns": [{"llm_calls": [
            {"timestamp": "2026-03-01T10:00:00Z", "duration_ms": 900, "model": "m",
             "tokens": {"prompt": 100, "completion": 5, "cached": 80}},
            {"timestamp": "2026-03-01T10:01:00Z", "duration_ms": 900, "model": "m",
             "tokens": {"prompt": 120, "completion": 5}}], "tool_batches": []}]},
        {"TIMESTAMP": "never", "ContextTokens": "1", "GeneratedTokens": "1"},
    ]  # fmt: skip

    requests, quality = read_rows(LENGTHS, rows)

    assert all(LENGTHS.is_row(row) for row in rows)
    assert [request.usage.num_input for request in requests] == [374, 472, 7, 100, 120]
    assert [request.usage.num_read for request in requests] == [None, None, None, 80, None]
    assert requests[0].start_s == 1700158546.68059
    assert [request.index for request in requests] == [None, None, None, 0, 1]
    assert not any(
        request.segments or request.hashed or request.has_full_text for request in requests
    )
    assert quality.notes[LENGTHS_ONLY] == 5
    assert quality.bad_lines == [("log.jsonl", 5)]


RECORD = {
    "timestamp": 1_790_000_002_000, "id": "chatcmpl-1", "tenant": "t1", "input_length": 9,
    "output_length": 4, "page_size": 4, "hash_ids": [(1 << 64) - 1, 7], "hit": 4, "end": "length",
    "total_ms": 500.0, "ttft_ms": 125.0, "read": 4, "shared": 0, "written": 4,
    "miss": {"reason": "evicted", "at_token": 4, "segment": "messages[0]"}, "token_ids": [5, 6, 7],
}  # fmt: skip


def test_our_own_records_have_times_hits_and_the_reason_of_the_miss() -> None:
    """The tenant is the scope; token ids are segments beside the hashes."""
    [request], quality = read_rows(RAMIFY_RECORD, [RECORD])

    assert RAMIFY_RECORD.is_row(RECORD) and not MOONCAKE.is_row(RECORD)
    assert request.hashed == HashedPrompt(4, ((1 << 64) - 1, 7), 9)
    assert (request.start_s, request.first_output_s, request.end_s) == (
        1_790_000_001.5,
        1_790_000_001.625,
        1_790_000_002.0,
    )
    assert (request.usage.num_input, request.usage.num_read) == (9, 4)
    assert request.verdict == VendorVerdict("evicted", 5, "messages[0]")
    assert (request.cache_scope, request.provider, request.request_id) == (
        "t1",
        "ramify",
        "chatcmpl-1",
    )
    assert request.segments[0].text == "5 6 7"
    assert not quality.notes


def test_records_of_older_servers_are_read() -> None:
    """Without durations the end is taken for the start, which a note tells."""
    fields = (
        "timestamp",
        "tenant",
        "input_length",
        "output_length",
        "page_size",
        "hash_ids",
        "hit",
    )
    old = {name: RECORD[name] for name in fields}

    [request], quality = read_rows(RAMIFY_RECORD, [old])

    assert (request.start_s, request.end_s) == (1_790_000_002.0, 1_790_000_002.0)
    assert request.verdict is None
    assert quality.notes[NO_DURATION] == 1
