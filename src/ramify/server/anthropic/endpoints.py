"""Handlers of the Anthropic endpoints."""

from __future__ import annotations

from dataclasses import replace

from starlette.responses import Response

from ramify.server.anthropic.messages_request import messages_to_generation, render_messages
from ramify.server.anthropic.messages_response import MessageResponseBuilder
from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.context import RequestContext
from ramify.server.http.wire import sse_event


async def messages(context: RequestContext) -> Response:
    """POST /v1/messages."""
    request = await context.body(MessageRequest)
    generation_request = await context.in_prompt_thread(
        messages_to_generation, request, context.service, context.caller.tenant
    )
    generation = await context.start(generation_request, prefix="msg_")
    builder = MessageResponseBuilder(context.service, request, generation)
    request_id = context.headers["x-request-id"]
    context = replace(context, headers=context.headers | {"request-id": request_id})
    return await context.respond(
        builder,
        stream=request.stream,
        on_error=lambda error: sse_event(error.anthropic(request_id), "error"),
    )


async def count_tokens(context: RequestContext) -> Response:
    """POST /v1/messages/count_tokens."""
    request = await context.body(CountRequest)
    warnings: list[str] = []
    history_entry = await context.in_prompt_thread(
        render_messages, request, context.service, context.caller.tenant, warnings
    )
    for message in warnings:
        context.warn(message)
    return context.json({"input_tokens": len(history_entry.prompt.ids)})
