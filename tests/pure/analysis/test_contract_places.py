"""Lines, best matches, paths and characters in the JSON of `lint`: a tiny log for each clause."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pure.analysis.contract_log import (
    MORE,
    RULES,
    Json,
    causes,
    chat,
    lint_rows,
    message,
    verdicts,
)

SYSTEM = message("system", RULES)
QUESTION = message("user", "Please answer the question about the river market.")
LATER = (message("assistant", "Yes."), message("user", "And more?"))
MARK = {"cache_control": {"type": "ephemeral"}}


def place(verdict: Json) -> tuple[str, int] | None:
    """Segment and character of a divergence."""
    said = verdict["divergence"]
    return None if said is None else (said["segment"], said["char"])


def exchange(body: Json, second: int, *, ttft_s: float = 0.5, duration_s: float = 1) -> Json:
    """A row of a wrapper that notes times."""
    return {
        "request": body, "start_time": f"2026-03-04T10:00:{second:02d}Z",
        "ttft_ms": ttft_s * 1000, "duration_ms": duration_s * 1000,
    }  # fmt: skip


def anthropic(system: Any, *messages: Json, **more: Any) -> Json:
    """A body of Anthropic's API."""
    return {
        "model": "claude-sonnet-4-5", "max_tokens": 9, "system": system,
        "messages": list(messages), **more,
    }  # fmt: skip


def text(value: str, **more: Any) -> Json:
    """A text block."""
    return {"type": "text", "text": value, **more}


def test_lines_count_from_one_with_bad_and_empty_lines(tmp_path: Path) -> None:
    """Requests stand on lines 3 and 5; lines 1 and 4 are bad, line 2 is empty."""
    rows = ["garbage", "", chat(SYSTEM, QUESTION), '{"a":', chat(SYSTEM, QUESTION, *LATER)]

    report = lint_rows(tmp_path, rows)

    assert [verdict["line"] for verdict in report["verdicts"]] == [3, 5]
    assert report["quality"]["bad_lines"] == [
        [str(tmp_path / "log.jsonl"), line] for line in (1, 4)
    ]
    assert report["verdicts"][1]["best_match_line"] == 3


def test_requests_of_one_line_have_an_index(tmp_path: Path) -> None:
    """Two prompts of a body are 0 and 1, and the third request names the one it matches."""
    bodies = [
        {"model": "m", "prompt": [f"{RULES} one", f"{RULES} two"]},
        {"model": "m", "prompt": f"{RULES} three"},
    ]

    made = verdicts(tmp_path, *bodies)

    keys = ("line", "index", "best_match_line", "best_match_index")
    assert [tuple(verdict.get(key) for key in keys) for verdict in made] == [
        (1, 0, None, None), (1, 1, 1, 0), (2, None, 1, 1),
    ]  # fmt: skip


def test_elements_of_an_array_stand_on_the_line_where_they_begin(tmp_path: Path) -> None:
    """A pretty-printed array: the second element's line, without an index."""
    array = json.dumps([chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, *LATER)], indent=1)
    second = array[: array.rindex('"model"')].count("\n")

    made = verdicts(tmp_path, array)

    assert [(verdict["line"], verdict.get("index")) for verdict in made] == [
        (2, None),
        (second, None),
    ]


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_prompt_that_begins_as_the_other_has_no_divergence(
    tmp_path: Path, is_longer: bool
) -> None:
    """A next turn, and an earlier turn sent again."""
    bodies = [chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, *LATER)]

    verdict = verdicts(tmp_path, *(bodies if is_longer else bodies[::-1]))[1]

    assert (place(verdict), verdict["causes"], verdict["tokens"]["lost"]) == (None, [], 0)


def test_an_equal_prompt_is_reusable_as_a_whole(tmp_path: Path) -> None:
    """Settings are no tokens of the prompt."""
    body = chat(SYSTEM, QUESTION, reasoning_effort="high")

    tokens = verdicts(tmp_path, body, body)[1]["tokens"]

    assert tokens["reusable"] == tokens["total"] > 500


def test_earlier_is_by_start(tmp_path: Path) -> None:
    """The request on line 1 started later than that on line 2."""
    rows = [exchange(chat(SYSTEM, QUESTION, *LATER), 50), exchange(chat(SYSTEM, QUESTION), 0)]

    made = verdicts(tmp_path, *rows)

    assert [verdict["best_match_line"] for verdict in made] == [2, None]


def test_a_line_without_a_start_comes_behind_the_line_before(tmp_path: Path) -> None:
    """The second line has no times: it is later than the first and earlier than the third."""
    rows = [
        exchange(chat(SYSTEM, message("user", f"{word}?")), 10 * number)
        for number, word in enumerate(("A one", "B two", "C three"))
    ]
    for key in ("start_time", "ttft_ms", "duration_ms"):
        del rows[1][key]

    made = verdicts(tmp_path, *rows)

    assert [verdict["best_match_line"] for verdict in made] == [None, 1, 2]


@pytest.mark.parametrize(("system", "certainty"), [(RULES + MORE, "likely"), (RULES, "suspected")])
def test_a_request_in_flight_is_named_and_no_match(
    tmp_path: Path, system: str, certainty: str
) -> None:
    """`parallel_cold` quotes its line; only suspected where the provider caches no prompt so short."""
    head = message("system", system)
    rows = [
        exchange(chat(head, message("user", "A one?")), 0, ttft_s=5, duration_s=9),
        exchange(chat(head, message("user", "B two?")), 2),
    ]

    verdict = verdicts(tmp_path, *rows)[1]

    assert verdict["best_match_line"] is None
    (cause,) = verdict["causes"]
    assert (cause["cause"], cause["certainty"]) == ("parallel_cold", certainty)
    assert "log.jsonl:1" in cause["had"]


def test_the_match_of_a_request_beside_one_in_flight_is_an_older_one(tmp_path: Path) -> None:
    """The newest that could share most has not answered; the older one is the match."""
    opened = (message("user", "A one?"), message("assistant", f"Long. {MORE}"))
    rows = [
        exchange(chat(SYSTEM, message("user", "Z zero?")), 0),
        exchange(chat(SYSTEM, *opened, message("user", "Next?")), 10, ttft_s=20, duration_s=30),
        exchange(chat(SYSTEM, *opened, message("user", "Other?")), 15),
    ]

    verdict = verdicts(tmp_path, *rows)[2]

    assert (verdict["best_match_line"], place(verdict)) == (1, ("messages[1]", 0))
    assert causes(verdict) == ["new_content", "parallel_cold"]


def test_equal_matches_are_decided_by_raw_prefix_then_by_age(tmp_path: Path) -> None:
    """Within a page the longest raw prefix is the match, among equals the newest."""
    questions = (
        "Tell me of the tall ships",
        "Unrelated",
        "Otherwise",
        "Tell me of the tall trees",
        "No",
    )

    made = verdicts(tmp_path, *(chat(SYSTEM, message("user", f"{item}?")) for item in questions))

    assert [verdict["best_match_line"] for verdict in made] == [None, 1, 2, 1, 4]
    assert place(made[3]) == ("messages[1]", 20)


def test_what_would_be_shared_if_mended_decides(tmp_path: Path) -> None:
    """The match shares the document behind a clock, not the clock as sent."""
    early, late = (message("system", f"Now 10:{at}:00. {RULES}") for at in ("01", "07"))
    document = f"Question about {MORE}"

    verdict = verdicts(
        tmp_path,
        chat(early, message("user", document)),
        chat(late, message("user", "Other")),
        chat(late, message("user", f"{document} end")),
    )[2]

    assert (verdict["best_match_line"], place(verdict)) == (1, ("messages[0]", 8))
    assert causes(verdict) == ["clock"]


def test_two_files_are_named(tmp_path: Path) -> None:
    """`best_match_file` is the other file."""
    from ramify.analysis import lint
    from ramify.analysis.lint_json import report_as_json

    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, more in zip(paths, [(), LATER], strict=True):
        path.write_text(json.dumps(chat(SYSTEM, QUESTION, *more)) + "\n")

    verdict = report_as_json(lint(paths))["verdicts"][1]

    assert (verdict["file"], verdict["line"]) == (str(paths[1]), 1)
    assert (verdict["best_match_file"], verdict["best_match_line"]) == (str(paths[0]), 1)


def _tool(about: str, **more: Any) -> Json:
    return {"type": "function", "function": {"name": "a", "description": about}, **more}


def _image(name: str, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": f"https://example.com/{name}.png", **more}}


def _responses(instructions: str, *items: Any) -> Json:
    return {"model": "gpt-5", "instructions": instructions, "input": list(items)}


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "A"}
PLACES: dict[str, tuple[Json, Json, str, int]] = {
    "model": (chat(QUESTION), chat(QUESTION, model="gpt-4o-mini"), "settings.model", 0),
    "setting": (
        chat(QUESTION), chat(QUESTION, tool_choice="none"), "settings.tool_choice", 0,
    ),
    "tool before system": (
        chat(message("system", "a"), QUESTION, tools=[_tool("naïve 😀 x.")]),
        chat(message("system", "b"), QUESTION, tools=[_tool("naïve 😀 y.")]),
        "tools[0]", len('{"type":"function","function":{"name":"a","description":"naïve 😀 '),
    ),
    "system text": (
        anthropic(f"{RULES} 😀a", QUESTION), anthropic(f"{RULES} 😀b", QUESTION), "system", len(RULES) + 2,
    ),
    "system block": (
        anthropic([text(RULES), text("Second a")], QUESTION),
        anthropic([text(RULES), text("Second b")], QUESTION), "system[1]", 7,
    ),
    "system of a chat": (
        chat(message("developer", f"{RULES}a")), chat(message("developer", f"{RULES}b")),
        "messages[0]", len(RULES),
    ),
    "content text": (
        chat(SYSTEM, message("user", "See a")), chat(SYSTEM, message("user", "See b")), "messages[1]", 4,
    ),
    "content block": (
        anthropic(RULES, message("user", [text("one"), text("two 😀a")])),
        anthropic(RULES, message("user", [text("one"), text("two 😀b")])), "messages[0].content[1]", 5,
    ),
    "image": (
        chat(SYSTEM, message("user", [text("See"), _image("a")])),
        chat(SYSTEM, message("user", [text("See"), _image("b")])), "messages[1].content[1]", 0,
    ),
    "detail of an image": (
        chat(SYSTEM, message("user", [text("See"), _image("a", detail="low")])),
        chat(SYSTEM, message("user", [text("See"), _image("a", detail="high")])),
        "messages[1].content[1]", 0,
    ),
    "call": (
        anthropic(RULES, message("assistant", [{"type": "tool_use", "id": "t", "name": "a", "input": {"q": "x"}, **MARK}])),
        anthropic(RULES, message("assistant", [{"type": "tool_use", "id": "t", "name": "a", "input": {"q": "y"}}])),
        "messages[0].content[0]", len('{"type":"tool_use","id":"t","name":"a","input":{"q":"'),
    ),
    "instructions": (
        _responses(f"{RULES}a", QUESTION), _responses(f"{RULES}b", QUESTION), "system", len(RULES),
    ),
    "input": (
        _responses(RULES, QUESTION, THOUGHT, message("assistant", "ok"), message("user", "see a")),
        _responses(RULES, QUESTION, THOUGHT, message("assistant", "ok"), message("user", "see b")),
        "messages[3]", 4,
    ),
    "input content": (
        _responses(RULES, message("user", [{"type": "input_text", "text": "see a"}])),
        _responses(RULES, message("user", [{"type": "input_text", "text": "see b"}])),
        "messages[0].content[0]", 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_the_place_of_a_divergence(tmp_path: Path, name: str) -> None:
    """Paths are those of the body as sent; `char` counts code points, 0 for settings and media."""
    had, got, segment, char = PLACES[name]
    question = message("user", RULES)  # enough to share for a match
    if name in {"model", "setting"}:
        had, got = ({**body, "messages": [question]} for body in (had, got))

    verdict = verdicts(tmp_path, had, got)[1]

    assert place(verdict) == (segment, char)


def test_breakpoints_and_the_list_that_holds_them_are_no_difference(tmp_path: Path) -> None:
    """`cache_control` moves with every turn, and texts become lists for it."""
    tool = {"name": "a", "input_schema": {}}
    first = anthropic(
        [text(RULES, **MARK)], message("user", [text("Hi?", **MARK)]), tools=[{**tool, **MARK}]
    )
    second = anthropic(
        RULES, message("user", "Hi?"), message("assistant", "Yes."),
        message("user", [text("More?", **MARK)]), tools=[tool],
    )  # fmt: skip

    assert place(verdicts(tmp_path, first, second)[1]) is None


def test_escapes_are_decoded_before_counting(tmp_path: Path) -> None:
    """An escaped pair of surrogates is one code point."""
    head = '{"model":"m","messages":[{"role":"user","content":"\\ud83d\\ude00 \\u00e9 '
    rows = [f'{head}{RULES} {word}"}}]}}' for word in ("one", "two")]

    assert place(verdicts(tmp_path, *rows)[1]) == ("messages[0]", 4 + len(RULES) + 1)


def test_sampling_is_no_setting_of_the_prompt(tmp_path: Path) -> None:
    """Temperature, limits, seeds and users do not split a cache."""
    first = chat(SYSTEM, QUESTION, temperature=1, max_tokens=5, stream=True, user="a", seed=1)
    second = chat(SYSTEM, QUESTION, *LATER, temperature=0, max_tokens=9, user="b", n=2)

    assert place(verdicts(tmp_path, first, second)[1]) is None


def test_failed_attempts_are_no_requests(tmp_path: Path) -> None:
    """Neither a status of 500 nor an error counts."""
    row = exchange(chat(SYSTEM, QUESTION), 0)
    rows = [row, {**row, "status_code": 500}, {**row, "error": {"message": "overloaded"}}]

    report = lint_rows(tmp_path, rows)

    assert report["num_requests"] == len(report["verdicts"]) == 1
