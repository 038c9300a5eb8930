"""Causes from times, usage, replicas and vendors' verdicts, on small logs with a known story."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ramify.analysis.compare.evidence import LogFacts, MatchFacts
from ramify.analysis.compare.outside import outside_causes, unread_writes
from ramify.analysis.providers import CacheModel, load_rules
from ramify.analysis.records import LoggedRequest, VendorVerdict
from ramify.analysis.verdicts import Certainty
from tests.pure.analysis.replay_prompts import (
    Block,
    corpus_of,
    request_of,
    tokens,
    usage_of,
)


def facts_of(provider: str, log: list[LoggedRequest]) -> LogFacts:
    log = [replace(request, line=line) for line, request in enumerate(log, 1)]
    return LogFacts(CacheModel(corpus_of(log), provider, load_rules()))


def causes_of(
    provider: str, log: list[LoggedRequest], reusable: int = 2000, **facts
) -> list[tuple[str, str]]:
    """Name and certainty of the causes of the last request."""
    known = facts_of(provider, log)
    last = known.requests[len(log) - 1]
    match = MatchFacts(known.requests[0], reusable, **facts)
    return [(str(item.cause), str(item.certainty)) for item in outside_causes(known, last, match)]


HEAD = Block(tokens(0, 2000), ttl=300.0)


def turn(number: int, ttl: float | None = 300.0) -> Block:
    return Block(tokens(10_000 * number, 500), ttl=ttl)


def test_a_next_turn_has_no_cause() -> None:
    """Whoever reads all that can be read has lost nothing."""
    log = [request_of([HEAD], start=0, first=1), request_of([HEAD, turn(1)], start=60, first=61)]

    assert causes_of("anthropic", log) == []


def test_six_minutes_later_the_entry_has_expired() -> None:
    """A gap over the lifetime is likely the cause, unless the bill shows the read."""
    log = [request_of([HEAD], start=0, first=1), request_of([HEAD, turn(1)], start=400, first=401)]

    assert causes_of("anthropic", log) == [("ttl_expired", "likely")]
    log[1] = replace(log[1], usage=usage_of(2500, 2000, 500))
    assert causes_of("anthropic", log) == []


def test_a_transcript_without_breakpoints_shows_a_pause_by_its_bill() -> None:
    """A pause over an hour after hour-long writes, then 0 of 2,000 tokens read."""
    bare = [replace(HEAD, ttl=None), turn(1, None)]
    before = replace(usage_of(2000, 0, 2000), num_written_1h=2000)
    log = [
        request_of(bare[:1], start=0, end=9, has_full_text=False, usage=before),
        request_of(bare, start=3700, end=3709, has_full_text=False, usage=usage_of(2500, 0, 2500)),
    ]

    assert causes_of("anthropic", log) == [("ttl_expired", "likely")]
    log[1] = replace(log[1], start_s=3000.0, end_s=3009.0)
    assert causes_of("anthropic", log) == []


def test_a_transcript_shows_a_miss_of_the_next_turn_by_its_bill() -> None:
    """A minute after a read of 2,000 tokens none is read, and the text that is logged goes on."""
    bare = [replace(HEAD, ttl=None), turn(1, None)]
    more: dict[str, Any] = {"conversation": "s1", "has_full_text": False}
    log = [
        request_of(bare[:1], start=0, end=9, usage=usage_of(2004, 2000, 0), **more),
        request_of(bare, start=60, end=69, usage=usage_of(2500, 0, 2500), **more),
    ]

    assert causes_of("anthropic", log) == [("outside_prompt", "likely")]
    assert causes_of("anthropic", log, divergence="messages[0]") == []
    assert causes_of("anthropic", [log[0], replace(log[1], conversation="s2")]) == []
    assert causes_of("anthropic", [log[0], replace(log[1], usage=usage_of(2500, 2000, 500))]) == []


def test_a_gap_within_the_published_range_is_only_suspected() -> None:
    """OpenAI says 5 to 10 minutes, up to an hour: 20 minutes may have been too long."""
    block = Block(tokens(0, 2000))
    log = [
        request_of([block], model="gpt-4o", start=0, first=1),
        request_of([block, turn(1)], model="gpt-4o", start=1200, first=1201),
    ]

    assert causes_of("openai", log) == [("ttl_expired", "suspected")]
    log[1] = replace(log[1], start_s=8000.0, first_output_s=8001.0)
    assert causes_of("openai", log) == [("ttl_expired", "likely")]


def test_parallel_requests_name_the_request_in_flight() -> None:
    """The second of two simultaneous requests cannot read the first one's entry."""
    log = [request_of([HEAD], start=0, first=5), request_of([HEAD, turn(1)], start=1, first=6)]
    known = facts_of("anthropic", log)

    (cause,) = outside_causes(known, known.requests[1], MatchFacts(None))

    assert (cause.cause, cause.certainty) == ("parallel_cold", Certainty.LIKELY)
    assert "log.jsonl:1" in cause.had


def test_a_prefix_without_a_breakpoint_blames_the_reader() -> None:
    """The head was sent before, but its end had no breakpoint: the path of the head is named."""
    bare = replace(HEAD, ttl=None)
    log = [request_of([bare, turn(1)], line=1), request_of([bare, turn(2)], line=2)]
    known = facts_of("anthropic", log)

    (cause,) = outside_causes(known, known.requests[1], MatchFacts(known.requests[0], 2000))

    assert (cause.cause, cause.segment) == ("breakpoint_missing", "messages[0]")
    assert causes_of("anthropic", log, has_waste=True) == []


def test_an_edited_question_is_no_missing_breakpoint() -> None:
    """The answer before it is shared and not marked, which is a small part of what is read."""
    answer = Block(tokens(5000, 300), role="assistant")
    log = [
        request_of([HEAD]),
        request_of([replace(HEAD, ttl=None), answer, turn(1)]),
        request_of([replace(HEAD, ttl=None), answer, turn(2)]),
    ]

    assert causes_of("anthropic", log, 2300) == []


def test_a_log_without_any_breakpoint_only_raises_a_suspicion() -> None:
    """A gateway may have dropped breakpoints; a bill without reads shows that none were there."""
    bare = replace(HEAD, ttl=None)
    log = [request_of([bare, turn(at, None)]) for at in (1, 2)]

    assert causes_of("anthropic", log) == [("breakpoint_missing", "suspected")]
    log[1] = replace(log[1], usage=usage_of(2500, 0, 0))
    assert causes_of("anthropic", log) == [("breakpoint_missing", "likely")]


def test_more_than_twenty_positions_blame_the_reader() -> None:
    """25 blocks after the last entry, the breakpoint no longer finds it."""
    tail = [Block(tokens(10_000 * at, 50)) for at in range(1, 26)]
    tail[-1] = replace(tail[-1], ttl=300.0)
    log = [request_of([HEAD]), request_of([replace(HEAD, ttl=None), *tail])]

    assert causes_of("anthropic", log) == [("lookback_exceeded", "likely")]


@pytest.mark.parametrize(("size", "certainty"), [(500, "likely"), (1000, "suspected")])
def test_a_marked_prefix_below_the_minimum(size: int, certainty: str) -> None:
    """500 tokens are clearly fewer than 1,024; 1,000 estimated tokens may be more."""
    head = Block(tokens(0, size), ttl=300.0)
    log = [request_of([head, turn(at, None)]) for at in (1, 2)]

    assert causes_of("anthropic", log, size) == [("below_minimum", certainty)]


def test_another_replica_has_the_entry() -> None:
    """With a bill of zero reads, the other replica is likely the cause; without a bill suspected."""
    block = Block(tokens(0, 2000))
    log = [
        request_of([block], model="m", replica="a"),
        request_of([block, turn(1)], model="m", replica="b"),
    ]

    assert causes_of("vllm", log) == [("routing", "suspected")]
    log[1] = replace(log[1], usage=usage_of(2500, 0))
    assert causes_of("vllm", log) == [("routing", "likely")]
    log[1] = replace(log[1], usage=usage_of(2500, 2000))
    assert causes_of("vllm", log) == []


def test_another_model_answered() -> None:
    """A fallback shows in the response's model, and nowhere else."""
    log = [
        request_of([HEAD], response_model="claude-sonnet-4-5"),
        request_of([HEAD, turn(1)], response_model="claude-haiku-4-5"),
    ]

    assert causes_of("anthropic", log) == [("model_changed", "likely")]


def test_an_own_engine_that_computes_again_has_evicted() -> None:
    """Same replica, same text, no reads in the bill: evicted on an engine, unexplained at a vendor.

    Only suspected if the log has no reads at all.
    """
    block = Block(tokens(0, 2000))
    usage = usage_of(2500, 0)
    for provider, model, expected in [
        ("vllm", "m", "evicted"),
        ("openai", "gpt-4o", "outside_prompt"),
    ]:
        log = [
            request_of([block], model=model),
            request_of([block, turn(1)], model=model, usage=usage),
        ]

        assert causes_of(provider, log) == [(expected, "suspected")]
        log.insert(1, request_of([block, turn(2)], model=model, usage=usage_of(2500, 1920)))
        assert causes_of(provider, log) == [(expected, "likely")]


def test_a_busy_key_spills_to_other_machines() -> None:
    """20 requests in a minute with one key: over 15, misses have that cause."""
    block = Block(tokens(0, 2000))
    log = [
        request_of(
            [block, turn(at)],
            model="gpt-4.1",
            start=float(at),
            first=at + 0.5,
            cache_key="k",
            usage=usage_of(2500, 0),
        )
        for at in range(20)
    ]

    assert causes_of("openai", log) == [("cache_key_scattered", "likely")]


def test_a_verdict_about_text_that_is_not_logged() -> None:
    """`system_changed` where messages differ is outside the prompt, with the verdict as `got`."""
    log = [request_of([HEAD]), request_of([HEAD, turn(1)], verdict=VendorVerdict("system_changed"))]
    known = facts_of("anthropic", log)

    (cause,) = outside_causes(known, known.requests[1], MatchFacts(known.requests[0], 2000))

    assert (cause.cause, cause.certainty, cause.got) == (
        "outside_prompt",
        Certainty.LIKELY,
        "system_changed",
    )
    assert causes_of("anthropic", log, divergence="system[0]") == []
    log[1] = replace(log[1], verdict=VendorVerdict("unavailable"))
    assert causes_of("anthropic", log) == []


def test_writes_that_nobody_reads_blame_the_writer() -> None:
    """A conversation of one request that marks its only message pays for nothing; a head pays."""
    log = [request_of([HEAD, turn(at)], line=at) for at in (1, 2, 3)]
    log.append(request_of([HEAD, turn(3, None), turn(4)]))
    known = facts_of("anthropic", log)

    findings = unread_writes(known)

    assert sorted(findings) == [0, 1]
    assert findings[0].segment == "messages[1]"
    assert findings[0].had == "500 tokens written"
    assert sorted(unread_writes(known, excused=[0])) == [1]


def test_a_single_write_at_the_end_of_the_log_is_only_suspected() -> None:
    """Its read may come after the log; ten minutes later it would have come."""
    log = [request_of([HEAD], start=0, first=1)]
    later = request_of([Block(tokens(70_000, 2000))], start=700, first=701)

    assert unread_writes(facts_of("anthropic", log))[0].certainty == Certainty.SUSPECTED
    assert unread_writes(facts_of("anthropic", [*log, later]))[0].certainty == Certainty.LIKELY


def test_the_pause_counts_from_the_last_use() -> None:
    """A conversation of two hours with a pause of 15 minutes is within OpenAI's range."""
    block = Block(tokens(0, 2000))
    log = [
        request_of([block, turn(at)], model="gpt-4o", start=at * 500.0, end=at * 500.0 + 1)
        for at in range(1, 16)
    ]
    log.append(request_of([block, turn(99)], model="gpt-4o", start=8400.0, end=8401.0))
    known = facts_of("openai", log)

    (cause,) = outside_causes(known, known.requests[15], MatchFacts(known.requests[14], 2000))

    assert (cause.cause, cause.certainty) == ("ttl_expired", Certainty.SUSPECTED)
    assert "log.jsonl:15, 899 s before" in cause.had
