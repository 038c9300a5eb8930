"""Histories in the JSON of `lint`: summaries, edits, notes that rise; a tiny log for each clause."""

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
    verdicts,
)


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


TOOLS = [
    {"type": "function", "function": {"name": name, "description": RULES, "parameters": {}}}
    for name in ("read", "write")
]


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


NOTE = "Note for this conversation: the customer is a wholesale dealer."
DOCUMENT = f"Document:\n{MORE}\n\nQuestion: "


@pytest.mark.parametrize("is_apart", [True, False], ids=["a message", "within the prompt"])
@pytest.mark.parametrize("minute", ["07", "09"], ids=["same clock", "other clock"])
def test_another_conversation_stumbles_over_a_hoisted_note(
    tmp_path: Path, is_apart: bool, minute: str
) -> None:
    """The note is known to belong into its conversation: without it both would share the document."""
    questions = [message("user", f"{DOCUMENT}{text}?") for text in ("Who came", "How much was it")]
    rules = [f"{RULES} It is 10:{at}." for at in ("00", "07", minute)]
    top = (
        [message("system", rules[1]), message("system", NOTE)]
        if is_apart
        else [message("system", f"{rules[1]}\n\n{NOTE}")]
    )
    noted = chat(
        message("system", rules[0]), questions[0], TALK[1], message("system", NOTE), TALK[2]
    )
    hoisted = chat(*top, questions[0], *TALK[1:3], *LATER)

    first, other = verdicts(
        tmp_path, noted, hoisted, chat(message("system", rules[2]), questions[1])
    )[1:]

    assert (causes(first), causes(other)[-1:]) == (["clock", "system_hoisted"], ["system_hoisted"])
    assert causes(other)[:-1] == ["clock"] * (minute == "09")
    assert other["best_match_line"] == 2
    assert (other["causes"][-1]["had"][:20], other["causes"][-1]["got"]) == (NOTE[:20], "")
    # All but the question itself is shared once the note is back in its place.
    assert other["tokens"]["lost"] > 0.8 * len(MORE) / 4


def test_a_note_that_nothing_equal_follows_is_no_cause(tmp_path: Path) -> None:
    """Another conversation with a question of its own loses nothing to the note."""
    noted = chat(SYSTEM, *TALK[:2], message("system", NOTE), TALK[2])
    hoisted = chat(SYSTEM, message("system", NOTE), *TALK[:3], *LATER)

    verdict = verdicts(tmp_path, noted, hoisted, chat(SYSTEM, message("user", "Why?")))[2]

    assert causes(verdict) == ["new_content"]


def _told(day: str) -> tuple[Json, ...]:
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return (
        QUESTION,
        message("assistant", None, tool_calls=[call]),
        message("tool", f"{MORE[:200]}\nas of 2026-11-{day}T10:00Z", tool_call_id="call_1"),
        message("assistant", f"So it is. {MORE[:900]}"),
    )


def test_what_a_tool_says_another_day_is_news(tmp_path: Path) -> None:
    """The same question is asked again: the time in the tool's answer is no `clock`."""
    again = verdicts(
        tmp_path, chat(SYSTEM, *_told("03"), message("user", "Why?")), chat(SYSTEM, *_told("09"))
    )[1]
    within = verdicts(
        tmp_path,
        chat(SYSTEM, *_told("03"), message("user", "Why is that so?")),
        chat(SYSTEM, *_told("09"), message("user", "Why is that so?"), *LATER),
    )[1]

    assert (causes(again), again["tokens"]["lost"]) == (["new_content"], 0)
    assert causes(within) == ["clock"]


def test_the_newest_message_may_be_edited(tmp_path: Path) -> None:
    """Its text changes and its picture stays: a new question, no edit of the history."""
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KAAAA"}}
    newest = [
        message("user", [{"type": "text", "text": text}, url])
        for text in ("What is on the left side?", "Which colour has the roof?")
    ]

    sent = [
        {"session_id": "s1", "call_type": "acompletion", "startTime": 100.0 + at, "endTime": 100.5 + at,
         "messages": [SYSTEM, *TALK[:2], item], "model": "gpt-4o", "status": "success", "response": {}}
        for at, item in enumerate(newest)
    ]  # fmt: skip

    assert causes(verdicts(tmp_path, *sent)[1]) == ["new_content"]


def test_a_picture_may_go_where_a_counter_has_changed(tmp_path: Path) -> None:
    """The first message is the same but for a state and the picture: the conversation goes on."""
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KAAAA"}}
    blocks = [
        {"type": "text", "text": f"<status>turn {turn}, {left} tokens of context left</status>\n{MORE}"}
        for turn, left in ((1, 19937), (2, 18912))
    ]  # fmt: skip
    gone = {"type": "text", "text": "[image removed]"}

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, message("user", [blocks[0], url])),
        chat(SYSTEM, message("user", [blocks[1], gone]), *LATER),
    )[1]

    assert only(verdict) == [
        ("path_or_state", "proved", "messages[1].content[0]"),
        ("media_changed", "proved", "messages[1].content[1]"),
    ]


def test_a_long_question_beside_a_date_is_no_clock(tmp_path: Path) -> None:
    """Both ask something else in a line that speaks of a date and has numbers."""
    states = ["<todo>\n- [ ] step 1\n</todo>", "<todo>\n- [ ] step 4\n</todo>"]
    questions = [
        "about sourdough and typography, case 638961, where the buyer wrote yesterday that the parcel is late,",
        "about bridges and orchids, case 104822, which came in without any word of the one who had ordered it,",
    ]

    verdict = verdicts(
        tmp_path,
        *(
            chat(SYSTEM, message("user", f"{state}\n{MORE}\n\nTell me {text} and suggest a date."))
            for state, text in zip(states, questions, strict=True)
        ),
    )[1]

    assert causes(verdict) == ["path_or_state"]


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


def test_a_block_with_a_clock_hops(tmp_path: Path) -> None:
    """The newest message has the block with another time; the older one has lost it."""
    blocks = [f"\n\n<env>\nnow: 2026-03-04T09:0{minute}:11Z\n</env>" for minute in (1, 5)]

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, message("user", f"{TALK[0]['content']}{blocks[0]}")),
        chat(SYSTEM, *TALK[:2], message("user", f"{TALK[2]['content']}{blocks[1]}")),
    )[1]

    assert only(verdict) == [("context_moved", "proved", "messages[1]")]


def test_ids_of_calls_that_are_made_anew_are_ids(tmp_path: Path) -> None:
    """A client numbers its calls in each request: nothing else says that the conversation goes on."""

    def turns(call_id: str) -> tuple[Json, ...]:
        function = {"name": "read", "arguments": "{}"}
        call = {"id": call_id, "type": "function", "function": function}
        return (
            QUESTION,
            message("assistant", None, tool_calls=[call]),
            message("tool", MORE[:300], tool_call_id=call_id),
        )

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, *turns("call_aaa111bbb")),
        chat(SYSTEM, *turns("call_ccc222ddd"), *LATER),
    )[1]

    assert [name for name, _, _ in only(verdict)] == ["random_id", "random_id"]
    assert verdict["causes"][0]["segment"] == "messages[2].tool_calls[0]"


def test_an_empty_system_message_is_no_note(tmp_path: Path) -> None:
    """A client that drops it from the history has hoisted nothing."""
    empty = message("system", "")
    first = chat(*TALK[:2], empty, TALK[2])

    verdict = verdicts(tmp_path, first, chat(SYSTEM, *TALK[:3], *LATER))[1]

    assert "system_hoisted" not in causes(verdict)
