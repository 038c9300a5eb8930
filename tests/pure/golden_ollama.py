"""Requests of Ollama's API, to be recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.pure.golden_chat import FIND, LONG, SCHEMA, THOUGHT_TEXT, TWO_CALLS
from tests.pure.golden_recorder import Dialogue, DialogueGroup, Exchange, earlier
from tests.pure.server_bench import TOOL_TEMPLATE

CHAT, GENERATE = "/api/chat", "/api/generate"
HELLO = {"role": "user", "content": "Hi"}
CALL = {"function": {"name": "find", "arguments": {"city": "Rome"}}}
NOW = {"type": "function", "function": {"name": "now"}}


def body(*messages: Any, **fields: Any) -> dict[str, Any]:
    """A chat request of these messages, or of a greeting, that is answered whole."""
    base = {"model": "tiny", "messages": list(messages) or [HELLO], "stream": False}
    return base | {"options": {"num_predict": 4, "temperature": 0}} | fields


def question(**fields: Any) -> dict[str, Any]:
    """A generate request that is answered whole."""
    base = {"model": "tiny", "prompt": "Hi", "stream": False}
    return base | {"options": {"num_predict": 4, "temperature": 0}} | fields


def assistant(**fields: Any) -> dict[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": ""} | fields


TALKS: Mapping[str, list[dict[str, Any]]] = {
    "plain": [HELLO],
    "upper case": [{"role": "User", "content": "Hi"}],
    "no content": [HELLO, assistant(content=None), HELLO],
    "call and result": [
        HELLO,
        assistant(tool_calls=[CALL]),
        {"role": "tool", "content": "Ann", "tool_name": "find"},
    ],
    "call with an id": [
        HELLO,
        assistant(tool_calls=[CALL | {"id": "c1", "index": 0}]),
        {"role": "tool", "content": "Ann", "tool_call_id": "c1"},
    ],
    "thinking": [HELLO, assistant(content="Yes", thinking="Hm."), {"role": "user", "content": "W"}],
    "prefill": [HELLO, assistant(content="Ye")],
    "image": [HELLO | {"images": ["AAAA"]}],
    "poet": [{"role": "poet", "content": "Hi"}],
    "list": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
}
CHAT_FIELDS: Mapping[str, dict[str, Any]] = {
    "tag": {"model": "tiny:latest"},
    "wrong model": {"model": "gone"},
    "no model": {"model": None},
    "nothing": {"messages": []},
    "unload": {"messages": [], "keep_alive": 0},
    "json": {"format": "json", "options": {"num_predict": 30, "seed": 1}},
    "schema": {"format": SCHEMA, "options": {"num_predict": 30, "seed": 1}},
    "wrong format": {"format": "yaml"},
    "logprobs": {"logprobs": True, "top_logprobs": 1},
    "wrong logprobs": {"logprobs": True, "top_logprobs": 21},
    "think": {"think": True},
    "think high": {"think": "high"},
    "wrong think": {"think": "deep"},
    "prompt only": {"options": {"num_predict": 0}},
    "ignored": {"options": {"num_predict": 4, "seed": 1, "mirostat": 1, "num_gpu": 9, "poem": 1}},
    "wrong option": {"options": {"top_p": 2}},
    "unknown field": {"max_tokens": 4},
    "render only": {"_debug_render_only": True},
    "too long": {"messages": [{"role": "user", "content": "Q z " * 1500}]},
    "session": {"session_id": "a", "end_session": True, "cache_salt": "s", "priority": 1},
}
GENERATE_FIELDS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": "Be brief."},
    "raw": {"raw": True},
    "raw with system": {"raw": True, "system": "Be brief."},
    "template": {"template": "{{ .Prompt }}"},
    "suffix": {"suffix": "x"},
    "images": {"images": ["AAAA"]},
    "empty": {"prompt": ""},
    "json": {"format": "json", "options": {"num_predict": 30, "seed": 1}},
    "wrong context": {"context": [-1]},
}
TOOLS = body(tools=[FIND, NOW], options={"num_predict": 200})
CONTEXTS = Dialogue(
    "ollama generate: contexts",
    (
        Exchange(GENERATE, question(system=LONG)),
        Exchange(GENERATE, question(prompt="And?", context=earlier(0, "context"))),
        Exchange(
            GENERATE, question(prompt="So?", context=earlier(1, "context"), system="Be kind.")
        ),
    ),
)
GROUP = DialogueGroup(
    "ollama",
    [
        *(
            Dialogue(f"ollama chat: {name}", (Exchange(CHAT, body(*talk)),))
            for name, talk in TALKS.items()
        ),
        *(
            Dialogue(f"ollama field: {name}", (Exchange(CHAT, body() | fields),))
            for name, fields in CHAT_FIELDS.items()
        ),
        *(
            Dialogue(f"ollama generate: {name}", (Exchange(GENERATE, question() | fields),))
            for name, fields in GENERATE_FIELDS.items()
        ),
        *(
            Dialogue(
                f"ollama stream: {name}",
                (Exchange(path, request | {"stream": None}, text),),
            )
            for name, path, request, text in (
                ("plain", CHAT, body(), None),
                ("logprobs", CHAT, body(logprobs=True), None),
                ("thought and call", CHAT, TOOLS, THOUGHT_TEXT),
                ("two calls", CHAT, TOOLS, TWO_CALLS),
                ("a call cut off", CHAT, TOOLS | {"options": {"num_predict": 12}}, TWO_CALLS),
                ("generate", GENERATE, question(), None),
                ("prompt only", CHAT, body(options={"num_predict": 0}), None),
                ("wrong model", CHAT, body() | {"model": "gone"}, None),
            )
        ),
        Dialogue("ollama tools: whole", (Exchange(CHAT, TOOLS, THOUGHT_TEXT),)),
        CONTEXTS,
        Dialogue(
            "ollama cached",
            tuple(
                Exchange(CHAT, body({"role": "system", "content": LONG}, HELLO)) for _ in range(2)
            ),
        ),
        Dialogue(
            "ollama model",
            (
                Exchange("/api/tags", method="GET"),
                Exchange("/api/ps", method="GET"),
                Exchange("/api/version", method="GET"),
                Exchange("/api/show", {"model": "tiny"}),
                Exchange("/api/show", {"name": "gone"}),
                Exchange("/", method="GET"),
            ),
        ),
        Dialogue(
            "ollama unmanaged",
            (
                Exchange("/api/pull", {"model": "tiny"}),
                Exchange("/api/create", {"model": "a", "from": "tiny"}),
                Exchange("/api/push", {"model": "tiny"}),
                Exchange("/api/copy", {"source": "tiny", "destination": "a"}),
                Exchange("/api/delete", {"model": "tiny"}, method="DELETE"),
                Exchange("/api/nothing", {}),
                Exchange("/api/chat", method="GET"),
            ),
        ),
        Dialogue(
            "ollama vectors",
            (
                Exchange("/api/embed", {"model": "tiny", "input": ["a b", "c"], "dimensions": 2}),
                Exchange("/api/embed", {"model": "tiny", "input": ""}),
                Exchange("/api/embed", {"model": "tiny", "input": ["a", ""]}),
                Exchange("/api/embeddings", {"model": "tiny", "prompt": "c"}),
            ),
        ),
    ],
    {"chat_template": TOOL_TEMPLATE},
)
