"""Tools without parameters, and response formats in the spellings that clients use."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ramify.engine.text.chat_template import NO_PARAMETERS, with_parameters
from ramify.server.openai.answer_formats import answer_format
from ramify.server.openai.protocol import ChatRequest, ResponseFormat
from tests.pure.server_bench import Answer, ServerBench, ask, run, tokenizer_with

pytest.importorskip("starlette")

# As the templates of Qwen3-Coder, gpt-oss, Command R and others, it reads the parameters.
READS_PARAMETERS = """
{%- for tool in tools or [] -%}
{{- tool.function.name + (tool.function.parameters.properties | tojson) -}}
{{- tool.function.parameters | tojson -}}
{%- endfor -%}
{%- for message in messages -%}{{- '<|' + message.role + '|>' + message.content + '<|end|>' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""
USER = {"role": "user", "content": "a"}
WITHOUT: list[dict[str, Any]] = [{}, {"parameters": None}]


def bodies(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A request with a tool, in each API and for each endpoint that renders a prompt."""
    function = {"name": "f"} | fields
    chat = {"messages": [USER], "tools": [{"type": "function", "function": function}]}
    renamed = {"input_schema": None} if fields else {}
    claude = {"model": "tiny", "messages": [USER], "tools": [{"name": "f"} | renamed]}
    return {
        "/v1/chat/completions": {"max_tokens": 2} | chat,
        "/v1/responses": {
            "max_output_tokens": 2,
            "input": "a",
            "tools": [{"type": "function"} | function],
        },
        "/v1/messages": {"max_tokens": 2} | claude,
        "/v1/messages/count_tokens": claude,
        "/tokenize": chat,
        "/v1/cache/explain": chat,
    }


@pytest.mark.parametrize("fields", WITHOUT)
def test_a_tool_without_parameters_has_none(fields: dict[str, Any]) -> None:
    """Missing or null, in all three APIs: the prompt has the tool, and it is one prompt."""

    async def main() -> None:
        async with ServerBench(chat_template=READS_PARAMETERS).running() as bench:
            for path, body in bodies(fields).items():
                answer = await bench.post(path, body)

                assert answer.status == 200, (path, answer.body)
            prompts = {generation.request.prompt.text for generation in bench.ended}
            paths = {
                segment.path
                for generation in bench.ended
                for segment in generation.request.prompt.segments
            }

        [prompt] = prompts
        assert prompt.startswith('f{}{"type": "object", "properties": {}')
        assert "tools[0]" in paths

    run(main())


def test_the_engine_renders_a_tool_without_parameters() -> None:
    """`LLM.chat` and sessions render tools as they are given."""
    tokenizer = tokenizer_with(READS_PARAMETERS)
    tool = {"type": "function", "function": {"name": "f", "parameters": None}}

    text = tokenizer.apply_chat_template([USER], tools=[tool])

    assert text.startswith('f{}{"type": "object", "properties": {}')


def test_parameters_that_are_given_stay() -> None:
    """Also those that allow everything."""
    assert with_parameters({"name": "f", "parameters": {}})["parameters"] == {}
    assert with_parameters({"name": "f"})["parameters"] == NO_PARAMETERS


def test_a_call_of_it_has_no_arguments() -> None:
    """The grammar of a forced call allows the empty object only."""
    pytest.importorskip("llguidance")
    answer = ask(
        "/v1/chat/completions",
        bodies({})["/v1/chat/completions"] | {"max_tokens": 200, "tool_choice": "required"},
        chat_template=READS_PARAMETERS,
    )

    assert answer.status == 200, answer.body
    calls = answer.json["choices"][0]["message"]["tool_calls"]
    assert all(json.loads(call["function"]["arguments"]) == {} for call in calls[:-1])


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
SPELLINGS: dict[str, dict[str, Any]] = {
    "nested": {"json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    "beside the type": {"name": "n", "schema": SCHEMA, "strict": True},
    "only the schema": {"schema": SCHEMA},
    "the schema itself": {"json_schema": SCHEMA},
    "beside its name": {"schema": SCHEMA, "json_schema": {"name": "n", "strict": True}},
}


@pytest.mark.parametrize("fields", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_a_schema_may_stand_in_three_places(fields: dict[str, Any]) -> None:
    """Of chat completions and completions; all are the same format."""
    response_format = ResponseFormat("json_schema", **fields)
    request = ChatRequest(messages=[], response_format=response_format)
    plain = ChatRequest(messages=[], json_schema=SCHEMA)

    assert answer_format(request, [])[0] == answer_format(plain, [])[0]


@pytest.mark.parametrize("fields", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_text_format_has_the_same_spellings(fields: dict[str, Any]) -> None:
    """The Responses API serves each, and shows it as its own."""
    body = {
        "input": "a",
        "max_output_tokens": 2,
        "text": {"format": {"type": "json_schema"} | fields},
    }

    answer: Answer = ask("/v1/responses", body)

    assert answer.status == 200, answer.body
    assert answer.json["text"]["format"]["schema"] == SCHEMA


def test_a_missing_schema_is_named() -> None:
    """By its path in each API."""
    form = {"type": "json_schema"}
    chat = {"messages": [USER], "response_format": form}
    for path, body, param in (
        ("/v1/chat/completions", chat, "response_format.json_schema"),
        ("/v1/responses", {"input": "a", "text": {"format": form}}, "text.format.json_schema"),
    ):
        answer = ask(path, body)

        assert (answer.status, answer.json["error"]["param"]) == (400, param)
