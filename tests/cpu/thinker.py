"""A server whose model thinks, calls a tool and answers by a script; and the bodies to ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2
import openai

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

    def __init__(
        self, answer: str = ANSWER, template: str = THINKING_TEMPLATE, **options: Any
    ) -> None:
        super().__init__(chat_template=template, page_size=4, **options)
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
            ) as first,
            anthropic.AsyncAnthropic(
                base_url="http://127.0.0.1",
                api_key="none",
                max_retries=0,
                http_client=httpx2.AsyncClient(transport=transport),
            ) as other,
        ):
            yield first, other


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
