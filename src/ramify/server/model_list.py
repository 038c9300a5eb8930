"""`/v1/models` in the form of either API: one entry for each name of the model.

A request with the header `anthropic-version` gets Anthropic's form.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from ramify.server.anthropic.protocol import VERSION_HEADER
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import whole_number
from ramify.server.service import RequestService

MAX_ENTRIES = 1000  # of a page, in Anthropic's form
PAGE_PARAMETERS = (("limit", "integer"), ("after_id", "string"), ("before_id", "string"))


async def list_models(context: RequestContext) -> Response:
    """GET /v1/models."""
    service = context.service
    if VERSION_HEADER in context.request.headers:
        return context.json(_anthropic_page(context, service))
    entries = [_openai_entry(service, name) for name in service.names]
    return context.json({"object": "list", "data": entries})


async def get_model(context: RequestContext) -> Response:
    """GET /v1/models/{name}."""
    name = context.request.path_params["name"]
    if not name:  # which a server of any name serves
        raise ApiError(404, f"there is nothing at {context.request.url.path}; send /v1/models")
    name = context.service.check_model(name)
    is_anthropic = VERSION_HEADER in context.request.headers
    entry = _anthropic_entry if is_anthropic else _openai_entry
    return context.json(entry(context.service, name))


def _openai_entry(service: RequestService, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "ramify",
        "root": service.model,
        "display_name": name,
        "max_model_len": service.max_request_len,
        **_sampling_defaults(service),
    }


def _anthropic_entry(service: RequestService, name: str) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": service.max_request_len,
        "max_tokens": service.max_request_len,
        **_sampling_defaults(service),
    }


def _sampling_defaults(service: RequestService) -> dict[str, Any]:
    """The sampling parameters of a request that omits them, and the name of the file that sets them."""
    defaults = service.sampling_defaults
    return {
        "generation_config": None if defaults.file is None else defaults.file.name,
        "default_sampling_params": defaults.values(),
    }


def _anthropic_page(context: RequestContext, service: RequestService) -> dict[str, Any]:
    """The names after `after_id` or before `before_id`, at most `limit`.

    Raises:
        ApiError: 400, a parameter is wrong.
    """
    query = context.request.query_params
    limit = _limit(query.get("limit", "20"))
    names = list(service.names)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise ApiError(400, "send after_id or before_id, not both", param="before_id")
    if after is not None:
        names = names[_index(names, after, "after_id") + 1 :]
    elif before is not None:
        names = names[: _index(names, before, "before_id")]
    page = names[:limit] if before is None else names[max(0, len(names) - limit) :]
    return {
        "data": [_anthropic_entry(service, name) for name in page],
        "has_more": len(page) < len(names),
        "first_id": page[0] if page else None,
        "last_id": page[-1] if page else None,
    }


def _limit(text: str) -> int:
    limit = whole_number(text, max_digits=8)
    if limit is None or not 1 <= limit <= MAX_ENTRIES:
        raise ApiError(400, f"{text[:50]!r} is not in 1..{MAX_ENTRIES}", param="limit")
    return limit


def _index(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise ApiError(400, f"{name[:100]!r} is no model of this server", param=param)
    return names.index(name)
