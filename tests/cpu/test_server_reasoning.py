"""Reasoning and calls through the official clients, with scripted answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from ramify.server.openai.opaque_text import encode_opaque
from tests.pure.server_bench import ServerBench

# Reads reasoning as Qwen3's template does: kept after the last question, dropped before it.
THINKING_TEMPLATE = """
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|><tool_call>JSON</tool_call>' + (tools | tojson) + '<|end|>' -}}
{%- endif -%}
{%- if reasoning_effort is defined -%}{{- '<|system|>' + reasoning_effort + '<|end|>' -}}{%- endif -%}
{%- set last = namespace(question=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.question = loop.index -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '<|user|>Result: ' if message.role == 'tool' else '<|' + message.role + '|>' -}}
{%- if message.reasoning_content and loop.index > last.question -%}
{{- '<think>' + message.reasoning_content + '</think>' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think></think>' -}}{%- endif -%}
{%- endif -%}
"""
THOUGHT = 'I could <tool_call>{"name": "find", "arguments": {}}</tool_call>.'
ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>{{"name": "find", "arguments": {ARGUMENTS}}}</tool_call>'
ANSWER = f"<think>{THOUGHT}</think>I look it up.{CALL}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "find", "parameters": SCHEMA}
QUESTION = {"role": "user", "content": "Who lives in Rome?"}


SERVICE = ServerBench().service


def letters(text: str) -> list[int]:
    """Token ids of a text, encoded letter by letter."""
    return [token for letter in text for token in SERVICE.tokenizer.encode(letter, False)]


class Thinker(ServerBench):
    """A server whose model answers `answer`, letter by letter where no grammar asks for more."""

    def __init__(self, answer: str = ANSWER, template: str = THINKING_TEMPLATE) -> None:
        super().__init__(chat_template=template, page_size=4)
        self.answer = answer
        [self._end] = SERVICE.tokenizer.encode("<|end|>", False)
        self.device.next_token = self._next

    def _next(self, context: Sequence[int]) -> int:
        [live] = self.core.live
        text = SERVICE.tokenizer.decode(context[len(live.prompt_ids) :])
        letter = self.answer[len(text) : len(text) + 1]
        return letters(letter)[0] if letter else self._end

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.ended[-1].request.prompt.text

    @asynccontextmanager
    async def clients(self) -> AsyncIterator[tuple[Any, Any]]:
        """Run the server, with the official clients of both APIs; bodies are dictionaries."""
        transport = httpx2.ASGITransport(app=self.app)
        async with (
            self.running(),
            openai.AsyncOpenAI(
                base_url="http://127.0.0.1/v1",
                api_key="none",
                max_retries=0,
                http_client=httpx2.AsyncClient(transport=transport),
            ) as one,
            anthropic.AsyncAnthropic(
                base_url="http://127.0.0.1",
                api_key="none",
                max_retries=0,
                http_client=httpx2.AsyncClient(transport=transport),
            ) as other,
        ):
            yield one, other


def run(main: Any) -> Any:
    """Run a coroutine to its end."""
    return asyncio.run(asyncio.wait_for(main, 60))


CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [QUESTION],
    "tools": [{"type": "function", "function": FUNCTION}],
    "max_tokens": 500,
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "messages": [QUESTION],
    "tools": [{"name": "find", "input_schema": SCHEMA}],
    "max_tokens": 500,
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "input": [QUESTION],
    "tools": [{"type": "function", "strict": False} | FUNCTION],
    "max_output_tokens": 500,
}


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
        # steps of a slow reader are merged, and then counted by their characters
        assert abs(num_thought - len(letters(f"<think>{THOUGHT}</think>"))) < 16
        assert num_thought < usage.completion_tokens <= len(letters(ANSWER)) + 1


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
        assert answer.usage.output_tokens_details.reasoning_tokens > 0.8 * len(letters(THOUGHT))


RESULT = "Ann."
CHAT_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find", "arguments": ARGUMENTS},
}
CHAT_TURN = {"role": "assistant", "content": "I look it up.", "tool_calls": [CHAT_CALL]}
CHAT_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": RESULT}
TEXT_PART = {"type": "text", "text": "I look it up."}
THINKING_PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": THOUGHT}]},
    TEXT_PART,
]
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "find", "arguments": ARGUMENTS}
ITEMS_AFTER = [
    {"role": "assistant", "content": "I look it up."},
    ITEM_CALL,
    {"type": "function_call_output", "call_id": "c", "output": RESULT},
]
BLOCKS = [
    {"type": "thinking", "thinking": THOUGHT, "signature": "theirs"},
    {"type": "redacted_thinking", "data": "theirs"},
    TEXT_PART,
    {"type": "tool_use", "id": "t", "name": "find", "input": {"city": "Rome"}},
]
RESULT_BLOCK = {"type": "tool_result", "tool_use_id": "t", "content": RESULT}
HISTORIES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "reasoning_content": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"reasoning_content": THOUGHT}, CHAT_RESULT],
    ),
    "reasoning": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"reasoning": THOUGHT}, CHAT_RESULT],
    ),
    "thinking parts": (
        "/v1/chat/completions", CHAT, [CHAT_TURN | {"content": THINKING_PARTS}, CHAT_RESULT],
    ),
    "thinking blocks": (
        "/v1/messages",
        MESSAGES,
        [{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT_BLOCK]}],
    ),
    "reasoning items": (
        "/v1/responses",
        RESPONSES,
        [
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": THOUGHT}],
            },
            *ITEMS_AFTER,
        ],
    ),
    "carried reasoning": (
        "/v1/responses",
        RESPONSES,
        [
            {"type": "reasoning", "summary": [], "encrypted_content": encode_opaque(THOUGHT)},
            *ITEMS_AFTER,
        ],
    ),
    "reasoning of others": (
        "/v1/responses",
        RESPONSES,
        [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}, *ITEMS_AFTER],
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", HISTORIES)
def test_the_next_prompt_extends_prompt_and_answer(form: str) -> None:
    """Reasoning sent back in any form is in the prompt of the tool's result, and not after it."""
    path, body, more = HISTORIES[form]
    field = "input" if path == "/v1/responses" else "messages"
    later = {"role": "user", "content": "And in Paris?"}

    async def main() -> list[str]:
        bench, prompts = Thinker(), []
        async with bench.running():
            for history in ([QUESTION], [QUESTION, *more], [QUESTION, *more, later]):
                response = await bench.post(path, body | {field: history})
                assert response.status == 200, response.body
                prompts.append(bench.prompt)
        return prompts

    question, result, after = run(main())

    begun = "I look it up." + CALL if form == "reasoning of others" else ANSWER
    assert result == f"{question}{begun}<|end|><|user|>Result: Ann.<|end|><|assistant|>"
    assert THOUGHT not in after
    assert after.endswith("<|user|>And in Paris?<|end|><|assistant|>")


def test_a_stored_response_continues_with_its_reasoning() -> None:
    """`previous_response_id` gives the prompt that the echoed items give, and reads the answer."""

    async def main() -> tuple[str, int, int]:
        bench = Thinker()
        async with bench.running():
            first = (await bench.post("/v1/responses", RESPONSES)).json
            [call] = [item for item in first["output"] if item["type"] == "function_call"]
            result = {
                "type": "function_call_output", "call_id": call["call_id"], "output": RESULT,
            }  # fmt: skip
            body = RESPONSES | {"input": [result], "previous_response_id": first["id"]}
            second = (await bench.post("/v1/responses", body)).json
            details = second["usage"]["input_tokens_details"]
            return bench.prompt, details["cached_tokens"], first["usage"]["total_tokens"]

    prompt, num_cached, num_before = run(main())

    assert f"<|assistant|>{ANSWER}<|end|><|user|>Result: Ann.<|end|>" in prompt
    assert num_cached >= num_before - 8


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {}, ""),
    ("/v1/chat/completions", {"enable_thinking": False}, "off"),
    ("/v1/chat/completions", {"enable_thinking": True}, "on"),
    ("/v1/chat/completions", {"chat_template_kwargs": {"enable_thinking": False}}, "off"),
    (
        "/v1/chat/completions",
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False},
        "on",
    ),
    ("/v1/chat/completions", {"reasoning": {"enabled": False}}, "off"),
    ("/v1/chat/completions", {"reasoning": {"max_tokens": 0}}, "off"),
    ("/v1/chat/completions", {"reasoning": {"effort": "high"}}, "high"),
    ("/v1/chat/completions", {"reasoning_effort": "none"}, "off none"),
    ("/v1/chat/completions", {"reasoning_effort": "low"}, "low"),
    ("/v1/chat/completions", {"thinking": {"type": "disabled"}}, "off"),
    ("/v1/chat/completions", {"thinking": False}, "off"),
    ("/v1/responses", {"reasoning": {"effort": "low"}}, "low"),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "off"),
    ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "on"),
    ("/v1/messages", {"output_config": {"effort": "max"}}, "max"),
    (
        "/v1/messages",
        {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
        "off low",
    ),
]


def test_options_reach_the_template() -> None:
    """What clients say about thinking in any form becomes variables that the template mentions."""

    async def main() -> list[str]:
        bench, prompts = Thinker("Ann."), []
        async with bench.running():
            for path, options, _ in OPTIONS:
                body = {"model": "tiny", "max_tokens": 9, "messages": [QUESTION]}
                if path == "/v1/responses":
                    body = {"input": "Who lives in Rome?"}
                response = await bench.post(path, body | options)
                assert response.status == 200, response.body
                prompts.append(bench.prompt)
        return prompts

    for prompt, (_, options, wanted) in zip(run(main()), OPTIONS, strict=True):
        switch, *efforts = [*wanted.split(), ""][:2] if wanted else [""]
        efforts = [word for word in (switch, *efforts) if word not in ("on", "off", "")]
        assert prompt.endswith("<think></think>") == wanted.startswith("off"), options
        assert [word for word in ("none", "low", "high", "max") if f"|>{word}<|" in prompt] == (
            efforts
        ), options


# As DeepSeek V3.2's, whose user turn ends with the answer's header.
EARLY = THINKING_TEMPLATE.replace(
    "{{- '<|end|>' -}}\n{%- endfor -%}",
    "{{- '<|end|>' + ('<|assistant|><think>' if message.role == 'user' else '') -}}\n{%- endfor -%}",
).replace("{{- '<|assistant|>' -}}", "")
OPENING = THINKING_TEMPLATE.replace("{{- '<|assistant|>' -}}", "{{- '<|assistant|><think>' -}}")


@pytest.mark.parametrize(
    ("template", "question", "answer", "reasoning", "text"),
    [
        (OPENING, "Who?", "Hm.</think>Ann.", "Hm.", "Ann."),
        (OPENING, "Who?", "Hm.", "Hm.", ""),
        (EARLY, "Who is <think>?", "Hm.</think>Ann.", "Hm.", "Ann."),
        (THINKING_TEMPLATE, "What is <think>?", "Hm.", None, "Hm."),
    ],
)
def test_a_template_may_open_the_reasoning(
    template: str, question: str, answer: str, reasoning: str | None, text: str
) -> None:
    """An answer begins as reasoning if the template opened it, and not if the user wrote its mark."""

    async def main() -> Any:
        bench = Thinker(answer, template)
        async with bench.running():
            body = {"messages": [{"role": "user", "content": question}], "max_tokens": 99}
            return (await bench.post("/v1/chat/completions", body)).json

    message = run(main())["choices"][0]["message"]

    assert (message.get("reasoning_content"), message["content"]) == (reasoning, text)


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


def test_a_prefill_may_open_the_reasoning() -> None:
    """An answer that continues an open thought begins as reasoning."""
    prefill = {"role": "assistant", "content": "<think>Hm"}

    async def main() -> Any:
        bench = Thinker(". So.</think>Ann.")
        async with bench.running():
            body = {"messages": [QUESTION, prefill], "continue_final_message": True}
            return (await bench.post("/v1/chat/completions", body | {"max_tokens": 99})).json

    message = run(main())["choices"][0]["message"]

    assert (message["reasoning_content"], message["content"]) == (". So.", "Ann.")
