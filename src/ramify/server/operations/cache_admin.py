"""Handlers of the admin endpoints: statistics, tree, pins, eviction, explanation, metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.responses import Response

from ramify.cache.types import CacheStats
from ramify.errors import NoReplicaError, PinError
from ramify.server.anthropic.messages_request import read_count_request
from ramify.server.anthropic.protocol import VERSION_HEADER, CountRequest
from ramify.server.context import RequestContext
from ramify.server.conversation.to_generation import rendered
from ramify.server.errors import ApiError
from ramify.server.http.request_body import convert_value, decode_body
from ramify.server.http.wire import json_response, whole_number
from ramify.server.ollama.chat_request import chat_to_generation as ollama_chat_to_generation
from ramify.server.ollama.endpoints import FIELDS as OLLAMA_FIELDS
from ramify.server.ollama.generate_request import generate_to_generation
from ramify.server.ollama.protocol import GenerateRequest, OllamaChatRequest
from ramify.server.openai.chat_request import chat_to_generation
from ramify.server.openai.completions import completion_to_generations
from ramify.server.openai.protocol import (
    MAX_MESSAGES,
    CacheSalt,
    ChatRequest,
    CompletionRequest,
    Name,
)
from ramify.server.openai.responses.protocol import ResponsesRequest
from ramify.server.openai.responses.request import response_to_generation
from ramify.server.openai.responses.store import EarlierTurns, earlier_turns
from ramify.server.openai.unsupported import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSES_FIELDS
from ramify.server.operations.metrics import CONTENT_TYPE, READ_S
from ramify.server.prompts.renderer import RenderedPrompt
from ramify.server.replicas import ReplicaState, ReplicaStats
from ramify.server.request_fields.unsupported_fields import decode_request
from ramify.server.service import RequestService

MAX_NODES = 2000
AnyRequest = (
    ChatRequest
    | CompletionRequest
    | ResponsesRequest
    | CountRequest
    | OllamaChatRequest
    | GenerateRequest
)
# Fields that only Ollama's API has.
OLLAMA_ONLY = frozenset({"context", "format", "options", "raw", "think"})
CLEAR_PARAMETERS = (
    ("prefix", "string"),
    ("tenant", "string"),
    ("salt", "string"),
    ("older_than", "number"),
    ("pins", "boolean"),
)


class PinRequest(Struct, kw_only=True):
    """Body of POST /v1/cache/pins; exactly one of prompt, messages and token_ids."""

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(max_length=MAX_MESSAGES)] | None = None
    token_ids: list[int] | None = None
    ttl_s: Annotated[float, Meta(gt=0)] | None = None
    tenant: Name = ""
    salt: CacheSalt = ""


async def stats(context: RequestContext) -> Response:
    """GET /v1/cache."""
    engine = context.service.engine
    replicas = engine.replicas
    if replicas is None:
        return json_response(_stats_json(await engine.cache.stats()))
    answers = await replicas.stats(READ_S)
    if answers.sums is None:
        raise NoReplicaError(1.0, "none answers")
    return json_response(
        _stats_json(answers.sums.cache)
        | {
            "replicas": [
                _state_json(state, answers.replicas.get(state.name)) for state in replicas.states()
            ]
        }
    )


def _stats_json(stats: CacheStats) -> dict[str, Any]:
    payload = {
        name: value
        for name, value in asdict(stats).items()
        if name not in ("residency", "idle", "reuse_gap")
    }
    return payload | {
        "hit_rate": stats.hit_rate,
        "recent_hit_rate": stats.recent_hit_rate,
        "ideal_hit_rate": stats.ideal_hit_rate,
    }


def _state_json(state: ReplicaState, answer: ReplicaStats | None) -> dict[str, Any]:
    """A replica and its cache, as far as it has answered."""
    payload: dict[str, Any] = {
        "replica": state.number,
        "name": state.name,
        "state": state.state,
        "starts": state.num_starts,
        "cache_is_known": state.is_mirrored,
        "known_pages": state.mirrored_pages,
        "queue_s": round(state.queue_s, 3),
    }
    if state.error is not None:
        payload["error"] = state.error
    return payload | ({} if answer is None else _stats_json(answer.stats.cache))


async def tree(context: RequestContext) -> Response:
    """GET /v1/cache/tree?max_nodes=."""
    text = context.request.query_params.get("max_nodes", "200")
    max_nodes = whole_number(text)
    if max_nodes is None:
        raise ApiError(400, f"{text[:50]!r} is no whole number", param="max_nodes")
    if not 1 <= max_nodes <= MAX_NODES:
        message = f"{max_nodes} is not possible; it must be between 1 and {MAX_NODES}"
        raise ApiError(400, message, param="max_nodes")
    dump = await context.service.engine.cache.tree(max_nodes)
    return json_response(
        {"num_nodes": dump.num_nodes, "nodes": [asdict(node) for node in dump.nodes]}
    )


async def clear(context: RequestContext) -> Response:
    """DELETE /v1/cache?prefix=|tenant=|salt=|older_than=|pins=.

    `pins=true` ends the tenant's pins before; it needs `tenant`.
    """
    known = sorted(name for name, _ in CLEAR_PARAMETERS)
    query = context.request.query_params
    unknown = sorted(set(query) - set(known))
    if unknown:
        message = f"there is no such parameter; the parameters are {', '.join(known)}"
        raise ApiError(400, message, param=unknown[0])
    older_than = query.get("older_than")
    try:
        older_than_s = None if older_than is None else float(older_than)
    except ValueError:
        older_than_s = float("nan")
    if older_than_s is not None and not 0 <= older_than_s < float("inf"):
        raise ApiError(400, f"{older_than!r} is no number of seconds >= 0", param="older_than")
    # An unset shell variable gives an empty prefix; that must not clear everything.
    if query.get("prefix") == "":
        raise ApiError(400, "it is empty; leave it out to clear everything", param="prefix")
    text, tenant = query.get("pins", "false"), query.get("tenant")
    if text not in ("true", "false"):
        raise ApiError(400, f"{text!r} is neither true nor false", param="pins")
    ends_pins = text == "true"
    if ends_pins and tenant is None:
        raise ApiError(400, "it needs tenant: whose pins to end", param="pins")

    num_pins = 0
    cache = context.service.engine.cache
    if ends_pins and tenant is not None:
        num_pins = await cache.end_pins(tenant)
    cleared = await cache.clear(
        prefix=query.get("prefix"),
        tenant=tenant,
        salt=query.get("salt"),
        older_than_s=older_than_s,
    )
    payload = {"pages": cleared.num_pages, "kept_pages": cleared.num_kept}
    return json_response(payload | ({"pins": num_pins} if ends_pins else {}))


async def reset(context: RequestContext) -> Response:
    """POST /reset_prefix_cache, the path that benchmarks of vLLM and SGLang call."""
    await context.service.engine.cache.clear()
    return json_response({"status": "ok"})


async def pins(context: RequestContext) -> Response:
    """GET /v1/cache/pins."""
    entries = [
        {
            "id": pin.id,
            "owner": pin.owner,
            "tokens": len(pin.key),
            "pages": pin.num_pages,
            "ttl_s": pin.ttl_s,
        }
        for pin in await context.service.engine.cache.pins()
    ]
    return json_response({"pins": entries})


async def pin(context: RequestContext) -> Response:
    """POST /v1/cache/pins."""
    request = await context.body(PinRequest)
    fields = (request.prompt, request.messages, request.token_ids)
    given = [field for field in fields if field is not None]
    if len(given) != 1:
        raise ApiError(400, "one of prompt, messages and token_ids is needed", param="prompt")
    try:
        pin = await context.service.engine.cache.pin(
            given[0],
            owner=request.tenant or "operator",
            ttl_s=request.ttl_s,
            tenant=request.tenant,
            salt=request.salt,
            room_tokens=context.service.room_tokens,
        )
    except PinError as error:
        raise ApiError(409, str(error)) from error
    return json_response({"id": pin.id, "tokens": len(pin.key), "pages": pin.num_pages})


async def unpin(context: RequestContext) -> Response:
    """DELETE /v1/cache/pins/{id}."""
    name = context.request.path_params["name"]
    number = whole_number(name, max_digits=18)
    if number is None:
        raise ApiError(404, f"there is no pin {name[:100]!r}")
    try:
        await context.service.engine.cache.unpin(number)
    except PinError as error:
        raise ApiError(404, str(error)) from error
    return json_response({"id": number, "deleted": True})


async def explain(context: RequestContext) -> Response:
    """POST /v1/cache/explain: what a request would hit, without running it."""
    body = await context.read()
    service, tenant = context.service, context.caller.tenant
    is_anthropic = VERSION_HEADER in context.request.headers
    request, salt = await context.in_prompt_thread(
        decode_any_request, body, is_anthropic, service.model
    )
    earlier = EarlierTurns()
    if isinstance(request, ResponsesRequest):
        earlier = earlier_turns(request, service, tenant)
    prompt = await context.in_prompt_thread(render_any_request, request, earlier, service, tenant)
    num_cached, miss = await service.explain(prompt, context.caller, salt)
    payload: dict[str, Any] = {
        "prompt_tokens": len(prompt.ids),
        "cached_tokens": num_cached,
        "segments": [asdict(segment) for segment in prompt.segments],
        "miss": None if miss is None else miss.as_json(),
    }
    if prompt.rules:
        payload["rules"] = [rule.as_json() for rule in prompt.rules]
    if prompt.named is not None:
        payload["prefix"] = prompt.named.as_json(num_cached)
    replicas = service.engine.replicas
    if replicas is not None:
        cached = await replicas.cached_tokens(prompt.ids, tenant, salt, READ_S)
        # How much others have to be computed is the operator's.
        is_admin = context.caller.is_admin
        payload["replicas"] = [
            {"replica": state.number, "cached_tokens": cached[state.name]}
            | ({"queue_s": round(state.queue_s, 3)} if is_admin else {})
            for state in replicas.states()
            if state.name in cached
        ]
    return json_response(payload)


def decode_any_request(
    body: bytes | bytearray, is_anthropic: bool, model: str
) -> tuple[AnyRequest, str]:
    """Decode a request of any API, recognised by its fields; returns its `cache_salt` as well.

    A body of /api/generate that has none of `OLLAMA_ONLY`, nor `system`, is one of /v1/completions.

    Args:
        model: of a request to Anthropic's API that names none.

    Raises:
        ApiError: as if the request were sent to its own path.
    """
    fields = decode_body(body, dict[str, Any])
    salt = fields.get("cache_salt")
    salt = salt if isinstance(salt, str) else ""
    is_ollama = not OLLAMA_ONLY.isdisjoint(fields)
    if "prompt" in fields and (is_ollama or "system" in fields):
        return decode_request(body, GenerateRequest, OLLAMA_FIELDS)[0], salt
    if "messages" in fields and is_ollama:
        return decode_request(body, OllamaChatRequest, OLLAMA_FIELDS)[0], salt
    if "prompt" in fields:
        return decode_request(body, CompletionRequest, COMPLETION_FIELDS)[0], salt
    if "input" in fields:
        return decode_request(body, ResponsesRequest, RESPONSES_FIELDS)[0], salt
    if is_anthropic or "system" in fields:
        return convert_value({"model": model} | fields, CountRequest), salt
    return decode_request(body, ChatRequest, CHAT_FIELDS)[0], salt


def render_any_request(
    request: AnyRequest, earlier: EarlierTurns, service: RequestService, tenant: str
) -> RenderedPrompt:
    """The prompt of a request.

    Raises:
        ApiError, RequestError: as if the request were sent to its own path.
    """
    match request:
        case CompletionRequest():
            return completion_to_generations(request, service)[0].prompt
        case ResponsesRequest():
            translated = response_to_generation(request, earlier, service, tenant)
            return translated.generation_request.prompt
        case OllamaChatRequest():
            return ollama_chat_to_generation(request, service, tenant).prompt
        case GenerateRequest():
            return generate_to_generation(request, service, tenant).prompt
        case CountRequest():
            conversation = read_count_request(request, service, tenant)
            entry, _ = rendered(conversation, service, tenant)
            return entry.prompt
        case _:
            return chat_to_generation(request, service, tenant).prompt


async def metrics(context: RequestContext) -> Response:
    """GET /metrics; without an answer of the engine, its values are those of the last scrape."""
    await context.metrics.read_engine(context.service.engine, READ_S)
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE)
