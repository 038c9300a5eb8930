"""`lint` of inputs made to be slow: work grows with their size, not with its square."""

import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ramify.analysis import lint
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm

GROWTH = 4  # of the input
MOST = 1.5 * GROWTH  # of the work: linear, and some more for logarithms and steps


def texts(*contents: str) -> list[LoggedRequest]:
    """A request for each system prompt."""
    return [
        LoggedRequest(
            "log.jsonl",
            number,
            segments=(
                Segment("system", SegmentKind.SYSTEM, content),
                Segment("messages[0]", SegmentKind.MESSAGE, "Go on, please.", label="user"),
            ),
        )
        for number, content in enumerate(contents, 1)
    ]


def chats(*prompts: list[str]) -> list[LoggedRequest]:
    """A request for each list of messages, of user and assistant in turn."""
    return [
        LoggedRequest(
            "log.jsonl",
            number,
            segments=tuple(
                Segment(
                    f"messages[{at}]",
                    SegmentKind.MESSAGE,
                    text,
                    label=("user", "assistant")[at % 2],
                )
                for at, text in enumerate(prompt)
            ),
        )
        for number, prompt in enumerate(prompts, 1)
    ]


def tool_lists(*prompts: list[str]) -> list[LoggedRequest]:
    """A request for each list of tools."""
    return [
        LoggedRequest(
            "log.jsonl",
            number,
            segments=(
                *(
                    Segment(f"tools[{at}]", SegmentKind.TOOL, text, TextForm.JSON)
                    for at, text in enumerate(prompt)
                ),
                Segment("messages[0]", SegmentKind.MESSAGE, "Go on, please.", label="user"),
            ),
        )
        for number, prompt in enumerate(prompts, 1)
    ]


def rows(size: int) -> list[LoggedRequest]:
    """Every line has another number."""
    rng = random.Random(1)
    made = ["\n".join(f"row {n} is {rng.random()}" for n in range(size)) for _ in range(2)]
    return texts(*made)


def repeated_lines(size: int) -> list[LoggedRequest]:
    """No line is unique, so that a diff has no anchors."""
    other = ["- an item" if n % 5 else "- a gap" for n in range(size)]
    return texts("\n".join(["- an item"] * size), "\n".join(other))


def edited_history(size: int) -> list[LoggedRequest]:
    """All old messages differ a little."""
    first = [f"step {n} at 10:{n % 60:02d}:00 went as planned" for n in range(size)]
    return chats(first, [f"{text} today" for text in first], first[::-1])


def cleared_results(size: int) -> list[LoggedRequest]:
    """Old messages are stubs."""
    first = [f"step {n}: {'result ' * 5}{n}" for n in range(size)]
    stubs = ["[cleared]" if n % 2 else text for n, text in enumerate(first[: size // 2])]
    return chats(first, [*stubs, *first[size // 2 :], "go on"])


def equal_messages(size: int) -> list[LoggedRequest]:
    """The same message over and over."""
    same = ["continue please"] * size
    return chats(same, [*same[: size // 2], "wait", *same], same[3:])


def shuffled_tools(size: int) -> list[LoggedRequest]:
    """Tools in another order, and a tool that changed."""
    tools = [f'{{"name":"tool_{n}","description":"does thing {n}"}}' for n in range(size)]
    other = random.Random(1).sample(tools, size)
    changed = [*tools[: size // 2], '{"name":"new"}', *tools[size // 2 + 1 :]]
    return tool_lists(tools, other, changed)


def tools_of_a_name(size: int) -> list[LoggedRequest]:
    """All tools have the same name."""
    tools = [f'{{"name":"tool","description":"does thing {n}"}}' for n in range(size)]
    return tool_lists(tools, [*tools[1:], *tools[:3]], tools[::-1])


def lines_run(log: list[LoggedRequest]) -> int:
    """Lines of Python that a `lint` runs, repeats counted."""
    count = 0

    def trace(_frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        lint(log)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (rows, 150),
        (repeated_lines, 400),
        (edited_history, 100),
        (cleared_results, 100),
        (equal_messages, 100),
        (shuffled_tools, 100),
        (tools_of_a_name, 100),
    ],
)
def test_work_is_linear(make: Callable[[int], list[LoggedRequest]], size: int) -> None:
    """Four times the lines, messages or tools cost about four times the steps."""
    lint(make(10))  # what is computed once
    assert lines_run(make(GROWTH * size)) <= MOST * lines_run(make(size))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a" * 300_000, "b" + "a" * 300_000),
        ("-" * 300_000, "-" * 300_000 + "x"),
        ("\u6587" * 300_000, "\u6587" * 150_000 + "x" + "\u6587" * 150_000),
        ("x" + " " * 300_000 + "y", "x" + "\n " * 150_000 + "z"),
        ("key=" * 75_000, "key=" * 75_000 + "1"),
        ("http://a:" * 30_000, "http://a:" * 30_000 + "@"),
    ],
    ids=["letters", "dashes", "no blanks", "blanks", "keys", "urls"],
)
def test_a_text_without_words_is_read_in_linear_time(first: str, second: str) -> None:
    """A third of a megabyte without an end of a word takes well under a second, not minutes."""
    start = time.process_time()
    report = lint(texts(first, second))
    assert time.process_time() - start < 20
    assert report.num_requests == 2
