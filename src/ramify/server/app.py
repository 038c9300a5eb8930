"""The routes of the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ramify import __version__
from ramify.server.anthropic.messages_request import messages_to_generation, render_messages
from ramify.server.anthropic.messages_response import MessageResponseBuilder
from ramify.server.anthropic.protocol import CountRequest, MessageRequest
from ramify.server.errors import ApiError, as_api_error
from ramify.server.generation import Generation, GenerationRequest
from ramify.server.http.wire import (
    DONE,
    PING_S,
    KeepAliveResponse,
    decode_body,
    error_response,
    json_response,
    read_body,
    request_id,
    sse_event,
    sse_response,
)
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.chat_response import ChatResponseBuilder
from ramify.server.openai.completions import (
    CompletionResponseBuilder,
    completion_to_generations,
    encode_text,
)
from ramify.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from ramify.server.openai.responses_request import StoredResponse, response_to_generation
from ramify.server.openai.responses_response import ResponsesResponseBuilder
from ramify.server.openapi import openapi_document
from ramify.server.operations.cache_admin import CacheAdmin, PinRequest
from ramify.server.operations.health import Readiness
from ramify.server.operations.load_monitor import LoadMonitor
from ramify.server.operations.metrics import Metrics
from ramify.server.operations.request_log import log_rejected
from ramify.server.paths import ENDPOINTS
from ramify.server.service import Service
from ramify.server.tenants import ApiKeys, Caller, Quota

T = TypeVar("T")
Handler = Callable[["RequestContext"], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request whose caller is known."""

    request: Request
    caller: Caller
    headers: dict[str, str]  # that its response has
    generations: list[Generation] = field(default_factory=list)  # that end with it

    async def body(self, kind: type[T]) -> T:
        """The body as a value of a type."""
        return decode_body(await read_body(self.request), kind)

    async def close(self) -> None:
        """End what was begun for it and is still live."""
        for one in self.generations:
            await one.close()


class Server:
    """Routes over a `Service`.

    Args:
        keys: None lets everybody call, as one tenant.
        local_admin: without keys, everybody may look at the cache and work on it.
    """

    def __init__(
        self, service: Service, keys: ApiKeys | None = None, *, local_admin: bool = True
    ) -> None:
        self.service, self.keys = service, keys
        self.anonymous = Caller("", is_admin=local_admin, quota=Quota(max_cached_share=None))
        self.metrics = Metrics(service.model)
        self.cache_admin = CacheAdmin(service, self.metrics)
        service.listeners.append(self.metrics.observe_request)
        service.event_listeners.append(self.metrics.observe_tokens)
        self.health = Readiness(service.engine.health)
        self.ping_s = PING_S
        self._prompt_thread = ThreadPoolExecutor(
            1, "ramify-prompts"
        )  # rendering is not for the loop

    def app(self, lifespan: Callable[[Starlette], Any] | None = None) -> Starlette:
        """The ASGI application."""
        openai, both = self._route, self._route
        return Starlette(
            routes=[
                openai("/v1/chat/completions", self._chat, "POST"),
                openai("/v1/completions", self._completions, "POST"),
                openai("/v1/responses", self._responses, "POST"),
                openai("/v1/responses/{name}", self._response, "GET"),
                openai("/v1/responses/{name}", self._forget, "DELETE"),
                self._route("/v1/messages", self._messages, "POST", anthropic=True),
                self._route(
                    "/v1/messages/count_tokens", self._count_tokens, "POST", anthropic=True
                ),
                openai("/v1/models", self._models, "GET"),
                openai("/v1/models/{name:path}", self._model, "GET"),
                both("/tokenize", self._tokenize, "POST"),
                both("/detokenize", self._detokenize, "POST"),
                self._route("/v1/cache", self._cache, "GET", "DELETE"),
                self._route("/v1/cache/tree", self._tree, "GET"),
                self._route("/v1/cache/pins", self._pins, "GET", "POST"),
                self._route("/v1/cache/pins/{name}", self._unpin, "DELETE"),
                self._route("/v1/cache/explain", self._explain, "POST"),
                self._route("/reset_prefix_cache", self._reset, "POST"),
                self._route("/metrics", self._metrics, "GET"),
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/health", self._readyz),
                Route("/ping", self._readyz),
                Route("/version", self._version),
                Route("/openapi.json", self._openapi),
            ],
            exception_handlers={HTTPException: self._http_error, Exception: self._http_error},
            lifespan=lifespan or self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.serving():
            yield

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Ready from here on; what watches the server runs meanwhile."""
        watch = asyncio.create_task(LoadMonitor(self.service, self.metrics).run())
        self.health.is_ready = True
        try:
            yield
        finally:
            self.health.is_ready = False
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._prompt_thread.shutdown(wait=False)

    def _route(self, path: str, handler: Handler, *methods: str, anthropic: bool = False) -> Route:
        async def endpoint(request: Request) -> Any:
            headers = {"x-request-id": request_id(request)}
            call = RequestContext(request, self.anonymous, headers)
            try:
                call = replace(call, caller=self.caller(request))
                if path != "/metrics":
                    self.health.reject_if_draining()
                response = await handler(call)
            except Exception as error:  # noqa: BLE001 - every failure has an answer
                await call.close()
                response = error_response(error, anthropic=anthropic, headers=headers)
                log_rejected(as_api_error(error), path, headers["x-request-id"])
            except BaseException:
                await call.close()
                raise
            self.metrics.count_response(path, response.status_code)
            return KeepAliveResponse(response, call.close, ping_s=self.ping_s)

        return Route(path, endpoint, methods=list(methods))

    def caller(self, request: Request) -> Caller:
        """Whose key a request has.

        Raises:
            ApiError: 401.
        """
        if self.keys is None:
            return self.anonymous
        given = request.headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        if kind.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        return self.keys.caller(key.strip())

    async def _http_error(self, request: Request, error: Exception) -> Response:
        headers = {"x-request-id": request_id(request)}
        anthropic = request.url.path.startswith("/v1/messages")
        if isinstance(error, HTTPException):
            words = {
                404: f"there is nothing at {request.url.path[:200]}",
                405: f"{request.method} is not possible at {request.url.path[:200]}",
            }
            text = words.get(error.status_code, str(error.detail))
            error = ApiError(error.status_code, text)
        return error_response(error, anthropic=anthropic, headers=headers)

    async def in_prompt_thread(self, make: Callable[..., T], *args: Any) -> T:
        """Make a prompt, in the thread for that."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompt_thread, make, *args)

    # -- OpenAI --------------------------------------------------------------------------------

    async def _chat(self, context: RequestContext) -> Response:
        request = await context.body(ChatRequest)
        job: GenerationRequest = await self.in_prompt_thread(
            chat_to_generation, request, self.service, context.caller.tenant
        )
        generation = await self._start(context, job, prefix="chatcmpl-")
        answer = ChatResponseBuilder(self.service, request, generation)
        if request.stream:
            return self._stream(context, answer.chunks(), [generation])
        told = await self._until_done_or_disconnect(context, answer.body())
        return json_response(told, headers=context.headers | cache_header([generation]))

    async def _completions(self, context: RequestContext) -> Response:
        request = await context.body(CompletionRequest)
        jobs = await self.in_prompt_thread(completion_to_generations, request, self.service)
        begun = self.service.start_all(jobs, context.caller, prefix="cmpl-")
        generations = await self._until_done_or_disconnect(context, begun)
        context.generations.extend(generations)
        answer = CompletionResponseBuilder(self.service, request, generations)
        if request.stream:
            return self._stream(context, answer.chunks(), generations)
        told = await self._until_done_or_disconnect(context, answer.body())
        return json_response(told, headers=context.headers | cache_header(generations))

    def _stream(
        self,
        context: RequestContext,
        pieces: AsyncIterator[dict[str, Any]],
        generations: list[Generation],
    ) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async for piece in pieces:
                yield sse_event(piece)
            yield DONE

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            return sse_event(error.openai()) + DONE

        headers = context.headers | cache_header(generations)
        return sse_response(events(), on_error=on_error, headers=headers)

    async def _start(
        self, context: RequestContext, generation_request: GenerationRequest, *, prefix: str
    ) -> Generation:
        """`Service.start` for a request; what has begun ends with it."""
        generation = await self._until_done_or_disconnect(
            context, self.service.start(generation_request, context.caller, prefix=prefix)
        )
        context.generations.append(generation)
        return generation

    async def _until_done_or_disconnect(self, context: RequestContext, answer: Awaitable[T]) -> T:
        """Wait for an answer; a client that goes away ends it."""
        waiting = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_disconnected(context.request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ApiError(499, "the client went away")
        finally:
            for task in (waiting, gone):
                task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _responses(self, context: RequestContext) -> Response:
        request = await context.body(ResponsesRequest)
        before = None
        if request.previous_response_id is not None:
            before = self._stored_response(
                context.caller, request.previous_response_id, "previous_response_id"
            )
        owner = context.caller.tenant
        chat, job = await self.in_prompt_thread(
            response_to_generation, request, before, self.service, owner
        )
        generation = await self._start(context, job, prefix="resp_")
        answer = ResponsesResponseBuilder(self.service, request, chat, generation)

        def keep(body: Mapping[str, Any]) -> None:
            turn = answer.stored_response(body)
            if turn is not None:
                record = replace(job.history_entry, response=turn)
                self.service.history.put(context.caller.tenant, generation.id, record)

        headers = context.headers | cache_header([generation])
        if not request.stream:
            told = await self._until_done_or_disconnect(context, answer.body())
            keep(told)
            return json_response(told, headers=headers)

        async def events() -> AsyncIterator[bytes]:
            async for piece in answer.events():
                if "response" in piece and piece["response"]["usage"] is not None:
                    keep(piece["response"])
                yield sse_event(piece, piece["type"])

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            told = error.openai()["error"]
            return sse_event({"type": "error", "sequence_number": 0} | told, "error")

        return sse_response(events(), on_error=on_error, headers=headers)

    def _stored_response(self, caller: Caller, name: str, param: str) -> StoredResponse:
        record = self.service.history.get(caller.tenant, name)
        if record is None or not isinstance(record.response, StoredResponse):
            raise ApiError(
                404,
                f"there is no response {name[:100]!r}; it has expired or was never stored",
                param=param,
            )
        return record.response

    async def _response(self, context: RequestContext) -> Response:
        name = context.request.path_params["name"]
        turn = self._stored_response(context.caller, name, "response_id")
        return json_response(turn.body, headers=context.headers)

    async def _forget(self, context: RequestContext) -> Response:
        name = context.request.path_params["name"]
        self._stored_response(context.caller, name, "response_id")
        self.service.history.forget(context.caller.tenant, name)
        told = {"id": name, "object": "response", "deleted": True}
        return json_response(told, headers=context.headers)

    # -- Anthropic -----------------------------------------------------------------------------

    async def _messages(self, context: RequestContext) -> Response:
        request = await context.body(MessageRequest)
        job = await self.in_prompt_thread(
            messages_to_generation, request, self.service, context.caller.tenant
        )
        generation = await self._start(context, job, prefix="msg_")
        answer = MessageResponseBuilder(self.service, request, generation)
        headers = context.headers | {"request-id": context.headers["x-request-id"]}
        if not request.stream:
            told = await self._until_done_or_disconnect(context, answer.body())
            return json_response(told, headers=headers | cache_header([generation]))

        async def events() -> AsyncIterator[bytes]:
            async for name, data in answer.events():
                yield sse_event(data, name)

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            return sse_event(error.anthropic(headers["x-request-id"]), "error")

        return sse_response(
            events(), on_error=on_error, headers=headers | cache_header([generation])
        )

    async def _count_tokens(self, context: RequestContext) -> Response:
        request = await context.body(CountRequest)
        prompt, _ = await self.in_prompt_thread(
            render_messages, request, self.service, context.caller.tenant
        )
        return json_response({"input_tokens": len(prompt.ids)}, headers=context.headers)

    # -- models and tokens ---------------------------------------------------------------------

    async def _models(self, context: RequestContext) -> Response:
        told = [self._model_entry(name) for name in self.service.names]
        return json_response({"object": "list", "data": told}, headers=context.headers)

    async def _model(self, context: RequestContext) -> Response:
        name = context.request.path_params["name"]
        self.service.check_model(name)
        return json_response(self._model_entry(name), headers=context.headers)

    def _model_entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.service.started_s,
            "owned_by": "ramify",
            "root": self.service.model,
            "max_model_len": self.service.max_model_len,
        }

    async def _tokenize(self, context: RequestContext) -> Response:
        request = await context.body(TokenizeRequest)
        self.service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", param="prompt")

        def ids() -> Any:
            if request.prompt is not None:
                special = request.add_special_tokens
                return encode_text(request.prompt, self.service, add_special_tokens=special)
            chat = ChatRequest(messages=request.messages or [], tools=request.tools)
            opens = request.add_generation_prompt
            return chat_to_generation(
                chat, self.service, context.caller.tenant, add_generation_prompt=opens
            ).prompt.ids

        found = (await self.in_prompt_thread(ids)).tolist()
        told: dict[str, Any] = {
            "tokens": found,
            "count": len(found),
            "max_model_len": self.service.max_model_len,
        }
        if request.return_token_strs:
            told["token_strs"] = [self.service.tokenizer.token_text(token) for token in found]
        return json_response(told, headers=context.headers)

    async def _detokenize(self, context: RequestContext) -> Response:
        request = await context.body(DetokenizeRequest)
        self.service.check_model(request.model)
        tokenizer = self.service.tokenizer
        wrong = next((one for one in request.tokens if not 0 <= one < 2**31), None)
        if wrong is not None:
            raise ApiError(400, f"{wrong} is no token id", param="tokens")
        text = await self.in_prompt_thread(tokenizer.decode, request.tokens, False)
        return json_response({"prompt": text}, headers=context.headers)

    # -- the cache -----------------------------------------------------------------------------

    async def _cache(self, context: RequestContext) -> Response:
        if context.request.method == "DELETE":
            return await self.cache_admin.clear(context.caller, context.request)
        return await self.cache_admin.stats(context.caller)

    async def _tree(self, context: RequestContext) -> Response:
        return await self.cache_admin.tree(context.caller, context.request)

    async def _pins(self, context: RequestContext) -> Response:
        if context.request.method == "POST":
            return await self.cache_admin.pin(context.caller, await context.body(PinRequest))
        return await self.cache_admin.pins(context.caller)

    async def _unpin(self, context: RequestContext) -> Response:
        return await self.cache_admin.unpin(context.caller, context.request)

    async def _explain(self, context: RequestContext) -> Response:
        body = await read_body(context.request)
        is_anthropic = "anthropic-version" in context.request.headers
        make, owner = self.cache_admin.parse_any_request, context.caller.tenant
        prompt, salt = await self.in_prompt_thread(make, body, is_anthropic, owner)
        return await self.cache_admin.explain(context.caller, prompt, salt)

    async def _reset(self, context: RequestContext) -> Response:
        return await self.cache_admin.reset(context.caller)

    async def _metrics(self, context: RequestContext) -> Response:
        return await self.cache_admin.metrics(context.caller)

    # -- operations ----------------------------------------------------------------------------

    async def _livez(self, _: Request) -> Response:
        return _health_response(self.health.liveness_failure(), self.health)

    async def _readyz(self, _: Request) -> Response:
        return _health_response(self.health.unready_reason(), self.health)

    async def _version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def _openapi(self, _: Request) -> Response:
        return json_response(openapi_document(ENDPOINTS))


def _health_response(wrong: str | None, health: Readiness) -> Response:
    told = {"status": wrong or "ok"} | health.as_json()
    if wrong is None:
        return json_response(told)
    return json_response(told, status=503, headers={"Retry-After": "1"})


async def _disconnected(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def cache_header(generations: list[Generation]) -> dict[str, str]:
    """`X-Cache`: how much of the prompts was there already."""
    uses = [one.cache for one in generations if one.cache is not None]
    total = sum(len(one.request.prompt.ids) for one in generations)
    cached = sum(one.cached for one in uses)
    word = "HIT" if cached else "MISS"
    reason = next((one.miss.reason for one in uses if one.miss is not None), None)
    told = f"{word}; read={cached}; total={total}"
    return {"X-Cache": told + (f"; reason={reason}" if reason else "")}
