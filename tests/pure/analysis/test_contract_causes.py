"""Names of causes in the JSON of `lint`: a tiny log for each clause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.pure.analysis.contract_log import (
    LATER,
    MORE,
    QUESTION,
    RULES,
    SYSTEM,
    TALK,
    Json,
    causes,
    chat,
    message,
    only,
    system_verdicts,
    verdicts,
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

    turns = verdicts(tmp_path, first, chat(SYSTEM, _picture("iVBORw0KBBBB"), *LATER))
    within = turns[1]
    between = verdicts(tmp_path, first, chat(SYSTEM, _picture("iVBORw0KBBBB")))[1]

    assert only(within) == [("media_changed", "proved", "messages[1].content[1]")]
    # The picture itself is lost: with the same bytes, all of the first prompt is shared.
    first_turn, tokens = turns[0]["tokens"]["total"], within["tokens"]
    assert tokens["lost"] == pytest.approx(first_turn - tokens["reusable"], abs=4)
    assert tokens["lost"] > 20
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


def test_a_sentence_that_a_tool_gains_is_a_changed_tool(tmp_path: Path) -> None:
    """It is no id, whatever word stands before it."""
    about = f"{RULES} Then name the ticket paragraph."
    tools = [_tool(about), _tool(f"{about} When the buyer calls, name the ticket paragraph.")]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK, tools=tools[:1]), chat(SYSTEM, *TALK, *LATER, tools=tools[1:])
    )[1]

    assert only(verdict) == [("tool_changed", "proved", "tools[0]")]


@pytest.mark.parametrize("end", [" ", "\n", "\n\n"])
def test_a_blank_at_the_end_of_a_description_is_white_space(tmp_path: Path, end: str) -> None:
    """The last word of a description is the same word with a blank behind it."""
    tools = [_tool("Finds orders by a pattern."), _tool(f"Finds orders by a pattern.{end}")]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK, tools=tools[:1]), chat(SYSTEM, *TALK, *LATER, tools=tools[1:])
    )[1]

    assert only(verdict) == [("whitespace", "proved", "tools[0]")]


@pytest.mark.parametrize("more", ["It never writes.", "Ids of runs come first, then dates."])
def test_a_sentence_behind_a_state_word_is_a_changed_tool(tmp_path: Path, more: str) -> None:
    """A branch, a path or a status that prose speaks of names no value."""
    about = "Lists what a branch has changed, with status and path of each."
    tools = [_tool(about), _tool(f"{about} {more}")]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK, tools=tools[:1]), chat(SYSTEM, *TALK, *LATER, tools=tools[1:])
    )[1]

    assert only(verdict) == [("tool_changed", "proved", "tools[0]")]


def test_required_properties_in_another_order_are_a_changed_tool(tmp_path: Path) -> None:
    """A list has an order, unlike keys; its words are no ids."""
    tools = [
        {"type": "function", "function": {"name": "fetch", "parameters": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("order_id", "shard9f3", "day")},
            "required": required,
        }}}
        for required in (["order_id", "shard9f3", "day"], ["shard9f3", "order_id", "day"])
    ]  # fmt: skip

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK, tools=tools[:1]), chat(SYSTEM, *TALK, *LATER, tools=tools[1:])
    )[1]

    assert only(verdict) == [("tool_changed", "proved", "tools[0]")]
