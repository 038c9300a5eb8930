"""`/v1/responses/compact`: a conversation as its user messages and a summary by the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramify.server.errors import ApiError
from ramify.server.generation import Generation
from ramify.server.openai.responses.protocol import CompactRequest, ResponsesRequest
from ramify.server.openai.responses.request import TranslatedRequest, response_to_generation
from ramify.server.openai.responses.response import ResponsesResponseBuilder
from ramify.server.openai.responses.store import EarlierTurns, Item, item_id, numbered_items
from ramify.server.request_fields.opaque_text import encode_opaque
from ramify.server.service import RequestService

TASK = (
    "Write a summary of this conversation for yourself: you will go on with it, and will see only "
    "the user's messages and this summary. State the goal, what was done and found, the decisions, "
    "the names of files and the values that matter, and what is left to do. Call no tool."
)


def compaction_request(fields: CompactRequest, max_output_tokens: int) -> ResponsesRequest:
    """The request that has the model summarise a conversation; it is not stored."""
    items: list[Item] = [{"type": "message", "role": "user", "content": TASK}]
    if isinstance(fields.input, str):
        items.insert(0, {"type": "message", "role": "user", "content": fields.input})
    elif fields.input is not None:
        items = [*fields.input, *items]
    return ResponsesRequest(
        model=fields.model,
        input=items,
        instructions=fields.instructions,
        prefix=fields.prefix,
        previous_response_id=fields.previous_response_id,
        prompt_cache_key=fields.prompt_cache_key,
        prompt_cache_options=fields.prompt_cache_options,
        prompt_cache_retention=fields.prompt_cache_retention,
        service_tier=fields.service_tier,
        truncation="auto",
        max_output_tokens=max_output_tokens,
        store=False,
    )


def translate_compaction(
    request: ResponsesRequest, earlier: EarlierTurns, service: RequestService, tenant: str
) -> tuple[TranslatedRequest, list[Item]]:
    """Translate a `compaction_request` for the engine; returns the user's messages as well.

    Raises:
        ApiError, RequestError: it cannot be served.
    """
    translated = response_to_generation(request, earlier, service, tenant)
    history = [*earlier.items(), *translated.items[:-1]]
    if not history:
        raise ApiError(400, "there is nothing to compact; send messages", param="input")
    return translated, [item for item in history if _is_user_message(item)]


async def compacted_response(
    service: RequestService,
    translated: TranslatedRequest,
    user_messages: Sequence[Item],
    generation: Generation,
) -> dict[str, Any]:
    """Wait for the summary; returns the `response.compaction`.

    Its output is the input of the next request: all user messages, then one `compaction` item.
    """
    request = ResponsesRequest(store=False)
    body = await ResponsesResponseBuilder(service, request, translated, generation).body()
    summary = "".join(
        part["text"]
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    )
    messages = numbered_items(user_messages, generation.id)
    compaction: Item = {
        "id": item_id("compaction", generation.id, len(messages)),
        "type": "compaction",
        "encrypted_content": encode_opaque(summary),
    }
    return {
        "id": generation.id,
        "object": "response.compaction",
        "created_at": generation.created,
        "output": [*messages, compaction],
        "usage": body["usage"],
    }


def _is_user_message(item: Item) -> bool:
    return item.get("type", "message") == "message" and item.get("role") == "user"
