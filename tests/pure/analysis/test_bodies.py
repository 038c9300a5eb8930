"""Request bodies of each API as segments: paths, texts, labels and breakpoints."""

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.analysis.readers.bodies.batches import BATCHES
from ramify.analysis.readers.bodies.body_fields import BodyFields
from ramify.analysis.readers.bodies.request_bodies import parse_bodies
from ramify.analysis.readers.bodies.wrapped_bodies import BODIES
from ramify.analysis.records import TextForm
from tests.pure.analysis.log_rows import mutate, read_rows


def paths(fields: BodyFields) -> list[str]:
    return [segment.path for segment in fields.segments]


def texts(fields: BodyFields) -> dict[str, str]:
    return {segment.path: segment.text for segment in fields.segments}


def test_chat_has_settings_then_tools_then_messages() -> None:
    """The model comes first, the other settings by name, tools before the messages as sent."""
    body = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "é"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
        "model": "gpt-5.6",
        "temperature": 0.5,
        "reasoning_effort": "low",
        "prompt_cache_key": "k",
    }

    (fields,) = parse_bodies(body)

    assert paths(fields) == [
        "settings.model",
        "settings.reasoning_effort",
        "settings.tool_choice",
        "tools[0]",
        "messages[0]",
        "messages[1].content[0]",
        "messages[2].tool_calls[0]",
        "messages[3]",
    ]
    assert fields.api == "openai-chat"
    assert fields.cache_key == "k"
    assert fields.segments[-1].label == "tool c1"
    assert texts(fields)["tools[0]"] == (
        '{"type":"function","function":{"name":"f","parameters":{}}}'
    )


def test_anthropic_breakpoints_are_on_the_segments_that_they_end() -> None:
    """`cache_control` never shows in a text, and asks for five minutes or an hour."""
    body = {
        "model": "claude-opus-5",
        "max_tokens": 9,
        "system": [
            {"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        ],
        "tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Q"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "tool_use", "id": "u1", "name": "t", "input": {"b": 1, "a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "u1", "content": "R"}],
            },
        ],
        "cache_control": {"type": "ephemeral"},
    }

    (fields,) = parse_bodies(body)

    assert fields.api == "anthropic-messages"
    assert {s.path: s.breakpoint_ttl_s for s in fields.segments if s.breakpoint_ttl_s} == {
        "tools[0]": 300.0,
        "system[0]": 3600.0,
        "messages[2].content[0]": 300.0,
    }
    assert texts(fields)["tools[0]"] == '{"name":"t","input_schema":{}}'
    assert texts(fields)["messages[1].content[0]"] == "hm"
    assert texts(fields)["messages[1].content[1]"].endswith('"input":{"b":1,"a":2}}')
    assert texts(fields)["messages[2].content[0]"] == "R"


def test_responses_without_their_history_are_not_full() -> None:
    """`instructions` is `system`, `input[i]` is `messages[i]`; stored history is missing text."""
    body = {
        "model": "gpt-6-sol",
        "instructions": "I",
        "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "T"}]},
            {"type": "function_call_output", "call_id": "c", "output": "O"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        ],
    }

    (fields,) = parse_bodies(body)

    assert paths(fields) == [
        "settings.model",
        "system",
        "messages[0].content[0]",
        "messages[1]",
        "messages[2]",
    ]
    assert texts(fields)["messages[1]"] == "O"
    assert fields.history_id == "resp_1"
    assert not fields.has_full_text


def test_a_list_of_prompts_is_several_requests() -> None:
    """Each prompt of a completion is a request: texts and token ids."""
    of_texts = parse_bodies({"model": "m", "prompt": ["a", "b"]})
    of_ids = parse_bodies({"model": "m", "prompt": [[1, 2], [3]]})
    bare = parse_bodies({"model": "m", "prompt": [1, 2]})

    assert [fields.segments[-1].text for fields in of_texts] == ["a", "b"]
    assert [fields.segments[-1].text for fields in of_ids] == ["1 2", "3"]
    assert [(item.form, item.path) for item in bare[0].segments][-1] == (
        TextForm.TOKENS,
        "prompt",
    )


def test_blocks_of_anthropic_in_every_kind() -> None:
    """Images and files are digests, documents of text are text, lists of results are JSON."""
    data = "aGk="
    digest = sha256(data.encode()).hexdigest()
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
        "cache_control": {"type": "ephemeral"},
    }
    inner = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    content = [
        image,
        {"type": "document", "source": {"type": "text", "data": "D"}, "title": "T"},
        {"type": "document", "source": {"type": "url", "url": "https://a/b.pdf"}},
        {"type": "tool_result", "tool_use_id": "u", "content": [inner]},
        {"type": "redacted_thinking", "data": "zz"},
    ]
    body = {
        "model": "claude-opus-5",
        "max_tokens": 1,
        "system": "S",
        "messages": [
            {"role": "user", "content": content},
            {"role": "system", "content": "be quick"},
            {"role": "system", "content": [], "output_config": {"effort": "low"}},
        ],
    }

    (fields,) = parse_bodies(body, betas="context-1m")

    segments = {item.path: item for item in fields.segments}
    assert segments["settings.betas"].text == "context-1m"
    assert segments["messages[0].content[0]"].text == f"image sha256:{digest}"
    assert segments["messages[0].content[0]"].form is TextForm.MEDIA
    assert segments["messages[0].content[0]"].breakpoint_ttl_s == 300.0
    assert segments["messages[0].content[1]"].text == "D"
    assert segments["messages[0].content[2]"].form is TextForm.MEDIA
    assert segments["messages[0].content[3]"].breakpoint_ttl_s == 3600.0
    assert "cache_control" not in segments["messages[0].content[3]"].text
    assert segments["messages[0].content[4]"].form is TextForm.JSON
    assert (segments["messages[1]"].text, segments["messages[1]"].label) == ("be quick", "system")
    assert segments["messages[2]"].text == '{"content":[],"output_config":{"effort":"low"}}'


def test_the_same_image_sent_twice_has_the_same_digest_in_every_api() -> None:
    """Chat nests the URL, Responses does not; `detail` is a part of the prompt."""
    url = "data:image/png;base64,aGk="

    def text_of(block: dict[str, Any], name: str) -> str:
        body = {"model": "m", name: [{"role": "user", "content": [block]}]}
        return parse_bodies(body)[0].segments[-1].text

    chat = text_of({"type": "image_url", "image_url": {"url": url}}, "messages")
    low = text_of({"type": "image_url", "image_url": {"url": url, "detail": "low"}}, "messages")
    responses = text_of({"type": "input_image", "image_url": url}, "input")

    assert chat.partition(" ")[2] == responses.partition(" ")[2]
    assert low == f"{chat} detail=low"


def test_blocks_of_converse() -> None:
    """Bedrock's cache points mark the block before them and are no segments."""
    body = {
        "modelId": "anthropic.claude-opus-5",
        "system": [{"text": "S"}, {"cachePoint": {"type": "default"}}],
        "messages": [{"role": "user", "content": [{"text": "Q"}]}],
        "toolConfig": {"tools": [{"toolSpec": {"name": "t"}}, {"cachePoint": {"type": "default"}}]},
    }

    (fields,) = parse_bodies(body, url_path="/model/x/converse")

    assert [(item.path, item.text, item.breakpoint_ttl_s) for item in fields.segments] == [
        ("tools[0]", '{"toolSpec":{"name":"t"}}', 300.0),
        ("system[0]", "S", 300.0),
        ("messages[0].content[0]", "Q", None),
    ]


def test_bodies_and_streams_of_gemini() -> None:
    """`parts[j]` is `content[j]`, functions are tools, and the URL names the model."""
    body = {
        "systemInstruction": {"parts": [{"text": "S"}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Q"}, {"inlineData": {"data": "aGk="}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {}}}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}],
    }
    events = [
        {"candidates": [{"content": {"parts": [{"text": text}]}}], "usageMetadata": counts}
        for text, counts in (
            ("a", {}),
            ("b", {"promptTokenCount": 9, "cachedContentTokenCount": 4}),
        )
    ]
    url = (
        "https://generativelanguage.googleapis.com/v1beta/models/gemini-3-pro:streamGenerateContent"
    )
    row = {"request": {"url": url, "body": body}, "response": events}

    (request,), _ = read_rows(BODIES, [row])

    assert [(item.path, item.text) for item in request.segments[:4]] == [
        ("settings.model", "gemini-3-pro"),
        ("tools[0]", '{"name":"f"}'),
        ("tools[1]", '{"name":"g"}'),
        ("system[0]", "S"),
    ]
    assert [item.path for item in request.segments[4:]] == [
        "messages[0].content[0]",
        "messages[0].content[1]",
        "messages[1].content[0]",
    ]
    assert request.segments[5].form is TextForm.MEDIA
    assert [(item.path, item.text) for item in request.output] == [("messages[2].content[0]", "ab")]
    assert (request.provider, request.usage.num_input, request.usage.num_read) == ("gemini", 9, 4)


def test_reasoning_and_functions_of_chat() -> None:
    """Reasoning stands before the content as templates render it; old functions are tools."""
    body = {
        "model": "deepseek-chat",
        "functions": [{"name": "f"}],
        "messages": [
            {"role": "assistant", "content": "a", "reasoning_content": "r"},
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            {"role": "assistant", "content": None},
        ],
    }

    (fields,) = parse_bodies(body)

    assert paths(fields)[1:] == [
        "functions[0]",
        "messages[0].reasoning_content",
        "messages[0]",
        "messages[1].function_call",
        "messages[2]",
    ]


def test_a_stored_template_is_kept_as_its_reference() -> None:
    """`prompt.id` with variables hides text: the reference is compared, and the text not full."""
    body = {"model": "gpt-5.6", "prompt": {"id": "pmpt_1", "variables": {"a": 1}}, "input": "q"}

    (fields,) = parse_bodies(body)

    assert texts(fields)["prompt"] == '{"id":"pmpt_1","variables":{"a":1}}'
    assert not fields.has_full_text
    assert fields.note == "prompt template is stored at the vendor"


@pytest.mark.parametrize(
    "user",
    [
        "user_ab_account__session_0f3b1c22-1111-2222-3333-444455556666",
        '{"device_id": "d", "session_id": "0f3b1c22-1111-2222-3333-444455556666"}',
    ],
)
def test_coding_agents_name_the_conversation_in_the_user(user: str) -> None:
    """`metadata.user_id` ends with the session, or is JSON with it."""
    body = {"model": "claude", "max_tokens": 1, "messages": [], "metadata": {"user_id": user}}

    assert parse_bodies(body)[0].conversation == "0f3b1c22-1111-2222-3333-444455556666"


ASKED = [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("body", "response", "provider"),
    [
        ({"model": "claude-x", "messages": ASKED}, {"type": "message"}, "anthropic"),
        ({"model": "m", "messages": ASKED}, {"usage": {"prompt_cache_hit_tokens": 1}}, "deepseek"),
        ({"model": "gpt-5", "messages": ASKED}, {}, "openai"),
        ({"model": "openrouter/deepseek-v4", "messages": ASKED}, {}, "deepseek"),
        ({"model": "my-own", "messages": ASKED}, {}, None),
        ({"model": "my-own", "input": "x"}, {}, "openai"),
    ],
)
def test_providers_are_recognised(
    body: dict[str, Any], response: dict[str, Any], provider: str | None
) -> None:
    """By the response's shape and counters, by the API, by the model's name at last."""
    requests, _ = read_rows(BODIES, [{"request": body, "response": response}])

    assert [request.provider for request in requests] == [provider]


@pytest.mark.parametrize(
    "body",
    [
        {"model": "text-embedding-3-small", "input": "x"},
        {"url": "/v1/embeddings", "body": {"model": "m", "input": ["x"]}},
        {"url": "/v1/messages/count_tokens", "body": {"model": "claude", "messages": []}},
    ],
)
def test_other_calls_are_no_requests(body: dict[str, Any]) -> None:
    """Embeddings and counts of tokens are skipped."""
    requests, quality = read_rows(BODIES, [{"request": body}])

    assert requests == []
    assert quality.skipped["no LLM request"] == 1


ROWS: list[dict[str, Any]] = [
    {
        "request": {
            "model": "gpt-4o",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
                {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
        "response": {"id": "r", "choices": [{"message": {"role": "assistant", "content": "b"}}]},
        "timestamp": "2026-01-01T00:00:00Z",
    },
    {
        "model": "claude-opus-5",
        "max_tokens": 1,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": []}]}],
        "response": {
            "type": "message",
            "usage": {"input_tokens": 1},
            "content": [{"type": "text"}],
        },
    },
    {
        "request": {"model": "m", "input": [{"role": "user", "content": "q"}], "instructions": "i"},
        "response": {"id": "resp_1", "output": [{"type": "message", "role": "a"}]},
    },
    {"model": "m", "prompt": [[1, 2], [3]]},
    {"contents": [{"role": "user", "parts": [{"text": "Q"}]}], "tools": [{}], "response": [{}]},
]


@given(data=st.data())
def test_mutated_bodies_are_read_or_bad(data: st.DataObject) -> None:
    """Any part replaced, dropped or doubled: requests or a bad row, nothing else."""
    rows = [mutate(data, mutate(data, row)) for row in ROWS]

    requests, quality = read_rows(BODIES, rows)

    bad = {line for _, line in quality.bad_lines}
    assert not bad.intersection(request.line for request in requests)
    assert all(segment.path for request in requests for segment in request.segments)


@given(data=st.data())
def test_mutated_batches_are_read_or_bad(data: st.DataObject) -> None:
    """Entries and results of any shape."""
    body = ROWS[0]["request"]
    rows = [
        {"custom_id": "a", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "a", "response": {"status_code": 200, "body": ROWS[0]["response"]}},
        {"custom_id": "b", "params": ROWS[1]},
        {"custom_id": "b", "result": {"type": "succeeded", "message": {"usage": {}}}},
    ]

    requests, quality = read_rows(BATCHES, [mutate(data, row) for row in rows])

    assert len(requests) + len(quality.bad_lines) <= 4
