"""An HTTP request on its way through an endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from ramify.server.errors import ApiError
from ramify.server.generation import Generation, GenerationRequest, total_usage
from ramify.server.health import Readiness
from ramify.server.http.wire import decode_body, json_response, read_body, sse_event, sse_response
from ramify.server.operations.metrics import Metrics
from ramify.server.service import Service
from ramify.server.tenants import Caller

T = TypeVar("T")


class ResponseBuilder(Protocol):
    """Builds the response to a request from its generations."""

    async def body(self) -> dict[str, Any]:
        """Wait for the end; returns the whole response."""
        ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the data of server-sent events; an event's `type`, if it has one, is its name."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What an endpoint gets: the HTTP request, its caller, and the server's parts.

    `headers` go into the response. `generations` are aborted when the request ends before them.
    """

    request: Request
    caller: Caller
    headers: dict[str, str]
    service: Service
    metrics: Metrics
    health: Readiness
    prompt_thread: Executor
    generations: list[Generation] = field(default_factory=list)

    async def body(self, kind: type[T]) -> T:
        """Read and decode the body.

        Raises:
            ApiError: 400 or 413, for a body that is not of this type or too large.
        """
        return decode_body(await read_body(self.request), kind)

    async def in_prompt_thread(self, render: Callable[..., T], *args: Any) -> T:
        """Run `render(*args)` in the thread that renders and tokenises prompts."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.prompt_thread, render, *args)

    async def start(self, generation_request: GenerationRequest, *, prefix: str) -> Generation:
        """Start a generation as `Service.start` does; it ends with the HTTP request."""
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
            raise ApiError(499, "the client went away")
        finally:
            for task in (waiting, disconnected):
                task.cancel()
            await asyncio.gather(waiting, disconnected, return_exceptions=True)

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
    ) -> Response:
        """The response of a builder, whole or as server-sent events; `end` closes a stream."""
        if not stream:
            return self.json(await self.until_done_or_disconnect(builder.body()))

        async def events() -> AsyncGenerator[bytes]:
            async for event in builder.events():
                yield sse_event(event, event.get("type"))
            if end:
                yield end

        headers = self.headers | cache_header(self.generations)
        return sse_response(events(), on_error=on_error, headers=headers)

    async def close(self) -> None:
        """Abort the generations that are still live."""
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
