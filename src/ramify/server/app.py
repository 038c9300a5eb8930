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
from ramify.server.anthropic_answers import MessageAnswer
from ramify.server.anthropic_requests import message_job, message_prompt
from ramify.server.anthropic_types import CountRequest, MessageRequest
from ramify.server.errors import ApiError, as_api_error
from ramify.server.health import Readiness
from ramify.server.http import (
    DONE,
    PING_S,
    Closing,
    decode,
    error_response,
    event_stream,
    json_response,
    read_body,
    request_id,
    sse,
)
from ramify.server.logs import log_refusal
from ramify.server.metrics import Metrics
from ramify.server.openai_answers import ChatAnswer, CompletionAnswer
from ramify.server.openai_requests import chat_job, completion_jobs, encode_text
from ramify.server.openai_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ramify.server.openapi import document
from ramify.server.operate import Operations, PinRequest
from ramify.server.paths import OPERATIONS
from ramify.server.response_answers import ResponseAnswer
from ramify.server.responses import ResponsesRequest, Turn, response_job
from ramify.server.service import Generation, Job, Service
from ramify.server.tenants import Caller, Keys, Quota
from ramify.server.watch import Watch

T = TypeVar("T")
Handler = Callable[["Call"], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request whose caller is known."""

    request: Request
    who: Caller
    headers: dict[str, str]  # that its response has
    begun: list[Generation] = field(default_factory=list)  # that end with it

    async def body(self, kind: type[T]) -> T:
        """The body as a value of a type."""
        return decode(await read_body(self.request), kind)

    async def close(self) -> None:
        """End what was begun for it and is still live."""
        for one in self.begun:
            await one.close()


class Server:
    """Routes over a `Service`.

    Args:
        keys: None lets everybody call, as one tenant.
        local_admin: without keys, everybody may look at the cache and work on it.
    """

    def __init__(
        self, service: Service, keys: Keys | None = None, *, local_admin: bool = True
    ) -> None:
        self.service, self.keys = service, keys
        self.everybody = Caller("", is_admin=local_admin, quota=Quota(max_cached_share=None))
        self.metrics = Metrics(service.model)
        self.operations = Operations(service, self.metrics)
        service.listeners.append(self.metrics.note)
        service.event_listeners.append(self.metrics.note_event)
        self.health = Readiness(service.engine.health)
        self.ping_s = PING_S
        self._prompts = ThreadPoolExecutor(1, "ramify-prompts")  # rendering is not for the loop

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
        watch = asyncio.create_task(Watch(self.service, self.metrics).run())
        self.health.is_ready = True
        try:
            yield
        finally:
            self.health.is_ready = False
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self._prompts.shutdown(wait=False)

    def _route(self, path: str, handler: Handler, *methods: str, anthropic: bool = False) -> Route:
        async def endpoint(request: Request) -> Any:
            headers = {"x-request-id": request_id(request)}
            call = Call(request, self.everybody, headers)
            try:
                call = replace(call, who=self.caller(request))
                if path != "/metrics":
                    self.health.require_open()
                response = await handler(call)
            except Exception as error:  # noqa: BLE001 - every failure has an answer
                await call.close()
                response = error_response(error, anthropic=anthropic, headers=headers)
                log_refusal(as_api_error(error), path, headers["x-request-id"])
            except BaseException:
                await call.close()
                raise
            self.metrics.answered(path, response.status_code)
            return Closing(response, call.close, ping_s=self.ping_s)

        return Route(path, endpoint, methods=list(methods))

    def caller(self, request: Request) -> Caller:
        """Whose key a request has.

        Raises:
            ApiError: 401.
        """
        if self.keys is None:
            return self.everybody
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

    async def render(self, make: Callable[..., T], *args: Any) -> T:
        """Make a prompt, in the thread for that."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._prompts, make, *args)

    # -- OpenAI --------------------------------------------------------------------------------

    async def _chat(self, call: Call) -> Response:
        request = await call.body(ChatRequest)
        job: Job = await self.render(chat_job, request, self.service, call.who.tenant)
        generation = await self._begin(call, job, prefix="chatcmpl-")
        answer = ChatAnswer(self.service, request, generation)
        if request.stream:
            return self._stream(call, answer.pieces(), [generation])
        told = await self._finished(call, answer.whole())
        return json_response(told, headers=call.headers | x_cache([generation]))

    async def _completions(self, call: Call) -> Response:
        request = await call.body(CompletionRequest)
        jobs = await self.render(completion_jobs, request, self.service)
        begun = self.service.begin_all(jobs, call.who, prefix="cmpl-")
        generations = await self._finished(call, begun)
        call.begun.extend(generations)
        answer = CompletionAnswer(self.service, request, generations)
        if request.stream:
            return self._stream(call, answer.pieces(), generations)
        told = await self._finished(call, answer.whole())
        return json_response(told, headers=call.headers | x_cache(generations))

    def _stream(
        self, call: Call, pieces: AsyncIterator[dict[str, Any]], generations: list[Generation]
    ) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async for piece in pieces:
                yield sse(piece)
            yield DONE

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            return sse(error.openai()) + DONE

        headers = call.headers | x_cache(generations)
        return event_stream(events(), on_error=on_error, headers=headers)

    async def _begin(self, call: Call, job: Job, *, prefix: str) -> Generation:
        """`Service.begin` for a request; what has begun ends with it."""
        generation = await self._finished(call, self.service.begin(job, call.who, prefix=prefix))
        call.begun.append(generation)
        return generation

    async def _finished(self, call: Call, answer: Awaitable[T]) -> T:
        """Wait for an answer; a client that goes away ends it."""
        waiting = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_gone(call.request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
            raise ApiError(499, "the client went away")
        finally:
            for task in (waiting, gone):
                task.cancel()
            await asyncio.gather(waiting, gone, return_exceptions=True)

    async def _responses(self, call: Call) -> Response:
        request = await call.body(ResponsesRequest)
        before = None
        if request.previous_response_id is not None:
            before = self._turn(call.who, request.previous_response_id, "previous_response_id")
        owner = call.who.tenant
        chat, job = await self.render(response_job, request, before, self.service, owner)
        generation = await self._begin(call, job, prefix="resp_")
        answer = ResponseAnswer(self.service, request, chat, generation)

        def keep(body: Mapping[str, Any]) -> None:
            turn = answer.turn(body)
            if turn is not None:
                record = replace(job.record, response=turn)
                self.service.records.put(call.who.tenant, generation.id, record)

        headers = call.headers | x_cache([generation])
        if not request.stream:
            told = await self._finished(call, answer.whole())
            keep(told)
            return json_response(told, headers=headers)

        async def events() -> AsyncIterator[bytes]:
            async for piece in answer.events():
                if "response" in piece and piece["response"]["usage"] is not None:
                    keep(piece["response"])
                yield sse(piece, piece["type"])

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            told = error.openai()["error"]
            return sse({"type": "error", "sequence_number": 0} | told, "error")

        return event_stream(events(), on_error=on_error, headers=headers)

    def _turn(self, who: Caller, name: str, param: str) -> Turn:
        record = self.service.records.get(who.tenant, name)
        if record is None or not isinstance(record.response, Turn):
            raise ApiError(
                404,
                f"there is no response {name[:100]!r}; it has expired or was never stored",
                param=param,
            )
        return record.response

    async def _response(self, call: Call) -> Response:
        name = call.request.path_params["name"]
        turn = self._turn(call.who, name, "response_id")
        return json_response(turn.body, headers=call.headers)

    async def _forget(self, call: Call) -> Response:
        name = call.request.path_params["name"]
        self._turn(call.who, name, "response_id")
        self.service.records.forget(call.who.tenant, name)
        told = {"id": name, "object": "response", "deleted": True}
        return json_response(told, headers=call.headers)

    # -- Anthropic -----------------------------------------------------------------------------

    async def _messages(self, call: Call) -> Response:
        request = await call.body(MessageRequest)
        job = await self.render(message_job, request, self.service, call.who.tenant)
        generation = await self._begin(call, job, prefix="msg_")
        answer = MessageAnswer(self.service, request, generation)
        headers = call.headers | {"request-id": call.headers["x-request-id"]}
        if not request.stream:
            told = await self._finished(call, answer.whole())
            return json_response(told, headers=headers | x_cache([generation]))

        async def events() -> AsyncIterator[bytes]:
            async for name, data in answer.events():
                yield sse(data, name)

        def on_error(error: BaseException) -> bytes:
            assert isinstance(error, ApiError)
            return sse(error.anthropic(headers["x-request-id"]), "error")

        return event_stream(events(), on_error=on_error, headers=headers | x_cache([generation]))

    async def _count_tokens(self, call: Call) -> Response:
        request = await call.body(CountRequest)
        prompt, _ = await self.render(message_prompt, request, self.service, call.who.tenant)
        return json_response({"input_tokens": len(prompt.ids)}, headers=call.headers)

    # -- models and tokens ---------------------------------------------------------------------

    async def _models(self, call: Call) -> Response:
        told = [self._model_entry(name) for name in self.service.names]
        return json_response({"object": "list", "data": told}, headers=call.headers)

    async def _model(self, call: Call) -> Response:
        name = call.request.path_params["name"]
        self.service.require_model(name)
        return json_response(self._model_entry(name), headers=call.headers)

    def _model_entry(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.service.started_s,
            "owned_by": "ramify",
            "root": self.service.model,
            "max_model_len": self.service.max_model_len,
        }

    async def _tokenize(self, call: Call) -> Response:
        request = await call.body(TokenizeRequest)
        self.service.require_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", param="prompt")

        def ids() -> Any:
            if request.prompt is not None:
                special = request.add_special_tokens
                return encode_text(request.prompt, self.service, add_special_tokens=special)
            chat = ChatRequest(messages=request.messages or [], tools=request.tools)
            opens = request.add_generation_prompt
            return chat_job(chat, self.service, call.who.tenant, opens=opens).prompt.ids

        found = (await self.render(ids)).tolist()
        told: dict[str, Any] = {
            "tokens": found,
            "count": len(found),
            "max_model_len": self.service.max_model_len,
        }
        if request.return_token_strs:
            told["token_strs"] = [self.service.tokenizer.token_text(token) for token in found]
        return json_response(told, headers=call.headers)

    async def _detokenize(self, call: Call) -> Response:
        request = await call.body(DetokenizeRequest)
        self.service.require_model(request.model)
        tokenizer = self.service.tokenizer
        wrong = next((one for one in request.tokens if not 0 <= one < 2**31), None)
        if wrong is not None:
            raise ApiError(400, f"{wrong} is no token id", param="tokens")
        text = await self.render(tokenizer.decode, request.tokens, False)
        return json_response({"prompt": text}, headers=call.headers)

    # -- the cache -----------------------------------------------------------------------------

    async def _cache(self, call: Call) -> Response:
        if call.request.method == "DELETE":
            return await self.operations.clear(call.who, call.request)
        return await self.operations.stats(call.who)

    async def _tree(self, call: Call) -> Response:
        return await self.operations.tree(call.who, call.request)

    async def _pins(self, call: Call) -> Response:
        if call.request.method == "POST":
            return await self.operations.pin(call.who, await call.body(PinRequest))
        return await self.operations.pins(call.who)

    async def _unpin(self, call: Call) -> Response:
        return await self.operations.unpin(call.who, call.request)

    async def _explain(self, call: Call) -> Response:
        body = await read_body(call.request)
        is_anthropic = "anthropic-version" in call.request.headers
        make, owner = self.operations.explained_prompt, call.who.tenant
        prompt, salt = await self.render(make, body, is_anthropic, owner)
        return await self.operations.explain(call.who, prompt, salt)

    async def _reset(self, call: Call) -> Response:
        return await self.operations.reset(call.who)

    async def _metrics(self, call: Call) -> Response:
        return await self.operations.numbers(call.who)

    # -- operations ----------------------------------------------------------------------------

    async def _livez(self, _: Request) -> Response:
        return _health_response(self.health.death(), self.health)

    async def _readyz(self, _: Request) -> Response:
        return _health_response(self.health.closed_because(), self.health)

    async def _version(self, _: Request) -> Response:
        return json_response({"version": __version__})

    async def _openapi(self, _: Request) -> Response:
        return json_response(document(OPERATIONS))


def _health_response(wrong: str | None, health: Readiness) -> Response:
    told = {"status": wrong or "ok"} | health.as_json()
    if wrong is None:
        return json_response(told)
    return json_response(told, status=503, headers={"Retry-After": "1"})


async def _gone(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def x_cache(generations: list[Generation]) -> dict[str, str]:
    """`X-Cache`: how much of the prompts was there already."""
    uses = [one.cache for one in generations if one.cache is not None]
    total = sum(len(one.job.prompt.ids) for one in generations)
    cached = sum(one.cached for one in uses)
    word = "HIT" if cached else "MISS"
    reason = next((one.miss.reason for one in uses if one.miss is not None), None)
    told = f"{word}; read={cached}; total={total}"
    return {"X-Cache": told + (f"; reason={reason}" if reason else "")}
