"""Handlers of Ollama's endpoints."""

from __future__ import annotations

import asyncio
import re
import time

from starlette.responses import PlainTextResponse, Response

from ramify import __version__
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.generation import GenerationRequest
from ramify.server.http.wire import json_line
from ramify.server.ollama.chat_request import chat_to_generation
from ramify.server.ollama.generate_request import generate_to_generation
from ramify.server.ollama.model_card import ModelCard
from ramify.server.ollama.names import check_model
from ramify.server.ollama.protocol import (
    AnswerRequest,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
)
from ramify.server.ollama.response import (
    AnswerBuilder,
    Shape,
    loaded,
    message_shape,
    response_shape,
)
from ramify.server.request_fields.unsupported_fields import Refused, UnsupportedFields

API_VERSION = "0.13.0"  # of Ollama: clients ask for a least one
RUNNING = "Ollama is running"  # the text that clients compare with
FIELDS = UnsupportedFields(
    # No history is cut, and no context shifted: a prompt that is too long is refused.
    ignored=frozenset({"shift", "truncate"}),
    refused={
        "prefix": Refused(hint="send the request to /api/chat"),
        "_debug_render_only": Refused(hint="send the messages to /tokenize"),
    },
)
ZERO_DURATION = re.compile(r"[-+]?(0|((0{1,9}(\.0{0,9})?|\.0{1,9})(ns|us|µs|ms|s|m|h)){1,9})")
UNMANAGED = (
    "models are not managed here: this server has the model that it was started with; start another "
    "by `ramify serve MODEL`"
)


async def running(_: RequestContext) -> Response:
    """GET / for a client that probes."""
    return PlainTextResponse(RUNNING)


async def version(context: RequestContext) -> Response:
    """GET /api/version."""
    return context.json({"version": API_VERSION, "ramify": __version__})


async def chat(context: RequestContext) -> Response:
    """POST /api/chat."""
    arrived_s = time.monotonic()
    request = await context.body(OllamaChatRequest, FIELDS)
    if not request.messages:
        return _loaded(context, request, message_shape)
    generation_request = await context.in_prompt_thread(
        chat_to_generation, request, context.service, context.caller.tenant
    )
    return await _answer(context, request, generation_request, message_shape, arrived_s)


async def generate(context: RequestContext) -> Response:
    """POST /api/generate."""
    arrived_s = time.monotonic()
    request = await context.body(GenerateRequest, FIELDS)
    if not request.prompt:
        return _loaded(context, request, response_shape)
    generation_request = await context.in_prompt_thread(
        generate_to_generation, request, context.service, context.caller.tenant
    )
    has_context = not request.raw
    return await _answer(
        context, request, generation_request, response_shape, arrived_s, has_context=has_context
    )


async def _answer(
    context: RequestContext,
    request: AnswerRequest,
    generation_request: GenerationRequest,
    shape: Shape,
    arrived_s: float,
    *,
    has_context: bool = False,
) -> Response:
    """Start the generation and respond: line by line unless `stream` is false."""
    generation = await context.start(generation_request, prefix="ollama-")
    builder = AnswerBuilder(
        context.service,
        generation,
        shape,
        arrived_s=arrived_s,
        has_context=has_context,
        has_logprobs=bool(request.logprobs),
    )
    return await context.respond(
        builder,
        stream=request.stream is not False,
        on_error=lambda error: json_line(error.ollama()),
        is_ndjson=True,
    )


def _loaded(context: RequestContext, request: AnswerRequest, shape: Shape) -> Response:
    """The answer to a request without a prompt. Nothing is unloaded by `keep_alive: 0`."""
    model = check_model(request.model, context.service)
    if _is_zero(request.keep_alive):
        context.warn("keep_alive is ignored: the model is loaded as long as the server runs")
    return context.json(loaded(model, shape))


def _is_zero(keep_alive: float | str | None) -> bool:
    """Whether a duration is 0: seconds, or a text of Go's as "0", "0s" and "0h0m"."""
    if isinstance(keep_alive, str):
        return ZERO_DURATION.fullmatch(keep_alive) is not None
    return keep_alive == 0


async def tags(context: RequestContext) -> Response:
    """GET /api/tags."""
    card = await asyncio.to_thread(ModelCard.of, context.service)
    return context.json({"models": card.listed()})


async def ps(context: RequestContext) -> Response:
    """GET /api/ps."""
    card = await asyncio.to_thread(ModelCard.of, context.service)
    return context.json({"models": card.running()})


async def show(context: RequestContext) -> Response:
    """POST /api/show."""
    request = await context.body(ShowRequest)
    name = check_model(request.model or request.name, context.service)
    card = await asyncio.to_thread(ModelCard.of, context.service)
    return context.json(card.shown(name))


async def unmanaged(_: RequestContext) -> Response:
    """POST /api/pull, create, push, copy and DELETE /api/delete: 400."""
    raise ApiError(400, UNMANAGED)
