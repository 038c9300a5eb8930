"""The same requests to servers of other templates and options, to be recorded."""

from __future__ import annotations

from typing import Any

from ramify.models.configs.sampling_defaults import SamplingDefaults
from ramify.server.tenants import ApiKeys
from tests.pure import golden_chat, golden_messages, golden_responses
from tests.pure.golden_chat import CALL_TEXT, CHAT, COMPLETIONS, FIND, LONG
from tests.pure.golden_recorder import Dialogue, DialogueGroup, Exchange
from tests.pure.server_bench import TOOL_TEMPLATE, chat
from tests.pure.test_server_messages_blocks import refusing_late_system

MESSAGES, RESPONSES = golden_messages.PATH, golden_responses.PATH
ANN = {"authorization": "Bearer ann"}


def in_all_apis(name: str, system: Any) -> list[Dialogue]:
    """A question with tools, and with a system message behind it, in the three APIs."""
    late = [{"role": "user", "content": LONG}, {"role": "system", "content": system}]
    question = [{"role": "user", "content": "Hi"}]
    chat_body = {"messages": [*late, *question], "tools": [FIND], "max_tokens": 30}
    messages = golden_messages.body(*late, *question, tools=[golden_messages.FIND])
    responses = golden_responses.ask([*late, *question], tools=[golden_responses.FIND])
    return [
        Dialogue(f"{name}: chat", (Exchange(CHAT, chat_body, CALL_TEXT),)),
        Dialogue(
            f"{name}: messages", (Exchange(MESSAGES, messages | {"max_tokens": 30}, CALL_TEXT),)
        ),
        Dialogue(
            f"{name}: responses",
            (Exchange(RESPONSES, responses | {"max_output_tokens": 30}, CALL_TEXT),),
        ),
    ]


def hello(name: str, headers: dict[str, str] | None = None, **fields: Any) -> Dialogue:
    """A greeting in each API, with further fields."""
    exchanges = (
        Exchange(CHAT, chat("Hi") | fields),
        Exchange(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4} | fields),
        Exchange(MESSAGES, golden_messages.body() | fields),
        Exchange(RESPONSES, golden_responses.ask() | fields),
        Exchange("/v1/models", method="GET"),
    )
    sent = tuple(
        Exchange(exchange.target, exchange.body, method=exchange.method, headers=headers or {})
        for exchange in exchanges
    )
    return Dialogue(name, sent)


# The built-in model's template knows system, user and assistant, and neither tools nor calls.
BUILT_IN = [
    *in_all_apis("built-in", "late"),
    *(
        Dialogue(f"built-in chat: {name}", (Exchange(CHAT, {"messages": talk, "max_tokens": 4}),))
        for name, talk in golden_chat.MESSAGES.items()
        if name in ("developer", "two systems", "call and result", "reasoning", "assistant first")
    ),
    *(
        Dialogue(f"built-in messages: {name}", (Exchange(MESSAGES, golden_messages.body(*talk)),))
        for name, talk in golden_messages.TALKS.items()
        if name in ("call and result", "thinking", "system messages", "prefill")
    ),
]
DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, named=("temperature", "top_k"))
GROUPS = [
    DialogueGroup("built-in", BUILT_IN),
    DialogueGroup(
        "late system",
        in_all_apis("late system refused", [{"type": "text", "text": "late"}]),
        {"chat_template": refusing_late_system(TOOL_TEMPLATE)},
    ),
    DialogueGroup(
        "any model", [hello("any model", model="claude-any/4:latest")], {"aliases": ["*"]}
    ),
    DialogueGroup("no cache", [hello("no cache")], {"prefix_cache": False}),
    DialogueGroup("defaults", [hello("defaults")], {"sampling_defaults": DEFAULTS}),
    DialogueGroup(
        "tools first",
        in_all_apis("tools first", "late"),
        {"chat_template": TOOL_TEMPLATE, "tools_first": True},
    ),
    DialogueGroup(
        "keys", [hello("no key"), hello("a key", ANN)], {"keys": ApiKeys.of("ann", "bob")}
    ),
]
