"""`GET /v1/activity`: what runs, and the last ten minutes, of the caller's tenant; for the operator, of all."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.responses import Response

from ramify import __version__
from ramify.errors import EngineStoppedError, NoReplicaError, ReplicaLostError
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import json_response
from ramify.server.tenants import Caller

MAX_REQUESTS = 200
READ_S = 1.0


def seen_tenant(caller: Caller) -> str | None:
    """The tenant whose nodes and requests a caller may see; None: all.

    Raises:
        ApiError: 403, the caller is nobody: without keys, all strangers are one tenant.
    """
    if caller.is_admin:
        return None
    if not caller.tenant:
        raise ApiError(
            403,
            "without keys, a server on an address that others can reach shows no requests: start it "
            "with --api-key",
            code="admin_key_needed",
        )
    return caller.tenant


async def activity(context: RequestContext) -> Response:
    """GET /v1/activity."""
    service, caller = context.service, context.caller
    tenant = seen_tenant(caller)
    if tenant is None and service.activity.wants_sample:
        # In a long step the engine answers late; the next call has the sample.
        with suppress(TimeoutError, EngineStoppedError, NoReplicaError, ReplicaLostError):
            async with asyncio.timeout(READ_S):
                service.activity.sample((await service.engine.stats()).cache)
    service.observe_live(tenant)
    return json_response(
        {
            "version": __version__,
            "model": service.model,
            "max_model_len": service.max_request_len,
            "tenant": caller.tenant,
            "is_admin": caller.is_admin,
            "live": service.live.as_json(tenant, MAX_REQUESTS),
            "history": service.activity.as_json(tenant),
        }
    )
