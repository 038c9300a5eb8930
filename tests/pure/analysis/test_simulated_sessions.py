"""Simulated sessions: who belongs together, when they end, and what that is worth."""

import json
from pathlib import Path

import pytest

from ramify.analysis import simulate
from ramify.analysis.simulation.page_trace import PageTrace, PageTraceBuilder
from ramify.analysis.simulation.replays.cache_replay import replay
from ramify.analysis.simulation.replays.sessions import MAX_USES, ends_by_time, with_sessions
from ramify.errors import ConfigError


def trace_of(rows: list[tuple[float, list[int], str | None]]) -> PageTrace:
    """Requests with a start, keys of pages of 4 tokens, and the name of a session."""
    builder = PageTraceBuilder(4)
    for start_s, keys, session in rows:
        builder.add(keys, num_tokens=4 * len(keys) + 1, start_s=start_s, session=session)
    return builder.build()


def test_logged_sessions_are_taken_as_they_are() -> None:
    """A request without a name is in none; ends follow the last request of each."""
    trace = trace_of([(0, [1], "a"), (1, [1, 2], "b"), (2, [1, 3], None), (5, [1, 4], "a")])

    known, is_inferred = with_sessions(trace)

    assert not is_inferred
    assert known.session.tolist() == [0, 1, -1, 0]
    assert ends_by_time(known, 10.0) == [(11.0, 1), (15.0, 0)]


def test_sessions_are_inferred_from_prefixes() -> None:
    """A request continues the last one whose pages it begins with; a branch is a new session."""
    rows: list[tuple[float, list[int], str | None]] = [
        (0, [1, 2], None),
        (1, [1, 5], None),
        (2, [1, 2, 3], None),  # goes on from the first
        (3, [1, 2, 4], None),  # so does this, which the first has no more
        (4, [1, 2, 3, 6], None),
        (5, [1, 5, 7], None),
    ]

    known, is_inferred = with_sessions(trace_of(rows))

    assert is_inferred
    assert known.session.tolist() == [0, 1, 0, 2, 0, 1]


def test_a_system_prompt_alone_is_no_beginning() -> None:
    """What most requests begin with does not make them one session."""
    rows: list[tuple[float, list[int], str | None]] = [(0, [0], None)]
    rows += [(1 + at, [0, 1 + at], None) for at in range(MAX_USES)]

    known, _ = with_sessions(trace_of(rows))

    assert len(set(known.session.tolist())) == len(rows)


def test_ended_sessions_make_room() -> None:
    """A pool of six pages keeps the session that goes on, if the others say that they are over."""
    rows: list[tuple[float, list[int], str | None]] = [(0, [0, 1, 2], "long")]
    for at in range(1, 5):
        rows.append((10.0 * at, [100 * at, 100 * at + 1, 100 * at + 2], f"short {at}"))
    rows.append((50, [0, 1, 2, 3], "long"))
    trace = trace_of(rows)

    without = replay(trace, 6 * 4, "lru")
    ended = replay(trace, 6 * 4, "lru", end_sessions_s=5.0)

    assert (without.num_hit, ended.num_hit) == (0, 3 * 4)


def test_the_report_has_them(tmp_path: Path) -> None:
    """`end_sessions` adds rates by policy and capacity; it needs times, and a number of seconds."""
    rows = [
        {
            "timestamp": 1000 * at,
            "input_length": 1100,
            "output_length": 1,
            "hash_ids": [0, 1, 2 + at],
        }
        for at in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    report = simulate(path, capacity="1M", policy="auto", end_sessions="1m").to_json()

    assert report["ended_sessions"] == {
        "after_s": 60.0,
        "num_sessions": 1,
        "is_inferred": True,
        "curve": {"auto": {"1000000": pytest.approx(2 * 1024 / 3300)}},
    }
    for bad, match in (("soon", "end_sessions='soon'"), (-1, "end_sessions=-1")):
        with pytest.raises(ConfigError, match=match):
            simulate(path, capacity="1M", end_sessions=bad)
    del rows[0]["timestamp"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(ConfigError, match="requests without a time"):
        simulate(path, capacity="1M", end_sessions=10)
