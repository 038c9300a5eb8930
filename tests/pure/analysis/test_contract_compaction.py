"""Summaries in the JSON of `lint`: what is `compaction` and what only talks of it; a tiny log each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pure.analysis.contract_log import (
    LATER,
    MORE,
    RULES,
    SYSTEM,
    TALK,
    Json,
    causes,
    chat,
    message,
    only,
    verdicts,
)
from tests.pure.analysis.transcripts import Transcript, text

PREAMBLE = (
    "This session is being continued from a previous conversation that ran out of context. "
    "The conversation is summarized below: "
)
SHIPS = message(
    "user",
    f"{PREAMBLE}the user asked about tides and ships. Both were explained, with the moon as a cause, "
    "and ports by the sea were named as the next thing to look at.",
)
BREAD = message(
    "user",
    f"{PREAMBLE}bread was baked, and it rose well. What is left is the crust: the oven has to be "
    "hotter, and nobody has tried rye flour so far.",
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": RULES, "parameters": {}}}
    for name in ("read", "write")
]


@pytest.mark.parametrize("kept", [TALK[4:], ()], ids=["before kept messages", "alone"])
def test_a_summary_of_the_head_is_compaction(tmp_path: Path, kept: tuple[Json, ...]) -> None:
    """It is reported, and nothing is lost by it."""
    summary = message(
        "user",
        "This session is being continued from a previous conversation that ran out of context. "
        "The conversation is summarized below: tides, ships.",
    )

    verdict = verdicts(tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, summary, *kept))[1]

    assert (causes(verdict), verdict["tokens"]["lost"]) == (["compaction"], 0)


@pytest.mark.parametrize(
    "head",
    [
        (message("system", "Summary of the earlier conversation: tides and ships were discussed."),),
        (
            message("user", "Here is a summary of the conversation so far: tides, ships; all answered."),
            message("assistant", "Understood."),
        ),
    ],
    ids=["as a system message", "acknowledged"],
)  # fmt: skip
def test_summaries_stand_in_several_roles(tmp_path: Path, head: tuple[Json, ...]) -> None:
    """Whoever wrote it, a summary in place of the head is `compaction`."""
    verdict = verdicts(tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, *head, *TALK[4:], *LATER))[1]

    assert only(verdict) == [("compaction", "proved", "messages[1]")]


@pytest.mark.parametrize(
    "content",
    [
        (
            "Another language model started to solve this problem and produced a summary of its thinking "
            "process. Here is the summary produced by the other language model: tides, ships."
        ),
        "I spoke to you previously about a number of things.\nTides come twice a day; ships float.",
        "<state_snapshot>\n<overall_goal>Tides and ships are explained.</overall_goal>\n</state_snapshot>",
        [
            {
                "type": "compaction",
                "content": "Tides come twice a day; ships float on water, always.",
            }
        ],
    ],
    ids=["Codex", "Aider", "Gemini CLI", "Anthropic"],
)
@pytest.mark.parametrize("kept", [TALK[4:], ()], ids=["before kept messages", "alone"])
def test_summaries_of_clients_and_apis_are_compaction(
    tmp_path: Path, content: Any, kept: tuple[Json, ...]
) -> None:
    """They do not say that a conversation is what they sum up."""
    head = message("user" if isinstance(content, str) else "assistant", content)
    new = message("user", "Go on, please.")

    verdict = verdicts(tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, head, *kept, new))[1]

    assert [name for name, _, _ in only(verdict)] == ["compaction"]


def test_an_item_of_responses_is_compaction(tmp_path: Path) -> None:
    """It has a type and no role."""
    first = [message("user", "First question about tides?")]
    result = {"type": "function_call_output", "call_id": "call_1", "output": MORE[:300]}
    call = {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"}
    item = {"type": "compaction", "encrypted_content": "gAAAAABo" * 9}
    bodies = [
        {"model": "gpt-5", "instructions": RULES, "input": [*first, *behind]}
        for behind in ([call, result], [item, message("user", "Go on, please.")])
    ]

    assert only(verdicts(tmp_path, *bodies)[1]) == [("compaction", "proved", "messages[1]")]


@pytest.mark.parametrize("kept", [TALK[4:], ()], ids=["before kept messages", "alone"])
def test_a_summary_in_place_of_another_is_compaction(
    tmp_path: Path, kept: tuple[Json, ...]
) -> None:
    """A second compaction begins with the words of the first, and with a summary of its own."""
    compared = verdicts(
        tmp_path,
        chat(SYSTEM, *TALK),
        chat(SYSTEM, SHIPS, *TALK[4:], *LATER),
        chat(SYSTEM, BREAD, *kept),
    )

    assert [only(verdict) for verdict in compared[1:]] == [
        [("compaction", "proved", "messages[1]")]
    ] * 2
    (cause,) = compared[2]["causes"]
    assert ("ships" in cause["had"], "baked" in cause["got"]) == (True, True)


def test_a_summary_may_stand_behind_a_reminder_of_its_message(tmp_path: Path) -> None:
    """The program's own block comes first in the message, and is the same in both."""
    reminder = {"type": "text", "text": f"<system-reminder>{RULES}</system-reminder>"}
    first, second = (
        message("user", [reminder, {"type": "text", "text": item["content"]}])
        for item in (SHIPS, BREAD)
    )

    verdict = verdicts(tmp_path, chat(SYSTEM, first, *TALK[4:], *LATER), chat(SYSTEM, second))[1]

    assert only(verdict) == [("compaction", "proved", "messages[1].content[1]")]


def test_the_summary_that_both_have_is_no_compaction(tmp_path: Path) -> None:
    """It was reported when it came: a last message asked anew is new content."""
    first, second = (message("user", f"What about {what}?") for what in ("salt", "the moon"))

    verdict = verdicts(
        tmp_path, *(chat(SYSTEM, SHIPS, *TALK[4:], last) for last in (first, second))
    )[1]

    assert causes(verdict) == ["new_content"]


def test_conversations_with_summaries_of_their_own_are_two(tmp_path: Path) -> None:
    """Nothing behind the summaries is the same: the tools of each are its own."""
    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, SHIPS, *TALK[4:], tools=TOOLS),
        chat(SYSTEM, BREAD, *LATER, tools=TOOLS[:1]),
    )[1]

    assert (only(verdict), verdict["tokens"]["lost"]) == (
        [("new_content", "proved", "tools[1]")],
        0,
    )


@pytest.mark.parametrize("place", ["before", "within", "none"])
def test_a_second_compaction_may_lose_a_tool(tmp_path: Path, place: str) -> None:
    """A kept message says that it is one conversation, whatever reminders stand before its summary."""
    reminder = f"<system-reminder>{MORE[:300]}</system-reminder>"
    blocks = [
        [{"type": "text", "text": text} for text in (reminder, item["content"])]
        for item in (SHIPS, BREAD)
    ]
    heads: dict[str, tuple[list[Json], list[Json]]] = {
        "none": ([SHIPS], [BREAD]),
        "before": ([message("user", reminder), SHIPS], [message("user", reminder), BREAD]),
        "within": ([message("user", blocks[0])], [message("user", blocks[1])]),
    }
    segment = {"none": "messages[1]", "before": "messages[2]", "within": "messages[1].content[1]"}
    first, second = heads[place]

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, *first, *TALK[4:], tools=TOOLS),
        chat(SYSTEM, *second, *TALK[5:], *LATER, tools=TOOLS[:1]),
    )[1]

    assert only(verdict) == [
        ("tool_changed", "proved", "tools[1]"),
        ("compaction", "proved", segment[place]),
    ]


@pytest.mark.parametrize("place", ["system", "user"])
def test_words_about_summaries_are_content_in_a_talk(tmp_path: Path, place: str) -> None:
    """A changed sentence of a message that speaks of summaries is no new summary."""
    text = (
        "You write a compact recap, a summary of the conversation, when you are done; until then "
    )
    texts = [f"{text}{rest} {RULES}" for rest in ("rivers in the north.", "a loaf of rye bread.")]
    heads = {
        "system": [(message("system", item), *TALK[:1]) for item in texts],
        "user": [(SYSTEM, message("user", item)) for item in texts],
    }

    verdict = verdicts(tmp_path, *(chat(*head, *TALK[1:]) for head in heads[place]))[1]

    assert only(verdict) == [
        ("new_content", "proved", {"system": "messages[0]", "user": "messages[1]"}[place])
    ]


def test_tasks_about_summaries_are_content(tmp_path: Path) -> None:
    """A program that asks about one summary after the other has compacted nothing."""
    verdict = verdicts(
        tmp_path,
        *(
            chat(SYSTEM, message("user", f"Conversation summary: {what}. Which label fits it best of all?"))
            for what in ("the customer asked for a refund", "a parcel was late and then lost")
        ),
    )[1]  # fmt: skip

    assert causes(verdict) == ["new_content"]


@pytest.mark.parametrize("end", ["", "\nYou work on the release branch of the shop."])
def test_a_summary_within_the_system_prompt_is_compaction(tmp_path: Path, end: str) -> None:
    """The system prompt is longer by the summary, and the head of the history is gone.

    Words about a state may stand before it.
    """
    rules = f"{RULES}{end}"
    longer = f"{rules}\n\nConversation summary: tides and ships were discussed, all was answered."

    verdict = verdicts(
        tmp_path,
        chat(message("system", rules), *TALK),
        chat(message("system", longer), *TALK[4:], *LATER),
    )[1]

    assert (only(verdict), verdict["tokens"]["lost"]) == (
        [("compaction", "proved", "messages[0]")],
        0,
    )


@pytest.mark.parametrize(
    "question",
    [
        "Please write a summary of tides for my school paper, two pages, in simple words.",
        "Compact cars: which are best for a family of four with a dog, in your opinion?",
    ],
)
def test_questions_about_summaries_are_content(tmp_path: Path, question: str) -> None:
    """Another conversation that begins with such a question is no compaction."""
    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, message("user", question), *LATER)
    )[1]

    assert causes(verdict) == ["new_content"]


@pytest.mark.parametrize("kept", [TALK[4:], ()], ids=["before kept messages", "alone"])
@pytest.mark.parametrize(
    ("first", "second"), [("tides.", "ports."), ("a1.", "b2."), ("Ticket 8812 open.", "Ticket 9921 open.")]
)  # fmt: skip
def test_a_summary_may_be_a_word(
    tmp_path: Path, first: str, second: str, kept: tuple[Json, ...]
) -> None:
    """Whatever the word looks like, it is no id: nothing equal stands behind it in the summary."""
    heads = [message("user", f"{PREAMBLE}{text}") for text in (first, second)]
    if kept:
        heads = [
            message("user", f"Summary of the conversation: {text}") for text in (first, second)
        ]

    made = verdicts(
        tmp_path,
        chat(SYSTEM, *TALK),
        chat(SYSTEM, heads[0], *TALK[4:], *LATER),
        chat(SYSTEM, heads[1], *kept),
    )

    assert [only(verdict) for verdict in made[1:]] == [
        [("compaction", "proved", "messages[1]")]
    ] * 2


def test_a_clock_before_an_equal_summary_is_a_clock(tmp_path: Path) -> None:
    """The same summary is sent again with another time in its first line."""
    heads = [
        message("user", f"Conversation summary, made at 2026-03-04 10:0{minute}:00. {MORE}")
        for minute in (1, 7)
    ]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, heads[0], *TALK[4:]), chat(SYSTEM, heads[1], *TALK[4:], *LATER)
    )[1]

    assert only(verdict) == [("clock", "proved", "messages[1]")]


def test_a_summary_in_a_transcript_is_compaction(tmp_path: Path) -> None:
    """The transcript has no system prompt: the session says that nothing but the history is another."""
    log, other = Transcript(), Transcript("another-session")
    answered = log.answer(log.user(None, MORE[:300]), "msg_1", text(TALK[1]["content"]))
    log.answer(log.user(answered, "And more?"), "msg_2", text("Yes."))
    boundary = log.line(
        "system", None, subtype="compact_boundary", content="Conversation compacted"
    )
    summary = log.user(boundary, SHIPS["content"], isCompactSummary=True)
    log.answer(summary, "msg_3", text("Ports, then."))
    other.answer(other.user(None, "Bread?"), "msg_4", text("Rye."))
    other.answer(other.user(None, "Summary of the session so far: none."), "msg_5", text("Fine."))

    compared = verdicts(tmp_path, *log.lines, *other.lines)

    assert [only(verdict) for verdict in compared[:4]] == [
        [], [], [("compaction", "proved", "messages[0]")], []
    ]  # fmt: skip
    assert compared[2]["best_match_line"] == compared[1]["line"]
    assert compared[2]["tokens"]["lost"] == 0


@pytest.mark.parametrize("as_list", [True, False])
def test_a_summary_may_stand_where_a_picture_stood(tmp_path: Path, as_list: bool) -> None:
    """All messages of the head are gone with the picture, whose bytes have not changed."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KAAAA"}}
    first = message("user", [picture, text("First question about tides?")])
    summary = message("user", [text(SHIPS["content"])]) if as_list else SHIPS

    verdict = verdicts(
        tmp_path, chat(SYSTEM, first, *TALK[1:]), chat(SYSTEM, summary, *TALK[4:], *LATER)
    )[1]

    assert [name for name, _, _ in only(verdict)] == ["compaction"]
