"""Reasoning and calls through the official clients, with scripted answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from ramify.outputs import FinishReason
from tests.cpu.thinker import (
    ANSWER,
    ARGUMENTS,
    CHAT,
    MESSAGES,
    QUESTION,
    RESPONSES,
    SERVICE,
    THOUGHT,
    Thinker,
    letters,
    run,
)


def test_the_openai_client_reads_reasoning_and_calls() -> None:
    """Chat, streamed and whole: reasoning under both names, text, one call; marks in thoughts are none."""

    async def main() -> tuple[Any, Any]:
        async with Thinker().clients() as (client, _):
            whole = await client.chat.completions.create(**CHAT)
            state = ChatCompletionStreamState()
            options = {"stream": True, "stream_options": {"include_usage": True}}
            async for chunk in await client.chat.completions.create(**CHAT, **options):
                state.handle_chunk(chunk)
            return whole, state.get_final_completion()

    answers = run(main())

    for answer in answers:
        [choice] = answer.choices
        message = choice.message
        assert message.reasoning_content == message.reasoning == THOUGHT
        assert message.content == "I look it up."
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("find", ARGUMENTS)
        assert choice.finish_reason == "tool_calls"
        usage = answer.usage
        num_thought = usage.completion_tokens_details.reasoning_tokens
        assert 0 < num_thought < usage.completion_tokens <= len(letters(ANSWER)) + 1


def test_the_anthropic_client_reads_reasoning_and_calls() -> None:
    """Messages, streamed and whole: a signed thinking block, a text, a call with its input."""

    async def main() -> tuple[Any, Any]:
        async with Thinker().clients() as (_, client):
            whole = await client.messages.create(**MESSAGES)
            async with client.messages.stream(**MESSAGES) as stream:
                return whole, await stream.get_final_message()

    answers = run(main())

    for answer in answers:
        thinking, text, call = answer.content
        assert (thinking.type, thinking.thinking) == ("thinking", THOUGHT)
        assert thinking.signature
        assert (text.type, text.text) == ("text", "I look it up.")
        assert (call.type, call.name, call.input) == ("tool_use", "find", {"city": "Rome"})
        assert answer.stop_reason == "tool_use"
        usage = answer.usage
        assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens


def test_thinking_that_is_not_shown_comes_back_in_its_signature() -> None:
    """`display: omitted` streams no thinking; the signature sent back restores it in the prompt."""
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    body = MESSAGES | {"thinking": thinking}

    async def main() -> tuple[Any, Any, str]:
        bench = Thinker()
        async with bench.clients() as (_, client):
            whole = await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                streamed = await stream.get_final_message()
            call = streamed.content[-1]
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "Ann."}
            history = [
                QUESTION,
                {"role": "assistant", "content": [block.to_dict() for block in streamed.content]},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(**body | {"messages": history})
            return whole, streamed, bench.prompt

    whole, streamed, prompt = run(main())

    for answer in (whole, streamed):
        shown = answer.content[0]
        assert (shown.type, shown.thinking) == ("thinking", "")
        assert "I could" not in answer.to_json()
    assert f"<think>{THOUGHT}</think>I look it up." in prompt


def test_the_responses_client_reads_reasoning_and_calls() -> None:
    """Responses, streamed and whole: an item each for reasoning, message and call."""

    async def main() -> tuple[Any, Any]:
        async with Thinker().clients() as (client, _):
            whole = await client.responses.create(**RESPONSES)
            async with client.responses.stream(**RESPONSES) as stream:
                return whole, await stream.get_final_response()

    answers = run(main())

    for answer in answers:
        reasoning, message, call = answer.output
        assert reasoning.type == "reasoning"
        assert [part.text for part in reasoning.content] == [THOUGHT]
        assert [part.text for part in message.content] == ["I look it up."]
        assert (call.name, call.arguments) == ("find", ARGUMENTS)
        usage = answer.usage
        assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


@pytest.mark.parametrize("place", [0, 1])
def test_a_single_call_ends_the_answer(place: int) -> None:
    """Without parallel calls: end marks in thoughts and strings end nothing, the first call does."""
    text = "a</tool_call>b"
    call = f'<tool_call>{{"name": "find", "arguments": {{"city": "{text}"}}}}</tool_call>'
    answer = f"<think>{THOUGHT}</think>{call}And more.{call}{' And so on.' * 150}"
    auto = {"type": "auto", "disable_parallel_tool_use": True}
    path, body = [
        ("/v1/chat/completions", CHAT | {"parallel_tool_calls": False, "max_tokens": 1500}),
        ("/v1/messages", MESSAGES | {"tool_choice": auto, "max_tokens": 1500}),
    ][place]

    async def main() -> tuple[Any, Any]:
        bench = Thinker(answer)
        async with bench.running():
            response = await bench.post(path, body)
            return response.json, bench.ended[-1].output

    response, output = run(main())

    # The engine would have gone on up to `max_tokens`.
    assert output.finish_reason is FinishReason.STOP
    if path == "/v1/messages":
        thinking, block = response["content"]
        assert (thinking["thinking"], block["input"]) == (THOUGHT, {"city": text})
        assert response["stop_reason"] == "tool_use"
        return
    [choice] = response["choices"]
    [made] = choice["message"]["tool_calls"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == (THOUGHT, None)
    assert made["function"]["arguments"] == f'{{"city": "{text}"}}'
    assert choice["finish_reason"] == "tool_calls"
    assert response["usage"]["completion_tokens"] <= output.usage.completion_tokens


def test_a_drain_waits_for_the_last_answer_with_reasoning() -> None:
    """The engine ends with the answer, before its reasoning could be evicted: it is sent all the same."""

    async def main() -> Any:
        bench, begun = Thinker("<think>Hm, who?</think>Ann."), asyncio.Event()
        bench.service.event_listeners.append(lambda *_: begun.set())
        async with bench.llm:
            bench.server.health.is_ready = True
            asking = asyncio.ensure_future(bench.post("/v1/chat/completions", CHAT))
            await begun.wait()
            assert await bench.llm.drain(60)
            return await asking

    response = run(main())

    assert response.status == 200, response.body
    assert response.json["choices"][0]["message"]["content"] == "Ann."


def test_a_call_that_is_cut_off_keeps_its_beginning() -> None:
    """`max_tokens` inside a call: partial arguments, and the reason of the cut in every API."""

    async def main() -> list[Any]:
        bench = Thinker()
        decode = SERVICE.tokenizer.decode
        async with bench.running():
            await bench.post("/v1/chat/completions", CHAT)
            ids = bench.ended[-1].output.completions[0].token_ids  # type: ignore[union-attr]
            # a grammar may write several letters as one token
            texts = [decode(ids[:num_tokens]) for num_tokens in range(len(ids))]
            limit = next(place for place, text in enumerate(texts) if text.endswith(': "R'))
            bodies = [
                ("/v1/chat/completions", CHAT | {"max_tokens": limit}),
                ("/v1/messages", MESSAGES | {"max_tokens": limit}),
                ("/v1/responses", RESPONSES | {"max_output_tokens": limit}),
            ]
            return [(await bench.post(path, body)).json for path, body in bodies]

    chat, message, response = run(main())

    [choice] = chat["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "R'
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][-1]["input"] == {}
    assert response["status"] == "incomplete"
    assert response["output"][-1]["status"] == "incomplete"
    assert response["output"][-1]["arguments"] == '{"city": "R'
