"""`GET /v1/loads`: what each engine has to do, in SGLang's form, for routers in front of servers."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from ramify import __version__
from ramify.engine.context import EngineStats
from ramify.errors import NoReplicaError
from ramify.server.context import RequestContext
from ramify.server.errors import ApiError
from ramify.server.http.wire import json_response, whole_number

READ_S = 2.0
PARAMETERS = (("dp_rank", "integer"), ("include", "string"), ("format", "string"))
SECTIONS = frozenset({"all", "core", "queues", "memory", "spec", "lora", "disagg"})


async def loads(context: RequestContext) -> Response:
    """GET /v1/loads?dp_rank=&include=&format=.

    An entry for each engine: in a cluster, `dp_rank` is the number of the replica. `aggregate` is what
    older gateways read.
    """
    rank, sections = _read_query(context)
    engine = context.service.engine
    if engine.replicas is None:
        entries = [_entry(0, "0", await engine.stats(), engine.config.max_num_seqs)]
    else:
        answers = await engine.replicas.stats(READ_S)
        if not answers.replicas:
            raise NoReplicaError(1.0, "none answers")
        entries = [
            _entry(replica.number, name, replica.stats, replica.max_num_seqs)
            for name, replica in answers.replicas.items()
        ]
    if rank is not None:
        ranks = ", ".join(str(entry["dp_rank"]) for entry in entries)
        entries = [entry for entry in entries if entry["dp_rank"] == rank]
        if not entries:
            raise ApiError(404, f"no engine {rank} answers; there are {ranks}", param="dp_rank")
    if sections is not None and not sections & {"all", "queues"}:
        for entry in entries:
            del entry["queues"]
    running = sum(entry["num_running_reqs"] for entry in entries)
    waiting = sum(entry["num_waiting_reqs"] for entry in entries)
    return json_response(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": len(entries),
            "loads": entries,
            "aggregate": {
                "total_running_reqs": running,
                "total_waiting_reqs": waiting,
                "total_reqs": running + waiting,
                "total_tokens": sum(entry["num_total_tokens"] for entry in entries),
            },
        }
    )


def _read_query(context: RequestContext) -> tuple[int | None, set[str] | None]:
    """The number of the engine, and the sections.

    Raises:
        ApiError: 400, a value is none that this endpoint knows.
    """
    query = context.request.query_params
    text = query.get("dp_rank")
    rank = None if text is None else whole_number(text)
    if text is not None and rank is None:
        raise ApiError(400, f"{text[:50]!r} is no number of an engine, as 0", param="dp_rank")
    if query.get("format", "json") != "json":
        raise ApiError(400, "only json is known here; Prometheus reads /metrics", param="format")
    if not (include := query.get("include")):
        return rank, None
    sections = {name.strip() for name in include.split(",")}
    if unknown := sorted(sections - SECTIONS):
        known = ", ".join(sorted(SECTIONS))
        raise ApiError(400, f"{unknown[0][:50]!r} is unknown; known are {known}", param="include")
    return rank, sections


def _entry(number: int, name: str, stats: EngineStats, max_running: int) -> dict[str, Any]:
    """The load of one engine. Tokens in use are those that requests hold: cached ones make room."""
    cache = stats.cache
    used_pages = cache.num_pages - cache.free_pages - cache.evictable_pages
    used = used_pages * cache.page_size
    return {
        "dp_rank": number,
        "worker": name,
        "timestamp": time.time(),
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "num_waiting_uncached_tokens": stats.num_waiting_tokens,
        "num_used_tokens": used,
        "num_total_tokens": used + stats.num_waiting_tokens,
        "max_total_num_tokens": cache.num_pages * cache.page_size,
        "token_usage": round(used_pages / cache.num_pages, 4),
        "cache_hit_rate": round(cache.recent_hit_rate, 4),
        "max_running_requests": max_running,
        "queues": {"waiting": stats.num_waiting},
    }
