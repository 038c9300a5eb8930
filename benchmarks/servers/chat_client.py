"""Chats sent with OpenAI's SDK: streamed, greedy, past any end of sequence."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from openai import AsyncOpenAI

from servers.chats import Chats, Message
from servers.contract import MODEL, ClientFigures, RequestTimes

# A connection for each request: servers close connections that wait, llama.cpp's now and then at the
# moment when the client sends the next message.
SETTINGS: dict[str, Any] = {
    "api_key": "none", "max_retries": 0, "default_headers": {"Connection": "close"},
}  # fmt: skip


def send_chats(url: str, chats: Chats, limit_s: float) -> ClientFigures:
    """All users at once, each message after the answer to the last.

    Raises:
        TimeoutError: the chats took longer than `limit_s`.
        OpenAIError: the server refused a request or broke off.
    """
    return asyncio.run(_send(url, chats, limit_s))


async def _send(url: str, chats: Chats, limit_s: float) -> ClientFigures:
    async with AsyncOpenAI(base_url=f"{url}/v1", **SETTINGS) as client:
        talks = [
            _talk(client, opening, messages[1:], chats.num_new)
            for opening, messages in zip(chats.openings(), chats.users, strict=True)
        ]
        start = time.perf_counter()
        async with asyncio.timeout(limit_s):
            answered = await asyncio.gather(*talks)
        duration_s = time.perf_counter() - start
    return ClientFigures.of_requests(
        duration_s, [request for requests in answered for request in requests]
    )


async def _talk(
    client: AsyncOpenAI, history: list[Message], later: tuple[str, ...], num_new: int
) -> list[RequestTimes]:
    """A user's requests, one after the other; the answers join the history."""
    text, times = await _request(client, history, num_new)
    all_times = [times]
    for message in later:
        history += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": message},
        ]
        text, times = await _request(client, history, num_new)
        all_times.append(times)
    return all_times


async def _request(
    client: AsyncOpenAI, messages: list[Message], num_new: int
) -> tuple[str, RequestTimes]:
    """One streamed answer and its times; the first token is the first event with text."""
    history: Any = messages
    parts: list[str] = []
    first_s, usage = 0.0, None
    start = time.perf_counter()
    last_s = start
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=history,
        max_tokens=num_new,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices:
            last_s = time.perf_counter()
            text = chunk.choices[0].delta.content
            if text:
                first_s = first_s or last_s
                parts.append(text)
    if usage is None:
        raise RuntimeError("the server sent no usage")
    times = RequestTimes(
        ttft_s=(first_s or last_s) - start,
        total_s=last_s - start,
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
    )
    return "".join(parts), times
