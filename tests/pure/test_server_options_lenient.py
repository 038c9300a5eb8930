"""What lenient clients send: integral floats, null, odd bodies; and no combination is a 500."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.server.http.request_body import decode_body
from ramify.server.openai.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from tests.budget import examples
from tests.pure.server_bench import ask, chat

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


LENIENT: list[dict[str, Any]] = [
    {"max_tokens": 2.0},
    {"max_tokens": None},
    {"max_tokens": -1, "stop": ["e", "a", "t", "i"]},
    {"n": 2.0, "top_k": -1.0, "seed": 3.00},
    {"stop": []},
    {"stop": None},
    {"tools": []},
    {"tools": [], "tool_choice": "none"},
    {"tool_choice": "none"},
    {"tool_choice": "auto"},
    {"logprobs": 0},
    {"logprobs": False, "top_logprobs": 0},
    {"logit_bias": {}},
    {"stream_options": None},
    {"response_format": None},
    {"metadata": {"a": "b"}, "store": True, "prediction": {"type": "content", "content": "x"}},
]


@pytest.mark.parametrize("fields", LENIENT)
def test_what_other_servers_accept_is_accepted(fields: dict[str, Any]) -> None:
    """Integral floats, null, empty lists, and fields of OpenAI's that change nothing."""
    answer = ask(CHAT, chat("Hi") | fields)

    assert answer.status == 200, answer.body
    assert "x-ramify-warning" not in answer.headers


@pytest.mark.parametrize(
    "fields", [{"max_tokens": "2"}, {"temperature": "0.5"}, {"max_tokens": 2.5}, {"stream": "true"}]
)
def test_numbers_in_strings_and_fractions_are_refused(fields: dict[str, Any]) -> None:
    """As OpenAI does; the error names the field."""
    answer = ask(CHAT, chat("Hi") | fields)

    assert answer.status == 400
    assert answer.json["error"]["param"] in fields


def test_a_byte_order_mark_is_skipped() -> None:
    """Some clients on Windows begin the body with one; the unknown fields are found all the same."""
    answer = ask(CHAT, b"\xef\xbb\xbf" + json.dumps(chat("Hi", frobnicate=1)).encode())

    assert answer.status == 200
    assert "frobnicate" in answer.headers["x-ramify-warning"]


def test_an_unknown_role_is_refused_with_the_list() -> None:
    """The message has every role that is served."""
    answer = ask(CHAT, {"messages": [{"role": "bot", "content": "x"}]})

    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "messages[0].role")
    for role in ("system", "developer", "user", "assistant", "tool"):
        assert json.dumps(role) in error["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: 3 is not possible; it must be between 0 and 2"),
        ({"n": 0}, "n: 0 is not possible; it must be between 1 and 128"),
        ({"max_tokens": -2}, "max_tokens: -2 is not possible; it must be at least -1"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty: 0 is not possible; it must be more than 0 and at most 10",
        ),
        ({"messages": []}, "messages: it is empty; it must have at least 1 item"),
        ({"messages": None}, "messages: null is not possible; it must be an array"),
        ({"stop": 5}, "stop: 5 is not possible; it must be a string, an array or null"),
        ({"stop": ""}, "stop: it is empty; it must have at least 1 character"),
        (
            {"session_id": "a" * 257},
            "session_id: it has 257 characters; it must have at most 256 chara",
        ),
        ({"seed": 2**70}, f"seed: {2**70} is not possible; it must be at most {2**63 - 1}"),
        ({"temperature": "9" * 200}, f'temperature: "{"9" * 97}...", of 200 characters, is not '),
        (
            {"logit_bias": {"5": 101}},
            "logit_bias[...]: this value is not possible; it must be betw",
        ),
        ({"stream": {}}, "stream: an object is not possible; it must be true, false or null"),
        (
            {"tool_choice": "maybe"},
            'tool_choice: "maybe" is not possible; it must be "auto", "none" or "required"',
        ),
        ({"messages": [{}]}, "messages[0].role: it is missing"),
    ],
)
def test_what_does_not_fit_is_named_with_its_value_and_the_limit(
    fields: dict[str, Any], message: str
) -> None:
    """Field, value and what is possible, in the words of JSON; the field is in `param` too."""
    answer = ask(CHAT, chat("Hi") | fields)

    error = answer.json["error"]
    assert answer.status == 400
    assert error["message"].startswith(message)
    assert error["message"].startswith(f"{error['param']}: ")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b" \n", "the body is empty; send a JSON object"),
        (b'{"messages": [', "the body is not JSON: it ends too early"),
        (b'{"user": "\xff"}', "the body is not JSON: its text is not UTF-8"),
        (b"[]", "the body is an array, which is not possible; it must be an object"),
    ],
)
def test_a_body_that_is_no_object_is_refused_in_plain_words(body: bytes, reason: str) -> None:
    """What is wrong with it, without Python's words."""
    answer = ask(CHAT, body)

    assert answer.status == 400
    assert answer.json["error"]["message"].startswith(reason)


def test_a_fault_in_a_name_that_stands_twice_is_refused() -> None:
    """The fault may be in a value that the last one hides."""
    answer = ask(CHAT, b'{"messages": [{"role": "user"}, 5], "messages": []}')

    assert (answer.status, answer.json["error"]["param"]) == (400, "messages[1]")


NULLABLE = [
    (kind, info.encode_name)
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest)
    for info in msgspec.structs.fields(kind)
    if not info.required
]


@pytest.mark.parametrize(("kind", "name"), NULLABLE)
def test_every_option_may_be_null(kind: type, name: str) -> None:
    """Clients write null for an option that is not set."""
    required = {"messages": [{"role": "user", "content": "x"}], "prompt": "x"}

    decode_body(json.dumps(required | {name: None}).encode(), kind)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "bad_words",
                "truncate_prompt_tokens",
                "prompt_logprobs",
                "echo",
                "stop",
                "max_tokens",
                "allowed_token_ids",
                "logprobs",
                "n",
                "min_tokens",
                "return_token_ids",
                "functions",
                "best_of",
            ]
        ),
        st.sampled_from(
            [
                None,
                True,
                False,
                0,
                1,
                -1,
                2.0,
                0.5,
                3,
                "",
                "a",
                [],
                ["a"],
                ["\ud800"],
                [5],
                [-1],
                {},
                10**30,
            ]
        ),
        max_size=5,
    ),
    st.booleans(),
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize"]),
)
def test_no_combination_of_options_is_a_server_error(
    fields: dict[str, Any], stream: bool, path: str
) -> None:
    """200 or 4xx; a stream has no error of the server."""
    body = (
        ({"prompt": "Hi", "max_tokens": 12} if path == COMPLETIONS else chat("Hi"))
        | fields
        | {"stream": stream}
    )

    answer = ask(path, body)

    assert answer.status == 200 or 400 <= answer.status < 500, (fields, answer.body)
    if answer.status == 200 and stream and path != "/tokenize":
        errors = [event["error"] for event in answer.events if "error" in event]
        assert not [error for error in errors if error["type"] == "server_error"], errors
