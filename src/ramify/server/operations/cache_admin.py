"""Looking at the cache and working on it while it serves; the numbers of the server."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from ramify.engine.core import EngineCore
from ramify.errors import EngineStoppedError, PinError
from ramify.server.anthropic.messages_request import render_messages
from ramify.server.anthropic.protocol import CountRequest
from ramify.server.errors import ApiError
from ramify.server.http.wire import convert_value, decode_body, json_response
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.completions import completion_to_generations
from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
    Name,
    ResponsesRequest,
)
from ramify.server.openai.responses_request import StoredResponse, response_to_generation
from ramify.server.operations.metrics import CONTENT_TYPE, Metrics
from ramify.server.prompt_renderer import RenderedPrompt
from ramify.server.service import Service
from ramify.server.tenants import Caller

MAX_NODES = 2000
READ_S = 2.0  # a scrape does not wait for a long step


class PinRequest(Struct, kw_only=True):
    """POST /v1/cache/pins: one of the first three."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    token_ids: list[int] | None = None
    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    tenant: Name = ""
    salt: Annotated[str, Meta(max_length=1024)] = ""


class CacheAdmin:
    """What an operator asks of a server."""

    def __init__(self, service: Service, metrics: Metrics) -> None:
        self.service, self._metrics = service, metrics

    @staticmethod
    def require_admin(caller: Caller) -> None:
        """Raise ApiError 403 unless the caller is the operator."""
        if not caller.is_admin:
            raise ApiError(403, "this needs the admin key", code="admin_key_needed")

    async def stats(self, caller: Caller) -> Response:
        """GET /v1/cache."""
        self.require_admin(caller)
        stats = await self.service.cache.stats()
        told = {
            name: value
            for name, value in asdict(stats).items()
            if name not in ("residency", "idle", "reuse_gap")
        }
        told |= {
            "hit_rate": stats.hit_rate,
            "recent_hit_rate": stats.recent_hit_rate,
            "ideal_hit_rate": stats.ideal_hit_rate,
        }
        return json_response(told)

    async def tree(self, caller: Caller, request: Request) -> Response:
        """GET /v1/cache/tree?max_nodes=."""
        self.require_admin(caller)
        limit = _int_parameter(request, "max_nodes", 200)
        if not 1 <= limit <= MAX_NODES:
            raise ApiError(400, f"it must be in 1..{MAX_NODES}", param="max_nodes")
        found = await self.service.cache.tree(limit)
        return json_response(
            {"num_nodes": found.num_nodes, "nodes": [asdict(node) for node in found.nodes]}
        )

    async def clear(self, caller: Caller, request: Request) -> Response:
        """DELETE /v1/cache?prefix=|tenant=|salt=|older_than=."""
        self.require_admin(caller)
        known = {"prefix", "tenant", "salt", "older_than"}
        asked = request.query_params
        unknown = sorted(set(asked) - known)
        if unknown:
            raise ApiError(400, f"unknown parameters; known are {sorted(known)}", param=unknown[0])
        older = asked.get("older_than")
        try:
            seconds = None if older is None else float(older)
        except ValueError:
            seconds = float("nan")
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise ApiError(400, f"{older!r} is no number of seconds >= 0", param="older_than")
        if (
            asked.get("prefix") == ""
        ):  # as an unset variable gives it: not meant to clear everything
            raise ApiError(400, "it is empty; leave it out to clear everything", param="prefix")
        cleared = await self.service.cache.clear(
            prefix=asked.get("prefix"),
            tenant=asked.get("tenant"),
            salt=asked.get("salt"),
            older_than_s=seconds,
        )
        return json_response({"pages": cleared.num_pages, "kept_pages": cleared.num_kept})

    async def reset(self, caller: Caller) -> Response:
        """POST /reset_prefix_cache, as benchmarks of other servers call it."""
        self.require_admin(caller)
        await self.service.cache.clear()
        return json_response({"status": "ok"})

    async def pins(self, caller: Caller) -> Response:
        """GET /v1/cache/pins."""
        self.require_admin(caller)

        def look(core: EngineCore) -> list[dict[str, Any]]:
            return [
                {
                    "id": pin.id,
                    "owner": pin.owner,
                    "tokens": len(pin.key),
                    "pages": pin.num_pages,
                    "ttl_s": pin.ttl_s,
                }
                for pin in core.cache.pins()
            ]

        return json_response({"pins": await self.service.engine.run(look)})

    async def pin(self, caller: Caller, request: PinRequest) -> Response:
        """POST /v1/cache/pins."""
        self.require_admin(caller)
        given = [
            one for one in (request.prompt, request.messages, request.token_ids) if one is not None
        ]
        if len(given) != 1:
            raise ApiError(400, "one of prompt, messages and token_ids is needed", param="prompt")
        try:
            pin = await self.service.cache.pin(
                given[0],
                owner=request.tenant or "operator",
                ttl_s=request.ttl_s,
                tenant=request.tenant,
                salt=request.salt,
            )
        except PinError as error:
            raise ApiError(409, str(error)) from error
        return json_response({"id": pin.id, "tokens": len(pin.key), "pages": pin.num_pages})

    async def unpin(self, caller: Caller, request: Request) -> Response:
        """DELETE /v1/cache/pins/{id}."""
        self.require_admin(caller)
        name = request.path_params["name"]
        if not name.isascii() or not name.isdigit() or len(name) > 18:
            raise ApiError(404, f"there is no pin {name[:100]!r}")
        try:
            await self.service.cache.unpin(int(name))
        except PinError as error:
            raise ApiError(404, str(error)) from error
        return json_response({"id": int(name), "deleted": True})

    def parse_any_request(
        self, body: bytes, is_anthropic: bool, tenant: str
    ) -> tuple[RenderedPrompt, str]:
        """The prompt of a request of any API, by its fields, and its salt.

        Raises:
            ApiError, RequestError: as if it were sent to its own path.
        """
        found = decode_body(body, dict[str, Any])
        if "prompt" in found:
            job = completion_to_generations(decode_body(body, CompletionRequest), self.service)[0]
            return job.prompt, job.salt
        if "input" in found:
            request = decode_body(body, ResponsesRequest)
            before = None
            if request.previous_response_id is not None:
                record = self.service.history.get(tenant, request.previous_response_id)
                if record is None or not isinstance(record.response, StoredResponse):
                    raise ApiError(404, "that response is not stored", param="previous_response_id")
                before = record.response
            _, job = response_to_generation(request, before, self.service, tenant)
            return job.prompt, job.salt
        if is_anthropic or "system" in found:
            filled = {"model": self.service.model} | found
            prompt, _ = render_messages(convert_value(filled, CountRequest), self.service, tenant)
            salt = found.get("cache_salt")
            return prompt, salt if isinstance(salt, str) else ""
        job = chat_to_generation(decode_body(body, ChatRequest), self.service, tenant)
        return job.prompt, job.salt

    async def explain(self, caller: Caller, prompt: RenderedPrompt, salt: str = "") -> Response:
        """POST /v1/cache/explain: what a request would find, without running it."""
        found, miss = await self.service.explain(prompt, caller, salt)
        return json_response(
            {
                "prompt_tokens": len(prompt.ids),
                "cached_tokens": found,
                "segments": [asdict(one) for one in prompt.segments],
                "miss": None if miss is None else miss.as_json(),
            }
        )

    async def metrics(self, caller: Caller) -> Response:
        """GET /metrics."""
        self.require_admin(caller)
        with suppress(TimeoutError, EngineStoppedError):  # then the values are those of last time
            async with asyncio.timeout(READ_S):
                await self.service.engine.run(self._metrics.engine.read)
        return Response(self._metrics.exposition(), media_type=CONTENT_TYPE)


def _int_parameter(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ApiError(400, f"{text[:50]!r} is no whole number", param=name)
    return int(text)
