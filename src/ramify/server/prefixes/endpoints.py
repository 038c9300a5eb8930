"""Handlers of `/v1/prefixes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from ramify.errors import shortened
from ramify.server.anthropic.protocol import VERSION_HEADER
from ramify.server.context import RequestContext
from ramify.server.conversation.conversation import NamedPrefix
from ramify.server.conversation.named_prefix import NUM_QUOTED
from ramify.server.errors import ApiError
from ramify.server.history.named_values import NamedValues, TokenPrefix
from ramify.server.prefixes.definition import PrefixRequest, read_prefix
from ramify.server.prefixes.pages import compute, pinned_tokens, unpin
from ramify.server.request_fields.unsupported_fields import Refused, UnsupportedFields

FIELDS = UnsupportedFields(
    refused={
        "cache_salt": Refused(hint="a request with a salt computes the prefix apart"),
        "input": Refused(hint="send messages"),
        "instructions": Refused(hint="send system"),
        "prompt": Refused(hint="send system or messages"),
    }
)


async def create_prefix(context: RequestContext) -> Response:
    """POST /v1/prefixes: answers when it is computed and pinned; goes on if the client leaves."""
    request = await context.body(PrefixRequest, FIELDS)
    service, caller = context.service, context.caller
    if request.public and not caller.is_admin:
        raise ApiError(
            403, "a public prefix needs the admin key", param="public", code="admin_key_needed"
        )
    prefix, warnings = await context.in_prompt_thread(
        _read, request, context, VERSION_HEADER in context.request.headers
    )
    for message in warnings:
        context.warn(message)
    values, tenant = _values(context, is_public=prefix.is_public)
    earlier = values.get(tenant, prefix.name)
    _check_free(earlier, prefix, request)
    values.put(tenant, prefix.name, prefix)
    try:
        await compute(prefix, service, caller)
    except BaseException:
        if values.get(tenant, prefix.name) is prefix:
            values.remove(tenant, prefix.name)
            if earlier is not None:
                values.put(tenant, prefix.name, earlier)
        await unpin(prefix, service, caller.tenant)
        raise
    if values.get(tenant, prefix.name) is not prefix:  # deleted or replaced meanwhile
        await unpin(prefix, service, caller.tenant)
    if isinstance(earlier, NamedPrefix):
        await unpin(earlier, service, caller.tenant)
    [payload] = await _as_json([prefix], context)
    return context.json(payload)


def _read(
    request: PrefixRequest, context: RequestContext, is_anthropic: bool
) -> tuple[NamedPrefix, list[str]]:
    tenant = context.caller.tenant
    return read_prefix(request, context.service, tenant, is_anthropic=is_anthropic)


def _check_free(earlier: TokenPrefix | None, prefix: NamedPrefix, request: PrefixRequest) -> None:
    """Refuse another definition under a name that is taken; the same one is computed again."""
    if request.replace or not isinstance(earlier, NamedPrefix):
        return
    if (earlier.definition, earlier.ttl_s) != (prefix.definition, prefix.ttl_s):
        raise ApiError(
            409,
            f"there is a prefix {prefix.name!r} with another definition; send replace: true, or delete it",
            param="name",
            code="name_taken",
        )


def _values(context: RequestContext, *, is_public: bool) -> tuple[NamedValues[TokenPrefix], str]:
    """Where a name is, and for which tenant."""
    if is_public:
        return context.service.public_prefixes, ""
    return context.service.prefixes, context.caller.tenant


async def list_prefixes(context: RequestContext) -> Response:
    """GET /v1/prefixes: the tenant's own, and the public ones."""
    service = context.service
    own = service.prefixes.of(context.caller.tenant)
    prefixes = [
        prefix
        for prefix in (*own, *service.public_prefixes.of(""))
        if isinstance(prefix, NamedPrefix)
    ]
    return context.json({"object": "list", "data": await _as_json(prefixes, context)})


async def get_prefix(context: RequestContext) -> Response:
    """GET /v1/prefixes/{name}, with its definition; that of a public one for the operator only."""
    prefix = _named(context)
    [payload] = await _as_json([prefix], context)
    if not prefix.is_public or context.caller.is_admin:
        payload |= msgspec.json.decode(prefix.definition)
    return context.json(payload)


async def delete_prefix(context: RequestContext) -> Response:
    """DELETE /v1/prefixes/{name}: the name, and the pins of its pages."""
    prefix = _named(context)
    if prefix.is_public and not context.caller.is_admin:
        raise ApiError(
            403,
            f"the prefix {prefix.name!r} is public; to delete it needs the admin key",
            code="admin_key_needed",
        )
    values, tenant = _values(context, is_public=prefix.is_public)
    values.remove(tenant, prefix.name)
    try:
        await unpin(prefix, context.service, context.caller.tenant)
    except BaseException:  # its pins may live on: whoever tries again needs the name
        if values.get(tenant, prefix.name) is None:
            values.put(tenant, prefix.name, prefix)
        raise
    return context.json({"name": prefix.name, "object": "prefix", "deleted": True})


def _named(context: RequestContext) -> NamedPrefix:
    name, service = context.request.path_params["name"], context.service
    own = service.prefixes.get(context.caller.tenant, name)
    prefix = own or service.public_prefixes.get("", name)
    if not isinstance(prefix, NamedPrefix):
        raise ApiError(404, f"there is no prefix {shortened(name, NUM_QUOTED)!r}")
    return prefix


async def _as_json(
    prefixes: Sequence[NamedPrefix], context: RequestContext
) -> list[dict[str, Any]]:
    pinned = await pinned_tokens(prefixes, context.service, context.caller.tenant)
    return [
        {
            "name": prefix.name,
            "object": "prefix",
            "created_at": prefix.created,
            "model": prefix.model,
            "tokens": len(prefix.ids),
            "pinned_tokens": num_pinned,
            "ttl_s": prefix.ttl_s,
            "public": prefix.is_public,
            "bytes": prefix.num_bytes,
        }
        for prefix, num_pinned in zip(prefixes, pinned, strict=True)
    ]
