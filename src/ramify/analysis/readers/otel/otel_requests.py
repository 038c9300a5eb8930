"""A request from the attributes of a span or an event of OpenTelemetry GenAI."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ramify.analysis.reader import Place
from ramify.analysis.readers.bodies.body_fields import CHAT, BodyFields, is_cut
from ramify.analysis.readers.bodies.request_bodies import is_body, parse_bodies, provider_of
from ramify.analysis.readers.bodies.responses import ResponseFields
from ramify.analysis.readers.bodies.segments import settings_of
from ramify.analysis.readers.bodies.usage import parse_usage
from ramify.analysis.readers.gateways.hosts import provider_of_name, server_of
from ramify.analysis.readers.nested_json import decode_nested, is_cut_json
from ramify.analysis.readers.otel.openinference import openinference_body
from ramify.analysis.readers.otel.otel_dialects import event_body, openllmetry_body, vercel_body
from ramify.analysis.readers.otel.otel_messages import messages_of, system_of, tools_of_definitions
from ramify.analysis.readers.otel.otlp_values import OtlpItem
from ramify.analysis.readers.row_fields import (
    first_text,
    first_value,
    is_redacted,
    mapping_or_empty,
    merge_usage,
)
from ramify.analysis.readers.times import Times, duration, later
from ramify.analysis.records import LoggedRequest, Segment, SegmentKind, Usage

DETAILS_EVENT = "gen_ai.client.inference.operation.details"

_INPUT, _SYSTEM = "gen_ai.input.messages", "gen_ai.system_instructions"
_OPERATIONS = """chat generate_content text_completion completion completions chat.completions messages
    responses response""".split()
# Keys that only the span of an inference has.
_INFERENCE_KEYS = (
    "gen_ai.request.model",
    "gen_ai.response.model",
    "llm.model_name",
    "ai.prompt.messages",
    _INPUT,
)
_JSON_KEYS = (_INPUT, _SYSTEM, "gen_ai.tool.definitions", "ai.prompt.messages", "gen_ai.prompt")
_CONTENT_KEYS = (
    _INPUT, "gen_ai.prompt", "gen_ai.prompt.0.role", "gen_ai.prompt.0.content",
    "ai.prompt.messages", "input.value",
)  # fmt: skip
_CONVERSATION_KEYS = (
    "gen_ai.conversation.id", "session.id", "langfuse.session.id", "traceloop.association.properties.session_id",
    "traceloop.association.properties.conversation_id", "ai.telemetry.metadata.sessionId", "thread.id",
    "conversation.id",
)  # fmt: skip
_PROVIDER_KEYS = tuple(
    "gen_ai.provider.name gen_ai.system llm.provider llm.system ai.model.provider".split()
)
_MODEL_KEYS = (
    "gen_ai.request.model", "llm.model_name", "ai.model.id", "gen_ai.response.model", "model",
)  # fmt: skip
_FIRST_OUTPUT_KEYS = (
    "gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token",
    "gen_ai.latency.time_to_first_token",
)  # fmt: skip
# Attribute of a request's setting, and the setting's name in a body.
_SETTINGS = (
    ("gen_ai.request.reasoning.level", "reasoning_effort"),
    ("gen_ai.request.reasoning_effort", "reasoning_effort"),
    ("gen_ai.request.thinking", "thinking"),
    ("gen_ai.request.tool_choice", "tool_choice"),
    ("gen_ai.output.type", "response_format"),
    ("gen_ai.openai.request.response_format", "response_format"),
    ("gen_ai.openai.request.service_tier", "service_tier"),
    ("openai.request.service_tier", "service_tier"),
)

# Key of a count and its name in a usage object, and how that is read.
_USAGE_SPELLINGS = (
    (  # OpenInference
        (
            ("llm.token_count.prompt", "prompt_tokens"),
            ("llm.token_count.completion", "completion_tokens"),
            ("llm.token_count.prompt_details.cache_input", "cached_tokens"),
            ("llm.token_count.prompt_details.cache_read", "cached_tokens"),
            ("llm.token_count.prompt_details.cache_write", "cache_write_input_tokens"),
        ),
        None,
    ),
    (  # Vercel's SDK, OpenLLMetry
        (
            ("ai.usage.promptTokens", "input_tokens"),
            ("ai.usage.inputTokens", "input_tokens"),
            ("ai.usage.completionTokens", "output_tokens"),
            ("ai.usage.outputTokens", "output_tokens"),
            ("ai.usage.cachedInputTokens", "cached_input_tokens"),
            ("ai.usage.inputTokenDetails.cacheReadTokens", "cached_input_tokens"),
            ("ai.usage.inputTokenDetails.cacheWriteTokens", "cache_write_input_tokens"),
            ("llm.usage.prompt_tokens", "input_tokens"),
            ("llm.usage.completion_tokens", "output_tokens"),
        ),
        None,
    ),
    (  # Codex, Gemini CLI and its kin
        (
            ("input_token_count", "input_tokens"),
            ("cached_token_count", "cached_input_tokens"),
            ("cached_content_token_count", "cached_input_tokens"),
            ("output_token_count", "output_tokens"),
        ),
        None,
    ),
    (  # Claude Code
        (
            ("input_tokens", "input_tokens"),
            ("cache_read_tokens", "cache_read_input_tokens"),
            ("cache_creation_tokens", "cache_creation_input_tokens"),
            ("output_tokens", "output_tokens"),
        ),
        "anthropic",
    ),
)
_AGENT_COUNTS = ("input_tokens", "input_token_count")


def is_agent_call(item: OtlpItem) -> bool:
    """Whether an event of a coding agent's telemetry has the model and the counts of a request."""
    attributes = item.attributes
    return "model" in attributes and any(key in attributes for key in _AGENT_COUNTS)


def is_inference(item: OtlpItem) -> bool:
    """Whether a span or event is of one call of a model."""
    attributes = item.attributes
    kind = attributes.get("openinference.span.kind")
    if kind is not None:
        return bool(kind == "LLM")
    if "ai.operationId" in attributes:  # the outer span of Vercel's SDK repeats the inner one
        return str(attributes["ai.operationId"]).endswith((".doGenerate", ".doStream"))
    operation = attributes.get("gen_ai.operation.name")
    if operation is not None:
        return operation in _OPERATIONS
    if attributes.get("llm.request.type") is not None:
        return attributes["llm.request.type"] in ("chat", "completion")
    return any(key in attributes for key in _INFERENCE_KEYS) or has_content(item)


def has_content(item: OtlpItem) -> bool:
    """Whether a span or event holds a prompt."""
    attributes = item.attributes
    return (
        any(attributes.get(key) is not None for key in _CONTENT_KEYS)
        or any(key.startswith(("llm.input_messages.", "llm.prompts.")) for key in attributes)
        or event_body(item.events) is not None
        or any(_INPUT in event.attributes for event in item.events)
    )


def request_of(item: OtlpItem, events: Iterable[OtlpItem], place: Place) -> LoggedRequest:
    """The request of a span or event, and of the events that hold its prompt.

    Raises:
        BadRowError: the prompt cannot be read.
    """
    events = [*events, *item.events]
    attributes = dict(item.attributes)
    for event in events:
        if event.name == DETAILS_EVENT or _INPUT in event.attributes:
            attributes = {**mapping_or_empty(event.body), **event.attributes, **attributes}
    model = first_text(attributes, _MODEL_KEYS)
    segments, api = _prompt_of(attributes, events, model)
    has_text = any(segment.kind is not SegmentKind.SETTING for segment in segments)
    times = _times_of(item, attributes)
    return LoggedRequest(
        *place,
        segments=tuple(segments),
        output=_output_of(attributes),
        request_id=first_text(attributes, ("gen_ai.response.id", "ai.response.id"))
        or item.span_id
        or None,
        conversation=first_text(attributes, _CONVERSATION_KEYS),
        history_id=first_text(attributes, ("gen_ai.request.previous_response.id",)),
        start_s=times.start_s,
        first_output_s=times.first_output_s,
        end_s=times.end_s,
        api=api,
        provider=_provider_of(attributes, model),
        model=model,
        response_model=first_text(attributes, ("gen_ai.response.model", "ai.response.model")),
        replica=_server_of(attributes),
        has_full_text=has_text
        and not any(is_cut_json(attributes.get(key)) for key in _JSON_KEYS)
        and not is_cut(tuple(segments))
        and not is_redacted(segments),
        usage=_usage_of(attributes),
    )


def _provider_of(attributes: Mapping[str, Any], model: str | None) -> str | None:
    named = provider_of_name(first_text(attributes, _PROVIDER_KEYS), model)
    return named or provider_of(BodyFields(CHAT, (), model=model), ResponseFields())


def _prompt_of(
    attributes: Mapping[str, Any], events: list[OtlpItem], model: str | None
) -> tuple[list[Segment], str | None]:
    settings: dict[str, Any] = {} if model is None else {"model": model}
    for key, name in _SETTINGS:
        value = attributes.get(key)
        if value is not None and not (name == "response_format" and value == "text"):
            settings[name] = decode_nested(value)
    if attributes.get(_INPUT) is not None or attributes.get(_SYSTEM) is not None:
        segments = settings_of(settings)
        segments += tools_of_definitions(attributes.get("gen_ai.tool.definitions"))
        segments += system_of(attributes.get(_SYSTEM))
        if attributes.get(_INPUT) is not None:
            segments += messages_of(attributes[_INPUT])
        return segments, None
    makers: tuple[Callable[[Mapping[str, Any]], dict[str, Any] | None], ...] = (
        openllmetry_body,
        openinference_body,
        vercel_body,
    )
    bodies = (make(attributes) for make in makers)
    body = next((candidate for candidate in bodies if candidate is not None), None)
    body = body or event_body(events, attributes.get("events"))
    if body is None:
        return settings_of(settings), None
    tools = decode_nested(attributes.get("gen_ai.tool.definitions"))
    if isinstance(tools, list) and "tools" not in body:
        body["tools"] = [decode_nested(tool) for tool in tools]
    body = {**body, **settings}
    if not is_body(body):
        body.setdefault("messages", [])
    fields = parse_bodies(body)[0]
    return list(fields.segments), fields.api


def _output_of(attributes: Mapping[str, Any]) -> tuple[Segment, ...]:
    value = decode_nested(attributes.get("gen_ai.output.messages"))
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return tuple(messages_of(value))
    return ()


def _times_of(item: OtlpItem, attributes: Mapping[str, Any]) -> Times:
    start_s, end_s = item.start_s, item.end_s
    first_output_s = None
    if item.is_span:
        waited = next(
            (duration(attributes[key]) for key in _FIRST_OUTPUT_KEYS if key in attributes), None
        )
        if waited is None:
            milliseconds = first_value(attributes, ("ai.response.msToFirstChunk", "ttft_ms"))
            waited = duration(milliseconds, unit_s=1e-3)
        first_output_s = later(start_s, waited)
        if first_output_s is None:
            first_output_s = next(
                (event.start_s for event in item.events if "first" in event.name.lower()), None
            )
    # A details event is written when the response is there, the event of a message before.
    elif item.name == DETAILS_EVENT:
        start_s, end_s = None, item.start_s
    elif is_agent_call(item) and item.start_s is not None:
        seconds = duration(attributes.get("duration_ms"), unit_s=1e-3)
        start_s, end_s = item.start_s - (seconds or 0.0), item.start_s
    return Times.in_order(start_s, first_output_s, end_s)


def _server_of(attributes: Mapping[str, Any]) -> str | None:
    address = first_text(attributes, ("server.address",))
    if address is None:
        return server_of(attributes.get("gen_ai.openai.api_base"))
    port = first_text(attributes, ("server.port",))
    return server_of(f"//{address}:{port}" if port and ":" not in address else address)


def _usage_of(attributes: Mapping[str, Any]) -> Usage:
    """Counts in all spellings: a span may have the same ones twice, and the cached ones in one only."""
    usage = Usage()
    if any(key.startswith("gen_ai.usage.") for key in attributes):
        usage = parse_usage(attributes)
    for spelling, dialect in _USAGE_SPELLINGS:
        counts = {name: attributes[key] for key, name in spelling if key in attributes}
        if counts:
            usage = merge_usage(usage, parse_usage(counts, dialect=dialect))
    return usage
