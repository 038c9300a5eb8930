"""Handlers of GET /, GET /ui and GET /ui/{name}."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response

from ramify.server.context import RequestContext
from ramify.server.ollama import endpoints as ollama
from ramify.server.page.assets import HEADERS, PAGE, page_assets


async def root(context: RequestContext) -> Response:
    """GET /: the page for a browser, for a client that probes the text that it looks for."""
    if "text/html" in context.request.headers.get("accept", ""):
        response = _asset(context, PAGE)
    else:
        response = await ollama.running(context)
    response.headers["Vary"] = "Accept"
    return response


async def page(context: RequestContext) -> Response:
    """GET /ui; /ui/ leads there, since the page's own links begin with `ui/`."""
    if context.request.url.path.endswith("/"):
        # Relative: whatever Host says, and below whatever path a proxy serves it.
        return Response(status_code=307, headers={"Location": "../ui"})
    return _asset(context, PAGE)


async def asset(context: RequestContext) -> Response:
    """GET /ui/{name}: a script or style of the page."""
    return _asset(context, context.request.path_params["name"])


def _asset(context: RequestContext, name: str) -> Response:
    """A file, or 304 to a browser that has it.

    Raises:
        HTTPException: 404, the page has no such file.
    """
    file = page_assets().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": file.etag}
    known = context.request.headers.get("if-none-match", "")
    if file.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)
