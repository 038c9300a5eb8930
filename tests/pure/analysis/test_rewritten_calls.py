"""Tool calls and results that are written in another form in the next turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pure.analysis.contract_log import MORE, RULES, Json, causes, chat, message, verdicts

SENT = '{"q": "r\\u00edver", "n": 3}'
FORMS = {
    '{"n": 3, "q": "r\\u00edver"}': ["key_order"],
    '{"q":"r\\u00edver","n":3}': ["whitespace"],
    '{"n":3,"q":"r\\u00edver"}': ["key_order", "whitespace"],
    '{"q": "ríver", "n": 3}': ["whitespace"],
    '{"q": "r\\u00edver", "n": 3.0}': ["whitespace"],
    '{\n  "q": "r\\u00edver",\n  "n": 3\n}': ["whitespace"],
}
QUESTION = "Find the orders of the river market please."


def _chat_turn(arguments: str, *later: Json, content: str | None = None) -> Json:
    call = {"name": "search", "arguments": arguments}
    calls = [{"id": "call_abc123", "type": "function", "function": call}]
    return chat(
        message("system", RULES),
        message("user", QUESTION),
        message("assistant", content, tool_calls=calls),
        message("tool", MORE, tool_call_id="call_abc123"),
        *later,
    )


LATER = (message("assistant", "There are two."), message("user", "And the third?"))


@pytest.mark.parametrize("arguments", FORMS)
def test_arguments_in_another_form_are_named_at_the_call(tmp_path: Path, arguments: str) -> None:
    """Order of keys, spacing, escapes and number forms in the string of `arguments` are proved."""
    verdict = verdicts(tmp_path, _chat_turn(SENT), _chat_turn(arguments, *LATER))[1]

    assert causes(verdict) == FORMS[arguments]
    assert {cause["segment"] for cause in verdict["causes"]} == {"messages[2].tool_calls[0]"}
    assert {cause["certainty"] for cause in verdict["causes"]} == {"proved"}
    assert verdict["tokens"]["lost"] > 500


@pytest.mark.parametrize("arguments", FORMS)
def test_arguments_of_the_responses_api_are_named_at_the_item(
    tmp_path: Path, arguments: str
) -> None:
    """`input[1]` is `messages[1]`."""
    items = [message("user", QUESTION)]
    output = {"type": "function_call_output", "call_id": "c1", "output": MORE}
    call = {"type": "function_call", "call_id": "c1", "name": "search"}
    bodies = [
        {"model": "gpt-5", "instructions": RULES, "input": [*items, call | {"arguments": text}, output, *more]}
        for text, more in [(SENT, ()), (arguments, LATER)]
    ]  # fmt: skip

    verdict = verdicts(tmp_path, *bodies)[1]

    assert causes(verdict) == FORMS[arguments]
    assert {cause["segment"] for cause in verdict["causes"]} == {"messages[1]"}


def test_an_empty_text_in_place_of_null_is_white_space(tmp_path: Path) -> None:
    """The call is the same, and what follows is shared."""
    verdict = verdicts(tmp_path, _chat_turn(SENT), _chat_turn(SENT, *LATER, content=""))[1]

    assert causes(verdict) == ["whitespace"]
    assert verdict["divergence"]["segment"] == "messages[2]"
    assert verdict["divergence"]["char"] == 0
