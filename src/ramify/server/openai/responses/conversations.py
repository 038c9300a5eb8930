"""`/v1/conversations`: lists of items that responses go on from and add to."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response

from ramify.counts import counted
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.history.stored_conversation import (
    MAX_ITEMS,
    StoredConversation,
    has_room,
    put_conversation,
)
from ramify.server.http.wire import encode_json
from ramify.server.openai.responses.input import ItemTranslator
from ramify.server.openai.responses.protocol import (
    ConversationItemsRequest,
    ConversationRequest,
    ConversationUpdate,
)
from ramify.server.openai.responses.store import (
    Item,
    conversation_session,
    numbered_items,
    page_of_items,
    stored_conversation,
)
from ramify.server.prompts.renderer import KnownPrefix
from ramify.server.request_fields.unsupported_fields import UnsupportedFields
from ramify.server.service import RequestService

NO_FIELDS = UnsupportedFields()  # beside those of the request types

MAX_ANSWER_ITEMS = 64


async def create_conversation(context: RequestContext) -> Response:
    """POST /v1/conversations."""
    request = await context.body(ConversationRequest, NO_FIELDS)
    await _check_items(context, request.items or [])
    conversation = StoredConversation(
        f"conv_{secrets.token_hex(16)}", int(time.time()), request.metadata or {}
    )
    items = _numbered(request.items or [], conversation)
    _put(context, conversation.with_items(_packed(items)))
    return context.json(_as_json(conversation))


async def get_conversation(context: RequestContext) -> Response:
    """GET /v1/conversations/{name}."""
    return context.json(_as_json(_named(context)))


async def update_conversation(context: RequestContext) -> Response:
    """POST /v1/conversations/{name}: replaces the metadata."""
    request = await context.body(ConversationUpdate, NO_FIELDS)
    conversation = replace(_named(context), metadata=request.metadata)
    _put(context, conversation)
    return context.json(_as_json(conversation))


async def delete_conversation(context: RequestContext) -> Response:
    """DELETE /v1/conversations/{name}: its items as well, and its session ends."""
    name, tenant = _named(context).id, context.caller.tenant
    context.service.conversations.forget(tenant, name)
    await context.service.let_session_go(tenant, conversation_session(name))
    return context.json({"id": name, "object": "conversation.deleted", "deleted": True})


async def list_items(context: RequestContext) -> Response:
    """GET /v1/conversations/{name}/items."""
    items = {name: msgspec.Raw(packed) for name, packed in _named(context).items.items()}
    return context.json(page_of_items(items, context.request.query_params))


async def create_items(context: RequestContext) -> Response:
    """POST /v1/conversations/{name}/items; returns the new items."""
    request = await context.body(ConversationItemsRequest, NO_FIELDS)
    await _check_items(context, request.items)
    conversation = _named(context)
    items = _numbered(request.items, conversation)
    _put(context, conversation.with_items(_packed(items)))
    return context.json(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"],
            "last_id": items[-1]["id"],
            "has_more": False,
        }
    )


async def get_item(context: RequestContext) -> Response:
    """GET /v1/conversations/{name}/items/{item}."""
    conversation = _named(context)
    return context.json(msgspec.Raw(conversation.items[_item_name(context, conversation)]))


async def delete_item(context: RequestContext) -> Response:
    """DELETE /v1/conversations/{name}/items/{item}; returns the conversation."""
    conversation = _named(context)
    conversation = conversation.without_item(_item_name(context, conversation))
    _put(context, conversation)
    return context.json(_as_json(conversation))


def check_room(
    service: RequestService, conversation: StoredConversation | None, num_items: int, num_bytes: int
) -> None:
    """Raise ApiError 400 if a turn would not fit into its conversation, so that none is lost.

    Args:
        num_items, num_bytes: of the request; the answer has few.
    """
    store = service.conversations
    if conversation is not None and not has_room(
        store, conversation, num_items + MAX_ANSWER_ITEMS, num_bytes + service.max_prompt_bytes
    ):
        raise ApiError(
            400,
            f"the conversation has {counted(len(conversation.items), 'item')} of {conversation.num_bytes} "
            f"bytes, and no room for this turn; at most {MAX_ITEMS} items of "
            f"{store.max_tenant_bytes} bytes are kept. Begin a new one",
            param="conversation",
        )


def append_to_conversation(
    service: RequestService,
    tenant: str,
    name: str,
    items: Sequence[Item],
    known: Sequence[KnownPrefix],
) -> None:
    """Append the items of a turn; nothing happens if the conversation is gone. See `check_room`."""
    conversation = service.conversations.get(tenant, name)
    if conversation is not None:
        conversation = conversation.with_items(_packed(items), known)
        put_conversation(service.conversations, tenant, conversation)


def _named(context: RequestContext) -> StoredConversation:
    """The conversation that the path names."""
    name = context.request.path_params["name"]
    return stored_conversation(context.service, context.caller.tenant, name)


def _item_name(context: RequestContext, conversation: StoredConversation) -> str:
    """The item that the path names."""
    name: str = context.request.path_params["item"]
    if name not in conversation.items:
        raise ApiError(404, f"there is no item {name[:100]!r} in it", param="item_id")
    return name


async def _check_items(context: RequestContext, items: Sequence[Item]) -> None:
    """Raise ApiError if an item is malformed; warn of items that prompts leave out."""

    def warnings() -> list[str]:
        translator = ItemTranslator()
        for index, item in enumerate(items):
            translator.append(item, f"items[{index}]")
        return translator.warnings

    for message in await context.in_prompt_thread(warnings):
        context.warn(message)


def _numbered(items: Sequence[Item], conversation: StoredConversation) -> list[Item]:
    """The items as the conversation will have them."""
    return numbered_items(items, conversation.id, conversation.num_added, taken=conversation.items)


def _packed(items: Sequence[Item]) -> list[tuple[str, bytes]]:
    """Items by their ids, as JSON."""
    return [(item["id"], encode_json(item)) for item in items]


def _put(context: RequestContext, conversation: StoredConversation) -> None:
    """Store a conversation.

    Raises:
        ApiError: 400, it is too large.
    """
    store = context.service.conversations
    if not put_conversation(store, context.caller.tenant, conversation):
        raise ApiError(
            400,
            f"the conversation would have {counted(len(conversation.items), 'item')} of "
            f"{conversation.num_bytes} bytes; at most {MAX_ITEMS} items of "
            f"{store.max_tenant_bytes} bytes are kept. Begin a new one",
            param="items",
        )


def _as_json(conversation: StoredConversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }
