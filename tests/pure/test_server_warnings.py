"""`X-Ramify-Warning`: what the answer to a request says was ignored or changed."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from ramify.server.context import MAX_WARNING_CHARS, WARNING_HEADER, RequestContext
from ramify.server.http.request_body import convert_value
from ramify.server.http.wire import DONE
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.protocol import ChatRequest
from tests.pure.server_bench import ServerBench, chat, run


async def never() -> Any:
    await asyncio.Event().wait()


def context_of(bench: ServerBench) -> RequestContext:
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, never)
    return bench.server._context(request, {})


@given(st.lists(st.text(max_size=1200), min_size=1, max_size=8))
def test_warnings_fit_into_a_header_whatever_they_quote(messages: list[str]) -> None:
    """One line of printable ASCII, at most 1,000 characters, that begins with the first message."""
    context = replace(CONTEXT, headers={})

    for message in messages:
        context.warn(message)

    header = context.headers[WARNING_HEADER]
    assert len(header) <= MAX_WARNING_CHARS
    assert header.isascii() and header.isprintable()
    if messages[0].isascii() and messages[0].isprintable():
        assert header.startswith(messages[0][: MAX_WARNING_CHARS - 3])


CONTEXT = context_of(ServerBench())


def test_a_warning_is_sent_once() -> None:
    """A message that is there already is not repeated; others are joined."""
    context = replace(CONTEXT, headers={})

    for message in ("a is ignored", "b is ignored", "a is ignored"):
        context.warn(message)

    assert context.headers[WARNING_HEADER] == "a is ignored; b is ignored"


@pytest.mark.parametrize("stream", [False, True])
def test_whole_answers_and_streams_carry_warnings(stream: bool) -> None:
    """What a translator says in `GenerationRequest.warnings` is in the header."""

    async def main() -> str | None:
        bench = ServerBench()
        async with bench.running():
            context = context_of(bench)
            request = convert_value(chat("Hi"), ChatRequest)
            translated = replace(chat_to_generation(request, bench.service), warnings=("a\r\nb",))
            generation = await context.start(translated, prefix="chatcmpl-")
            response = await context.respond(
                ChatResponseBuilder(bench.service, request, generation),
                stream=stream,
                on_error=lambda _: DONE,
            )
            await context.close()
        return response.headers.get(WARNING_HEADER)

    assert run(main()) == "a\\r\\nb"


def test_json_answers_carry_warnings() -> None:
    """Also those that run nothing."""
    context = replace(CONTEXT, headers={})
    context.warn("`user` is ignored")

    assert context.json({}).headers[WARNING_HEADER] == "`user` is ignored"
