"""Handlers of the Anthropic endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.responses import Response

from ramify.server.anthropic.messages_request import messages_to_generation, render_messages
from ramify.server.anthropic.messages_response import MessageResponseBuilder
from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.context import RequestContext, cache_header
from ramify.server.errors import ApiError
from ramify.server.http.wire import json_response, sse_event, sse_response


async def messages(context: RequestContext) -> Response:
    """POST /v1/messages."""
    request = await context.body(MessageRequest)
    generation_request = await context.in_prompt_thread(
        messages_to_generation, request, context.service, context.caller.tenant
    )
    generation = await context.start(generation_request, prefix="msg_")
    builder = MessageResponseBuilder(context.service, request, generation)
    request_id = context.headers["x-request-id"]
    headers = context.headers | {"request-id": request_id}
    if not request.stream:
        body = await context.until_done_or_disconnect(builder.body())
        return json_response(body, headers=headers | cache_header([generation]))

    async def events() -> AsyncIterator[bytes]:
        async for name, payload in builder.events():
            yield sse_event(payload, name)

    def on_error(error: BaseException) -> bytes:
        assert isinstance(error, ApiError)
        return sse_event(error.anthropic(request_id), "error")

    return sse_response(events(), on_error=on_error, headers=headers | cache_header([generation]))


async def count_tokens(context: RequestContext) -> Response:
    """POST /v1/messages/count_tokens."""
    request = await context.body(CountRequest)
    prompt, _ = await context.in_prompt_thread(
        render_messages, request, context.service, context.caller.tenant
    )
    return context.json({"input_tokens": len(prompt.ids)})
