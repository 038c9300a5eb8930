"""What is one conversation, and which of equal matches a request can read, in the JSON of `lint`."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys
import time
from pathlib import Path

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

BLOCK = f"<context>\n{MORE[:200]}\nThe user has 3 open files.\n</context>"


def parts(*texts: str) -> list[Json]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("later", [BLOCK, BLOCK.replace("3", "5")], ids=["equal", "number"])
def test_a_part_of_the_content_hops(tmp_path: Path, *, is_first: bool, later: str) -> None:
    """It is `context_moved` as it is in a text, whatever is behind it."""
    questions = (TALK[0]["content"], TALK[2]["content"])
    sent = [
        message("user", parts(*((block, text) if is_first else (text, block))))
        for text, block in zip(questions, (BLOCK, later), strict=True)
    ]
    first, second = (
        chat(SYSTEM, sent[0]),
        chat(SYSTEM, message("user", parts(questions[0])), TALK[1], sent[1]),
    )

    verdict = verdicts(tmp_path, first, second)[1]

    assert [name for name, _, _ in only(verdict)] == ["context_moved"]


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_message_at_the_end_hops(tmp_path: Path, role: str) -> None:
    """A client that sends its context as the last message puts it behind each new question."""
    block = message(role, BLOCK)

    made = verdicts(
        tmp_path,
        chat(SYSTEM, TALK[0], block),
        chat(SYSTEM, *TALK[:3], block),
        chat(SYSTEM, *TALK[:5], block),
    )

    assert [only(verdict) for verdict in made[1:]] == [
        [("context_moved", "proved", f"messages[{at}]")] for at in (2, 4)
    ]


def test_the_newest_message_that_is_new_is_no_block(tmp_path: Path) -> None:
    """A user who asks again in other words has moved nothing."""
    again = message("user", "Which tides are there, and when do they come to the ports?")

    verdict = verdicts(tmp_path, chat(SYSTEM, *TALK), chat(SYSTEM, *TALK[:-1], again, *LATER))[1]

    assert causes(verdict) == ["new_content"]


BUTTON = message("user", "Please go on with the next step.")
REFUSAL = message("assistant", "I'm sorry, but I can't help with that request.")


@pytest.mark.parametrize("shared", [BUTTON, REFUSAL], ids=["button", "refusal"])
def test_a_message_of_many_conversations_makes_none_of_them_one(
    tmp_path: Path, shared: Json
) -> None:
    """What a button says, or a refusal, stands in conversations that have nothing else in common."""
    is_answer = shared is REFUSAL
    ends = ([TALK[0]], [TALK[2], TALK[3], TALK[4]]) if is_answer else (TALK[:2], TALK[2:4])
    first = chat(SYSTEM, *ends[0], shared, *([message("user", "Why is it?")] if is_answer else ()))
    second = chat(SYSTEM, *ends[1], shared, *TALK[5:], *LATER)

    verdict = verdicts(tmp_path, first, second)[1]

    assert (causes(verdict), verdict["tokens"]["lost"]) == (["new_content"], 0)


def test_examples_in_another_order_are_no_edit(tmp_path: Path) -> None:
    """A program picks examples for each question: they are other content, no edited history."""
    examples = [
        (message("user", f"Example {word}: {MORE[at : at + 90]}"), message("assistant", f"Label {word}."))
        for at, word in ((0, "one"), (100, "two"), (200, "three"), (300, "four"), (400, "five"))
    ]  # fmt: skip
    picks = [(0, 1, 2), (3, 2, 4), (2, 0, 3)]
    questions = ("Where is the river?", "Who sells oranges there?", "How old are bridges?")

    made = verdicts(
        tmp_path,
        *(
            chat(SYSTEM, *(item for at in pick for item in examples[at]), message("user", question))
            for pick, question in zip(picks, questions, strict=True)
        ),
    )

    assert [causes(verdict) for verdict in made[1:]] == [["new_content"]] * 2


def test_a_window_that_slides_is_an_edit(tmp_path: Path) -> None:
    """Old turns are dropped, also where the newest message is sent with another time."""
    questions = [
        message("user", f"{TALK[4]['content']} Sent at 10:0{minute}.") for minute in (1, 3)
    ]

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, *TALK[:4], questions[0]),
        chat(SYSTEM, *TALK[2:4], questions[1], *LATER),
    )[1]

    assert "history_edited" in causes(verdict)


@pytest.mark.parametrize("name", ["path", "file", "command"])
def test_the_id_of_a_call_is_an_id_whatever_its_arguments(tmp_path: Path, name: str) -> None:
    """The word for a path stands before it in the JSON; the id is in no path."""

    def turns(call_id: str) -> tuple[Json, ...]:
        function = {"name": "bash", "arguments": f'{{"{name}":"src"}}'}
        call = {"id": call_id, "type": "function", "function": function}
        return (
            QUESTION,
            message("assistant", None, tool_calls=[call]),
            message("tool", MORE[:300], tool_call_id=call_id),
        )

    verdict = verdicts(
        tmp_path,
        chat(SYSTEM, *turns("call_0ef17dc31d")),
        chat(SYSTEM, *turns("call_697de7f426"), *LATER),
    )[1]

    assert causes(verdict) == ["random_id", "random_id"]


@pytest.mark.parametrize("field", ["Invoice number: {}", "Order ID: {}", "Due date: 2026-03-1{}"])
def test_a_field_of_a_document_is_content(tmp_path: Path, field: str) -> None:
    """What a user asks about is no waste, though equal text stands behind it."""
    made = verdicts(
        tmp_path,
        *(
            chat(SYSTEM, message("user", f"Read this.\n{field.format(value)}\n{MORE[:400]}"))
            for value in (1, 4, 7)
        ),
    )

    assert [causes(verdict) for verdict in made[1:]] == [["new_content"]] * 2


def row(number: int, key: str, model: str) -> Json:
    """A row of LiteLLM."""
    start = dt.datetime.fromtimestamp(1764000000 + 5 * number, dt.UTC)
    body = chat(message("system", RULES), message("user", f"{MORE[number * 7 :][:60]}?"))
    return {
        "request_id": f"r{number}", "call_type": "acompletion", "api_key": key, "status": "success",
        "model": "gpt-4o", "startTime": start.isoformat(),
        "endTime": (start + dt.timedelta(seconds=2)).isoformat(),
        "messages": body["messages"], "proxy_server_request": {"body": body},
        "response": {
            "id": f"chatcmpl-{number}", "object": "chat.completion", "model": model,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}],
        },
    }  # fmt: skip


@pytest.mark.parametrize("varies", ["key", "model"])
def test_of_equal_matches_the_readable_one_is_best(tmp_path: Path, varies: str) -> None:
    """Tenants, or models behind a router, take turns: each request has one of its own to read."""
    keys = ["one", "two", "three"] if varies == "key" else ["one"] * 3
    models = ["gpt-4o-a", "gpt-4o-b", "gpt-4o-c"] if varies == "model" else ["gpt-4o"] * 3

    made = verdicts(tmp_path, *(row(n, keys[n % 3], models[n % 3]) for n in range(7)))

    assert [verdict["best_match_line"] for verdict in made[3:]] == [1, 2, 3, 4]
    assert all(not verdict["tokens"]["lost"] for verdict in made[3:])


def test_many_notes_at_the_top_cost_no_more_each(tmp_path: Path) -> None:
    """Each note that has risen is stepped over where it stood; the time is not two to their number."""
    notes = [message("system", f"Note {n}: {MORE[n * 9 :][:50]}") for n in range(60)]
    questions = [message("user", f"Question {n}: {MORE[n * 5 :][:40]}?") for n in range(60)]
    within = [item for pair in zip(questions, notes, strict=True) for item in pair]
    start = time.process_time()

    verdict = verdicts(
        tmp_path, chat(SYSTEM, *within), chat(SYSTEM, *notes, *questions, message("user", "More?"))
    )[1]

    assert causes(verdict) == ["system_hoisted"]
    assert time.process_time() - start < 20


def test_json_on_a_narrow_standard_output(tmp_path: Path) -> None:
    """Where standard output cannot write a letter, the JSON has its escape."""
    log = tmp_path / "log.jsonl"
    log.write_text('{"model":"gpt-4o","messages":[{"role":"user","content":"日本 – Grüße"}]}\n' * 2)

    done = subprocess.run(
        [sys.executable, "-m", "ramify.cli", "lint", str(log), "--json", "-"],
        capture_output=True,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "latin-1"},
        check=False,
    )

    assert (done.returncode, done.stdout[:1]) == (0, b"{"), done.stderr


SESSION = {"user_id": f"user_{'a1' * 32}_account__session_1b2c3d4e-1111-2222-3333-444455556666"}


def of_session(system: str, tools: tuple[str, ...], *messages: Json) -> Json:
    """A request of a coding agent's session to Anthropic."""
    return {
        "model": "claude-sonnet-4-5-20250929", "max_tokens": 900, "metadata": SESSION,
        "system": [{"type": "text", "text": system}], "messages": list(messages),
        "tools": [
            {"name": name, "description": f"{name}: {MORE[:200]}", "input_schema": {"type": "object"}}
            for name in tools
        ],
    }  # fmt: skip


def test_sub_agents_of_a_session_are_other_conversations(tmp_path: Path) -> None:
    """They have other prompts and fewer tools: nothing was changed or edited."""
    made = verdicts(
        tmp_path,
        of_session("Name the topic in three words.", (), TALK[0]),
        of_session(RULES, ("read", "grep", "bash"), TALK[0]),
        of_session(f"Search well. {MORE}", ("read", "grep"), TALK[2]),
        of_session(RULES, ("read", "grep", "bash"), *TALK[:3]),
    )

    assert {name for verdict in made[:3] for name in causes(verdict)} <= {"new_content"}
    assert (made[3]["best_match_line"], made[3]["divergence"]) == (2, None)


def test_steps_of_a_pipeline_in_one_session_are_no_edits(tmp_path: Path) -> None:
    """Each asks about another text, one for a summary, and all end alike."""
    ends = (message("assistant", "The verdict is:"), message("user", "Give a score from 1 to 5."))
    tasks = ("Classify the findings below", "Summarise the findings below", "Judge what is below")

    made = verdicts(
        tmp_path,
        *(
            of_session(RULES, (), message("user", f"{task}: {MORE[at * 150 :][:140]}"), *ends)
            for at, task in enumerate(tasks)
        ),
    )

    assert [causes(verdict) for verdict in made[1:]] == [["new_content"]] * 2


def test_numbers_and_dates_that_users_ask_about_are_content(tmp_path: Path) -> None:
    """Two questions from one form: what follows the values is no longer than a sentence."""
    form = "Where is parcel {} that I sent on {}? It should have reached my sister in Porto by now."
    first, second = (
        chat(message("system", RULES), message("user", form.format(*values)))
        for values in [("77120", "2026-04-09"), ("80931", "2026-04-11")]
    )

    verdict = verdicts(tmp_path, first, second)[1]

    assert causes(verdict) == ["new_content"]
