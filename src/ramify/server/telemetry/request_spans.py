"""The spans of an ended request, by the GenAI semantic conventions; no text of prompt or answer.

Attributes beside the conventions begin with `ramify.`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ramify.params import SamplingParams
from ramify.server.generation import CacheUsage, Generation, total_usage
from ramify.server.http.wire import log_safe

PROVIDER = "ramify"
CLIENT_LEFT = 499
NS = 1_000_000_000
# By the path of an endpoint; requests to others have no span.
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/compact": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
    "/v1/score": "embeddings",
    "/v1/rerank": "embeddings",
}

Attribute = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A span that has ended. Times are nanoseconds since the epoch.

    `error` describes a failure of the server; a request that is wrong in itself has none.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute]
    children: tuple[SpanRecord, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request whose response has been sent, or whose client has gone; or a line of a batch.

    Args:
        route: path of the endpoint.
        status: of the response; 499: its client has gone.
        generations: what it ran in the engine; none if it was refused before.
        batch: id of the batch whose line it is; empty: it came over HTTP.
    """

    route: str
    status: int
    is_stream: bool
    tenant: str
    start_ns: int
    end_ns: int
    generations: Sequence[Generation] = ()
    batch: str = ""


def request_span(
    request: EndedRequest, *, model: str, replica_name: Callable[[int], str]
) -> SpanRecord:
    """The server span of a request; its children are queue, prefill and decode of each prompt.

    Args:
        model: that this server serves.
        replica_name: of the number of a replica in a cluster.
    """
    operation, generations = OPERATIONS[request.route], request.generations
    attributes: dict[str, Attribute] = {
        "http.request.method": "POST",
        "http.route": request.route,
        "http.response.status_code": request.status,
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.response.model": model,
        "gen_ai.request.stream": request.is_stream,
    }
    if request.tenant:
        attributes["ramify.tenant"] = request.tenant
    if request.batch:
        attributes["ramify.batch"] = request.batch
    error = next((e for e in map(_failure, generations) if e is not None), None)
    if request.status >= 400:
        attributes["error.type"] = str(request.status)
    elif error is not None:
        attributes["error.type"] = error
    name = operation
    if generations:
        requested = generations[0].request.history_entry.model
        name = f"{operation} {requested}"
        attributes["gen_ai.request.model"] = requested
        attributes |= _generation_attributes(generations, replica_name)
    children = tuple(
        child
        for index, generation in enumerate(generations)
        for child in _phases(generation, index, request.end_ns)
    )
    is_failure = request.status >= 500 or (request.status != CLIENT_LEFT and error is not None)
    return SpanRecord(
        name,
        request.start_ns,
        request.end_ns,
        attributes,
        children,
        (error or f"HTTP {request.status}") if is_failure else "",
    )


def _failure(generation: Generation) -> str | None:
    """The class of the error that ended a request in the engine; None: there is none."""
    output = generation.output
    return None if output is None or output.error is None else type(output.error).__name__


def _generation_attributes(
    generations: Sequence[Generation], replica_name: Callable[[int], str]
) -> dict[str, Attribute]:
    first = generations[0]
    attributes = _request_attributes(first.request.params)
    if first.request.session:
        attributes["gen_ai.conversation.id"] = first.request.session
    attributes |= {
        "gen_ai.response.id": first.id,
        "gen_ai.response.finish_reasons": tuple(
            reason for generation in generations for reason in _finish_reasons(generation)
        ),
        "gen_ai.usage.input_tokens": sum(
            len(generation.request.prompt.ids) for generation in generations
        ),
        "gen_ai.usage.output_tokens": sum(generation.num_output for generation in generations),
    }
    usage = total_usage(generations)
    if usage is not None:
        attributes |= _cache_attributes(usage)
    if len(generations) == 1 and first.placement is not None:
        attributes["ramify.replica"] = replica_name(first.placement.replica)
        attributes["ramify.route.reason"] = first.placement.reason
    preemptions = sum(
        0 if generation.output is None else generation.output.metrics.preemptions
        for generation in generations
    )
    if preemptions:
        attributes["ramify.preemptions"] = preemptions
    return attributes


def _finish_reasons(generation: Generation) -> Sequence[str]:
    output = generation.output
    if output is None:
        return (generation.end_reason,)
    return [str(completion.finish_reason) for completion in output.completions]


def _request_attributes(params: SamplingParams) -> dict[str, Attribute]:
    """Sampling parameters. Stop strings are text of the client and stay away."""
    optional: dict[str, int | float | None] = {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.choice.count": params.n if params.n != 1 else None,
    }
    return {name: value for name, value in optional.items() if value is not None}


def _cache_attributes(usage: CacheUsage) -> dict[str, Attribute]:
    """Where the prompt's K/V came from, and why the cache look-up ended where it did."""
    attributes: dict[str, Attribute] = {
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.cache_creation.input_tokens": usage.written,
        "ramify.tokens.read": usage.read,
        "ramify.tokens.shared_in_flight": usage.shared,
        "ramify.tokens.computed": usage.computed,
    }
    if usage.tiers:
        by_tier = {"pool": usage.read - sum(usage.tiers.values()), **usage.tiers}
        attributes |= {f"ramify.tokens.read.{tier}": count for tier, count in by_tier.items()}
    if usage.resumed:
        attributes["ramify.resumed"] = True
    if usage.miss is not None:
        attributes |= {
            "ramify.miss.reason": usage.miss.reason,
            "ramify.miss.at_token": usage.miss.at_token,
        }
        optional = {
            "ramify.miss.field": usage.miss.segment,
            "ramify.miss.evicted_by": usage.miss.evicted_by,
            "ramify.miss.tier": usage.miss.tier,
            "ramify.miss.tier_reason": usage.miss.tier_reason,
        }
        attributes |= {
            name: log_safe(value) for name, value in optional.items() if value is not None
        }
    return attributes


def _phases(generation: Generation, index: int, end_ns: int) -> list[SpanRecord]:
    """Queue, prefill and decode of a prompt, as far as it got; none if its client left before."""
    if generation.output is None:
        return []
    times, start_ns = generation.output.metrics, generation.arrival_ns
    usage = generation.cache
    prefill: dict[str, Attribute] = {}
    if usage is not None:
        prefill = {
            "ramify.tokens.read": usage.read,
            "ramify.tokens.shared_in_flight": usage.shared,
            "ramify.tokens.computed": usage.computed,
        }
    decode: dict[str, Attribute] = {"gen_ai.usage.output_tokens": generation.num_output}
    if times.num_drafted:
        decode |= {
            "ramify.draft_tokens": times.num_drafted,
            "ramify.accepted_draft_tokens": times.num_accepted,
        }
    total_s = times.total_s
    first_s = total_s if times.ttft_s is None else times.ttft_s
    queue_s = min(times.queue_s, first_s)
    phases: list[tuple[str, float, float, dict[str, Attribute]]] = [
        ("queue", 0.0, queue_s, {}),
        ("prefill", queue_s, first_s, prefill),
    ]
    if times.ttft_s is not None:
        phases.append(("decode", first_s, total_s, decode))
    prompt: dict[str, Attribute] = {"ramify.prompt.index": index}
    return [
        SpanRecord(
            name,
            min(start_ns + int(NS * begin_s), end_ns),
            min(start_ns + int(NS * stop_s), end_ns),
            prompt | attributes,
        )
        for name, begin_s, stop_s, attributes in phases
    ]
