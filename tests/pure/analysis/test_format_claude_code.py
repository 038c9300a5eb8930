"""Transcripts of Claude Code."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.reader import ReadQuality, Row
from ramify.analysis.readers.transcripts.claude_code import CLAUDE_CODE
from ramify.analysis.records import LoggedRequest, Usage, VendorVerdict
from tests.pure.analysis.log_rows import mutate, read_rows
from tests.pure.analysis.transcripts import SESSION, Transcript, call, text


def texts(request: LoggedRequest) -> list[str]:
    """Paths and texts of the messages."""
    return [f"{item.path} {item.text}" for item in request.segments if item.path[:1] == "m"]


def session() -> Transcript:
    """Two turns: a question with a tool call, then its result with the next response."""
    log = Transcript()
    log.lines.append({"type": "summary", "summary": "Fix the build", "leafUuid": "x"})
    log.lines.append({"type": "file-history-snapshot", "messageId": "m", "snapshot": {}})
    question = log.user(None, "Why does it fail?")
    first = log.answer(question, "msg_1", text("Let me look."), call("t1", command="make"))
    result = log.result(first, "t1", "error: x")
    log.answer(result, "msg_2", text("It lacks x."))
    return log


def test_a_response_of_several_lines_is_one_request() -> None:
    """Named by the first line; usage once, with the final output and the split of lifetimes."""
    requests, quality = read_rows(CLAUDE_CODE, session().lines)

    assert all(CLAUDE_CODE.is_row(line) for line in session().lines)
    assert [(item.line, item.request_id, item.parent_id) for item in requests] == [
        (4, "msg_1", None),
        (7, "msg_2", "msg_1"),
    ]
    assert requests[0].usage == Usage(9302, 9000, 300, 200, 40)
    assert not any(item.has_full_text for item in requests)
    assert {item.conversation for item in requests} == {SESSION}
    assert quality.skipped["line of type summary"] == 1
    assert not quality.bad_lines


def test_the_prompt_is_the_history_of_messages() -> None:
    """The model, then all messages before the response; the answer is the output."""
    _, second = read_rows(CLAUDE_CODE, session().lines)[0]

    assert (second.segments[0].path, second.segments[0].text) == ("settings.model", "claude-opus-5")
    assert texts(second) == [
        "messages[0] Why does it fail?",
        "messages[1].content[0] Let me look.",
        'messages[1].content[1] {"type":"tool_use","id":"t1","name":"Bash","input":{"command":"make"}}',
        "messages[2].content[0] error: x",
    ]
    assert [(item.path, item.text) for item in second.output] == [
        ("messages[3].content[0]", "It lacks x.")
    ]
    assert second.start_s is not None and second.end_s == second.start_s + 1


def test_results_of_parallel_calls_are_in_one_message() -> None:
    """They are siblings in the tree, and one of them is no ancestor of the next response."""
    log = Transcript()
    question = log.user(None, "Look")
    log.answer(question, "msg_1", call("t1", command="a"), call("t2", command="b"))
    lines = [line["uuid"] for line in log.lines]
    log.result(lines[1], "t1", "one")
    second = log.result(lines[2], "t2", "two")
    log.answer(second, "msg_2", text("Done"))

    requests, _ = read_rows(CLAUDE_CODE, log.lines)

    assert len(requests) == 2
    assert texts(requests[1])[-2:] == ["messages[2].content[0] one", "messages[2].content[1] two"]


def test_a_result_that_comes_while_the_response_streams_ends_nothing() -> None:
    """Lines of the response go on after the first result."""
    log = Transcript()
    question = log.user(None, "Look")
    first = log.answer(question, "msg_1", call("t1", command="a"))
    log.result(first, "t1", "one")
    second = log.answer(first, "msg_1", call("t2", command="b"))
    result = log.result(second, "t2", "two")
    log.answer(result, "msg_2", text("Done"))

    requests, _ = read_rows(CLAUDE_CODE, log.lines)

    assert [item.request_id for item in requests] == ["msg_1", "msg_2"]
    assert [line.rpartition(" ")[2] for line in texts(requests[1])[-2:]] == ["one", "two"]


def test_a_response_goes_on_below_the_result_of_its_own_call() -> None:
    """Tools run while the response streams: its lines and their results are one chain."""
    log = Transcript()
    question = log.user(None, "Look")
    first = log.answer(question, "msg_1", text("Let me"), call("t1", command="a"), stop=None)
    first_result = log.result(first, "t1", "one")
    second = log.answer(first_result, "msg_1", call("t2", command="b"), stop="tool_use")
    second_result = log.result(second, "t2", "two")
    log.answer(second_result, "msg_2", text("Done"), stop=None)

    first_request, last_request = read_rows(CLAUDE_CODE, log.lines)[0]

    assert [line.partition(" ")[0] for line in texts(last_request)] == [
        "messages[0]",
        "messages[1].content[0]",
        "messages[1].content[1]",
        "messages[1].content[2]",
        "messages[2].content[0]",
        "messages[2].content[1]",
    ]
    assert [line.rpartition(" ")[2] for line in texts(last_request)[-2:]] == ["one", "two"]
    assert (first_request.usage.num_output, last_request.usage.num_output) == (40, None)


def test_a_rewind_is_another_branch() -> None:
    """The edited question shares what is before it, and nothing after."""
    log = Transcript()
    question = log.user(None, "Hello")
    answer = log.answer(question, "msg_1", text("Hi"))
    log.answer(log.user(answer, "Why?"), "msg_2", text("Because"))
    log.answer(log.user(answer, "How?"), "msg_3", text("So"))

    requests, _ = read_rows(CLAUDE_CODE, log.lines)

    assert [item.parent_id for item in requests] == [None, "msg_1", "msg_1"]
    assert texts(requests[2]) == [
        "messages[0] Hello",
        "messages[1].content[0] Hi",
        "messages[2] How?",
    ]


def test_sidechains_are_conversations_of_their_own() -> None:
    """Named by the agent, or by the first line in older versions; their lines interleave."""
    log = Transcript()
    question = log.user(None, "Explore")
    task = log.user(None, "Find x", isSidechain=True, agentId="a7")
    old = log.user(None, "Find y", isSidechain=True)
    log.answer(question, "msg_1", text("Wait"))
    log.answer(task, "msg_2", text("x is here"), isSidechain=True, agentId="a7")
    log.answer(old, "msg_3", text("y is here"), isSidechain=True)

    requests, _ = read_rows(CLAUDE_CODE, log.lines)

    assert [item.conversation for item in requests] == [
        SESSION,
        f"{SESSION}/a7",
        f"{SESSION}/{old}",
    ]
    assert texts(requests[1]) == ["messages[0] Find x"]


def test_after_a_compaction_the_history_is_the_summary() -> None:
    """The boundary cuts the tree; lines that are shown and not sent are not in the prompt."""
    log = Transcript()
    answered = log.answer(log.user(None, "Long"), "msg_1", text("Very"))
    hidden = log.user(answered, "<banner>", isVisibleInTranscriptOnly=True)
    log.answer(log.user(hidden, "More"), "msg_2", text("Yes"))
    boundary = log.line(
        "system", None, subtype="compact_boundary", logicalParentUuid=hidden,
        compactMetadata={"trigger": "auto", "preTokens": 9},
    )  # fmt: skip
    summary = log.user(
        boundary, "This session is being continued.", isCompactSummary=True,
        isVisibleInTranscriptOnly=True,
    )  # fmt: skip
    log.answer(summary, "msg_3", text("Go on"))

    requests, quality = read_rows(CLAUDE_CODE, log.lines)

    assert texts(requests[1])[-1] == "messages[2] More"
    assert texts(requests[2]) == ["messages[0] This session is being continued."]
    assert quality.notes["compaction"] == 1


def test_a_resumed_session_is_not_counted_twice() -> None:
    """The new file begins with copies of the old lines under another session id."""
    old, new = session(), Transcript("new-session")
    new.lines += copy.deepcopy(old.lines[2:])
    again = new.user(new.lines[-1]["uuid"], "And now?", uuid="u9")
    new.answer(again, "msg_3", text("Fine"))
    quality = ReadQuality()
    reader = CLAUDE_CODE.reader(quality)

    requests = [
        request
        for file, log in (("a", old), ("b", new))
        for number, line in enumerate(log.lines, 1)
        for request in reader.feed(Row(file, number, line))
    ] + list(reader.close())

    assert [(item.file, item.request_id) for item in requests] == [
        ("a", "msg_1"),
        ("a", "msg_2"),
        ("b", "msg_3"),
    ]
    assert texts(requests[2])[0] == "messages[0] Why does it fail?"
    assert quality.skipped["response that an earlier file has"] == 2


def test_the_vendors_verdict_and_the_effort_are_read() -> None:
    """A missing diagnosis is no verdict; effort is a setting."""
    log = Transcript()
    reason = {"type": "messages_changed", "cache_missed_input_tokens": 6455}
    diagnostics = {"diagnostics": {"cache_miss_reason": reason}}
    question = log.user(None, "Hello")
    answer = log.answer(question, "msg_1", text("Hi"), message=diagnostics, effort="xhigh")
    log.answer(log.user(answer, "Why?"), "msg_2", text("Because"))

    first, second = read_rows(CLAUDE_CODE, log.lines)[0]

    assert first.verdict == VendorVerdict("messages_changed", 6455)
    assert second.verdict is None
    assert [(item.path, item.text) for item in first.segments[:2]] == [
        ("settings.model", "claude-opus-5"),
        ("settings.output_config", '{"effort":"xhigh"}'),
    ]


def test_absent_counters_are_unknown() -> None:
    """Usage without cache counters has no total."""
    log = Transcript()
    log.answer(log.user(None, "Hello"), "msg_1", text("Hi"), usage={"input_tokens": 7})

    [request] = read_rows(CLAUDE_CODE, log.lines)[0]

    assert request.usage == Usage(num_output=40)


def test_errors_are_no_requests() -> None:
    """Messages that the program wrote in place of an answer."""
    log = Transcript()
    question = log.user(None, "Hello")
    log.answer(question, "a", text("API Error 529"), model="<synthetic>", isApiErrorMessage=True)
    log.answer(question, "msg_1", text("Hi"))

    requests, quality = read_rows(CLAUDE_CODE, log.lines)

    assert [item.request_id for item in requests] == ["msg_1"]
    assert quality.skipped["failed attempt"] == 1


def test_circles_end() -> None:
    """A line that is its own ancestor."""
    log = Transcript()
    log.user("b", "one", uuid="a")
    log.user("a", "two", uuid="b")
    log.answer("b", "msg_1", text("Hi"), isSidechain=True)

    assert len(read_rows(CLAUDE_CODE, log.lines)[0]) == 1


def test_printed_lines_are_a_chain() -> None:
    """`stream-json` has no parents: each line is below the one before it, a sub-agent's apart."""
    log = Transcript()
    first = log.answer(None, "msg_1", text("Let me look."), call("t1", command="make"))
    inner = log.answer(None, "msg_2", text("Inside"), agentId="t1")
    log.answer(log.result(first, "t1", "error"), "msg_3", text("It lacks x."))
    lines: list[dict[str, object]] = [{"type": "system", "subtype": "init", "session_id": "s"}]
    for line in log.lines:
        agent = "t1" if line["uuid"] == inner else None
        lines.append(
            {"type": line["type"], "message": line["message"], "uuid": line["uuid"],
             "session_id": "s", "parent_tool_use_id": agent, "timestamp": line["timestamp"]}
        )  # fmt: skip
    lines.append({"type": "result", "subtype": "success", "session_id": "s", "usage": {}})

    requests, quality = read_rows(CLAUDE_CODE, lines)

    assert all(map(CLAUDE_CODE.is_row, lines))
    assert {item.request_id: item.conversation for item in requests} == {
        "msg_1": "s",
        "msg_2": "s/t1",
        "msg_3": "s",
    }
    assert len(requests) == 3
    last = next(item for item in requests if item.request_id == "msg_3")
    assert texts(last)[-1] == "messages[1].content[0] error"
    assert not quality.bad_lines


@given(st.data())
def test_mutated_transcripts_raise_nothing_else(data: st.DataObject) -> None:
    """Every line is read, skipped or bad, whatever it holds and in whatever order."""
    lines = copy.deepcopy(session().lines)
    for _ in range(data.draw(st.integers(1, 3))):
        index = data.draw(st.integers(0, len(lines) - 1))
        lines[index] = mutate(data, lines[index])
    if data.draw(st.booleans()):
        lines = data.draw(st.permutations(lines))

    requests, quality = read_rows(CLAUDE_CODE, lines)

    assert len(requests) <= 4
    assert all(1 <= line <= len(lines) for _, line in quality.bad_lines)


@given(st.data())
def test_a_turn_continues_the_prompt_of_the_turn_before_it(data: st.DataObject) -> None:
    """In any tree of questions, parallel calls, rewinds and sub-agents."""
    log = Transcript()
    tips: list[tuple[str | None, bool]] = [(None, False)]
    for number in range(data.draw(st.integers(1, 8))):
        parent, is_side = data.draw(st.sampled_from(tips))
        if parent is None:
            is_side = data.draw(st.booleans())
        extra = {"isSidechain": True, "agentId": "a"} if is_side else {}
        question = log.user(parent, f"question {number}", **extra)
        calls = [f"t{number}.{at}" for at in range(data.draw(st.integers(0, 3)))]
        last = log.answer(
            question, f"msg_{number}", text(f"answer {number}"), *map(call, calls), **extra
        )
        above = {block["id"]: line["uuid"] for line in log.lines if line["type"] == "assistant"
                 for block in line["message"]["content"] if block["type"] == "tool_use"}  # fmt: skip
        for name in data.draw(st.permutations(calls)):
            last = log.result(above[name], name, f"result {name}")
        tips.append((last, is_side))

    requests, quality = read_rows(CLAUDE_CODE, log.lines)

    by_id = {request.request_id: request for request in requests}
    assert len(by_id) == len(requests)
    assert not quality.bad_lines
    for request in requests:
        if request.parent_id is not None:
            before = by_id[request.parent_id]
            assert request.segments[: len(before.segments)] == before.segments
            answered = request.segments[len(before.segments) :]
            assert answered[: len(before.output)] == before.output
            results = [item.text for item in answered if item.text.startswith("result")]
            assert len(results) == sum(item.text.startswith("{") for item in before.output)
