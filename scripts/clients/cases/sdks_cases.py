"""OpenAI's and Anthropic's own SDKs: answers, streams, tools, structured output, errors."""

from __future__ import annotations

import json

import anthropic
import openai
import pydantic
from report import KEY, MODEL, SCRIPTED_URL, URL, case

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
scripted = openai.OpenAI(base_url=f"{SCRIPTED_URL}/v1", api_key=KEY, max_retries=0)
claude = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
scripted_claude = anthropic.Anthropic(base_url=SCRIPTED_URL, api_key=KEY, max_retries=0)
HELLO = [{"role": "user", "content": "Who has lamps?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLAUDE_TOOL = {"name": "weather", "input_schema": PARAMETERS}


class Place(pydantic.BaseModel):
    """A nested schema for structured output."""

    class Position(pydantic.BaseModel):
        """Where a place is."""

        latitude: float
        names: list[str]

    city: str
    position: Position


@case("openai: models, chat, stream with usage, logprobs, n")
def _() -> str:
    assert client.models.list().data[0].id == MODEL
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, n=2, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs.content
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=8, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[-1].usage.total_tokens == (
        chunks[-1].usage.prompt_tokens + chunks[-1].usage.completion_tokens
    )
    return f"{len(chunks)} chunks"


@case("openai: tool call, streamed and whole, and the turn after it")
def _() -> str:
    message = scripted.chat.completions.create(model=MODEL, messages=HELLO, tools=[TOOL]).choices[0]
    assert message.finish_reason == "tool_calls", message
    call = message.message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    with scripted.chat.completions.stream(model=MODEL, messages=HELLO, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    streamed = final.choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    after = scripted.chat.completions.create(
        model=MODEL, tools=[TOOL],
        messages=[*HELLO, message.message.model_dump(exclude_none=True),
                  {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}],
    )  # fmt: skip
    assert "22 degrees" in after.choices[0].message.content
    return after.choices[0].message.content


@case("openai: parse() of a nested schema; required and named tool choice")
def _() -> str:
    parsed = scripted.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Place)
    assert parsed.choices[0].message.parsed.position.names
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = scripted.chat.completions.create(
            model=MODEL, messages=HELLO, tools=[TOOL], tool_choice=choice, max_tokens=200
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    return str(parsed.choices[0].message.parsed)


@case("openai: responses, streamed, continued, parsed; function call output")
def _() -> str:
    first = client.responses.create(model=MODEL, input="Who?", max_output_tokens=8)
    client.responses.create(
        model=MODEL, input="And?", previous_response_id=first.id, max_output_tokens=8
    )
    tool = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    with scripted.responses.stream(model=MODEL, input="Weather?", tools=[tool]) as stream:
        response = stream.get_final_response()
    call = response.output[-1]
    assert call.type == "function_call", response.output
    after = scripted.responses.create(
        model=MODEL, previous_response_id=response.id, tools=[tool],
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}],
    )  # fmt: skip
    assert "22 degrees" in after.output_text, after.output_text
    assert scripted.responses.parse(model=MODEL, input="Where?", text_format=Place).output_parsed
    return after.output_text


@case("openai: errors are of the SDK's types")
def _() -> str:
    try:
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a b " * 40_000}]
        )
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error
        assert "maximum context length" in str(error), error
    else:
        raise AssertionError("a prompt that is too long was answered")
    try:
        client.chat.completions.create(model="another", messages=HELLO)
    except openai.NotFoundError as error:
        return str(error)
    raise AssertionError("an unknown model was answered")


@case("anthropic: message, stream, count_tokens, cache_control")
def _() -> str:
    block = {"type": "text", "text": "Mara has 4 lamps. " * 40,
             "cache_control": {"type": "ephemeral"}}  # fmt: skip
    for _attempt in range(2):
        message = claude.messages.create(model=MODEL, max_tokens=8, system=[block], messages=HELLO)
    assert message.usage.cache_read_input_tokens > 0
    assert claude.messages.count_tokens(model=MODEL, system=[block], messages=HELLO).input_tokens
    with claude.messages.stream(model=MODEL, max_tokens=8, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        assert text == stream.get_final_text()
    return f"read {message.usage.cache_read_input_tokens}"


@case("anthropic: tool use, streamed and whole, and its result; models")
def _() -> str:
    message = scripted_claude.messages.create(
        model=MODEL, max_tokens=300, messages=HELLO, tools=[CLAUDE_TOOL]
    )
    use = message.content[-1]
    assert message.stop_reason == "tool_use"
    assert use.input == {"city": "Rome"}
    with scripted_claude.messages.stream(
        model=MODEL, max_tokens=300, messages=HELLO, tools=[CLAUDE_TOOL]
    ) as stream:
        assert stream.get_final_message().content[-1].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "22 degrees"}
    after = scripted_claude.messages.create(
        model=MODEL, max_tokens=300, tools=[CLAUDE_TOOL],
        messages=[*HELLO, {"role": "assistant", "content": message.content},
                  {"role": "user", "content": [result]}],
    )  # fmt: skip
    assert "22 degrees" in after.content[0].text
    assert scripted_claude.models.list().data[0].id == MODEL
    return after.content[0].text
