"""Requests of OpenAI's Responses API and its conversations, to be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.server.request_fields.opaque_text import encode_opaque
from tests.pure.golden_chat import CALL_TEXT, LONG, SCHEMA, THOUGHT_TEXT, TWO_CALLS
from tests.pure.golden_recorder import Dialogue, DialogueGroup, Exchange, earlier, spread
from tests.pure.server_bench import TOOL_TEMPLATE
from tests.pure.test_server_responses import CODEX

PATH, CONVERSATIONS = "/v1/responses", "/v1/conversations"
FIND = {"type": "function", "name": "find", "parameters": SCHEMA, "strict": False}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}
CUSTOM = {
    "type": "custom",
    "name": "patch",
    "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"},
}
SPACE = {"type": "namespace", "name": "mail", "tools": [NOW]}
PATCH_TEXT = '<tool_call>{"name": "patch", "arguments": {"input": "a"}}</tool_call>'
SHELL_TEXT = '<tool_call>{"name": "local_shell", "arguments": {"command": ["ls"]}}</tool_call>'
MAIL_TEXT = '<tool_call>{"name": "mail__now", "arguments": {}}</tool_call>'
IMAGE = {"type": "input_image", "image_url": "data:,"}
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"city": "Rome"}'}


def ask(question: Any = "Hi", **fields: Any) -> dict[str, Any]:
    """A request for a short answer."""
    return {"input": question, "max_output_tokens": 4} | fields


def user(content: Any) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


def part(text: str, kind: str = "input_text", **fields: Any) -> dict[str, Any]:
    """A part of a message."""
    return {"type": kind, "text": text} | fields


def output(value: Any = "Ann", kind: str = "function_call_output", **fields: Any) -> dict[str, Any]:
    """The output of a call."""
    return {"type": kind, "call_id": "c1", "output": value} | fields


INPUTS: Mapping[str, Any] = {
    "null": None,
    "empty text": "",
    "empty list": [],
    "parts": [user([part("Who"), part(""), part("lives?")])],
    "image and file": [user([part("See"), IMAGE, {"type": "input_file", "file_data": "AA"}])],
    "unknown part": [user([{"type": "hologram"}])],
    "roles": [
        {"type": "message", "role": "developer", "content": "a"},
        {"role": "system", "content": [part("b")]},
        user("Hi"),
        {"role": "assistant", "content": [part("c", "output_text")]},
        user("And?"),
    ],
    "refusal": [
        user("Hi"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        user("Why?"),
    ],
    "unknown role": [{"role": "tool", "content": "x"}],
    "reasoning": [
        user("Hi"),
        {"type": "reasoning", "summary": [part("hm", "summary_text")]},
        {"role": "assistant", "content": "Yes"},
        {"type": "reasoning", "summary": [], "content": [part("so", "reasoning_text")]},
        CALL,
        output(),
    ],
    "encrypted reasoning": [
        user("Hi"),
        {"type": "reasoning", "summary": [], "encrypted_content": encode_opaque("Hm.")},
        {"role": "assistant", "content": "Yes"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        user("Why?"),
    ],
    "call and output": [user("Hi"), CALL, output()],
    "output in parts": [user("Hi"), CALL, output([part("Ann"), IMAGE])],
    "output as an object": [user("Hi"), CALL, output({"content": "Ann", "success": False})],
    "failed output": [user("Hi"), CALL, output(status="incomplete")],
    "empty output": [user("Hi"), CALL, output(None)],
    "bad arguments": [user("Hi"), CALL | {"arguments": "{"}, output()],
    "call in a namespace": [user("Hi"), CALL | {"namespace": "mail", "arguments": {}}, output()],
    "call without a name": [user("Hi"), {"type": "function_call", "call_id": "c1"}],
    "custom call": [
        user("Hi"),
        {"type": "custom_tool_call", "name": "patch", "input": "*** Begin", "call_id": "c1"},
        output("done", "custom_tool_call_output"),
    ],
    "shell calls": [
        user("Hi"),
        {
            "type": "local_shell_call",
            "call_id": "c1",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "c1", "output": "a.py"},
        {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
        output([{"stdout": "b"}], "shell_call_output"),
        {
            "type": "apply_patch_call",
            "call_id": "c3",
            "operation": {"type": "delete_file", "path": "a"},
        },
        output("u", "apply_patch_call_output", status="failed"),
    ],
    "calls of other servers": [
        user("Hi"),
        {"type": "mcp_call", "id": "5", "server_label": "m", "name": "g", "output": "v"},
        {"type": "code_interpreter_call", "id": "6", "code": "1", "outputs": [{"logs": "w"}]},
        {"type": "web_search_call", "status": "completed"},
        {"type": "mcp_list_tools", "tools": []},
        user("And?"),
    ],
    "additional tools": [user("Hi"), {"type": "additional_tools", "tools": [FIND]}],
    "compaction": [
        {"type": "compaction", "encrypted_content": encode_opaque("So far.")},
        user("Hi"),
    ],
    "foreign compaction": [{"type": "compaction", "encrypted_content": "gAAA"}, user("Hi")],
    "unknown item": [user("Hi"), {"type": "hologram"}],
    "item without a type": [{"content": "x"}],
    "unknown reference": [user("Hi"), {"type": "item_reference", "id": "msg_x"}],
    "breakpoint": [user([part(LONG, prompt_cache_breakpoint={"ttl": "1h"}), part("Hi")])],
    "too long": LONG * 60,
    "a number": 5,
}
FIELDS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "no input": {"input": None},
    "instructions": {"instructions": "Be brief."},
    "no limit": {"max_output_tokens": None, "text": {"format": {"type": "text"}}, "top_p": 0.01},
    "limit 0": {"max_output_tokens": 0},
    "sampling": {"temperature": 0.5, "top_p": 0.9},
    "logprobs": {
        "top_logprobs": 2,
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 2,
    },
    "unknown include": {"include": ["file_search_call.results", "x"]},
    "unknown model": {"model": "gpt-6"},
    "metadata": {
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "flex",
    },
    "metadata too long": {"metadata": {"a": "x" * 513}},
    "not stored": {"store": False},
    "background": {"background": True},
    "prompt": {"prompt": {"id": "p"}},
    "truncation": {"truncation": "auto", "input": [user(LONG * 4) for _ in range(16)]},
    "truncation unknown": {"truncation": "maybe"},
    "max_tool_calls": {"max_tool_calls": 2},
    "cache fields": {
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit", "ttl": "1h"},
        "cache_salt": "s",
    },
    "prewarm": {"prompt_cache_options": {"prewarm": True}},
    "comparison unknown": {"prompt_cache_options": {"comparison_response_id": "resp_x"}},
    "tools": {
        "tools": [FIND, NOW, CUSTOM, SPACE, {"type": "local_shell"}, {"type": "apply_patch"}]
    },
    "unserved tools": {
        "tools": [FIND, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]
    },
    "nested function": {"tools": [{"type": "function", "function": {"name": "g"}}]},
    "same tool twice": {"tools": [FIND, FIND]},
    "tool without a name": {"tools": [{"type": "function"}]},
    "tool without a type": {"tools": [{"name": "x"}]},
    "choice required": {"tools": [FIND, NOW], "tool_choice": "required", "max_output_tokens": 60},
    "choice none": {"tools": [FIND], "tool_choice": "none"},
    "choice named": {
        "tools": [FIND, NOW],
        "tool_choice": {"type": "function", "name": "now"},
        "max_output_tokens": 60,
    },
    "choice custom": {
        "tools": [FIND, CUSTOM],
        "tool_choice": {"type": "custom", "name": "patch"},
        "max_output_tokens": 60,
    },
    "choice gone": {"tools": [FIND], "tool_choice": {"type": "function", "name": "gone"}},
    "choice web_search": {"tools": [FIND], "tool_choice": {"type": "web_search"}},
    "choice unknown": {"tools": [FIND], "tool_choice": "whatever"},
    "choice alone": {"tool_choice": "required"},
    "choice allowed": {
        "tools": [FIND, NOW],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}, {"type": "function", "name": "gone"}],
        },
        "max_output_tokens": 60,
    },
    "single calls": {"tools": [FIND], "parallel_tool_calls": False},
    "json_schema": {
        "text": {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA, "strict": True}},
        "max_output_tokens": 60,
    },
    "json_object": {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 30},
    "json_schema missing": {"text": {"format": {"type": "json_schema", "name": "p"}}},
    "verbosity": {"text": {"verbosity": "low"}},
    "reasoning": {"reasoning": {"effort": "high", "summary": "auto"}},
    "reasoning none": {"reasoning": {"effort": "none"}},
    "unserved": {"context_management": [{"type": "compaction"}], "client_metadata": {"a": 1}},
    "unknown field": {"frobnicate": 1},
    "messages": {"messages": [user("Hi")]},
    "max_tokens": {"max_tokens": 4},
    "seed": {"seed": 1},
    "neutral values": {"n": 1, "stop": [], "seed": None, "top_k": -1},
    "previous unknown": {"previous_response_id": "resp_x"},
    "conversation unknown": {"conversation": "conv_x"},
    "both": {"previous_response_id": "resp_x", "conversation": "conv_x"},
}
COUNTED = ("plain", "instructions", "tools", "no input", "previous unknown", "unknown field")


def turns(name: str, text: str, tools: list[Any], kind: str, **fields: Any) -> Dialogue:
    """A question whose answer ends with a call; its output, with the items and with the id alone."""
    result = {"type": kind, "call_id": earlier(0, "output", -1, "call_id"), "output": "Ann"}
    first = (
        ask([user(LONG)], tools=tools, instructions="Be brief.")
        | {"max_output_tokens": 120}
        | fields
    )
    whole = first | {"input": [user(LONG), spread(0, "output"), result]}
    short = first | {"input": [result], "previous_response_id": earlier(0, "id")}
    return Dialogue(
        name,
        (
            Exchange(PATH, first, text),
            Exchange(PATH, whole, "Ann does."),
            Exchange(PATH, short, "Ann does."),
            Exchange(f"{PATH}/input_tokens", short),
        ),
    )


def stored_dialogue(name: str, *, stream: bool) -> Dialogue:
    """A response that is read again, listed, replayed and deleted."""
    id_ = earlier(0, -1, "response", "id") if stream else earlier(0, "id")
    body = ask(tools=[FIND], max_output_tokens=120, stream=stream)
    reads = ("", "/input_items?order=asc&limit=1", "?stream=true&starting_after=3", "?stream=maybe")
    return Dialogue(
        name,
        (
            Exchange(PATH, body, CALL_TEXT),
            *(Exchange((PATH, "/", id_, query), method="GET") for query in reads),
            Exchange((PATH, "/", id_, "/cancel")),
            Exchange((PATH, "/", id_), method="DELETE"),
            Exchange((PATH, "/", id_), method="GET"),
        ),
    )


def conversation_dialogue() -> Dialogue:
    """Two responses in a conversation, its items, and its end."""
    id_ = earlier(0, "id")
    path = (CONVERSATIONS, "/", id_)
    first = ask("one", conversation=id_)
    second = ask("two", conversation={"id": id_}, store=False)
    return Dialogue(
        "conversation",
        (
            Exchange(CONVERSATIONS, {"metadata": {"a": "b"}, "items": [user("zero")]}),
            Exchange(PATH, first),
            Exchange(PATH, second),
            Exchange((*path, "/items?order=asc"), method="GET"),
            Exchange((*path, "/items"), {"items": [user("three")]}),
            Exchange((*path, "/items/", earlier(4, "data", 0, "id")), method="GET"),
            Exchange((*path, "/items/", earlier(4, "data", 0, "id")), method="DELETE"),
            Exchange(path, {"metadata": {"c": "d"}}),
            Exchange((*path, "/items"), {"items": []}),
            Exchange(path, method="DELETE"),
            Exchange(path, method="GET"),
        ),
    )


def dialogues() -> list[Dialogue]:
    """Inputs, fields, streams, turns, and what is stored."""
    talks = [
        Dialogue(f"responses input: {name}", (Exchange(PATH, ask(value)),))
        for name, value in INPUTS.items()
    ]
    talks += [
        Dialogue(f"responses field: {name}", (Exchange(PATH, ask() | fields),))
        for name, fields in FIELDS.items()
    ]
    talks += [
        Dialogue(f"input_tokens: {name}", (Exchange(f"{PATH}/input_tokens", ask() | FIELDS[name]),))
        for name in COUNTED
    ]
    tools = {"tools": [FIND, NOW, CUSTOM, SPACE, {"type": "local_shell"}], "max_output_tokens": 120}
    encrypted = tools | {"include": ["reasoning.encrypted_content"], "store": False}
    streams: dict[str, tuple[dict[str, Any], str | None]] = {
        "plain": ({}, None),
        "calls": (tools, TWO_CALLS),
        "reasoning": (encrypted, THOUGHT_TEXT),
        "custom call": (tools, PATCH_TEXT),
        "shell call": (tools, SHELL_TEXT),
        "cut off": (tools | {"max_output_tokens": 20}, CALL_TEXT),
        "logprobs": ({"top_logprobs": 1, "max_output_tokens": 2}, None),
        "refused": ({"temperature": 9}, None),
    }
    talks += [
        Dialogue(
            f"responses stream: {name}", (Exchange(PATH, ask() | {"stream": True} | fields, text),)
        )
        for name, (fields, text) in streams.items()
    ]
    comparison = {"prompt_cache_options": {"comparison_response_id": earlier(0, "id")}}
    compacted = ask([spread(0, "output"), user("And?")])
    talks += [
        turns("responses turns: call", CALL_TEXT, [FIND, NOW], "function_call_output"),
        turns("responses turns: thought", THOUGHT_TEXT, [FIND], "function_call_output"),
        turns(
            "responses turns: encrypted",
            THOUGHT_TEXT,
            [FIND],
            "function_call_output",
            include=["reasoning.encrypted_content"],
        ),
        turns("responses turns: custom", PATCH_TEXT, [CUSTOM], "custom_tool_call_output"),
        turns(
            "responses turns: shell",
            SHELL_TEXT,
            [{"type": "local_shell"}],
            "local_shell_call_output",
        ),
        turns("responses turns: namespace", MAIL_TEXT, [SPACE], "function_call_output"),
        Dialogue(
            "responses turns: comparison",
            (Exchange(PATH, ask(LONG)), Exchange(PATH, ask(LONG, instructions="x") | comparison)),
        ),
        Dialogue(
            "responses turns: reference",
            (
                Exchange(PATH, ask(LONG)),
                Exchange(
                    PATH,
                    ask(
                        [{"type": "item_reference", "id": earlier(0, "output", 0, "id")}, user("?")]
                    ),
                ),
            ),
        ),
        Dialogue(
            "responses compact",
            (
                Exchange(
                    f"{PATH}/compact", {"input": [user(LONG), CALL, output()]}, "Ann lives there."
                ),
                Exchange(PATH, compacted),
                Exchange(f"{PATH}/compact", {"input": None}),
                Exchange(f"{PATH}/compact", {"input": "Hi", "tools": [FIND], "poem": 1}, "So."),
            ),
        ),
        Dialogue("responses: Codex", (Exchange(PATH, CODEX),)),
        Dialogue("responses: explain", (Exchange("/v1/cache/explain", ask(LONG, **tools)),)),
        Dialogue("responses: not JSON", (Exchange(PATH, b"{"),)),
        Dialogue("responses: unknown", (Exchange(f"{PATH}/resp_x", method="GET"),)),
        stored_dialogue("responses stored: whole", stream=False),
        stored_dialogue("responses stored: stream", stream=True),
        conversation_dialogue(),
    ]
    return talks


GROUP = DialogueGroup("responses", dialogues(), {"chat_template": TOOL_TEMPLATE})
