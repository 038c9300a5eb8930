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
    completion_to_generations,
    encode_text,
    read_token_ids,
)
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ramify.server.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS
from ramify.server.openai.vllm_fields import with_vllm_fields


async def chat_completions(context: RequestContext) -> Response:
    """POST /v1/chat/completions."""
    request = await context.body(ChatRequest, CHAT_FIELDS)
    generation_request = await context.in_prompt_thread(
        chat_to_generation, request, context.service, context.caller.tenant
    )
    generation = await context.start(generation_request, prefix="chatcmpl-")
    builder = with_vllm_fields(
        ChatResponseBuilder(context.service, request, generation),
        request,
        [generation],
        context.service.tokenizer,
    )
    return await context.respond(builder, stream=request.stream, on_error=_error_event, end=DONE)


async def completions(context: RequestContext) -> Response:
    """POST /v1/completions; a prompt of the list is a generation of its own."""
    request = await context.body(CompletionRequest, COMPLETION_FIELDS)
    generation_requests = await context.in_prompt_thread(
        completion_to_generations, request, context.service
    )
    generation_requests = [context.in_session(request) for request in generation_requests]
    for message in (message for request in generation_requests for message in request.warnings):
        context.warn(message)
    generations = await context.until_done_or_disconnect(
        context.service.start_all(generation_requests, context.caller, prefix="cmpl-")
    )
    context.generations.extend(generations)
    builder = with_vllm_fields(
        CompletionResponseBuilder(context.service, request, generations),
        request,
        generations,
        context.service.tokenizer,
    )
    return await context.respond(builder, stream=request.stream, on_error=_error_event, end=DONE)


def _error_event(error: ApiError) -> bytes:
    return sse_event(error.openai()) + DONE


async def tokenize(context: RequestContext) -> Response:
    """POST /tokenize: token ids of a text, or of the prompt that a chat request would run."""
    request = await context.body(TokenizeRequest, CHAT_FIELDS)
    service = context.service
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "one of prompt and messages is needed", param="prompt")

    def encode() -> Any:
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return encode_text(request.prompt, service, add_special_tokens=special)
        if request.add_special_tokens:
            raise ApiError(
                400, "of messages, the chat template writes them", param="add_special_tokens"
            )
        return chat_to_generation(request, service, context.caller.tenant).prompt.ids

    def payload() -> dict[str, Any]:
        token_ids = encode().tolist()
        fields: dict[str, Any] = {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": service.max_request_len,
        }
        if request.return_token_strs:
            fields["token_strs"] = [service.tokenizer.token_text(token) for token in token_ids]
        return fields

    return context.json(await context.in_prompt_thread(payload))


async def detokenize(context: RequestContext) -> Response:
    """POST /detokenize: the text of token ids."""
    request = await context.body(DetokenizeRequest)
    service = context.service
    service.check_model(request.model)

    def decode() -> str:
        read_token_ids(request.tokens, "tokens")
        return service.tokenizer.decode(request.tokens, False)

    return context.json({"prompt": await context.in_prompt_thread(decode)})


async def tokenizer_info(context: RequestContext) -> Response:
    """GET /tokenizer_info: the chat template and special tokens, as remote tokenizers need them."""
    service = context.service
    tokenizer = service.tokenizer
    return context.json(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",  # the class that reads any tokenizer.json
            "chat_template": tokenizer.chat_template,
            "model_max_length": service.max_request_len,
            "vocab_size": tokenizer.vocab_size,
            **tokenizer.special_tokens,
        }
    )
