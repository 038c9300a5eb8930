"""Handlers of the OpenAI endpoints, and of `/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import DONE, sse_event
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.completions import (
    CompletionResponseBuilder,
    check_token_ids,
    completion_to_generations,
    encode_text,
)
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ramify.server.service import Service


async def chat_completions(context: RequestContext) -> Response:
    """POST /v1/chat/completions."""
    request = await context.body(ChatRequest)
    generation_request = await context.in_prompt_thread(
        chat_to_generation, request, context.service, context.caller.tenant
    )
    generation = await context.start(generation_request, prefix="chatcmpl-")
    builder = ChatResponseBuilder(context.service, request, generation)
    return await context.respond(builder, stream=request.stream, on_error=_error_event, end=DONE)


async def completions(context: RequestContext) -> Response:
    """POST /v1/completions; a prompt of the list is a generation of its own."""
    request = await context.body(CompletionRequest)
    generation_requests = await context.in_prompt_thread(
        completion_to_generations, request, context.service
    )
    for message in (message for each in generation_requests for message in each.warnings):
        context.warn(message)
    generations = await context.until_done_or_disconnect(
        context.service.start_all(generation_requests, context.caller, prefix="cmpl-")
    )
    context.generations.extend(generations)
    builder = CompletionResponseBuilder(context.service, request, generations)
    return await context.respond(builder, stream=request.stream, on_error=_error_event, end=DONE)


def _error_event(error: ApiError) -> bytes:
    return sse_event(error.openai()) + DONE


async def list_models(context: RequestContext) -> Response:
    """GET /v1/models."""
    entries = [_model_entry(context.service, name) for name in context.service.names]
    return context.json({"object": "list", "data": entries})


async def get_model(context: RequestContext) -> Response:
    """GET /v1/models/{name}."""
    name = context.request.path_params["name"]
    context.service.check_model(name)
    return context.json(_model_entry(context.service, name))


def _model_entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "ramify",
        "root": service.model,
        "max_model_len": service.max_model_len,
    }


async def tokenize(context: RequestContext) -> Response:
    """POST /tokenize: token ids of a text, or of messages by chat template."""
    request = await context.body(TokenizeRequest)
    service = context.service
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", param="prompt")

    def encode() -> Any:
        if request.prompt is not None:
            special = request.add_special_tokens
            return encode_text(request.prompt, service, add_special_tokens=special)
        chat = ChatRequest(messages=request.messages or [], tools=request.tools)
        return chat_to_generation(
            chat,
            service,
            context.caller.tenant,
            add_generation_prompt=request.add_generation_prompt,
        ).prompt.ids

    token_ids = (await context.in_prompt_thread(encode)).tolist()
    payload: dict[str, Any] = {
        "tokens": token_ids,
        "count": len(token_ids),
        "max_model_len": service.max_model_len,
    }
    if request.return_token_strs:
        payload["token_strs"] = [service.tokenizer.token_text(token) for token in token_ids]
    return context.json(payload)


async def detokenize(context: RequestContext) -> Response:
    """POST /detokenize: the text of token ids."""
    request = await context.body(DetokenizeRequest)
    service = context.service
    service.check_model(request.model)
    check_token_ids(request.tokens, "tokens")
    text = await context.in_prompt_thread(service.tokenizer.decode, request.tokens, False)
    return context.json({"prompt": text})
