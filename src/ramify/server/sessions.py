"""`/v1/sessions/{name}`: a client ends its session."""

from __future__ import annotations

from starlette.responses import Response

from ramify.server.context import RequestContext
from ramify.server.errors import ApiError


async def delete_session(context: RequestContext) -> Response:
    """DELETE /v1/sessions/{name}: its pages are evicted first, but for those that others have used."""
    name = context.request.path_params["name"]
    ending = context.service.engine.cache.end_session(name, tenant=context.caller.tenant)
    num_pages = await context.until_done_or_disconnect(ending)
    if num_pages is None:
        raise ApiError(404, f"there is no session {name[:100]!r}; it has ended or never begun")
    return context.json({"id": name, "object": "session", "deleted": True, "pages": num_pages})
