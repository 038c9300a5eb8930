"""Bytes of a request to a typed value, and values to responses: limits before any work."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ramify.server.errors import ApiError, as_api_error

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
MAX_DEPTH = 64  # of brackets in a body
BODY_TIMEOUT_S = 60.0
PING_S = 15.0
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WHERE = re.compile(r" - at `(?:key in )?\$?(.*)`$")
EVENT_STREAM = "text/event-stream"
PING = b": ping\n\n"
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}

T = TypeVar("T")
_ENCODER = msgspec.json.Encoder()


def encode_json(value: object) -> bytes:
    """A value as JSON."""
    return _ENCODER.encode(value)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body of a request.

    Raises:
        ApiError: it is too large, compressed, or too slow.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "compressed bodies are not read; send the JSON as it is")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from error
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes; send less, or token ids")


def decode_body(body: bytes, kind: type[T]) -> T:
    """A body as a value of a type.

    Raises:
        ApiError: it is no JSON, is nested too deep, or does not fit the type.
    """
    if json_depth(body) > MAX_DEPTH:
        raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _unfit(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}") from None


def convert_value(value: object, kind: type[T]) -> T:
    """A decoded value as a value of a type.

    Raises:
        ApiError: it does not fit.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _unfit(error) from None


def _unfit(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    found = _WHERE.search(text)
    where = None if found is None else found[1].lstrip(".") or None
    return ApiError(400, text if found is None else text[: found.start()], param=where)


def json_depth(body: bytes) -> int:
    """How deep brackets are nested in JSON, those in strings left out; at most so deep if broken.

    Without recursion, and without a Python step per byte: bodies may be large.
    """
    opened = body.count(b"[") + body.count(b"{")
    if opened <= MAX_DEPTH:
        return opened
    plain = body.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # every quote left is a border
    found = np.frombuffer(plain, np.uint8)
    inside = np.cumsum(found == ord('"'), dtype=np.uint8) & 1  # it wraps at an even number
    opens = (found == ord("[")) | (found == ord("{"))
    closes = (found == ord("]")) | (found == ord("}"))
    steps = opens.view(np.int8) - closes.view(np.int8)
    steps[inside == 1] = 0
    return int(np.cumsum(steps, dtype=np.int32).max())


def request_id(request: Request) -> str:
    """The client's own id of a request, or a new one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A value as a response."""
    return Response(
        encode_json(value), status, media_type="application/json", headers=dict(headers or {})
    )


def error_response(
    error: BaseException, *, anthropic: bool = False, headers: Mapping[str, str] | None = None
) -> Response:
    """A failure as a response in the form of an API; what is our fault is logged, not told."""
    told = as_api_error(error)
    name = (headers or {}).get("x-request-id")
    if told.status >= 500 and not isinstance(error, ApiError) and told.code is None:
        logger.error("request %s failed", name, exc_info=error)
    body = told.anthropic(name) if anthropic else told.openai()
    return json_response(body, status=told.status, headers={**(headers or {}), **told.headers})


def sse_response(
    pieces: AsyncIterator[bytes],
    *,
    on_error: Callable[[BaseException], bytes],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Server-sent events; see `KeepAliveResponse` for the rest.

    Args:
        pieces: whole events, ends of line included.
        on_error: the events that tell of a failure in the middle.
    """

    async def body() -> AsyncIterator[bytes]:
        try:
            async for piece in pieces:
                yield piece
        except (asyncio.CancelledError, GeneratorExit, ClientDisconnect):
            raise
        except BaseException as error:
            told = as_api_error(error)
            if told.status >= 500 and told.code is None:
                logger.error("a stream failed", exc_info=error)
            yield on_error(told)
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(pieces, "aclose", None)
            if close is not None:
                await close()

    return StreamingResponse(
        body(), media_type=EVENT_STREAM, headers={**STREAM_HEADERS, **(headers or {})}
    )


class KeepAliveResponse:
    """A response on its way: tidied up after in any case, and pinged while it is silent.

    The generators of a streamed body are no place for that: one that was never begun is closed
    without running. One task minds the whole stream, as a timer for each event would cost more than
    the event. A client that takes nothing is the protocol's affair: see `TimeoutProtocol`.

    Args:
        close: what is to be done once it is sent, or cannot be.
        ping_s: a stream of events that is silent for so long gets a comment.
    """

    def __init__(
        self, response: Response, close: Callable[[], Awaitable[None]], *, ping_s: float = PING_S
    ) -> None:
        self.response, self._close, self._ping_s = response, close, ping_s
        self._sent_s = time.monotonic()
        self._is_open = False  # more of a stream can be sent now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def noting(message: Message) -> None:
            self._is_open = False
            await send(message)
            self._sent_s = time.monotonic()
            self._is_open = message["type"] == "http.response.start" or bool(
                message.get("more_body")
            )

        if self.response.media_type != EVENT_STREAM:
            try:
                await self.response(scope, receive, send)
            finally:
                await self._close()
            return
        pinger = asyncio.ensure_future(self._ping(send))
        try:
            await self.response(scope, receive, noting)
        finally:
            pinger.cancel()
            await asyncio.gather(pinger, return_exceptions=True)
            await self._close()

    async def _ping(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self._ping_s / 4)
            if self._is_open and time.monotonic() - self._sent_s > self._ping_s:
                self._sent_s = time.monotonic()
                await send({"type": "http.response.body", "body": PING, "more_body": True})


def sse_event(value: object, event: str | None = None) -> bytes:
    """One event."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + encode_json(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def log_safe(value: Any) -> str:
    """A value in a log line: no control characters, not too long."""
    return json.dumps(str(value)[:200], ensure_ascii=True)[1:-1]
