"""Request bodies of each API as segments: paths, texts, labels and breakpoints."""

from ramify.analysis.formats.bodies import parse_bodies
from ramify.analysis.formats.body_fields import BodyFields
from ramify.analysis.records import TextForm


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
    one = parse_bodies({"model": "m", "prompt": [1, 2]})

    assert [fields.segments[-1].text for fields in of_texts] == ["a", "b"]
    assert [fields.segments[-1].text for fields in of_ids] == ["1 2", "3"]
    assert [(item.form, item.path) for item in one[0].segments][-1] == (TextForm.TOKENS, "prompt")
