"""Histories in the JSON of `lint`: edits, notes that rise, pictures; a tiny log for each clause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pure.analysis.contract_log import (
    LATER,
    MORE,
    QUESTION,
    RULES,
    SYSTEM,
    TALK,
    WORDS,
    Json,
    causes,
    chat,
    message,
    only,
    verdicts,
)


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
def test_a_note_rises_while_others_ask(tmp_path: Path, is_apart: bool) -> None:
    """Between the two requests of the conversation there are those of others, with the same system prompt."""
    note = message("system", NOTE)
    others = [chat(SYSTEM, message("user", f"{item} asks for bread?")) for item in WORDS[:6]]
    top = [SYSTEM, note] if is_apart else [message("system", f"{RULES}\n\n{NOTE}")]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK[:3], note), *others, chat(*top, *TALK[:3], *LATER)
    )[7]

    assert (verdict["best_match_line"], causes(verdict)) == (1, ["system_hoisted"])


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


def test_a_note_before_another_picture_is_no_cause(tmp_path: Path) -> None:
    """Conversations that each begin with a picture of their own share nothing behind the note."""
    questions = [
        message("user", [_picture(data), {"type": "text", "text": text}])
        for data, text in (("iVBORw0KAAAA", "What is this?"), ("iVBORw0KBBBB", "How old is it?"))
    ]
    noted = chat(SYSTEM, questions[0], TALK[1], message("system", NOTE), TALK[2])
    hoisted = chat(SYSTEM, message("system", NOTE), questions[0], *TALK[1:3], *LATER)

    verdict = verdicts(tmp_path, noted, hoisted, chat(SYSTEM, questions[1]))[2]

    assert (causes(verdict), verdict["tokens"]["lost"]) == (["new_content"], 0)


def test_a_clock_before_a_note_is_a_clock_alone(tmp_path: Path) -> None:
    """Nothing equal follows the note, and the rules before it are shared but for the time."""
    tops = [f"It is 10:0{minute}. {RULES}" for minute in range(3)]
    noted = chat(message("system", tops[0]), *TALK[:2], message("system", NOTE), TALK[2])
    hoisted = chat(message("system", f"{tops[1]}\n\n{NOTE}"), *TALK[:3], *LATER)
    other = chat(message("system", tops[2]), message("user", f"Bread, please. {MORE[:300]}"))

    verdict = verdicts(tmp_path, noted, hoisted, other)[2]

    assert (verdict["best_match_line"], causes(verdict)) == (2, ["clock"])


def _picture(data: str) -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


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


MEMORY = "<memory>\nThe customer likes short answers.\nThe depot is in Bremen.\n</memory>"
THOUGHTS = {
    "type": "thinking",
    "thinking": "Tides follow the moon, so I say that.",
    "signature": "c2ln",
}


ANSWER = message("assistant", [THOUGHTS, {"type": "text", "text": TALK[1]["content"]}])


def test_reasoning_of_a_new_answer_is_no_cause(tmp_path: Path) -> None:
    """The answer behind a block or a note that has moved is new, reasoning and all."""
    block = {"type": "text", "text": MEMORY}
    question = message("user", [{"type": "text", "text": TALK[0]["content"]}, block])
    newest = message("user", [{"type": "text", "text": "And ships?"}, block])
    note = message("system", NOTE)

    hop = verdicts(tmp_path, chat(SYSTEM, question), chat(SYSTEM, TALK[0], ANSWER, newest))[1]
    rise = verdicts(
        tmp_path, chat(SYSTEM, TALK[0], note), chat(SYSTEM, note, TALK[0], ANSWER, TALK[2])
    )[1]

    assert (causes(hop), causes(rise)) == (["context_moved"], ["system_hoisted"])


def test_reasoning_that_comes_back_is_a_cause(tmp_path: Path) -> None:
    """The answer stood in the earlier prompt without it."""
    verdict = verdicts(
        tmp_path, chat(SYSTEM, *TALK[:3]), chat(SYSTEM, TALK[0], ANSWER, *TALK[2:5])
    )[1]

    assert only(verdict) == [("reasoning_dropped", "proved", "messages[2].content[0]")]


def test_reasoning_of_an_answer_that_is_dropped_is_no_cause(tmp_path: Path) -> None:
    """The answer behind the dropped turn has its own reasoning."""
    other = {"type": "thinking", "thinking": "Ships are lighter than water.", "signature": "c2lo"}
    ships = message("assistant", [other, {"type": "text", "text": TALK[3]["content"]}])
    talk = (TALK[0], ANSWER, TALK[2], ships, TALK[4])

    verdict = verdicts(tmp_path, chat(SYSTEM, *talk), chat(SYSTEM, TALK[0], *talk[3:], *TALK[5:]))[
        1
    ]

    assert only(verdict) == [("history_edited", "proved", "messages[2].content[0]")]


@pytest.mark.parametrize("number", ["rs_2", None])
def test_reasoning_with_another_id_is_not_dropped(tmp_path: Path, number: str | None) -> None:
    """A client that stores nothing leaves out the ids of items, or writes ids of its own."""
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB" * 9}
    sent = {name: value for name, value in item.items() if name != "id"}
    if number is not None:
        sent["id"] = number
    answer = message("assistant", TALK[1]["content"])

    verdict = verdicts(
        tmp_path,
        *(
            {"model": "gpt-5", "instructions": RULES, "input": [TALK[0], *behind]}
            for behind in ([item, answer, TALK[2]], [sent, answer, *TALK[2:5]])
        ),
    )[1]

    assert only(verdict) == [("random_id", "proved", "messages[1]")]
    assert (verdict["causes"][0]["had"], verdict["causes"][0]["got"]) == ("rs_1", number or "")


def _pictured(data: str, *blocks: str) -> Json:
    """A question about a picture, with blocks of text before it."""
    texts = [{"type": "text", "text": block} for block in blocks]
    return message(
        "user", [*texts, _picture(data), {"type": "text", "text": "What do the tides do here?"}]
    )


def test_a_picture_behind_a_block_that_hops_is_compared_with_the_picture(tmp_path: Path) -> None:
    """The block has gone from before it, and it is coded anew."""
    newest = message("user", [{"type": "text", "text": text} for text in (MEMORY, "And ships?")])

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, _pictured("iVBORw0KAAAA", MEMORY)),
        chat(SYSTEM, _pictured("iVBORw0KBBBB"), TALK[1], newest),
    )[1]

    assert only(verdict) == [
        ("context_moved", "proved", "messages[1].content[0]"),
        ("media_changed", "proved", "messages[1].content[0]"),
    ]
    assert (verdict["causes"][1]["had"][:5], verdict["causes"][1]["got"][:5]) == ("image", "image")


def test_another_picture_in_the_first_message_is_content(tmp_path: Path) -> None:
    """Without a message behind it nothing says that the conversation goes on."""
    pictures = [_pictured(data) for data in ("iVBORw0KAAAA", "iVBORw0KBBBB")]

    verdict = verdicts(tmp_path, *(chat(SYSTEM, item) for item in pictures))[1]

    assert (causes(verdict), verdict["tokens"]["lost"]) == (["new_content"], 0)


@pytest.mark.parametrize(
    ("had", "got", "cause"),
    [
        ("On branch main, with five files that nobody has staged so far.", "On branch ma… [cut]", "history_edited"),
        ("On branch: feature/tides", "On branch: main", "path_or_state"),
    ],
)  # fmt: skip
def test_a_result_that_is_cut_behind_a_state_is_edited(
    tmp_path: Path, had: str, got: str, cause: str
) -> None:
    """What is gone at the end of an older result is more than a value."""
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    exchange = (QUESTION, message("assistant", None, tool_calls=[call]))
    results = [message("tool", f"{MORE[:200]}\n{end}", tool_call_id="c1") for end in (had, got)]

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *exchange, results[0]), chat(SYSTEM, *exchange, results[1], *LATER)
    )[1]

    assert only(verdict) == [(cause, "proved", "messages[3]")]
