"""Miss diagnostics: Anthropic's, OpenAI's, and `usage.ramify_cache.miss`."""

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


def talk_of(ask: Ask, topic: str) -> Talk:
    """A conversation that no other test sends: a miss is explained by the longest cached prompt."""
    name = f"{getattr(ask, '__name__', '')} {topic}"
    letter = "abcdefgh"[ASKS.index(ask)]
    tools = [
        tool_spec | {"name": f"{letter * 8}_{tool_spec['name']}"} for tool_spec in TALK["tools"]
    ]
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
    diagnostics = answer.diagnostics
    reason = None if diagnostics is None else diagnostics.cache_miss_reason.to_dict()
    return answer.id, reason, answer.usage.ramify_cache.get("miss")


def by_anthropic_stream(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    with server.anthropic(key).messages.stream(
        **talk, max_tokens=2, diagnostics={"previous_message_id": before}
    ) as stream:
        answer = stream.get_final_message()
    diagnostics = answer.diagnostics
    reason = None if diagnostics is None else diagnostics.cache_miss_reason.to_dict()
    return answer.id, reason, answer.usage.ramify_cache.get("miss")


def openai_tools(talk: Talk) -> list[Talk]:
    return [
        {
            "name": tool_spec["name"],
            "description": tool_spec["description"],
            "parameters": tool_spec["input_schema"],
        }
        for tool_spec in talk["tools"]
    ]


def chat_body(talk: Talk) -> Talk:
    return {
        "model": talk["model"],
        "messages": [{"role": "system", "content": talk["system"]}, *talk["messages"]],
        "tools": [{"type": "function", "function": function} for function in openai_tools(talk)],
        "max_tokens": 2,
    }


def by_chat(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    answer = server.openai(key).chat.completions.create(
        **chat_body(talk),
        extra_body={"prompt_cache_options": {"comparison_response_id": before}},
    )
    diagnostics = getattr(answer, "prompt_cache_diagnostics", None)
    return answer.id, diagnostics, answer.usage.ramify_cache.get("miss")


def by_chat_stream(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    stream = server.openai(key).chat.completions.create(
        **chat_body(talk),
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"prompt_cache_options": {"comparison_response_id": before}},
    )
    last = list(stream)[-1]
    diagnostics = getattr(last, "prompt_cache_diagnostics", None)
    return last.id, diagnostics, last.usage.ramify_cache.get("miss")


def by_responses(server: Running, talk: Talk, before: str | None, key: str) -> Any:
    answer = server.openai(key).responses.create(
        model=talk["model"],
        instructions=talk["system"],
        input=talk["messages"],
        tools=[{"type": "function"} | tool_spec for tool_spec in openai_tools(talk)],
        max_output_tokens=2,
        prompt_cache_options={"comparison_response_id": before} if before else {},
    )
    diagnostics = answer.prompt_cache_diagnostics
    reason = None if diagnostics is None else diagnostics.to_dict()
    return answer.id, reason, answer.usage.ramify_cache.get("miss")


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
# (mutation, Anthropic's type, OpenAI's reason, path of the segment in Messages, Chat, Responses)
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
    """Reason and segment are right, in the API's own diagnostics and in `usage.ramify_cache`."""
    change, anthropic_type, openai_reason, segments = case
    server = start(*NAMES, model=talker)
    talk = talk_of(ask, change.__name__)
    first, _, _ = ask(server, talk, None, "none")
    changed = copy.deepcopy(talk)
    change(changed)

    _, reason, miss = ask(server, changed, first, "none")

    is_anthropic = "anthropic" in ask.__name__
    segment = segments[0 if is_anthropic else 2 if ask is by_responses else 1]
    if change is message_added:
        assert reason == (None if is_anthropic else {"type": "cache_hit"})
        assert miss is None or miss["reason"] in ("page_tail", "cold", "new_turn")
        return
    assert reason is not None
    if is_anthropic:
        assert reason["type"] == anthropic_type
        assert reason["cache_missed_input_tokens"] > 0
    else:
        assert reason["type"] == "cache_miss"
        assert reason["reason"] == openai_reason
        assert reason["cache_missed_tokens"] > 0
    assert reason["segment"] == segment
    if change is not other_model:  # aliases of one model share its cache
        assert miss is not None
        assert miss["reason"] == "diverged"
        assert miss["segment"] == segment
        assert miss["had"] != miss["got"]
        words = {
            date_changed: ("Monday", "Friday"),
            tools_reordered: ("city", "age"),
            message_edited: ("Ann", "Cleo"),
        }[change]
        assert words[0] in miss["had"]
        assert words[1] in miss["got"]


@pytest.mark.parametrize("ask", ASKS)
def test_an_unknown_message_is_said_to_be_unknown(start: Start, talker: str, ask: Ask) -> None:
    """Nothing is compared."""
    server = start(*NAMES, model=talker)
    _, reason, _ = ask(server, TALK, "msg_nobody", "none")
    assert reason is not None
    assert reason["type"] in ("previous_message_not_found", "comparison_response_not_found")


@pytest.mark.parametrize("ask", ASKS)
def test_another_tenants_message_is_unknown_and_its_prefix_cold(
    start: Start, talker: str, ask: Ask
) -> None:
    """The same prompt with another key: nothing is read, and the miss is `cold`, without text."""
    other_keys = [other_ask.__name__ for other_ask in ASKS]  # a fresh tenant for each test
    options = [option for key in ("ann", *other_keys) for option in ("--api-key", key)]
    server = start(*options, model=talker)
    talk = talk_of(ask, "tenants")
    first, _, _ = ask(server, talk, None, "ann")

    _, reason, miss = ask(server, talk, first, ask.__name__)

    assert reason is not None
    assert reason["type"] in ("previous_message_not_found", "comparison_response_not_found")
    assert miss is not None
    assert miss["reason"] == "cold"
    assert "had" not in miss


@pytest.mark.parametrize("ask", ASKS)
def test_an_evicted_prefix_is_said_to_be_evicted(start: Start, talker: str, ask: Ask) -> None:
    """Nothing changed: `unavailable` in the APIs' own diagnostics, `evicted` in ours."""
    server = start("--kv-cache-tokens", "2048", "--policy", "lru", model=talker)
    talk = talk_of(ask, "evicted")
    first, _, _ = ask(server, talk, None, "none")
    for index in range(12):
        flood = copy.deepcopy(TALK) | {
            "system": f"{index} {ask.__name__} flood. {DATED}",
            "tools": [],
        }
        ask(server, flood, None, "none")

    _, reason, miss = ask(server, talk, first, "none")

    assert reason is not None
    assert reason["type"] == "unavailable"
    assert miss is not None
    assert miss["reason"] == "evicted"
    assert miss["evicted_ago_s"] >= 0


def test_a_request_is_explained_without_running_it(start: Start, talker: str) -> None:
    """With bodies of all three APIs: first cold, then hit, then the segment where it diverges."""
    server = start(*NAMES, model=talker)
    client = server.openai()
    body = chat_body(copy.deepcopy(TALK) | {"system": "Explained. " + DATED})

    def explain(request_body: Talk) -> Any:
        return client.post("/cache/explain", body=request_body, cast_to=object)

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
    responses_body = {"model": "talker", "input": "Who?", "instructions": "Explained. " + DATED}
    assert explain(responses_body)["prompt_tokens"] > 16
    anthropic_body = {name: TALK[name] for name in ("messages", "system", "tools")}
    assert explain(anthropic_body)["segments"][0]["path"] == "tools[0]"
    assert explain({"prompt": "Who?"})["prompt_tokens"] > 0
