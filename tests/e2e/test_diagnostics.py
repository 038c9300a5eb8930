"""Why a prefix was not read again: in Anthropic's words, in OpenAI's, and in ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.conftest import Running, Start

RULES = "You answer questions about people and their cities in a few words, and nothing else. "
DATED = RULES * 2 + "Today is Monday. " + RULES
NAMES = ("--served-model-name", "talker", "--served-model-name", "twin")
Talk = dict[str, Any]
Ask = Callable[[Running, Talk, str | None, str], tuple[str, dict[str, Any] | None, dict[str, Any]]]


def talk_of(ask: Ask, about: str) -> Talk:
    """One that no other test has asked: of cached prompts, the one that goes furthest is told of."""
    name = f"{getattr(ask, '__name__', '')} {about}"
    letter = "abcdefgh"[ASKS.index(ask)]
    tools = [one | {"name": f"{letter * 8}_{one['name']}"} for one in TALK["tools"]]
    return copy.deepcopy(TALK) | {"system": f"{name}. {DATED}", "tools": tools}


def tool(name: str) -> Talk:
    return {"name": name, "description": f"Finds a {name}.", "input_schema": {"type": "object"}}


TALK: Talk = {
    "model": "talker",
    "system": DATED,
    "tools": [tool("city"), tool("name"), tool("age")],
    "messages": [
        {"role": "user", "content": "Who lives in Rome? " + RULES},
        {"role": "assistant", "content": "Ann does, and Bob too."},
        {"role": "user", "content": "And in Paris? " + RULES},
    ],
}


def by_anthropic(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    answer = server.anthropic(key).messages.create(
        **talk, max_tokens=2, diagnostics={"previous_message_id": before}
    )
    found = answer.diagnostics
    told = None if found is None else found.cache_miss_reason.to_dict()
    return answer.id, told, answer.usage.ramify_cache.get("miss")


def by_anthropic_stream(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    with server.anthropic(key).messages.stream(
        **talk, max_tokens=2, diagnostics={"previous_message_id": before}
    ) as stream:
        answer = stream.get_final_message()
    found = answer.diagnostics
    told = None if found is None else found.cache_miss_reason.to_dict()
    return answer.id, told, answer.usage.ramify_cache.get("miss")


def openai_tools(talk: Talk) -> list[Talk]:
    return [
        {
            "name": one["name"],
            "description": one["description"],
            "parameters": one["input_schema"],
        }
        for one in talk["tools"]
    ]


def chat_body(talk: Talk) -> Talk:
    return {
        "model": talk["model"],
        "messages": [{"role": "system", "content": talk["system"]}, *talk["messages"]],
        "tools": [{"type": "function", "function": one} for one in openai_tools(talk)],
        "max_tokens": 2,
    }


def by_chat(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    answer = server.openai(key).chat.completions.create(
        **chat_body(talk),
        extra_body={"prompt_cache_options": {"comparison_response_id": before}},
    )
    found = getattr(answer, "prompt_cache_diagnostics", None)
    return answer.id, found, answer.usage.ramify_cache.get("miss")


def by_chat_stream(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    stream = server.openai(key).chat.completions.create(
        **chat_body(talk),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prompt_cache_options": {"comparison_response_id": before}},
    )
    last = list(stream)[-1]
    found = getattr(last, "prompt_cache_diagnostics", None)
    return last.id, found, last.usage.ramify_cache.get("miss")


def by_responses(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    answer = server.openai(key).responses.create(
        model=talk["model"],
        instructions=talk["system"],
        input=talk["messages"],
        tools=[{"type": "function"} | one for one in openai_tools(talk)],
        max_output_tokens=2,
        prompt_cache_options={"comparison_response_id": before} if before else {},
    )
    found = answer.prompt_cache_diagnostics
    told = None if found is None else found.to_dict()
    return answer.id, told, answer.usage.ramify_cache.get("miss")


def date_changed(talk: Talk) -> None:
    talk["system"] = talk["system"].replace("Monday", "Friday")


def tools_reordered(talk: Talk) -> None:
    talk["tools"].reverse()


def message_edited(talk: Talk) -> None:
    talk["messages"][1]["content"] = "Cleo does, and Bob too."


def other_model(talk: Talk) -> None:
    talk["model"] = "twin"


def message_added(talk: Talk) -> None:
    talk["messages"] += [
        {"role": "assistant", "content": "Dan."},
        {"role": "user", "content": "And in Oslo?"},
    ]


ASKS: list[Ask] = [by_anthropic, by_anthropic_stream, by_chat, by_chat_stream, by_responses]
# by mutation: what Anthropic's API says, OpenAI's, and the segment in each API's own words
CASES: list[tuple[Callable[[Talk], None], str | None, str | None, tuple[str, str, str]]] = [
    (
        date_changed,
        "system_changed",
        "input_changed",
        ("system", "messages[0].content", "instructions"),
    ),
    (tools_reordered, "tools_changed", "tools_changed", ("tools[0]",) * 3),
    (
        message_edited,
        "messages_changed",
        "input_changed",
        ("messages[1].content", "messages[2].content", "input[1].content"),
    ),
    (other_model, "model_changed", "model_changed", ("model",) * 3),
    (message_added, None, None, ("", "", "")),
]


@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_a_changed_conversation_is_told_where(
    start: Start, talker: str, ask: Ask, case: tuple[Any, ...]
) -> None:
    """The right reason and segment in the API's own diagnostics and in `usage.ramify_cache`."""
    change, of_anthropic, of_openai, segments = case
    server = start(*NAMES, model=talker)
    talk = talk_of(ask, change.__name__)
    first, _, _ = ask(server, talk, None, "none")
    changed = copy.deepcopy(talk)
    change(changed)

    _, told, miss = ask(server, changed, first, "none")

    is_anthropic = "anthropic" in ask.__name__
    segment = segments[0 if is_anthropic else 2 if ask is by_responses else 1]
    if change is message_added:
        assert told == (None if is_anthropic else {"type": "cache_hit"})
        assert miss is None or miss["reason"] in ("page_tail", "cold")
        return
    assert told is not None
    if is_anthropic:
        assert told["type"] == of_anthropic
        assert told["cache_missed_input_tokens"] > 0
    else:
        assert told["type"] == "cache_miss"
        assert told["reason"] == of_openai
        assert told["cache_missed_tokens"] > 0
    assert told["segment"] == segment
    if change is not other_model:  # twins are one model: its cache does not care for the name
        assert miss is not None
        assert miss["reason"] == "diverged"
        assert miss["segment"] == segment
        assert miss["had"] != miss["got"]
        shown = {
            date_changed: ("Monday", "Friday"),
            tools_reordered: ("city", "age"),
            message_edited: ("Ann", "Cleo"),
        }[change]
        assert shown[0] in miss["had"]
        assert shown[1] in miss["got"]


@pytest.mark.parametrize("ask", ASKS)
def test_an_unknown_message_is_said_to_be_unknown(start: Start, talker: str, ask: Ask) -> None:
    """Not a word on what it could have been."""
    server = start(*NAMES, model=talker)
    _, told, _ = ask(server, TALK, "msg_nobody", "none")
    assert told is not None
    assert told["type"] in ("previous_message_not_found", "comparison_response_not_found")


@pytest.mark.parametrize("ask", ASKS)
def test_another_tenants_message_is_unknown_and_its_prefix_cold(
    start: Start, talker: str, ask: Ask
) -> None:
    """The same prompt with another key: nothing is read, and nothing is said of whose it was."""
    others = [one.__name__ for one in ASKS]  # each has asked nothing before
    options = [word for key in ("ann", *others) for word in ("--api-key", key)]
    server = start(*options, model=talker)
    talk = talk_of(ask, "tenants")
    mine, _, _ = ask(server, talk, None, "ann")

    _, told, miss = ask(server, talk, mine, ask.__name__)

    assert told is not None
    assert told["type"] in ("previous_message_not_found", "comparison_response_not_found")
    assert miss is not None
    assert miss["reason"] == "cold"
    assert "had" not in miss


@pytest.mark.parametrize("ask", ASKS)
def test_an_evicted_prefix_is_said_to_be_evicted(start: Start, talker: str, ask: Ask) -> None:
    """Nothing changed: the APIs' own diagnostics have no word for it, ours has."""
    server = start("--kv-cache-tokens", "2048", "--policy", "lru", model=talker)
    talk = talk_of(ask, "evicted")
    first, _, _ = ask(server, talk, None, "none")
    for at in range(12):
        flood = copy.deepcopy(TALK) | {"system": f"{at} {ask.__name__} flood. {DATED}", "tools": []}
        ask(server, flood, None, "none")

    _, told, miss = ask(server, talk, first, "none")

    assert told is not None
    assert told["type"] == "unavailable"
    assert miss is not None
    assert miss["reason"] == "evicted"
    assert miss["evicted_ago_s"] >= 0


def test_a_request_is_explained_without_running_it(start: Start, talker: str) -> None:
    """By the bodies of all three APIs: first cold, then found, then where it parts."""
    server = start(*NAMES, model=talker)
    client = server.openai()
    body = chat_body(copy.deepcopy(TALK) | {"system": "Explained. " + DATED})

    def explain(asked: Talk) -> Any:
        return client.post("/cache/explain", body=asked, cast_to=object)

    before = explain(body)
    answer = client.chat.completions.create(**body)
    after = explain(body)
    body["messages"][1]["content"] = "Who lives in Oslo?"
    changed = explain(body)

    assert before["miss"]["reason"] in ("cold", "diverged")
    assert after["cached_tokens"] >= (answer.usage.prompt_tokens - 1) // 16 * 16
    assert changed["miss"]["reason"] == "diverged"
    assert changed["miss"]["segment"] == "messages[1].content"
    assert "Rome" in changed["miss"]["had"]
    responses = {"model": "talker", "input": "Who?", "instructions": "Explained. " + DATED}
    assert explain(responses)["prompt_tokens"] > 16
    talk = {name: TALK[name] for name in ("messages", "system", "tools")}
    assert explain(talk)["segments"][0]["path"] == "tools[0]"
    assert explain({"prompt": "Who?"})["prompt_tokens"] > 0
