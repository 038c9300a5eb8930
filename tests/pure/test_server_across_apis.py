"""What the APIs have in common: fields of another API, tools that no template shows, paths in errors."""

import json
import sys
from typing import Any

import pytest

from tests.pure.server_bench import TOOL_TEMPLATE, Answer, ask, chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
WARNING = "x-ramify-warning"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: chat("Hi"),
    "/tokenize": chat("Hi"),
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 4},
    RESPONSES: {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    MESSAGES: chat("Hi", model="tiny", max_tokens=4),
    OLLAMA: {"model": "tiny", "messages": chat("Hi")["messages"], "stream": False},
    "/v1/messages/count_tokens": chat("Hi", model="tiny"),
}
LIST_SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


def send(path: str, fields: dict[str, Any], template: str | None = None) -> Answer:
    options = {} if template is None else {"chat_template": template}
    return ask(path, BODIES[path] | fields, **options)


def message_and_param(answer: Answer) -> tuple[str, str]:
    """Of an error; in Anthropic's form the message begins with the field."""
    error = answer.json["error"]
    if isinstance(error, str):  # in Ollama's form too
        error = {"message": error}
    param, _, message = (
        error["message"].partition(": ")
        if "param" not in error
        else (error["param"], "", error["message"])
    )
    return message, param


@pytest.mark.parametrize(
    ("path", "field", "value", "way_out"),
    [
        (CHAT, "system", "Be brief", "role system"),
        (CHAT, "previous_response_id", "resp_1", "/v1/responses"),
        (CHAT, "text", {"format": {"type": "json_object"}}, "response_format"),
        (CHAT, "max_output_tokens", 4, "max_tokens"),
        ("/tokenize", "chat_template", "{{ messages }}", "the model's own"),
        (COMPLETIONS, "tools", [{"type": "function"}], "/v1/chat/completions"),
        (RESPONSES, "seed", 1, "/v1/chat/completions"),
        (RESPONSES, "top_k", 5, "/v1/chat/completions"),
        (RESPONSES, "guided_regex", "a+", "/v1/chat/completions"),
        (RESPONSES, "use_beam_search", True, "leave it out"),
        (RESPONSES, "reasoning_effort", "low", "reasoning.effort"),
        ("/v1/responses/input_tokens", "messages", [{"role": "user"}], "input"),
        ("/v1/responses/compact", "messages", [{"role": "user"}], "input"),
        (MESSAGES, "stop", ["x"], "stop_sequences"),
        (MESSAGES, "response_format", {"type": "json_object"}, "output_config.format"),
        (MESSAGES, "presence_penalty", 1, "/v1/chat/completions"),
        (MESSAGES, "max_new_tokens", 4, "leave it out"),
        ("/v1/messages/count_tokens", "instructions", "Be brief", "system"),
    ],
)
def test_a_field_of_another_api_is_refused(
    path: str, field: str, value: object, way_out: str
) -> None:
    """If it would change the answer: 400, with the field and the way out."""
    answer = send(path, {field: value})

    message, param = message_and_param(answer)
    assert (answer.status, param) == (400, field), answer.body
    assert way_out in message


@pytest.mark.parametrize(
    ("path", "field", "way_out"),
    [
        (CHAT, "prompt", "/v1/completions"),
        (CHAT, "input", "send messages"),
        (COMPLETIONS, "messages", "/v1/chat/completions"),
        (COMPLETIONS, "input", "send prompt"),
        (MESSAGES, "prompt", "send messages"),
        ("/v1/messages/count_tokens", "input", "send messages"),
    ],
)
def test_the_prompt_of_another_api_is_recognised_alone(path: str, field: str, way_out: str) -> None:
    """It is named with the way out, before the field that is missing."""
    answer = ask(path, {"model": "tiny", "system": "Hi", field: chat("Hi")["messages"]})

    message, param = message_and_param(answer)
    assert (answer.status, param) == (400, field)
    assert way_out in message


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_values_that_change_nothing_pass(path: str) -> None:
    """Without a warning: clients send them with every request."""
    neutral = {
        "min_p": 0,
        "n": 1,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "response_format": {"type": "text"},
        "seed": None,
        "skip_special_tokens": True,
        "stop": [],
        "use_beam_search": False,
    }

    answer = send(path, neutral)

    assert answer.status == 200, answer.body
    assert WARNING not in answer.headers


@pytest.mark.parametrize(
    "path", [RESPONSES, "/v1/responses/input_tokens", "/v1/responses/compact", "/tokenize", OLLAMA]
)
def test_unknown_fields_are_named(path: str) -> None:
    """At every path that renders a prompt."""
    assert "poem" in send(path, {"poem": 1}).headers[WARNING]


TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "f", "parameters": LIST_SCHEMA}},
    RESPONSES: {"type": "function", "name": "f", "parameters": LIST_SCHEMA},
    MESSAGES: {"name": "f", "input_schema": LIST_SCHEMA},
    OLLAMA: {"type": "function", "function": {"name": "f", "parameters": LIST_SCHEMA}},
}


@pytest.mark.parametrize("path", TOOLS)
def test_tools_that_the_template_leaves_out_are_told(path: str) -> None:
    """The model does not see them; a template that shows them gets no such warning."""
    hidden = send(path, {"tools": [TOOLS[path]]})
    shown = send(path, {"tools": [TOOLS[path]]}, TOOL_TEMPLATE)

    assert "the model does not see them" in hidden.headers[WARNING]
    assert "the model does not see them" not in shown.headers[WARNING]


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        (RESPONSES, {"type": "web_search"}),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}),
    ],
)
def test_a_tool_has_its_place_in_the_request(path: str, left_out: dict[str, Any]) -> None:
    """Also behind a tool that is left out, which both APIs say in the same words."""
    header = send(path, {"tools": [left_out, TOOLS[path]]}, TOOL_TEMPLATE).headers[WARNING]

    assert "tools that this server does not run are left out: web_search" in header
    assert "tools[1].properties.a: uniqueItems" in header


def test_the_schema_of_a_response_is_named_as_it_was_sent() -> None:
    """`text.format`, not the field of the chat request that it becomes."""
    named = {"type": "json_schema", "name": "x", "schema": LIST_SCHEMA}

    header = send(RESPONSES, {"text": {"format": named}}).headers[WARNING]
    refused = send(RESPONSES, {"text": {"format": named | {"strict": True}}})

    assert header.startswith("text.format.schema.properties.a")
    assert message_and_param(refused)[1].startswith("text.format.schema.properties.a")


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "messages"), (COMPLETIONS, "prompt"), (RESPONSES, "input")],
)
def test_a_prompt_that_is_too_long_is_named_as_it_was_sent(path: str, field: str) -> None:
    """By the field that the client can shorten."""
    text = "Q z " * 1500
    value: object = [{"role": "user", "content": text}] if field == "messages" else text

    error = send(path, {field: value}).json["error"]

    assert (error["code"], error["param"]) == ("context_length_exceeded", field)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_type_of_thinking_that_is_unknown_is_told(path: str) -> None:
    """It is ignored; the warning has the types."""
    header = send(path, {"thinking": {"type": "deep"}}).headers[WARNING]

    assert "'deep'" in header
    assert "adaptive" in header


def test_structured_outputs_name_a_format() -> None:
    """A misspelt name would leave the answer free."""
    answer = send(CHAT, {"structured_outputs": {"regexp": "a+"}})

    message, param = message_and_param(answer)
    assert (answer.status, param) == (400, "structured_outputs")
    assert "regex" in message


def test_a_call_in_its_older_form_is_in_the_prompt() -> None:
    """`function_call` of an assistant's message renders as the same `tool_calls` do."""
    call = {"name": "f", "arguments": '{"a": 1}'}
    prompts = []
    for form in ({"function_call": call}, {"tool_calls": [{"function": call}]}):
        message = {"role": "assistant", "content": None} | form
        body = {"messages": [*BODIES[CHAT]["messages"], message]}
        prompts.append(ask("/tokenize", body, chat_template=TOOL_TEMPLATE).json["tokens"])

    assert prompts[0] == prompts[1]
    assert len(prompts[0]) > len(ask("/tokenize", BODIES["/tokenize"]).json["tokens"]) + 2


def test_a_refusal_is_in_the_prompt_beside_the_content_or_within() -> None:
    """`refusal` of an assistant's message renders as a part of type `refusal` does."""
    parts = [{"type": "text", "text": "Yes"}, {"type": "refusal", "refusal": "I cannot"}]
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"content": None, "refusal": "I cannot"}, {"content": parts[1:]}),
        ({"content": "Yes", "refusal": "I cannot"}, {"content": parts}),
    ]
    for beside, within in forms:
        prompts = [
            ask("/tokenize", {"messages": [{"role": "assistant"} | form]}).json["tokens"]
            for form in (beside, within)
        ]
        assert prompts[0] == prompts[1]


def test_only_an_assistant_refuses() -> None:
    """The field in a message of the user does not enter the prompt."""
    plain, extended = (
        ask("/tokenize", {"messages": [{"role": "user", "content": "Yes"} | extra]}).json["tokens"]
        for extra in ({}, {"refusal": "I cannot"})
    )

    assert plain == extended


def test_nothing_cannot_be_compacted() -> None:
    """400: the model would summarise an empty conversation."""
    answer = send("/v1/responses/compact", {"input": None})

    assert message_and_param(answer)[1] == "input"
    assert answer.status == 400


def test_allowed_tools_that_are_not_served_are_told() -> None:
    """They are left out; the others can be called."""
    allowed = [{"type": "function", "name": "f"}, {"type": "function", "name": "gone"}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}

    answer = send(RESPONSES, {"tools": [TOOLS[RESPONSES]], "tool_choice": choice}, TOOL_TEMPLATE)

    assert answer.status == 200, json.dumps(answer.json)
    assert "tool_choice.tools: not served: function 'gone'" in answer.headers[WARNING]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_a_negative_top_k_is_refused(path: str) -> None:
    """Except -1, which is off as 0 is."""
    assert send(path, {"top_k": -1}).status == 200
    assert message_and_param(send(path, {"top_k": -2}))[1] == "top_k"


def test_an_image_in_the_output_of_a_call_is_named_as_it_was_sent() -> None:
    """`output`, not the content of the message that it becomes."""
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
    output = [{"type": "input_image", "image_url": "data:,"}]
    items = [call, {"type": "function_call_output", "call_id": "c", "output": output}]

    answer = send(RESPONSES, {"input": [{"role": "user", "content": "Hi"}, *items]}, TOOL_TEMPLATE)

    assert answer.status == 200, answer.body
    assert "input[2].output[0]" in answer.headers[WARNING]


@pytest.mark.parametrize("depth", [65, 990, 5000])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_arguments_in_the_history_are_nested_within_the_limit(path: str, depth: int) -> None:
    """They are JSON in a string, which the limits of the body do not see."""
    arguments = "[" * depth + "]" * depth
    call: dict[str, Any] = {"name": "f", "arguments": arguments}
    if path == CHAT:
        message = {"role": "assistant", "tool_calls": [{"id": "c", "function": call}]}
        fields = {"messages": [*BODIES[CHAT]["messages"], message]}
    else:
        fields = {"input": [{"role": "user", "content": "Hi"}, {"type": "function_call"} | call]}

    answer = send(path, fields, TOOL_TEMPLATE)

    assert answer.status == 400, answer.body
    assert "64 levels" in message_and_param(answer)[0]


@pytest.mark.parametrize(
    ("field", "value", "param", "reason"),
    [
        ("guided_grammar", "root ::= " + '"a" ' * 9000 + "(", "guided_grammar", "Expected ')'"),
        ("guided_regex", "(" * 200 + "a" * 9000, "guided_regex", "unclosed group"),
        (
            "response_format",
            {
                "type": "json_schema",
                "json_schema": {
                    "name": "n",
                    "strict": True,
                    "schema": {"type": "string", "pattern": "(a" * 9000},
                },
            },
            "response_format.json_schema.schema.pattern",
            "cannot be enforced; leave it out",
        ),
        ("bad_words", ["xy " * 1000] * 100, "bad_words", "262144"),
    ],
)
def test_a_long_value_does_not_hide_the_reason(
    field: str, value: object, param: str, reason: str
) -> None:
    """The message is cut in the value, not behind it."""
    answer = send(CHAT, {field: value})

    message, named = message_and_param(answer)
    assert (answer.status, named) == (400, param)
    assert reason in message


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}, "name": "a"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"tools": [TOOLS[CHAT]], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"guided_regex": "a+"}, "guided_regex"),
        (CHAT, {"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        (COMPLETIONS, {"guided_json": {"type": "object"}}, "guided_json"),
        (RESPONSES, {"text": {"format": SCHEMA}}, "text.format"),
        (RESPONSES, {"tools": [TOOLS[RESPONSES]], "tool_choice": "required"}, "tool_choice"),
        (MESSAGES, {"tools": [TOOLS[MESSAGES]], "tool_choice": {"type": "any"}}, "tool_choice"),
        (MESSAGES, {"output_config": {"format": SCHEMA}}, "output_config.format"),
        (OLLAMA, {"format": "json"}, "format"),
        ("/api/generate", {"format": "json", "raw": True}, "format"),
    ],
)
def test_a_format_without_its_library_names_field_and_package(
    path: str, fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400: the field that the client sent, and what to install on the server."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    body = BODIES.get(path, {"model": "tiny", "prompt": "Hi", "stream": False})

    answer = ask(path, body | fields, chat_template=TOOL_TEMPLATE)

    message, named = message_and_param(answer)
    assert (answer.status, named) == (400, param)
    assert message.endswith(
        "it cannot be enforced: llguidance is not installed: pip install 'ramify[structured]'"
    )


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (CHAT, {"guided_regex": "[a-"}, 'guided_regex: "[a-" cannot be enforced: at '),
        (COMPLETIONS, {"guided_regex": "[a-"}, 'guided_regex: "[a-" cannot be enforced: at '),
        (CHAT, {"guided_choice": []}, "guided_choice: it must be a list of texts, not empty"),
        (CHAT, {"regex": ""}, "regex: it must be a text, not empty"),
    ],
)
def test_a_format_that_is_wrong_is_named_as_it_was_sent(
    path: str, fields: dict[str, Any], message: str
) -> None:
    """The error has the client's own field, not that of the engine."""
    pytest.importorskip("llguidance", reason="llguidance is missing: the extra 'structured'")

    answer = send(path, fields)

    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(message)
    assert answer.json["error"]["param"] == next(iter(fields))
