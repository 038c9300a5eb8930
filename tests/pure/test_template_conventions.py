"""Messages as a chat template reads them, of clients that send odd ones, and odd templates."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.server.prompts.template_conventions import TemplateConventions
from tests.pure.server_bench import ask, chat

SINGLE = TemplateConventions(has_single_calls=True)


def call(name: str, id_: str) -> dict[str, Any]:
    """A call of a tool without arguments."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": {}}}


def shown(calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[str]:
    """Names of calls and contents of results, in the order of the messages."""
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    return [
        message["content"] or message["tool_calls"][0]["function"]["name"]
        for message in SINGLE.adapt(messages, str)
    ]


def test_each_result_follows_its_call_once() -> None:
    """In any order; results of no call are last."""
    results = [
        {"role": "tool", "tool_call_id": id_, "content": text}
        for id_, text in (("b", "B"), ("x", "X"), ("a", "A"), ("b", "B2"))
    ]

    assert shown([call("f", "a"), call("g", "b")], results) == ["f", "A", "g", "B", "B2", "X"]


@pytest.mark.parametrize("id_", ["", "same"])
def test_results_of_calls_with_equal_ids_are_not_repeated(id_: str) -> None:
    """One result each, in their order; not every result behind every call."""
    named = {"tool_call_id": id_} if id_ else {}
    results = [{"role": "tool", "content": text, **named} for text in "ABCD"]
    calls = [call(name, id_) for name in "fgh"]

    assert shown(calls, results) == ["f", "A", "g", "B", "h", "C", "D"]


def test_messages_of_a_user_are_joined() -> None:
    """With the results, where these are the user's; empty ones leave no line."""
    messages = [
        {"role": "user", "content": "a"},
        {"role": "tool", "content": "b"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]

    adapted = TemplateConventions(result_role="user").adapt(messages, str)

    assert [message["content"] for message in adapted] == ["a\nb", "c", "d"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% break %}",
        "".join(f"{{% for a{number} in [1] %}}" for number in range(25)) + "{% endfor %}" * 25,
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{{ cycler() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
    ids=["raises", "break", "nested", "deep", "cycler", "endless"],
)
def test_a_template_that_cannot_be_rendered_is_a_bad_request(template: str) -> None:
    """The server starts, and its other routes work; a chat is refused with the reason."""
    answer = ask("/v1/chat/completions", chat("Who lives in Rome?"), chat_template=template)

    assert answer.status == 400
    assert "the chat template cannot render" in answer.json["error"]["message"]
    assert ask("/v1/completions", {"prompt": "a"}, chat_template=template).status == 200
