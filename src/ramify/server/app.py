"""The ASGI application: keys, errors and disconnects around the endpoints of `routes.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from ramify.library_panics import panics_as_errors
from ramify.outputs import FinishReason
from ramify.server.anthropic.protocol import VERSION_HEADER
from ramify.server.batches.batches import Batches
from ramify.server.batches.lines import LineAnswer
from ramify.server.batches.runner import BatchRunner
from ramify.server.batches.slots import LineSlots
from ramify.server.batches.store import BatchStore
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError, ContextLengthError, as_api_error
from ramify.server.health import Readiness
from ramify.server.http.body_budget import BodyBudget
from ramify.server.http.browser_guard import BrowserGuard, BrowserRules, origin_name
from ramify.server.http.wire import (
    EVENT_STREAM,
    NDJSON,
    PING_S,
    PINGS,
    Dialect,
    KeepAliveResponse,
    error_response,
    request_id,
)
from ramify.server.internal_calls import internal_request
from ramify.server.operations.batch_metrics import watch_batches
from ramify.server.operations.load_monitor import LoadMonitor
from ramify.server.operations.metrics import Metrics
from ramify.server.operations.request_log import log_rejected
from ramify.server.prompts.jobs import PromptWorkers
from ramify.server.routes import ENDPOINTS, Endpoint
from ramify.server.service import RequestService
from ramify.server.telemetry.options import OtlpOptions
from ramify.server.telemetry.request_spans import EndedRequest
from ramify.server.telemetry.server_telemetry import ServerTelemetry
from ramify.server.tenants import ApiKeys, Caller, Quota

# The endpoints that lines of batches are sent to.
_POSTS = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.method == "POST"}
EXPOSED_HEADERS = ("X-Request-Id", "X-Cache", "X-Ramify-Warning", "Retry-After")
CORS_MAX_AGE_S = 600


class Server:
    """Serves the endpoints over a `RequestService`.

    Args:
        keys: None lets everybody call, as one tenant.
        local_admin: without keys, everybody may use the admin endpoints.
        allowed_hosts: Host headers to answer; None: any. See `BrowserRules`.
        allowed_origins: origins of other sites whose pages may call and read answers. Without keys
            no other page may call; with keys it may, if it knows one, but not read.
        otlp: where traces and metrics are sent; None: nowhere.
        batch_store: files and batches; None: there are none.
    """

    def __init__(
        self,
        service: RequestService,
        keys: ApiKeys | None = None,
        *,
        local_admin: bool = True,
        allowed_hosts: Collection[str] | None = None,
        allowed_origins: Collection[str] = (),
        otlp: OtlpOptions | None = None,
        batch_store: BatchStore | None = None,
    ) -> None:
        self.service, self.keys = service, keys
        self.allowed_origins = tuple(map(origin_name, allowed_origins))
        self._browser_rules = BrowserRules.of(
            allowed_hosts, allowed_origins if keys is None else None
        )
        is_admin = local_admin and keys is None
        self.anonymous = Caller("", is_admin=is_admin, quota=Quota(max_cached_share=None))
        service.has_several_tenants = keys is not None and keys.num_tenants > 1
        self.metrics = Metrics(service.model)
        service.listeners.append(self.metrics.observe_request)
        service.event_listeners.append(self.metrics.observe_tokens)
        self.metrics.watch(
            "request_history_bytes",
            "memory of ended requests, for diagnostics and stored responses",
            lambda: service.history.num_bytes,
        )
        self.metrics.watch(
            "conversation_bytes",
            "memory of /v1/conversations",
            lambda: service.conversations.num_bytes,
        )
        self.metrics.watch(
            "named_prefixes",
            "prefixes with a name, of all tenants",
            lambda: len(service.prefixes) + len(service.public_prefixes),
        )
        self.metrics.watch(
            "named_prefix_bytes",
            "memory of their definitions",
            lambda: service.prefixes.num_bytes + service.public_prefixes.num_bytes,
        )
        self.telemetry = None if otlp is None else ServerTelemetry(otlp, service, self.metrics)
        self.health = Readiness(service.engine.health)
        self.ping_s = PING_S
        self.bodies = BodyBudget()
        self._prompt_workers = PromptWorkers()
        self.batches = None if batch_store is None else self._batches(batch_store)
        watch_batches(self.metrics, self.batches)

    def app(self, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
        """The ASGI application.

        Args:
            lifespan: in place of the server's own, for tests that start and stop the server themselves.
        """
        guard = Middleware(BrowserGuard, rules=self._browser_rules, refuse=self._refuse)
        cors = Middleware(
            CORSMiddleware,
            allow_origins=self.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
            max_age=CORS_MAX_AGE_S,
        )
        app = Starlette(
            routes=[route for endpoint in ENDPOINTS for route in self._routes(endpoint)],
            middleware=[guard, cors] if self.allowed_origins else [guard],
            exception_handlers={HTTPException: self._http_error, Exception: self._http_error},
            lifespan=lifespan or self._lifespan,
        )
        app.router.redirect_slashes = False  # redirects would go to whatever Host says
        app.state.batches = self.batches
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        """Ready while the application runs; load monitor, telemetry and batches run meanwhile."""
        tasks = [asyncio.create_task(LoadMonitor(self.service, self.metrics).run())]
        if self.telemetry is not None:
            tasks.append(asyncio.create_task(self.telemetry.run()))
        self.health.is_ready = True
        if self.batches is not None:
            self.batches.runner.start()
        try:
            yield
        finally:
            self.health.is_ready = False
            if self.batches is not None:
                await self.batches.runner.aclose()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._prompt_workers.shutdown()
            if self.telemetry is not None:
                await self.telemetry.close()

    def _routes(self, endpoint: Endpoint) -> list[Route]:
        async def serve(request: Request) -> Any:
            start_ns = time.time_ns()
            dialect = endpoint.dialect_of(request)
            headers = _id_headers(request, dialect)
            context = self._context(request, headers)
            try:
                context = replace(context, caller=self.caller(request))
                if not endpoint.while_draining:
                    self.health.reject_if_draining()
                if endpoint.admin and not context.caller.is_admin:
                    raise ApiError(403, "this needs the admin key", code="admin_key_needed")
                with panics_as_errors("a library"):
                    response = await endpoint.handler(context)
            except Exception as error:  # noqa: BLE001 - every failure has a response
                await context.close()
                response = _rejection(error, endpoint, headers, dialect)
            except BaseException:
                await context.close()
                raise
            is_stream = response.media_type in {EVENT_STREAM, NDJSON}
            count = partial(self._end_request, context, endpoint.path, is_stream, start_ns)
            ping = PINGS[dialect]
            return KeepAliveResponse(
                response, context.close, count=count, ping_s=self.ping_s, ping=ping
            )

        async def serve_open(request: Request) -> Response:
            context = self._context(request, {})
            with suppress(ApiError):  # a wrong key is as good as none here
                context = replace(context, caller=self.caller(request))
            return await endpoint.handler(context)

        handler = serve_open if endpoint.is_open else serve
        return [Route(path, handler, methods=[endpoint.method]) for path in endpoint.paths]

    def _end_request(
        self, context: RequestContext, route: str, is_stream: bool, start_ns: int, status: int
    ) -> None:
        """A response has been sent, or its client has gone: count it, and send its trace."""
        self.metrics.count_response(route, status)
        self._send_trace(context, route, status, start_ns, is_stream=is_stream)

    def _send_trace(
        self,
        context: RequestContext,
        route: str,
        status: int,
        start_ns: int,
        *,
        is_stream: bool = False,
        batch: str = "",
    ) -> None:
        if self.telemetry is not None:
            ended = EndedRequest(
                route,
                status,
                is_stream,
                context.caller.tenant,
                start_ns,
                time.time_ns(),
                tuple(context.generations),
                batch,
            )
            self.telemetry.end_request(ended, context.request.headers)

    def _context(self, request: Request, headers: dict[str, str]) -> RequestContext:
        return RequestContext(
            request,
            self.anonymous,
            headers,
            self.service,
            self.metrics,
            self.health,
            self._prompt_workers,
            self.bodies,
        )

    # -- batches -----------------------------------------------------------------------------

    def _batches(self, store: BatchStore) -> Batches:
        service = self.service
        slots = LineSlots(
            service.live,
            self._num_rows,
            lambda: self.health.is_ready and not self.health.is_draining,
        )
        runner = BatchRunner(
            store,
            slots,
            self.answer_line,
            caller_of=self._background_caller,
            check_model=service.check_model,
            tools_first=service.prompt_renderer.conventions.has_tools_first,
        )
        return Batches(store, runner)

    def _num_rows(self) -> int:
        """Rows of the engine's batch, of all replicas that are ready."""
        engine = self.service.engine
        states = [] if engine.replicas is None else engine.replicas.states()
        return engine.config.max_num_seqs * max(
            1, sum(replica.state == "ready" for replica in states)
        )

    def _background_caller(self, tenant: str) -> Caller | None:
        """The caller of a batch's lines; None: its tenant has no key any more."""
        if self.keys is not None:
            caller = self.keys.caller_of(tenant)
        else:
            caller = self.anonymous if tenant == self.anonymous.tenant else None
        return None if caller is None else replace(caller, is_background=True)

    async def answer_line(self, path: str, body: bytes, caller: Caller, batch: str) -> LineAnswer:
        """The answer to a line of a batch: what the endpoint at `path` answers to this body.

        Args:
            batch: its id, for the trace.
        """
        endpoint, start_ns = _POSTS[path], time.time_ns()
        request = internal_request(path, body)
        dialect = endpoint.dialect_of(request)
        headers = _id_headers(request, dialect)
        context = replace(self._context(request, headers), caller=caller)
        try:
            with panics_as_errors("a library"):
                response: Response = await endpoint.handler(context)
        except Exception as error:  # noqa: BLE001 - every failure has a response
            response = _rejection(error, endpoint, headers, dialect)
        finally:
            await context.close()
        self._send_trace(context, path, response.status_code, start_ns, batch=batch)
        outputs = [generation.output for generation in context.generations]
        retry_after = response.headers.get("retry-after")
        return LineAnswer(
            response.status_code,
            headers["x-request-id"],
            bytes(response.body),
            retry_after_s=None if retry_after is None else float(retry_after),
            is_aborted=any(
                output is not None and output.finish_reason is FinishReason.ABORT
                for output in outputs
            ),
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

    def _refuse(self, scope: Scope, error: ApiError) -> Response:
        """The response to a request that `BrowserRules` refuse."""
        request = Request(scope)
        dialect = dialect_at(request)
        headers = _id_headers(request, dialect)
        log_rejected(error, "-", headers["x-request-id"])
        self.metrics.count_response("-", error.status)
        return error_response(error, dialect=dialect, headers=headers)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        dialect = dialect_at(request)
        headers = _id_headers(request, dialect)
        if isinstance(error, HTTPException):
            path, message = request.url.path[:200], str(error.detail)
            if error.status_code == 404:
                message = f"there is nothing at {path}"
            elif error.status_code == 405:
                methods = sorted(allowed_methods(request))
                headers["Allow"] = ", ".join(methods)
                way_out = " or ".join(method for method in methods if method != "HEAD")
                message = f"{request.method} is not possible at {path}; send {way_out}"
            error = ApiError(error.status_code, message)
        return error_response(error, dialect=dialect, headers=headers)


def allowed_methods(request: Request) -> set[str]:
    """The methods of all routes that match the path of a request."""
    methods: set[str] = set()
    for route in request.app.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return methods


def dialect_at(request: Request) -> Dialect:
    """The form of errors at a request's path, which may be none of the server's."""
    path = request.url.path
    if path.startswith(("/v1/messages", "/messages")) or VERSION_HEADER in request.headers:
        return "anthropic"
    return "ollama" if path.startswith("/api/") else "openai"


def _rejection(
    error: Exception, endpoint: Endpoint, headers: dict[str, str], dialect: Dialect
) -> Response:
    """The response for an error, which is logged.

    No local of a frame in the error's traceback may hold the error: a cycle would keep the body.
    """
    failure = as_api_error(error)
    if isinstance(failure, ContextLengthError):
        failure.param = endpoint.prompt_field or failure.param
        error = failure
    log_rejected(failure, endpoint.path, headers["x-request-id"])
    return error_response(error, dialect=dialect, headers=headers)


def _id_headers(request: Request, dialect: Dialect) -> dict[str, str]:
    """The request's id in a header, or in two: Anthropic's clients read another."""
    name = request_id(request)
    return {"x-request-id": name} | ({"request-id": name} if dialect == "anthropic" else {})
