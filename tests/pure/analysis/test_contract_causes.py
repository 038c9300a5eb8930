"""Names of causes in the JSON of `lint`: a tiny log for each clause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pure.analysis.contract_log import (
    MORE,
    RULES,
    Json,
    causes,
    chat,
    message,
    system_verdicts,
    verdicts,
)

SYSTEM = message("system", RULES)
QUESTION = message("user", "Please answer the question about the river market.")
LATER = (message("assistant", "Yes."), message("user", "And more?"))
TALK = (
    message("user", "First question about tides?"),
    message("assistant", f"The tides come twice a day. {MORE[:300]}"),
    message("user", "Second question about ships?"),
    message("assistant", f"Ships float on water always. {MORE[300:600]}"),
    message("user", "Third question about ports?"),
    message("assistant", f"Ports are by the sea mostly. {MORE[600:900]}"),
    message("user", "Fourth?"),
)

VALUES = [
    ("Log: /var/run/9f86d081884c/x.log", "Log: /var/run/60303ae22b99/x.log", "path_or_state"),
    ("See https://example.com/s/9f86d081/", "See https://example.com/s/60303ae2/", "path_or_state"),
    ("Folder: C:\\Users\\ann\\p1", "Folder: C:\\Users\\bob\\p2", "path_or_state"),
    ("<status>\ncommit: 9f86d081\n</status>", "<status>\ncommit: 60303ae2\n</status>", "path_or_state"),
    ("<status>\nlease 9f86d081884c\n</status>", "<status>\nlease 60303ae22b99\n</status>", "path_or_state"),
    ("Git status: 3 modified", "Git status: 14 modified", "path_or_state"),
    ("Git status:\n M src/a.py", "Git status:\n M src/b.py\n M src/c.py", "path_or_state"),
    ("Recent commits:\n9f86d08 fix the door", "Recent commits:\n77ab3c1 paint it", "path_or_state"),
    ("Todo:\n- [ ] test\n- [ ] land", "Todo:\n- [x] test\n- [ ] land", "path_or_state"),
    ("<todo>\n1. test (pending)\n</todo>", "<todo>\n1. test (completed)\n</todo>", "path_or_state"),
    ("Context window: 45% used", "Context window: 61% used", "path_or_state"),
    ("Session id: 9f86d081884c", "Session id: 60303ae22b99", "random_id"),
    ("Request-ID: req_011CS7abc", "Request-ID: req_022DT8xyz", "random_id"),
    ("Nonce=AbCdEf12345", "Nonce=ZyXwVu98765", "random_id"),
    ("Date: 03/04/2026", "Date: 03/05/2026", "clock"),
    ("Current time: 1772618400", "Current time: 1772618467", "clock"),
    ("Last deploy 3 hours ago.", "Last deploy 4 hours ago.", "clock"),
    (
        "x-anthropic-billing-header: cc_version=2.1.3.a1b; cch=1a2b3;",
        "x-anthropic-billing-header: cc_version=2.1.3.c4d; cch=9f8e7;",
        "billing_header",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("had", "got", "cause"), VALUES)
def test_a_changing_value_has_its_name(tmp_path: Path, had: str, got: str, cause: str) -> None:
    """Two requests are enough; paths and status blocks come before ids."""
    verdict = system_verdicts(tmp_path, f"{RULES}\n{had}\n{MORE}", f"{RULES}\n{got}\n{MORE}")[1]

    assert [(item["cause"], item["certainty"]) for item in verdict["causes"]] == [(cause, "proved")]


def only(verdict: Json) -> list[tuple[str, str, str]]:
    """Cause, certainty and segment."""
    return [(item["cause"], item["certainty"], item["segment"]) for item in verdict["causes"]]


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
    """Tools that only one of them has are no `tool_changed`."""
    tools = [
        {"type": "function", "function": {"name": name, "description": RULES, "parameters": {}}}
        for name in ("read", "write")
    ]

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, SHIPS, *TALK[4:], tools=tools),
        chat(SYSTEM, BREAD, *LATER, tools=tools[:1]),
    )[1]

    assert "tool_changed" not in causes(verdict)


@pytest.mark.parametrize("place", ["system", "user"])
def test_words_about_summaries_are_content_in_a_talk(tmp_path: Path, place: str) -> None:
    """A changed sentence of a message that speaks of summaries is no new summary."""
    text = (
        "You write a compact recap, a summary of the conversation, when you are done; until then "
    )
    texts = [f"{text}{rest} {RULES}" for rest in ("rivers in the north.", "a loaf of rye bread.")]
    rows = [
        chat(message("system", item), *TALK)
        if place == "system"
        else chat(SYSTEM, *TALK[:2], message("user", item))
        for item in texts
    ]

    assert "compaction" not in causes(verdicts(tmp_path, *rows)[1])


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


def test_a_summary_within_the_system_prompt_is_compaction(tmp_path: Path) -> None:
    """The system prompt is longer by the summary, and the head of the history is gone."""
    longer = f"{RULES}\n\nConversation summary: tides and ships were discussed, all was answered."

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK), chat(message("system", longer), *TALK[4:], *LATER)
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


@pytest.mark.parametrize(
    ("history", "segment"),
    [
        (TALK[2:], "messages[1]"),
        ((TALK[0], message("assistant", "[trimmed]"), *TALK[2:]), "messages[2]"),
        ((*TALK[:2], *TALK[4:]), "messages[3]"),
    ],
    ids=["dropped at the head", "stubbed", "dropped in the middle"],
)
def test_messages_that_are_gone_before_equal_ones_are_edits(
    tmp_path: Path, history: tuple[Json, ...], segment: str
) -> None:
    """Without a summary it is `history_edited`, at the first message that differs."""
    verdict = verdicts(tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, *history, *LATER))[1]

    assert only(verdict) == [("history_edited", "proved", segment)]
    assert verdict["divergence"]["segment"] == segment


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_white_space_before_a_hoisted_message_is_found(tmp_path: Path, end: str) -> None:
    """The system prompt that takes in a message of the history may have other line ends as well."""
    note = "Note for this conversation: the customer is a wholesale dealer."
    first = message("system", f"{RULES}{end}{end}{MORE}")
    noted = chat(first, *TALK[:2], message("system", note), TALK[2])
    hoisted = chat(message("system", f"{RULES}\n\n{MORE}\n\n{note}"), *TALK[:3], *LATER)

    verdict = verdicts(tmp_path, noted, hoisted)[1]

    assert causes(verdict) == [*["whitespace"] * (end != "\n"), "system_hoisted"]


def _tool(about: str) -> Json:
    return {"type": "function", "function": {"name": "search", "description": about}}


def test_tools_are_blamed_within_a_conversation_only(tmp_path: Path) -> None:
    """The same change between two conversations is content."""
    first = chat(SYSTEM, QUESTION, tools=[_tool("Finds orders.")])
    other = message("user", "Something else entirely?")

    within = verdicts(tmp_path, first, chat(SYSTEM, QUESTION, *LATER, tools=[_tool("Finds all.")]))
    between = verdicts(tmp_path, first, chat(SYSTEM, other, tools=[_tool("Finds all.")]))

    assert only(within[1]) == [("tool_changed", "proved", "tools[0]")]
    assert causes(between[1]) == ["new_content"]


@pytest.mark.parametrize(
    "later",
    [[], [_tool("Finds orders.") | {"function": {"name": "other"}}]],
    ids=["none", "others"],
)
def test_tools_that_a_conversation_loses_are_blamed(tmp_path: Path, later: list[Json]) -> None:
    """A turn without tools, or with others, has the turn before it as its match."""
    more: Json = {"tools": later} if later else {}

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, *TALK, tools=[_tool("Finds orders.")]),
        chat(SYSTEM, *TALK, *LATER, **more),
    )[1]

    assert verdict["best_match_line"] == 1
    assert only(verdict) == [("tool_changed", "proved", "tools[0]")]


def test_a_property_beside_a_branch_is_a_changed_tool(tmp_path: Path) -> None:
    """Keys of a schema are no values, whatever words stand before them."""
    branch = {"type": "string"}
    schemas: list[Json] = [{"branch": branch}, {"branch": branch, "extra": {"type": "string"}}]
    tools = [
        {"type": "function", "function": {"name": "read", "description": RULES, "parameters": {
            "type": "object", "properties": {**schema, "limit": {"type": "integer"}},
        }}}
        for schema in schemas
    ]  # fmt: skip

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK, tools=tools[:1]), chat(SYSTEM, *TALK, *LATER, tools=tools[1:])
    )[1]

    assert only(verdict) == [("tool_changed", "proved", "tools[0]")]


def test_another_name_of_a_speaker_is_content(tmp_path: Path) -> None:
    """`name` says who speaks; only ids of calls are ids."""
    questions = [message("user", "Hello there my friend?", name=name) for name in ("ann", "bob")]

    assert causes(verdicts(tmp_path, *(chat(SYSTEM, item) for item in questions))[1]) == [
        "new_content"
    ]


@pytest.mark.parametrize("clock", ["", "Now 10:0{}:07. "], ids=["same system", "clock"])
def test_a_conversation_that_begins_with_a_short_word_is_one(tmp_path: Path, clock: str) -> None:
    """`Hi` is no sign of a conversation, all messages of an earlier prompt and an answer are."""
    systems = [message("system", clock.format(minute) + RULES) for minute in (1, 7)]
    first = chat(systems[0], message("user", "Hi"), tools=[_tool("Finds orders.")])
    second = chat(systems[1], message("user", "Hi"), *LATER, tools=[_tool("Finds all.")])

    assert causes(verdicts(tmp_path, first, second)[1]) == [
        "tool_changed",
        *["clock"] * bool(clock),
    ]


@pytest.mark.parametrize(
    ("more", "cause", "segment"),
    [
        ({"model": "gpt-4o-mini"}, "model_changed", "settings.model"),
        ({"response_format": {"type": "json_object"}}, "settings_changed", "settings.response_format"),
        ({"tool_choice": "none"}, "settings_changed", "settings.tool_choice"),
    ],
)  # fmt: skip
def test_a_changed_setting_shares_nothing(
    tmp_path: Path, more: dict[str, Any], cause: str, segment: str
) -> None:
    """It is proved at its path, nothing is reusable, and all that was shared is lost."""
    verdict = verdicts(tmp_path, chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, *LATER, **more))[1]

    assert only(verdict) == [(cause, "proved", segment)]
    assert verdict["tokens"]["reusable"] == 0
    assert verdict["tokens"]["lost"] > 900


def _picture(data: str) -> Json:
    url = {"url": f"data:image/png;base64,{data}"}
    return message(
        "user", [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": url}]
    )


def test_pictures_are_blamed_within_a_conversation_only(tmp_path: Path) -> None:
    """Another picture is a new question; the same turn with other bytes is waste."""
    first = chat(SYSTEM, _picture("iVBORw0KAAAA"))

    within = verdicts(tmp_path, first, chat(SYSTEM, _picture("iVBORw0KBBBB"), *LATER))[1]
    between = verdicts(tmp_path, first, chat(SYSTEM, _picture("iVBORw0KBBBB")))[1]

    assert only(within) == [("media_changed", "proved", "messages[1].content[1]")]
    assert causes(between) == ["new_content"]


def test_a_vendors_reason_without_text_is_outside_the_prompt(tmp_path: Path) -> None:
    """`system_changed` where the logged system prompts are equal is likely, quoted as `got`."""
    bodies = [
        {
            "model": "claude-sonnet-4-5",
            "max_tokens": 9,
            "system": RULES,
            "messages": [QUESTION, *more],
        }
        for more in ((), LATER)
    ]
    reason = {"type": "system_changed", "cache_missed_input_tokens": 900}
    answer = {
        "id": "msg_2", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5",
        "content": [{"type": "text", "text": "Y"}], "diagnostics": {"cache_miss_reason": reason},
        "usage": {
            "input_tokens": 10, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 2000,
            "output_tokens": 3,
        },
    }  # fmt: skip

    verdict = verdicts(tmp_path, bodies[0], {"request": bodies[1], "response": answer})[1]

    said = [(item["cause"], item["certainty"], item["got"]) for item in verdict["causes"]]
    assert said == [("outside_prompt", "likely", "system_changed")]


@pytest.mark.parametrize(("model", "certainty"), [("gpt-5.6", "likely"), ("mystery", "suspected")])
def test_a_write_under_an_assumed_rule_is_only_suspected(
    tmp_path: Path, model: str, certainty: str
) -> None:
    """Of a model without a rule of its own nobody knows whether it bills writes."""
    questions = [f"Question {number}: {MORE} {RULES}" for number in (1, 2)]

    made = verdicts(tmp_path, *(chat(message("user", text), model=model) for text in questions))

    said = [(item["cause"], item["certainty"]) for item in made[1]["causes"]]
    assert ("unread_write", certainty) in said
