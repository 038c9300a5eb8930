"""The ASGI application: keys, errors and disconnects around the endpoints of `routes.py`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ramify.server.context import RequestContext
from ramify.server.errors import ApiError, as_api_error
from ramify.server.health import Readiness
from ramify.server.http.wire import PING_S, KeepAliveResponse, error_response, request_id
from ramify.server.operations.load_monitor import LoadMonitor
from ramify.server.operations.metrics import Metrics
from ramify.server.operations.request_log import log_rejected
from ramify.server.routes import ENDPOINTS, Endpoint
from ramify.server.service import Service
from ramify.server.tenants import ApiKeys, Caller, Quota


class Server:
    """Serves the endpoints over a `Service`.

    Args:
        keys: None lets everybody call, as one tenant.
        local_admin: without keys, everybody may use the admin endpoints.
    """

    def __init__(
        self, service: Service, keys: ApiKeys | None = None, *, local_admin: bool = True
    ) -> None:
        self.service, self.keys = service, keys
        is_admin = local_admin and keys is None
        self.anonymous = Caller("", is_admin=is_admin, quota=Quota(max_cached_share=None))
        service.has_several_tenants = keys is not None and keys.num_tenants > 1
        self.metrics = Metrics(service.model)
        service.listeners.append(self.metrics.observe_request)
        service.event_listeners.append(self.metrics.observe_tokens)
        self.health = Readiness(service.engine.health)
        self.ping_s = PING_S
        # Rendering and tokenising a long prompt would block the event loop.
        self._prompt_thread = ThreadPoolExecutor(1, "ramify-prompts")

    def app(self, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
        """The ASGI application.

        Args:
            lifespan: in place of the server's own, for tests that start and stop the server themselves.
        """
        return Starlette(
            routes=[self._route(endpoint) for endpoint in ENDPOINTS],
            exception_handlers={HTTPException: self._http_error, Exception: self._http_error},
            lifespan=lifespan or self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready while the application runs; the load monitor runs meanwhile."""
        monitor = asyncio.create_task(LoadMonitor(self.service, self.metrics).run())
        self.health.is_ready = True
        try:
            yield
        finally:
            self.health.is_ready = False
            monitor.cancel()
            await asyncio.gather(monitor, return_exceptions=True)
            self._prompt_thread.shutdown(wait=False)

    def _route(self, endpoint: Endpoint) -> Route:
        async def serve(request: Request) -> Any:
            headers = {"x-request-id": request_id(request)}
            context = self._context(request, headers)
            try:
                context = replace(context, caller=self.caller(request))
                if not endpoint.while_draining:
                    self.health.reject_if_draining()
                if endpoint.admin and not context.caller.is_admin:
                    raise ApiError(403, "this needs the admin key", code="admin_key_needed")
                response = await endpoint.handler(context)
            except Exception as error:  # noqa: BLE001 - every failure has a response
                await context.close()
                is_anthropic = endpoint.dialect == "anthropic"
                response = error_response(error, anthropic=is_anthropic, headers=headers)
                log_rejected(as_api_error(error), endpoint.path, headers["x-request-id"])
            except BaseException:
                await context.close()
                raise
            self.metrics.count_response(endpoint.path, response.status_code)
            return KeepAliveResponse(response, context.close, ping_s=self.ping_s)

        async def serve_open(request: Request) -> Response:
            context = self._context(request, {})
            with suppress(ApiError):  # a wrong key is as good as none here
                context = replace(context, caller=self.caller(request))
            return await endpoint.handler(context)

        handler = serve_open if endpoint.is_open else serve
        return Route(endpoint.path, handler, methods=[endpoint.method])

    def _context(self, request: Request, headers: dict[str, str]) -> RequestContext:
        return RequestContext(
            request,
            self.anonymous,
            headers,
            self.service,
            self.metrics,
            self.health,
            self._prompt_thread,
        )

    def caller(self, request: Request) -> Caller:
        """The tenant whose key a request carries.

        Raises:
            ApiError: 401, there is no such key.
        """
        if self.keys is None:
            return self.anonymous
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        return self.keys.caller(key.strip())

    async def _http_error(self, request: Request, error: Exception) -> Response:
        headers = {"x-request-id": request_id(request)}
        anthropic = request.url.path.startswith("/v1/messages")
        if isinstance(error, HTTPException):
            messages = {
                404: f"there is nothing at {request.url.path[:200]}",
                405: f"{request.method} is not possible at {request.url.path[:200]}",
            }
            message = messages.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, message)
        return error_response(error, anthropic=anthropic, headers=headers)
