"""Handlers of the Anthropic endpoints."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from ramify.server.anthropic.messages_request import messages_to_generation, read_count_request
from ramify.server.anthropic.messages_response import MessageResponseBuilder
from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.context import RequestContext
from ramify.server.conversation.to_generation import rendered
from ramify.server.http.wire import sse_event
from ramify.server.openai.unsupported import refused_elsewhere
from ramify.server.request_fields.unsupported_fields import UnsupportedFields

# The fields that are ignored do not change the answer. `count_tokens` gets the body of a whole message
# request, so its fields are among them.
FIELDS = UnsupportedFields(
    refused=refused_elsewhere(
        MessageRequest,
        {
            "chat_template": "the model's own is used",
            "enable_thinking": "send thinking",
            "functions": "send tools",
            "input": "send messages",
            "instructions": "send system",
            "max_completion_tokens": "send max_tokens",
            "max_output_tokens": "send max_tokens",
            "n": "send several requests",
            "prompt": "send messages",
            "reasoning": "send thinking, or output_config.effort",
            "reasoning_effort": "send output_config.effort",
            "response_format": "send output_config.format",
            "stop": "send stop_sequences",
            "text": "send output_config.format",
        },
    ),
    ignored=frozenset(field.name for field in msgspec.structs.fields(MessageRequest))
    | {
        "betas",
        "billing_policy",
        "container",
        "fallback_credit_token",
        "fallbacks",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
    },
)


async def messages(context: RequestContext) -> Response:
    """POST /v1/messages."""
    request = await context.body(MessageRequest, FIELDS)
    generation_request = await context.in_prompt_thread(
        messages_to_generation, request, context.service, context.caller.tenant
    )
    generation = await context.start(generation_request, prefix="msg_")
    builder = MessageResponseBuilder(context.service, request, generation)
    request_id = context.headers["x-request-id"]
    return await context.respond(
        builder,
        stream=request.stream,
        on_error=lambda error: sse_event(error.anthropic(request_id), "error"),
    )


async def count_tokens(context: RequestContext) -> Response:
    """POST /v1/messages/count_tokens."""
    request = await context.body(CountRequest, FIELDS)

    def count() -> tuple[int, list[str]]:
        conversation = read_count_request(request, context.service, context.caller.tenant)
        entry, warnings = rendered(conversation, context.service, context.caller.tenant)
        return len(entry.prompt.ids), warnings

    num_tokens, warnings = await context.in_prompt_thread(count)
    for message in warnings:
        context.warn(message)
    return context.json({"input_tokens": num_tokens})
