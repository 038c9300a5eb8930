"""Handlers of the Responses API."""

from __future__ import annotations

from starlette.responses import Response

from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import sse_event
from ramify.server.openai.responses_protocol import ResponsesRequest
from ramify.server.openai.responses_request import (
    previous_response,
    response_to_generation,
    stored_response,
)
from ramify.server.openai.responses_response import ResponsesResponseBuilder


async def create_response(context: RequestContext) -> Response:
    """POST /v1/responses; stores the response unless the request says `store: false`."""
    request = await context.body(ResponsesRequest)
    service, tenant = context.service, context.caller.tenant
    previous = previous_response(request, service, tenant)
    chat, generation_request = await context.in_prompt_thread(
        response_to_generation, request, previous, service, tenant
    )
    generation = await context.start(generation_request, prefix="resp_")
    builder = ResponsesResponseBuilder(service, request, chat, generation)

    def on_error(error: ApiError) -> bytes:
        payload = {"type": "error", "sequence_number": 0} | error.openai()["error"]
        return sse_event(payload, "error")

    return await context.respond(builder, stream=request.stream, on_error=on_error)


async def get_response(context: RequestContext) -> Response:
    """GET /v1/responses/{name}."""
    name = context.request.path_params["name"]
    stored = stored_response(context.service, context.caller.tenant, name, "response_id")
    return context.json(stored.body)


async def delete_response(context: RequestContext) -> Response:
    """DELETE /v1/responses/{name}."""
    name = context.request.path_params["name"]
    stored_response(context.service, context.caller.tenant, name, "response_id")
    context.service.history.forget(context.caller.tenant, name)
    return context.json({"id": name, "object": "response", "deleted": True})
