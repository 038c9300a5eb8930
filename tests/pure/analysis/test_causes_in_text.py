"""Causes that text proves: each is named at its place, and decoys are not."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ramify.analysis import lint
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, TextForm
from ramify.analysis.verdicts import LintReport

RULES = "".join(
    f"Rule {n}: answer politely about topic number {n} and never guess.\n" for n in range(60)
)
TALK = (
    "Where is the parcel that I sent to Lisbon last week?",
    "It has left the depot in Bremen and is on its way to Lisbon now.",
    "And when will it be there, roughly, if nothing else goes wrong?",
    "It should be there within three days if customs do not stop it.",
    "Thanks, please tell me how I can change the address of delivery.",
)


def setting(name: str, value: str) -> Segment:
    return Segment(f"settings.{name}", SegmentKind.SETTING, value)


def tool(at: int, name: str, about: str = "Does something useful.") -> Segment:
    value = {"type": "function", "function": {"name": name, "description": about}}
    text = json.dumps(value, separators=(",", ":"))
    return Segment(f"tools[{at}]", SegmentKind.TOOL, text, TextForm.JSON)


def talk(*texts: str, label: str = "") -> list[Segment]:
    roles = ("user", "assistant")
    return [
        Segment(f"messages[{at}]", SegmentKind.MESSAGE, text, label=label or roles[at % 2])
        for at, text in enumerate(texts)
    ]


def lint_prompts(*prompts: list[Segment], system: str | list[str] = RULES) -> LintReport:
    """Lint prompts, each with the system prompt before its messages."""
    requests = []
    for line, prompt in enumerate(prompts, 1):
        text = system if isinstance(system, str) else system[line - 1]
        first = next(
            (i for i, s in enumerate(prompt) if s.path.startswith("messages")), len(prompt)
        )
        middle = Segment("system", SegmentKind.SYSTEM, text)
        segments = (*prompt[:first], middle, *prompt[first:])
        requests.append(LoggedRequest("log.jsonl", line, segments=segments, api="openai-chat"))
    return lint(requests)


def named(report: LintReport, line: int = 2) -> list[tuple[str, str]]:
    """Causes of a request that are no suspicion and no legitimate change, with their segments."""
    return [
        (str(cause.cause), cause.segment)
        for cause in report.verdicts[line - 1].causes
        if cause.certainty != "suspected" and cause.cause not in ("new_content", "unread_write")
    ]


VALUES: dict[str, tuple[str, Callable[[int], str]]] = {
    "iso": ("clock", lambda n: f"2026-03-04T10:{n:02d}:09Z"),
    "words": ("clock", lambda n: f"Tuesday, {n + 1} March 2026"),
    "ago": ("clock", lambda n: f"Last seen {n + 2} hours ago."),
    "epoch": ("clock", lambda n: f"Timestamp: {1790000000 + 61 * n}"),
    "uuid": ("random_id", lambda n: f"Session: 9f8b{n}c1e-{n}3aa-4f1b-8e2d-71c0{n}1d2e3f4"),
    "hex": ("random_id", lambda n: f"trace {n}fe0{n}cafe12{n}"),
    "temp": ("path_or_state", lambda n: f"Working directory: /tmp/run-{n}8fa2{n}/work"),
    "branch": ("path_or_state", lambda n: f"Current branch: feature-{n}"),
    "budget": ("path_or_state", lambda n: f"Tokens used: {1200 + 37 * n}"),
    "billing": ("billing_header", lambda n: f"x-anthropic-billing-header: cch=a{n}3f{n};"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_in_the_system_prompt_is_named(name: str) -> None:
    """A value that changes with every request is named with its kind, and costs what follows."""
    cause, make = VALUES[name]
    report = lint_prompts(
        *(talk(f"{question}?") for question in "abcd"),
        system=[f"{make(n)}\n{RULES}" for n in range(4)],
    )

    assert named(report) == [(cause, "system")]
    assert report.verdicts[1].tokens.lost > 300
    assert cause in {str(finding.cause) for finding in report.findings}


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("Where is order 48151623?", "Where is order 42108154?"),
        ("What happened on 2026-03-04?", "What happened on 2026-05-06?"),
        ("Open /home/ada/notes.md please", "Open /home/bob/todo.md please"),
        ("My id is 5f3a9c1e77d0", "My id is 77d05f3a9c1e"),
        ("I called 3 hours ago", "I called 5 hours ago"),
    ],
)
def test_values_in_a_question_are_content(earlier: str, later: str) -> None:
    """Dates, numbers, paths and ids that the user asks about are no waste."""
    report = lint_prompts(talk(earlier), talk(later))

    assert named(report) == []
    assert report.verdicts[1].tokens.lost == 0
    assert report.verdicts[1].divergence is not None


def test_another_user_is_content() -> None:
    """A user's name in the system prompt comes again and is no waste."""
    users = ["Ada", "Bob", "Ada", "Bob", "Ada"]

    report = lint_prompts(
        *(talk(f"Question {n}?") for n in range(5)),
        system=[f"You help {user}.\n{RULES}" for user in users],
    )

    assert all(named(report, line) == [] for line in range(1, 6))
    assert report.verdicts[2].best_match_line == 1


def test_tools_in_another_order_are_named_once() -> None:
    """A permutation of tools is `tool_order`, at the first tool that is another."""
    report = lint_prompts(
        [tool(0, "alpha"), tool(1, "beta"), tool(2, "gamma"), *talk("Hi")],
        [tool(0, "alpha"), tool(1, "gamma"), tool(2, "beta"), *talk("Hello")],
    )

    assert named(report) == [("tool_order", "tools[1]")]


@pytest.mark.parametrize("number", [0, 1])
def test_a_tool_that_disappears_is_named_within_a_conversation(number: int) -> None:
    """A removed tool is `tool_changed` at its old place; the divergence is where texts differ."""
    tools = [tool(0, "alpha"), tool(1, "beta")]
    left = [tool(0, ("beta", "alpha")[number])]

    report = lint_prompts([*tools, *talk(*TALK[:1])], [*left, *talk(*TALK[:3])])

    assert named(report) == [("tool_changed", f"tools[{number}]")]
    divergence = report.verdicts[1].divergence
    assert divergence is not None
    assert divergence.segment == f"tools[{number}]"
    assert (divergence.got == "") == (number == 1)


def test_other_tools_of_another_conversation_are_no_cause() -> None:
    """Two conversations may have different tools."""
    report = lint_prompts(
        [tool(0, "alpha"), *talk("Hi there")], [tool(0, "beta"), *talk("Good day")]
    )

    assert named(report) == []


@pytest.mark.parametrize("api", ["openai-chat", "anthropic-messages"])
def test_order_of_keys(api: str) -> None:
    """Keys in another order are proved where text is cached, and likely at a vendor that parses."""
    first, second = (
        Segment("tools[0]", SegmentKind.TOOL, text, TextForm.JSON)
        for text in ('{"name":"f","a":{"x":1,"y":2}}', '{"name":"f","a":{"y":2,"x":1}}')
    )
    rest = (Segment("system", SegmentKind.SYSTEM, RULES), *talk("Hi"))

    report = lint(
        [
            LoggedRequest("log.jsonl", n + 1, segments=(item, *rest), api=api)
            for n, item in enumerate((first, second))
        ]
    )

    (cause,) = [c for c in report.verdicts[1].causes if c.cause == "key_order"]
    assert cause.certainty == ("likely" if api.startswith("anthropic") else "proved")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace(". ", ".  "),
        lambda text: text + " ",
        lambda text: text.replace("é", "e\u0301"),
        lambda text: "\ufeff" + text,
        lambda text: text.replace(". ", ".\n"),
        lambda text: text.replace("<b> & 'c'", "&lt;b&gt; &amp; &#39;c&#39;"),
    ],
)
def test_white_space_and_unicode_form(change: Callable[[str], str]) -> None:
    """The same text in another form is `whitespace`."""
    system = f"Le café est fermé. Answer in French.\n{RULES} Write <b> & 'c'."

    report = lint_prompts(talk("Hi"), talk("Hello"), system=[system, change(system)])

    assert named(report) == [("whitespace", "system")]


def test_settings_and_models_are_named_at_their_setting() -> None:
    """A setting or a model that changes within a conversation loses everything."""
    report = lint_prompts(
        [setting("model", "m-1"), setting("tool_choice", "auto"), *talk(*TALK[:1])],
        [setting("model", "m-2"), setting("tool_choice", "none"), *talk(*TALK[:3])],
    )

    assert named(report) == [
        ("model_changed", "settings.model"),
        ("settings_changed", "settings.tool_choice"),
    ]
    assert report.verdicts[1].tokens.reusable == 0
    assert report.verdicts[1].divergence is not None
    assert report.verdicts[1].divergence.segment == "settings.model"


def test_history_that_is_cut_in_the_middle_is_named() -> None:
    """Dropped messages with equal ones after them are `history_edited`."""
    report = lint_prompts(
        talk(*TALK[:3]), [replace(s, label=s.label) for s in talk(TALK[2], TALK[3], TALK[4])]
    )

    assert named(report) == [("history_edited", "messages[0]")]


def test_an_edited_question_is_content() -> None:
    """The newest message may be written anew."""
    report = lint_prompts(talk(*TALK[:3]), talk(*TALK[:2], "No, forget that; where is my invoice?"))

    assert named(report) == []


def test_a_summary_is_no_waste() -> None:
    """A summary in place of the head is `compaction`, and nothing is lost by it."""
    summary = (
        "This session is continued from a previous conversation, summarised below: parcels. " * 3
    )

    report = lint_prompts(talk(*TALK[:3]), talk(summary, TALK[3], TALK[4]))

    assert named(report) == [("compaction", "messages[0]")]
    assert report.verdicts[1].tokens.lost == 0


def test_reasoning_that_is_left_out_is_named() -> None:
    """Thoughts of an earlier turn that are gone are `reasoning_dropped`."""
    question, thought, answer, more, reply, last = (
        Segment("messages[0]", SegmentKind.MESSAGE, TALK[0], label="user"),
        Segment(
            "messages[1].content[0]", SegmentKind.MESSAGE, "I think so.", label="assistant thinking"
        ),
        Segment("messages[1].content[1]", SegmentKind.MESSAGE, TALK[1], label="assistant"),
        Segment("messages[2]", SegmentKind.MESSAGE, TALK[2], label="user"),
        Segment("messages[3]", SegmentKind.MESSAGE, TALK[3], label="assistant"),
        Segment("messages[4]", SegmentKind.MESSAGE, TALK[4], label="user"),
    )

    report = lint_prompts([question, thought, answer, more], [question, answer, more, reply, last])

    assert named(report) == [("reasoning_dropped", "messages[1].content[1]")]


def test_a_block_that_hops_is_named() -> None:
    """A block of the newest user message that leaves the older one is `context_moved`."""
    block = "<memory>\nThe customer likes short answers.\nThe depot is in Bremen.\n</memory>"

    report = lint_prompts(
        talk(f"{block}\n{TALK[0]}"), talk(TALK[0], TALK[1], f"{block}\n{TALK[2]}")
    )

    assert named(report) == [("context_moved", "messages[0]")]


def test_a_system_message_that_rises_is_named() -> None:
    """A system message of the history that stands at the top later is `system_hoisted`."""
    note = "Note: the customer is a wholesale dealer with a contract."
    earlier = talk(*TALK[:3])
    earlier.insert(1, Segment("messages[1]", SegmentKind.MESSAGE, note, label="system"))

    report = lint_prompts(earlier, talk(*TALK), system=[RULES, f"{RULES}\n{note}"])

    assert ("system_hoisted", "system") in named(report)


def test_a_picture_that_is_coded_anew_is_named() -> None:
    """An older picture with other bytes is `media_changed`."""
    pictures = [
        Segment(
            "messages[0].content[1]",
            SegmentKind.MESSAGE,
            f"image sha256:{n}",
            TextForm.MEDIA,
            "user",
        )
        for n in range(2)
    ]
    text = Segment("messages[0].content[0]", SegmentKind.MESSAGE, TALK[0], label="user")

    report = lint_prompts([text, pictures[0]], [text, pictures[1], *talk(*TALK[:3])[1:]])

    assert named(report) == [("media_changed", "messages[0].content[1]")]


def test_causes_behind_each_other_are_all_named() -> None:
    """Tools in another order hide a clock, which hides white space; all three are named."""
    system = [f"Time: 10:{n:02d}:05\n{RULES}" for n in range(2)]

    report = lint_prompts(
        [tool(0, "alpha"), tool(1, "beta"), *talk(*TALK[:1])],
        [tool(0, "beta"), tool(1, "alpha"), *talk(TALK[0] + " ", *TALK[1:3])],
        system=system,
    )

    assert named(report) == [
        ("tool_order", "tools[0]"),
        ("clock", "system"),
        ("whitespace", "messages[0]"),
    ]


def test_secrets_are_not_quoted() -> None:
    """A key that changes is masked in every quote."""
    report = lint_prompts(
        *(talk(f"{n}?") for n in "abc"),
        system=[f"api_key: sk-live{n}abcdef0123456789{n}\n{RULES}" for n in range(3)],
    )

    assert "abcdef0123456789" not in repr(report)


@pytest.mark.parametrize("text", ["naïve 😀 ", "e\u0301tude ", "\ud800 lone ", "日本語 "])
def test_places_count_code_points(text: str) -> None:
    """A divergence behind emoji, combining marks and surrogates is counted in code points."""
    prompts = [talk(f"{text}{end}") for end in ("one", "two")]

    report = lint_prompts(*prompts)

    divergence = report.verdicts[1].divergence
    assert divergence is not None
    assert (divergence.segment, divergence.char) == ("messages[0]", len(text))
