"""Handlers of the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator

import msgspec
from starlette.responses import Response

from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import sse_event, stream_response, whole_number
from ramify.server.openai.responses.compaction import (
    compacted_response,
    compaction_request,
    translate_compaction,
)
from ramify.server.openai.responses.conversations import check_room
from ramify.server.openai.responses.protocol import (
    CompactRequest,
    InputTokensRequest,
    ResponsesRequest,
)
from ramify.server.openai.responses.replay import replayed_events
from ramify.server.openai.responses.request import TranslatedRequest, response_to_generation
from ramify.server.openai.responses.response import ResponsesResponseBuilder
from ramify.server.openai.responses.store import (
    CHAIN_PREFIX,
    StoredResponse,
    earlier_turns,
    items_by_id,
    page_of_items,
    stored_response,
)
from ramify.server.openai.unsupported import INPUT_FIELDS, RESPONSES_FIELDS

MAX_SUMMARY_SHARE = 8  # a summary has at most this part of the context
MAX_SEQUENCE_DIGITS = 12  # of `starting_after`


async def create_response(context: RequestContext) -> Response:
    """POST /v1/responses; stores the response unless the request says `store: false`."""
    request = await context.body(ResponsesRequest, RESPONSES_FIELDS)
    translated = await _translate(context, request)
    conversation, num_items = translated.earlier.conversation, len(translated.items)
    check_room(context.service, conversation, num_items, context.num_body_bytes)
    session = translated.earlier.session
    is_stored = request.store is not False and not context.caller.is_background
    if not session and is_stored:  # for the responses that will continue it
        session = CHAIN_PREFIX + secrets.token_hex(8)
    generation = await context.start(
        translated.generation_request, prefix="resp_", implied_session=session
    )
    builder = ResponsesResponseBuilder(context.service, request, translated, generation)
    return await context.respond(builder, stream=request.stream, on_error=_error_event)


async def _translate(context: RequestContext, request: ResponsesRequest) -> TranslatedRequest:
    service, tenant = context.service, context.caller.tenant
    earlier = earlier_turns(request, service, tenant)
    return await context.in_prompt_thread(response_to_generation, request, earlier, service, tenant)


def _error_event(error: ApiError) -> bytes:
    payload = {"type": "error", "sequence_number": 0} | error.openai()["error"]
    return sse_event(payload | {"type": "error"}, "error")


async def get_response(context: RequestContext) -> Response:
    """GET /v1/responses/{name}; with `stream=true` its events, those after `starting_after`."""
    stored = _named(context)
    query = context.request.query_params
    if query.get("stream", "false") not in ("true", "1"):
        return context.json(stored.body)
    text = query.get("starting_after", "-1")
    if whole_number(text.removeprefix("-"), max_digits=MAX_SEQUENCE_DIGITS) is None:
        raise ApiError(400, f"{text!r} is not a sequence number", param="starting_after")

    async def events() -> AsyncGenerator[bytes]:
        for event in replayed_events(stored):
            if event["sequence_number"] > int(text):
                yield sse_event(event, event["type"])

    return stream_response(events(), on_error=_error_event, headers=context.headers)


async def delete_response(context: RequestContext) -> Response:
    """DELETE /v1/responses/{name}; the last of those that continue each other ends their session."""
    chain, name = _named(context).chain, context.request.path_params["name"]
    context.service.history.forget(context.caller.tenant, name)
    if chain.is_own and chain.last == name:
        await context.service.let_session_go(context.caller.tenant, chain.session)
    return context.json({"id": name, "object": "response", "deleted": True})


async def cancel_response(context: RequestContext) -> Response:
    """POST /v1/responses/{name}/cancel: 400, as no response runs in the background."""
    _named(context)
    raise ApiError(
        400,
        "only responses that were created with background: true can be cancelled, and these are "
        "not served; close the connection to end a response",
        param="response_id",
    )


async def list_input_items(context: RequestContext) -> Response:
    """GET /v1/responses/{name}/input_items: of the whole conversation before the answer."""
    items = await context.in_prompt_thread(items_by_id, _named(context).packed_input)
    return context.json(page_of_items(items, context.request.query_params))


async def count_input_tokens(context: RequestContext) -> Response:
    """POST /v1/responses/input_tokens: the length of the prompt, without running it."""
    fields = await context.body(InputTokensRequest, INPUT_FIELDS)
    request = ResponsesRequest(**msgspec.structs.asdict(fields))
    translated = await _translate(context, request)
    for message in translated.generation_request.warnings:
        context.warn(message)
    num_tokens = len(translated.generation_request.prompt.ids)
    return context.json({"object": "response.input_tokens", "input_tokens": num_tokens})


async def compact_response(context: RequestContext) -> Response:
    """POST /v1/responses/compact: the user's messages, and a summary that the model writes."""
    fields = await context.body(CompactRequest, INPUT_FIELDS)
    service, tenant = context.service, context.caller.tenant
    request = compaction_request(fields, max(1, service.max_request_len // MAX_SUMMARY_SHARE))
    earlier = earlier_turns(request, service, tenant)
    translated, user_messages = await context.in_prompt_thread(
        translate_compaction, request, earlier, service, tenant
    )
    generation = await context.start(translated.generation_request, prefix="resp_")
    payload = await context.until_done_or_disconnect(
        compacted_response(service, translated, user_messages, generation)
    )
    return context.json(payload)


def _named(context: RequestContext) -> StoredResponse:
    """The stored response that the path names."""
    name = context.request.path_params["name"]
    return stored_response(context.service, context.caller.tenant, name, "response_id")
