"""`GET /v1/cache/branches`: a part of the prefix tree, as the caller may see it."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from starlette.responses import Response

from ramify.engine.cache_admin.branch_view import BranchQuery, BranchView
from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ConfigError
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import json_response, whole_number
from ramify.server.operations.activity_report import seen_tenant

READ_S = 5.0
MAX_NODES = 1000
MAX_LEVELS = 64
PARAMETERS = (("below", "integer"), ("max_nodes", "integer"), ("levels", "integer"))


async def branches(context: RequestContext) -> Response:
    """GET /v1/cache/branches?below=&max_nodes=&levels=.

    The nodes of most hits below a node, or of all prompts, parents first. A tenant sees its own nodes.
    """
    engine, tenant = context.service.engine, seen_tenant(context.caller)
    query = BranchQuery(
        below=_number(context, "below", 0, least=0, most=None),
        max_nodes=_number(context, "max_nodes", 200, most=MAX_NODES),
        max_levels=_number(context, "levels", 8, most=MAX_LEVELS),
        tenant=tenant,
    )
    replicas = engine.replicas
    try:
        if replicas is None:
            async with asyncio.timeout(READ_S):
                view = await engine.cache.branches(query)
        else:
            view = await replicas.branches(query, READ_S)
    except ConfigError as error:
        raise ApiError(404, str(error), param="below") from error
    except TimeoutError as error:
        raise ApiError(
            503, f"the engine has not answered within {READ_S:.0f} s", retry_after_s=1
        ) from error
    # Whoever has used up the quota may still see what the cache has.
    job = partial(_as_json, view, context.service.tokenizer)
    done = context.prompt_workers.run(context.caller.tenant, job)
    return json_response(await context.until_done_or_disconnect(done))


def _as_json(view: BranchView, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer; of a thousand nodes it takes 0.1 s and more, which no event loop should."""
    nodes = []
    for node in view.with_texts(tokenizer).nodes:
        fields = asdict(replace(node, token_ids=()))
        del fields["token_ids"]  # the text says it
        nodes.append(fields)
    return {"nodes": nodes, "is_cut": view.is_cut, "num_nodes": view.num_nodes}


def _number(
    context: RequestContext, name: str, default: int, *, least: int = 1, most: int | None
) -> int:
    """A whole number of the query.

    Raises:
        ApiError: 400, it is none, or outside the limits.
    """
    text = context.request.query_params.get(name)
    if text is None:
        return default
    value = whole_number(text, max_digits=15)
    if value is None or value < least or (most is not None and value > most):
        limits = f"{least} or more" if most is None else f"in {least}..{most}"
        raise ApiError(400, f"{text[:50]!r} is no whole number that is {limits}", param=name)
    return value
