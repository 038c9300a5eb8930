"""The wire format: read bodies, encode JSON and streams of it, send errors and keep-alive pings."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ramify.server.errors import ApiError, as_api_error

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
BODY_TIMEOUT_S = 60.0
PING_S = 15.0
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_NOT_PRINTABLE = re.compile(r"[^ -~]")
EVENT_STREAM = "text/event-stream"
NDJSON = "application/x-ndjson"  # a line of JSON for each value
CLIENT_GONE = "the client went away"
DONE = b"data: [DONE]\n\n"  # the end of a stream of OpenAI's
Dialect = Literal["openai", "anthropic", "ollama"]
PINGS: Mapping[Dialect, bytes] = {
    "openai": b": ping\n\n",  # a comment, which clients skip
    "anthropic": b'event: ping\ndata: {"type":"ping"}\n\n',
    "ollama": b" ",  # before the next line, whose JSON may begin with white space
}
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

encode_json = msgspec.json.Encoder().encode


async def read_body(request: Request, *, reserve: Callable[[int], None]) -> bytes | bytearray:
    """Read the body of a request into one buffer: a copy of a large body would take 20 ms.

    Args:
        reserve: called with the number of bytes of each piece; raises ApiError to read no further.

    Raises:
        ApiError: 413 larger than `MAX_BODY_BYTES`, 415 compressed, 408 not complete in time, 499 the
            client disconnected.
    """
    too_large = ApiError(
        413, f"the body is larger than {MAX_BODY_BYTES} bytes; send less, or token ids"
    )
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not supported; send plain JSON")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                reserve(len(chunk))
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect:
        raise ApiError(499, CLIENT_GONE) from None
    return body


def whole_number(text: str, *, max_digits: int = 9) -> int | None:
    """The number of a path or query; None if it is not digits, or has more than `max_digits`."""
    is_number = text.isascii() and text.isdigit() and len(text) <= max_digits
    return int(text) if is_number else None


def request_id(request: Request) -> str:
    """The client's `x-request-id` if it is well-formed, else a new id."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A response whose body is a value as JSON."""
    return Response(
        encode_json(value), status, media_type="application/json", headers=dict(headers or {})
    )


def error_response(
    error: BaseException, *, dialect: Dialect, headers: Mapping[str, str]
) -> Response:
    """The response for an exception, in the form of an API.

    An unexpected exception is logged with its traceback; the client gets a 500 without details.
    """
    api_error = as_api_error(error)
    x_request_id = headers["x-request-id"]
    if api_error.status >= 500 and not isinstance(error, ApiError) and api_error.code is None:
        logger.error("request %s failed", x_request_id, exc_info=error)
    if dialect == "openai":
        body = api_error.openai()
    else:
        is_ollama = dialect == "ollama"
        body = api_error.ollama() if is_ollama else api_error.anthropic(x_request_id)
    return json_response(body, status=api_error.status, headers={**headers, **api_error.headers})


def stream_response(
    events: AsyncGenerator[bytes],
    *,
    on_error: Callable[[ApiError], bytes],
    headers: Mapping[str, str],
    media: str = EVENT_STREAM,
) -> Response:
    """A streamed response; `KeepAliveResponse` adds pings and clean-up.

    Args:
        events: whole events or lines, as `sse_event` and `json_line` make them.
        on_error: encodes the error with which a stream breaks off.
        media: `EVENT_STREAM` or `NDJSON`.
    """

    async def body() -> AsyncIterator[bytes]:
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
            raise
        except BaseException as error:
            api_error = as_api_error(error)
            if api_error.status >= 500 and api_error.code is None:
                logger.error("a stream failed", exc_info=error)
            yield on_error(api_error)

    return StreamingResponse(body(), media_type=media, headers={**STREAM_HEADERS, **headers})


class KeepAliveResponse:
    """Sends a response, pings its client while a stream is silent, then calls `close`.

    Whether the client took all of it goes to `count`: as the response's status, or 499.

    `close` also runs when sending fails. A `finally` in the body's generator would not do: closing a
    generator that was never started does not run it. One task pings for the whole stream; a timer
    per event would cost more than the event. `TimeoutProtocol` drops clients that do not read.

    Args:
        close: ends what the response was made from.
        count: called with the status, once, when the response is sent or its client has gone.
        ping_s: seconds of silence after which a stream gets a ping.
        ping: its bytes, which depend on the API.
    """

    def __init__(
        self,
        response: Response,
        close: Callable[[], Awaitable[None]],
        *,
        count: Callable[[int], None],
        ping_s: float = PING_S,
        ping: bytes = PINGS["openai"],
    ) -> None:
        self.response, self._close = response, close
        self._ping_s, self._ping_bytes = ping_s, ping
        self._count, self._is_sent = count, False
        self._sent_s = time.monotonic()
        self._is_open = False  # between two messages of a stream: a ping may be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response: the ASGI application."""

        async def send_and_track(message: Message) -> None:
            self._is_open = False
            await send(message)
            self._sent_s = time.monotonic()
            self._is_open = message["type"] == "http.response.start" or bool(
                message.get("more_body")
            )
            self._is_sent = not self._is_open

        is_stream = self.response.media_type in (EVENT_STREAM, NDJSON)
        pinger = asyncio.ensure_future(self._ping(send)) if is_stream else None
        try:
            await self.response(scope, receive, send_and_track)
        except (ClientDisconnect, OSError):
            pass  # it is counted below
        finally:
            if pinger is not None:
                pinger.cancel()
                await asyncio.gather(pinger, return_exceptions=True)
            try:
                self._count(self.response.status_code if self._is_sent else 499)
            finally:
                await self._close()

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._ping_s / 4)
            if self._is_open and time.monotonic() - self._sent_s > self._ping_s:
                self._sent_s = time.monotonic()
                await send(
                    {"type": "http.response.body", "body": self._ping_bytes, "more_body": True}
                )


def sse_event(value: object, event: str | None = None) -> bytes:
    """Encode one server-sent event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encode_json(value) + b"\n\n"


def json_line(value: object) -> bytes:
    """Encode one line of `NDJSON`."""
    return encode_json(value) + b"\n"


def log_safe(value: Any) -> str:
    """Escape a value for a log line: ASCII without control characters, at most 200 characters."""
    return json.dumps(str(value)[:200], ensure_ascii=True)[1:-1]


def header_text(text: str) -> str:
    """Escape a text for a header: printable ASCII in one line."""
    return _NOT_PRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
