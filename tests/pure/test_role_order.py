"""Roles in any order, in all three APIs, on templates that insist on an order or drop messages."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.server.prompts.role_order import RoleOrder
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench, run

BEGIN = "{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}"
SYSTEM = (
    "{%- if messages[0].role == 'system' -%}{{- messages[0].content + '<|end|>' -}}{%- endif -%}"
)
WRITE = (
    "{{- '<|' + message.role + '|>' + message.content -}}"
    "{%- for call in message.tool_calls or [] -%}{{- call.function | tojson -}}{%- endfor -%}"
    "{{- '<|end|>' -}}"
)
END = "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
REFUSE = "{{- raise_exception('roles must alternate') -}}"
# Writes the first system message only, as the templates of SmolLM3, Granite 4, EXAONE 4 and others.
DROPPING = (
    f"{BEGIN}{SYSTEM}{{%- for message in rest -%}}"
    f"{{%- if message.role != 'system' -%}}{WRITE}{{%- endif -%}}{END}"
)
# As Llama 2 and Gemma: every message counts.
STRICT = (
    f"{BEGIN}{SYSTEM}{{%- for message in rest -%}}"
    f"{{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}}{REFUSE}{{%- endif -%}}"
    f"{WRITE}{END}"
)
# As Mistral: calls and results do not count; an answer has text.
MISTRAL = (
    f"{BEGIN}{SYSTEM}{{%- set ns = namespace(index=0) -%}}{{%- for message in rest -%}}"
    "{%- if message.role != 'tool' and message.tool_calls is not defined -%}"
    f"{{%- if (message.role == 'user') != (ns.index % 2 == 0) -%}}{REFUSE}{{%- endif -%}}"
    "{%- set ns.index = ns.index + 1 -%}"
    f"{{%- if not message.content -%}}{REFUSE}{{%- endif -%}}{{%- endif -%}}"
    f"{WRITE}{END}"
)
TEMPLATES = {"takes all": TOOL_TEMPLATE, "drops": DROPPING, "strict": STRICT, "Mistral": MISTRAL}
CONVERSATIONS = {
    "two system messages": ["system", "system", "user"],
    "a late system message": ["system", "user", "assistant", "system", "user"],
    "a last system message": ["user", "system"],
    "a late one without a first": ["user", "assistant", "system", "user"],
    "an answer first": ["assistant", "user"],
    "an answer after the system prompt": ["system", "assistant", "user"],
    "two answers": ["user", "assistant", "assistant", "user"],
    "two questions": ["user", "user", "assistant", "user", "user"],
    "a result, then the user": ["user", "call", "tool", "user"],
    "a call without a result": ["user", "call", "user"],
    "a result, then a system message": ["user", "call", "tool", "system"],
}
APIS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


def words(roles: list[str]) -> list[str]:
    """The text of each message; that of a call is in its arguments."""
    return [f"word{number}" for number in range(len(roles))]


def chat_messages(roles: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for role, word in zip(roles, words(roles), strict=True):
        if role == "call":
            function = {"name": "f", "arguments": f'{{"x": "{word}"}}'}
            call = {"id": "abcdef123", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif role == "tool":
            messages.append({"role": "tool", "tool_call_id": "abcdef123", "content": word})
        else:
            messages.append({"role": role, "content": word})
    return messages


def response_items(roles: list[str]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for role, word in zip(roles, words(roles), strict=True):
        if role == "call":
            call = {"name": "f", "call_id": "abcdef123", "arguments": f'{{"x": "{word}"}}'}
            items.append({"type": "function_call", **call})
        elif role == "tool":
            output = {"call_id": "abcdef123", "output": word}
            items.append({"type": "function_call_output", **output})
        else:
            items.append({"role": "developer" if role == "system" else role, "content": word})
    return items


def claude_messages(roles: list[str]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for role, word in zip(roles, words(roles), strict=True):
        if role == "call":
            call = {"type": "tool_use", "id": "abcdef123", "name": "f", "input": {"x": word}}
            messages.append({"role": "assistant", "content": [call]})
        elif role == "tool":
            result = {"type": "tool_result", "tool_use_id": "abcdef123", "content": word}
            messages.append({"role": "user", "content": [result]})
        else:
            messages.append({"role": role, "content": word})
    return messages


def body_of(path: str, roles: list[str]) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "tiny", APIS[path]: 2}
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    if path == "/v1/responses":
        tool: dict[str, Any] = {"type": "function", "name": "f", "parameters": parameters}
        return body | {"input": response_items(roles), "tools": [tool]}
    if path == "/v1/messages":
        tool = {"name": "f", "input_schema": parameters}
        return body | {"messages": claude_messages(roles), "tools": [tool]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return body | {"messages": chat_messages(roles), "tools": [tool]}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_no_message_is_lost_or_refused(template: str) -> None:
    """Each text is in the prompt once, in its order, in all three APIs."""

    async def main() -> None:
        async with ServerBench(chat_template=template).running() as bench:
            for name, roles in CONVERSATIONS.items():
                for path in APIS:
                    answer = await bench.post(path, body_of(path, roles))

                    assert answer.status == 200, (name, path, answer.body)
                    prompt = bench.ended[-1].request.prompt.text
                    places = [prompt.find(word) for word in words(roles)]
                    assert places == sorted(places), (name, path, prompt)
                    assert [prompt.count(word) for word in words(roles)] == [1] * len(roles)

    run(main())


def test_the_three_apis_write_one_prompt() -> None:
    """System messages at the beginning are one; later ones are the user's, joined with it."""
    roles = CONVERSATIONS["a late system message"]

    async def main() -> None:
        async with ServerBench(chat_template=DROPPING).running() as bench:
            for path in APIS:
                assert (await bench.post(path, body_of(path, roles))).status == 200
            prompts = {generation.request.prompt.text for generation in bench.ended}

        expected = (
            "word0<|end|><|user|>word1<|end|><|assistant|>word2<|end|>"
            "<|user|>word3\nword4<|end|><|assistant|>"
        )
        assert prompts == {expected}

    run(main())


def test_only_messages_out_of_order_are_changed() -> None:
    """Messages of the user are not joined where the template takes them one by one."""
    roles = "system system user system user assistant tool system assistant user user".split()
    messages = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]

    ordered = RoleOrder(has_late_system=False).apply(messages)

    assert [(message["role"], message["content"]) for message in ordered] == [
        ("system", "0\n1"),
        ("user", "2\n3\n4"),
        ("assistant", "5"),
        ("tool", "6"),
        ("user", "7"),
        ("assistant", "8"),
        ("user", "9"),
        ("user", "10"),
    ]
    assert [message["content"] for message in messages] == [str(i) for i in range(len(roles))]


def test_a_message_is_put_where_one_is_missing() -> None:
    """Before an answer that comes first, and between a result and the user."""
    order = RoleOrder(
        has_repeated_roles=False, begins_with_user=True, fills_after_results=True, filler="OK"
    )

    ordered = order.apply(chat_messages(["system", "assistant", "user", "call", "tool", "user"]))

    assert [message["role"] for message in ordered] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
    ]
    assert [ordered[place]["content"] for place in (1, 6)] == ["OK", "OK"]
