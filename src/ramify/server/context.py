"""`RequestContext`: the HTTP request that an endpoint handles, with its caller, budgets and headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ramify.errors import shortened
from ramify.server.errors import ApiError
from ramify.server.generation import Generation, GenerationRequest, total_usage
from ramify.server.health import Readiness
from ramify.server.http.body_budget import BodyBudget, BodyReservation
from ramify.server.http.wire import (
    CLIENT_GONE,
    EVENT_STREAM,
    NDJSON,
    header_text,
    json_line,
    json_response,
    read_body,
    sse_event,
    stream_response,
)
from ramify.server.operations.metrics import Metrics
from ramify.server.prompts.jobs import PromptWorkers
from ramify.server.request_fields.unsupported_fields import (
    UnsupportedFields,
    decode_request,
    unknown_warning,
)
from ramify.server.service import MAX_BYTES_PER_TOKEN, RequestService
from ramify.server.tenants import Caller

SMALL_BODY = 1 << 16  # bytes; decoded on the event loop in a few milliseconds
SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARS = 256
WARNING_HEADER = "X-Ramify-Warning"
MAX_WARNING_CHARS = 1000  # of the whole header
T = TypeVar("T")


class ResponseBuilder(Protocol):
    """Builds the response to a request from its generations."""

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the whole response."""
        ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the values of a stream; an event's `type`, if it has one, is its name."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The argument of an endpoint: the HTTP request, its caller, and the server's parts.

    `headers` go into the response. `generations` are aborted when the request ends before them, and
    `reservations` are released.
    """

    request: Request
    caller: Caller
    headers: dict[str, str]
    service: RequestService
    metrics: Metrics
    health: Readiness
    prompt_workers: PromptWorkers
    bodies: BodyBudget
    generations: list[Generation] = field(default_factory=list)
    reservations: list[BodyReservation] = field(default_factory=list)

    async def body(self, kind: type[T], unsupported: UnsupportedFields | None = None) -> T:
        """Read and decode the body; refuse fields of `unsupported` and warn of unknown ones, if it is given.

        Raises:
            ApiError: 400 or 413, for a body that is not of this type, has a refused field, or is
                too large.
        """
        body = await self.read()
        if len(body) <= SMALL_BODY:
            value, names = decode_request(body, kind, unsupported)
        else:
            value, names = await self.in_prompt_thread(decode_request, body, kind, unsupported)
        if names:
            self.warn(unknown_warning(names))
            self.service.unknown_fields.report(names, self.request.url.path)
        return value

    async def read(self) -> bytes | bytearray:
        """Read the body; its bytes count in the tenant's budget until the request ends.

        Raises:
            ApiError: as `read_body`; 429 or 503, too many bytes of bodies are in memory.
        """
        reservation = BodyReservation(self.bodies, self.caller.tenant)
        self.reservations.append(reservation)
        return await read_body(self.request, reserve=reservation.add)

    @property
    def num_body_bytes(self) -> int:
        """Bytes of the body, as far as they were read."""
        return sum(reservation.num_bytes for reservation in self.reservations)

    def warn(self, message: str) -> None:
        """Tell the client in `X-Ramify-Warning` what was ignored or changed; it is still served.

        Call it before the response is made. Messages are joined by "; ", each is sent once, and
        what exceeds `MAX_WARNING_CHARS` is cut.
        """
        text = header_text(message[:MAX_WARNING_CHARS])
        earlier = self.headers.get(WARNING_HEADER)
        if earlier is not None and (text in earlier or len(earlier) >= MAX_WARNING_CHARS):
            return
        joined = text if earlier is None else f"{earlier}; {text}"
        self.headers[WARNING_HEADER] = shortened(joined, MAX_WARNING_CHARS)

    async def in_prompt_thread(self, render: Callable[..., T], *args: Any) -> T:
        """Run `render(*args)` in a thread that renders and tokenises prompts, when it is its turn.

        It counts as a live request of the tenant. If it fails, or the client has gone, the tenant is
        charged for the body's bytes, as for the fewest tokens that they could be.

        Raises:
            ApiError: 429 or 503, the quota is used up or too many wait; 499, the client has gone.
        """
        quotas, charge = self.service.quotas, self.num_body_bytes // MAX_BYTES_PER_TOKEN
        quotas.acquire(self.caller, 0)
        try:
            job = self.prompt_workers.run(self.caller.tenant, partial(render, *args))
            result = await self.until_done_or_disconnect(job)
            charge = 0
            return result
        except ApiError as error:
            if error.status in (429, 503):  # nothing was done
                charge = 0
            raise
        finally:
            quotas.release(self.caller, 0, charge)

    def in_session(self, request: GenerationRequest, implied: str = "") -> GenerationRequest:
        """The request in the session that its body names, else its header, else in `implied`.

        Raises:
            ApiError: 400, the header is too long, or it ends a session and names none.
        """
        header = self.request.headers.get(SESSION_HEADER, "")
        if len(header) > MAX_SESSION_CHARS:
            raise ApiError(
                400,
                f"the header {SESSION_HEADER} has {len(header)} characters; at most "
                f"{MAX_SESSION_CHARS}",
                param=SESSION_HEADER,
            )
        name = request.session or header or implied
        if request.ends_session and not name:
            raise ApiError(
                400,
                f"no session is named; send session_id or the header {SESSION_HEADER}",
                param="end_session",
            )
        return replace(request, session=name)

    async def start(
        self, generation_request: GenerationRequest, *, prefix: str, implied_session: str = ""
    ) -> Generation:
        """Start a generation as `RequestService.start` does; it ends with the HTTP request."""
        generation_request = self.in_session(generation_request, implied_session)
        for message in generation_request.warnings:
            self.warn(message)
        generation = await self.until_done_or_disconnect(
            self.service.start(generation_request, self.caller, prefix=prefix)
        )
        self.generations.append(generation)
        return generation

    async def until_done_or_disconnect(self, answer: Awaitable[T]) -> T:
        """Await an answer, and cancel it when the client disconnects.

        Raises:
            ApiError: 499, the client has disconnected.
        """
        waiting = asyncio.ensure_future(answer)
        disconnected = asyncio.ensure_future(_disconnected(self.request))
        try:
            await asyncio.wait({waiting, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ApiError(499, CLIENT_GONE)
        finally:
            for task in (waiting, disconnected):
                task.cancel()
            await asyncio.gather(waiting, disconnected, return_exceptions=True)
            # Their errors' tracebacks have this frame: a cycle would keep the body.
            del waiting, disconnected, task

    def json(self, payload: Any) -> Response:
        """A JSON response with this request's headers, and `X-Cache` if it ran generations."""
        headers = self.headers | (cache_header(self.generations) if self.generations else {})
        return json_response(payload, headers=headers)

    async def respond(
        self,
        builder: ResponseBuilder,
        *,
        stream: bool | None,
        on_error: Callable[[ApiError], bytes],
        end: bytes = b"",
        is_ndjson: bool = False,
    ) -> Response:
        """The response of a builder, whole or as a stream, which `end` closes.

        Args:
            is_ndjson: the stream is lines of JSON, not server-sent events.
        """
        if not stream:
            return self.json(await self.until_done_or_disconnect(builder.body()))

        async def events() -> AsyncGenerator[bytes]:
            async for event in builder.events():
                yield json_line(event) if is_ndjson else sse_event(event, event.get("type"))
            if end:
                yield end

        headers = self.headers | cache_header(self.generations)
        media = NDJSON if is_ndjson else EVENT_STREAM
        return stream_response(events(), on_error=on_error, headers=headers, media=media)

    async def close(self) -> None:
        """Release the body, and abort the generations that are still live."""
        for reservation in self.reservations:
            reservation.close()
        for generation in self.generations:
            await generation.close()


async def _disconnected(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def cache_header(generations: list[Generation]) -> dict[str, str]:
    """The `X-Cache` header: prompt tokens read from the cache, and the reason for a miss."""
    usage = total_usage(generations)
    total = sum(len(generation.request.prompt.ids) for generation in generations)
    cached = 0 if usage is None else usage.cached
    value = f"{'HIT' if cached else 'MISS'}; read={cached}; total={total}"
    if usage is not None and usage.miss is not None:
        value += f"; reason={usage.miss.reason}"
    if usage is not None and usage.pins_refused:
        value += f"; pins_refused={usage.pins_refused}"
    return {"X-Cache": value}
