"""Rollouts of Codex CLI."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.reader import ReadQuality, Row
from ramify.analysis.readers.transcripts.codex import CODEX
from ramify.analysis.records import LoggedRequest, Usage
from tests.pure.analysis.log_rows import mutate, read_rows

Line = dict[str, Any]


class Rollout:
    """Writes lines of a thread; a second apart."""

    def __init__(self, **meta: Any) -> None:
        self.lines: list[Line] = []
        self.total = 0
        self.add(
            "session_meta",
            {
                "id": "th_1", "cwd": "/work", "cli_version": "0.99", "model_provider": "openai",
                "base_instructions": {"text": "You are Codex."},
            } | meta,
        )  # fmt: skip
        self.context("gpt-5.5", "medium")

    def add(self, kind: str, payload: Line) -> None:
        number = len(self.lines)
        time = f"2026-09-01T10:{number // 60:02}:{number % 60:02}.000Z"
        self.lines.append({"timestamp": time, "ordinal": number, "type": kind, "payload": payload})

    def context(self, model: str, effort: str) -> None:
        self.add("turn_context", {"turn_id": "t", "model": model, "effort": effort, "cwd": "/work"})

    def message(self, role: str, text: str) -> None:
        kind = "output_text" if role == "assistant" else "input_text"
        content = [{"type": kind, "text": text}]
        self.add("response_item", {"type": "message", "role": role, "content": content})

    def call(self, call_id: str) -> None:
        item = {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": call_id}
        self.add("response_item", item)

    def output(self, call_id: str, text: str) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": text}
        self.add("response_item", item)

    def usage(self, number: int) -> Line:
        return {
            "input_tokens": number, "cached_input_tokens": number // 2, "output_tokens": 5,
            "reasoning_output_tokens": 0, "total_tokens": number + 5,
        }  # fmt: skip

    def count(self, number: int) -> None:
        self.total += number
        info = {"total_token_usage": self.usage(self.total), "last_token_usage": self.usage(number)}
        self.add("event_msg", {"type": "token_count", "info": info, "rate_limits": {}})

    def record(self, response_id: str, number: int) -> None:
        payload = {"thread_id": "th_1", "turn_id": "t", "response_id": response_id}
        self.add("token_usage_record", payload | {"usage": self.usage(number)})


def rollout() -> Rollout:
    """A turn with a call and two responses."""
    log = Rollout()
    log.message("user", "Fix it")
    log.add("event_msg", {"type": "token_count", "info": None, "rate_limits": {}})
    log.call("c1")
    log.count(100)
    log.lines.append(copy.deepcopy(log.lines[-1]))
    log.output("c1", "error")
    log.message("assistant", "Fixed")
    log.count(150)
    return log


def texts(request: LoggedRequest) -> list[str]:
    """Paths and texts."""
    return [f"{item.path} {item.text}" for item in request.segments]


def test_each_movement_of_the_counts_is_a_request() -> None:
    """Repeated counts and counts without info are dropped; usage is that of the response."""
    log = rollout()

    requests, quality = read_rows(CODEX, log.lines)

    assert all(CODEX.is_row(line) for line in log.lines)
    assert [(item.line, item.usage) for item in requests] == [
        (5, Usage(100, 50, None, None, 5)),
        (9, Usage(150, 75, None, None, 5)),
    ]
    assert quality.skipped["token count without a response"] == 2
    assert [item.conversation for item in requests] == ["th_1", "th_1"]
    assert requests[1].parent_id == requests[0].request_id


def test_the_prompt_ends_where_the_response_begins() -> None:
    """Settings, instructions, and the items before the first that the model wrote."""
    first, second = read_rows(CODEX, rollout().lines)[0]

    assert texts(first) == [
        "settings.model gpt-5.5",
        'settings.reasoning {"effort":"medium"}',
        "system You are Codex.",
        "messages[0].content[0] Fix it",
    ]
    assert texts(second)[3:] == [
        "messages[0].content[0] Fix it",
        'messages[1] {"type":"function_call","name":"shell","arguments":"{}","call_id":"c1"}',
        "messages[2] error",
    ]
    assert [item.text for item in second.output] == ["Fixed"]
    assert (first.api, first.provider, first.has_full_text) == ("openai-responses", "openai", False)
    assert first.start_s is not None and first.end_s is not None and first.start_s < first.end_s


def test_an_output_that_comes_before_the_count_is_no_part_of_the_prompt() -> None:
    """A fast tool answers before the response is counted."""
    log = Rollout()
    log.message("user", "Fix it")
    log.call("c1")
    log.call("c2")
    log.output("c1", "one")
    log.output("c2", "two")
    log.count(100)
    log.message("assistant", "Done")
    log.count(200)

    first, second = read_rows(CODEX, log.lines)[0]

    assert texts(first)[-1] == "messages[0].content[0] Fix it"
    assert texts(second)[-1] == "messages[4] two"


def test_records_of_usage_are_counted_once() -> None:
    """Newer versions have both kinds of lines; a copied response is known by its id."""
    log = Rollout()
    for number, response in enumerate(("r1", "r2"), 1):
        log.message("user", "Fix it")
        log.message("assistant", "Fixed")
        log.record(response, 100 * number)
        log.count(100 * number)
    log.record("r2", 200)

    requests, quality = read_rows(CODEX, log.lines)

    assert [item.request_id for item in requests] == ["r1", "r2"]
    assert quality.skipped["response that an earlier line has"] == 1


def test_a_record_after_its_count_is_the_same_response() -> None:
    """The first response is not counted twice in either order."""
    log = Rollout()
    log.message("user", "Fix it")
    log.message("assistant", "Fixed")
    log.count(100)
    log.record("r1", 100)

    assert len(read_rows(CODEX, log.lines)[0]) == 1


def test_sums_alone_give_the_differences() -> None:
    """Older versions have no usage of the last response."""
    log = rollout()
    for line in log.lines:
        info = line["payload"].get("info")
        if info:
            del info["last_token_usage"]

    requests, _ = read_rows(CODEX, log.lines)

    assert [item.usage.num_input for item in requests] == [100, 150]


def test_after_a_compaction_the_history_is_its_replacement() -> None:
    """Items of the replacement, or the summary alone where the rollout has no more."""
    log = rollout()
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Sum"}]}
    log.add("compacted", {"message": "Sum", "replacement_history": [item]})
    log.message("assistant", "On")
    log.count(60)
    log.add("compacted", {"message": "Sum of all"})
    log.message("assistant", "On")
    log.count(70)

    requests, quality = read_rows(CODEX, log.lines)

    assert texts(requests[2])[3:] == ["messages[0].content[0] Sum"]
    assert texts(requests[3])[3:] == ["messages[0].content[0] Sum of all"]
    assert quality.notes["compaction"] == 2


def test_a_rolled_back_turn_leaves_the_history() -> None:
    """The user takes the last turn back and asks something else."""
    log = rollout()
    log.message("user", "Wrong")
    log.message("assistant", "Hm")
    log.count(160)
    log.add("event_msg", {"type": "thread_rolled_back", "num_turns": 1})
    log.message("user", "Right")
    log.message("assistant", "Yes")
    log.count(170)

    requests, _ = read_rows(CODEX, log.lines)

    assert [line for line in texts(requests[-1]) if "Wrong" in line or "Hm" in line] == []
    assert texts(requests[-1])[-1].endswith("Right")


def test_a_sub_agents_copy_of_its_parents_history_has_no_requests() -> None:
    """Lines before the first ordinal of the thread are history only."""
    log = rollout()
    log.lines[0]["payload"]["subagent_history_start_ordinal"] = 10

    requests, quality = read_rows(CODEX, log.lines)

    assert not requests
    assert quality.skipped["response of the parent thread"] == 2


def test_files_are_threads_of_their_own() -> None:
    """Counts and history of one file do not reach into the next."""
    reader = CODEX.reader(ReadQuality())

    requests = [
        request
        for file in ("a", "b")
        for number, line in enumerate(rollout().lines, 1)
        for request in reader.feed(Row(file, number, line))
    ]

    assert [(item.file, item.usage.num_input) for item in requests] == [
        ("a", 100),
        ("a", 150),
        ("b", 100),
        ("b", 150),
    ]


@given(st.data())
def test_mutated_rollouts_raise_nothing_else(data: st.DataObject) -> None:
    """Every line is read, skipped or bad, whatever it holds and in whatever order."""
    lines = rollout().lines
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = mutate(data, lines[index])
    if data.draw(st.booleans()):
        lines = data.draw(st.permutations(lines))

    _, quality = read_rows(CODEX, lines)

    assert all(1 <= line <= len(lines) for _, line in quality.bad_lines)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_a_response_continues_the_prompt_of_the_one_before_it(calls: list[int]) -> None:
    """In any sequence of turns with calls, whose results come before or after the count."""
    log = Rollout()
    for number, num_calls in enumerate(calls):
        log.message("user", f"question {number}")
        for at in range(num_calls):
            log.call(f"c{number}.{at}")
        if not num_calls:
            log.message("assistant", f"answer {number}")
        if num_calls % 2:
            log.count(100 + number)
        for at in range(num_calls):
            log.output(f"c{number}.{at}", "done")
        if not num_calls % 2:
            log.count(100 + number)

    requests, _ = read_rows(CODEX, log.lines)

    assert len(requests) == len(calls)
    for before, after in pairwise(requests):
        assert after.segments[: len(before.segments)] == before.segments
        assert after.segments[len(before.segments) :][: len(before.output)] == before.output
        assert after.parent_id == before.request_id
