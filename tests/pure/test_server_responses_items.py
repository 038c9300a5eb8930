"""Tools and items of the Responses API as functions and messages; stored conversations."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.errors import RequestError
from ramify.server.errors import ApiError
from ramify.server.history.expiring_store import ExpiringStore
from ramify.server.history.stored_conversation import StoredConversation, put_conversation
from ramify.server.openai.protocol import NamedTool
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.openai.responses.request import response_to_generation
from ramify.server.openai.responses.store import EarlierTurns
from ramify.server.openai.responses.tools import (
    MAX_TOOLS,
    CallForm,
    apply_tool_choice,
    served_tools,
)
from ramify.server.request_fields.opaque_text import encode_opaque
from tests.pure.server_bench import TOOL_TEMPLATE, ServerBench

SERVICE = ServerBench(chat_template=TOOL_TEMPLATE).service
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CUSTOM = {
    "type": "custom",
    "name": "c",
    "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"},
}
SPACE = {"type": "namespace", "name": "n", "tools": [FUNCTION, CUSTOM]}


def test_tools_become_functions() -> None:
    """Names, forms, the regex of a custom tool; doubles and what is not served are told."""
    tools: list[dict[str, Any]] = [
        FUNCTION,
        {"type": "function", "function": {"name": "g"}},
        CUSTOM,
        SPACE,
        FUNCTION,
        {"type": "shell"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "local_shell"},
        {"type": "apply_patch"},
        {"type": "mcp", "server_label": "x", "server_url": "https://x"},
        {"type": "web_search_2025_08_26"},
    ]

    served = served_tools([("tools", tools), ("input[3].tools", [FUNCTION | {"name": "late"}])])

    names = ["f", "g", "c", "n__f", "n__c", "shell", "local_shell", "apply_patch", "late"]
    assert [tool.function.name for tool in served.functions] == names == list(served.forms)
    assert served.forms["n__c"] == CallForm("custom", "c", "n")
    schema: Any = served.functions[2].function.parameters
    assert schema["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert served.skipped == ["shell in a container", "mcp", "web_search_2025_08_26"]
    assert "tools[4]" in served.warnings[0]
    assert "mcp" in served.warnings[1]


@pytest.mark.parametrize(
    ("choice", "mode", "left"),
    [
        (None, None, ["f", "c", "n__f", "n__c", "local_shell"]),
        ("required", "required", ["f", "c", "n__f", "n__c", "local_shell"]),
        ({"type": "function", "name": "f"}, "f", None),
        ({"type": "function", "name": "f", "namespace": "n"}, "n__f", None),
        ({"type": "custom", "name": "c"}, "c", None),
        ({"type": "local_shell"}, "local_shell", None),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "c"}, {"type": "mcp", "server_label": "x"}],
            },
            "required",
            ["c"],
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "namespace", "name": "n"}],
            },
            "auto",
            ["n__f", "n__c"],
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "auto", []),
    ],
)
def test_a_tool_choice_names_functions(choice: Any, mode: str, left: list[str] | None) -> None:
    """One to call, or those that may be called."""
    tools = served_tools([("tools", [FUNCTION, CUSTOM, SPACE, {"type": "local_shell"}])])

    translated, rest = apply_tool_choice(choice, tools)

    name = translated.function.name if isinstance(translated, NamedTool) else translated
    assert name == mode
    if left is not None:
        allowed = rest.forms.keys() if rest.allowed is None else rest.allowed
        assert [name for name in rest.forms if name in allowed] == left
        assert rest.functions == tools.functions


def test_items_of_a_turn_of_the_model_are_one_message() -> None:
    """Reasoning, text and calls; each result is a message, wrapped or in parts."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "one"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "custom_tool_call", "name": "c", "input": "x", "call_id": "2"},
        {"type": "message", "role": "assistant", "content": "B"},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "r"}],
        },
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": {"content": "s", "success": False},
        },
        {"type": "shell_call_output", "call_id": "3", "output": [{"stdout": "t"}]},
        {"type": "apply_patch_call_output", "call_id": "4", "status": "failed", "output": "u"},
        {"type": "mcp_call", "id": "5", "server_label": "m", "name": "g", "output": "v"},
        {"type": "code_interpreter_call", "id": "6", "code": "1", "outputs": [{"logs": "w"}]},
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "lost"}],
        },
    ]
    translator = ItemTranslator()
    for index, item in enumerate(items):
        translator.append(item, f"input[{index}]")

    messages, names = translator.finish()

    assert [message.role for message in messages] == [
        "user",
        "assistant",
        *["tool"] * 4,
        *["assistant", "tool"] * 2,
    ]
    turn = messages[1]
    assert (turn.content, turn.reasoning_content) == ("AB", "hm")
    calls = [(call.function.name, call.function.arguments) for call in turn.tool_calls or ()]
    assert calls == [("f", {}), ("c", {"input": "x"})]
    assert [message.content for message in messages[3:6]] == ["s", '[{"stdout":"t"}]', "failed\nu"]
    assert [message.content for message in messages[7::2]] == ["v", "w"]
    outputs = {2, 3, 4, 5, 7, 9}
    assert names == [
        f"input[{item}].output" if place in outputs else f"input[{item}]"
        for place, item in enumerate((0, 1, 6, 7, 8, 9, 10, 10, 11, 11))
    ]
    assert translator.warnings == []


def test_too_many_tools_are_refused() -> None:
    """Those of namespaces count."""
    tools = [SPACE | {"tools": [FUNCTION] * (MAX_TOOLS // 2)}] * 2

    with pytest.raises(ApiError) as refusal:
        served_tools([("tools", tools)])

    assert (refusal.value.status, refusal.value.param) == (400, "tools")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2)
    ),
    max_leaves=4,
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "input_image", "refusal", "x"])},
        optional={"text": st.text(max_size=4) | JSON, "image_url": st.just("data:x")},
    ),
    max_size=2,
)
TYPES = [
    *(
        "message function_call function_call_output custom_tool_call custom_tool_call_output"
    ).split(),
    *("local_shell_call local_shell_call_output shell_call shell_call_output reasoning").split(),
    *("apply_patch_call apply_patch_call_output compaction mcp_call code_interpreter_call").split(),
    *(
        "additional_tools tool_search_output item_reference web_search_call mcp_list_tools x"
    ).split(),
]
VALUES = st.text(max_size=4) | PARTS | JSON
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(TYPES) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer", "x"]),
        "content": VALUES,
        "id": VALUES,
        "call_id": VALUES,
        "name": st.sampled_from(["f", "c", ""]) | JSON,
        "namespace": JSON,
        "arguments": st.sampled_from(["{}", "{"]) | JSON,
        "input": VALUES,
        "output": VALUES,
        "outputs": VALUES,
        "summary": VALUES,
        "action": JSON,
        "operation": JSON,
        "tools": st.lists(st.sampled_from([FUNCTION, CUSTOM, SPACE]) | JSON, max_size=2) | JSON,
        "encrypted_content": st.sampled_from([encode_opaque("a"), "ramify1.%", "gAAA"]) | JSON,
        "status": JSON,
    },
)


@given(
    st.lists(ITEM, max_size=4),
    st.lists(st.sampled_from([FUNCTION, SPACE]) | JSON, max_size=2),
    JSON,
)
def test_random_items_and_tools_are_served_or_refused(
    items: list[Any], tools: list[Any], choice: Any
) -> None:
    """A prompt, or one 4xx that names a field; never another exception."""
    body: dict[str, Any] = {"input": [*items, {"role": "user", "content": "go on"}], "tools": tools}
    body |= {"tool_choice": choice} if isinstance(choice, str | dict) else {}
    try:
        request = msgspec.convert(body, ResponsesRequest)
    except msgspec.ValidationError:
        return  # the tools are no objects

    error: Exception | None = None
    try:
        translated = response_to_generation(request, EarlierTurns(), SERVICE)
        assert "go on" in translated.generation_request.prompt.text
    except (ApiError, RequestError) as refusal:  # the latter is the template's
        error = refusal

    if isinstance(error, ApiError):
        assert 400 <= error.status < 500
        assert error.param


def test_conversations_are_bounded_by_tenant() -> None:
    """One that is too large is refused and its earlier version stays; the oldest is forgotten."""
    now = [0.0]
    store: ExpiringStore[StoredConversation] = ExpiringStore(
        max_bytes=20_000, max_tenant_bytes=10_000, clock=lambda: now[0]
    )

    def conversation(name: str, num_chars: int) -> StoredConversation:
        items = {"i": b"x" * num_chars} if num_chars else {}
        return StoredConversation(name, 0, {}, items)

    small, large = conversation("a", 0), conversation("a", 11_000)
    assert put_conversation(store, "ann", small)
    assert not put_conversation(store, "ann", large)
    assert store.get("ann", "a") == small
    assert store.get("bob", "a") is None
    for name in ("b", "c"):
        assert put_conversation(store, "ann", conversation(name, 4000))
    assert store.get("ann", "a") is None
    assert store.num_bytes <= 10_000
    for tenant, num_chars in (("bob", 8000), ("cyn", 7000)):
        assert put_conversation(store, tenant, conversation("d", num_chars))
    assert store.num_bytes <= 20_000
    assert store.get("cyn", "d") is not None
    now[0] += 24 * 3600
    assert store.get("cyn", "d") is None
    assert put_conversation(store, "ann", small)
    assert len(store) == 1
