"""Responses of every API: usage, model, id, verdict and answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.anthropic_bodies import anthropic_message
from ramify.analysis.readers.bodies.body_fields import text_or_none
from ramify.analysis.readers.bodies.gemini_bodies import gemini_answer
from ramify.analysis.readers.bodies.openai_bodies import chat_message
from ramify.analysis.readers.bodies.responses_bodies import input_items
from ramify.analysis.readers.bodies.sse import events_of, join_events, looks_like_sse
from ramify.analysis.readers.bodies.usage import parse_usage, provider_of_usage
from ramify.analysis.readers.nested_json import decode_nested
from ramify.analysis.readers.times import parse_time
from ramify.analysis.records import Segment, SegmentKind, Usage, VendorVerdict

_FAILED = ("failed", "cancelled", "errored", "expired")


@dataclass(frozen=True, slots=True)
class ResponseFields:
    """What a response says; None is unknown."""

    usage: Usage = field(default_factory=Usage)
    response_id: str | None = None
    model: str | None = None
    provider: str | None = None
    created_s: float | None = None
    verdict: VendorVerdict | None = None
    output: tuple[Segment, ...] = ()  # as a message, `messages[0]`, or items of Responses
    is_failure: bool = False  # an error in place of an answer
    finds_no_divergence: bool = False  # a diagnosis without a reason


def parse_response(value: object) -> ResponseFields:
    """Fields of a response: an object, JSON text, the text of a stream, or a list of its events.

    Raises:
        BadRowError: the value is no response of a known API.
    """
    if isinstance(value, str):
        if looks_like_sse(value):
            return _parse_object(join_events(events_of(value)))
        value = decode_nested(value)
    if isinstance(value, list):
        value = join_events(value)
    if value is None:
        return ResponseFields()
    if not isinstance(value, Mapping):
        raise BadRowError("response is no object and no stream")
    return _parse_object(value)


def _parse_object(response: Mapping[str, Any]) -> ResponseFields:
    usage = _usage_object(response)
    provider = provider_of_usage(usage)
    is_anthropic = response.get("type") == "message" or provider == "anthropic"
    created = response.get("created", response.get("created_at"))
    diagnostics = response.get("diagnostics", ...)
    return ResponseFields(
        usage=parse_usage(usage, dialect="anthropic" if is_anthropic else None),
        response_id=text_or_none(response.get("id")) or text_or_none(response.get("responseId")),
        model=text_or_none(response.get("model")) or text_or_none(response.get("modelVersion")),
        provider=provider or ("anthropic" if is_anthropic else None),
        created_s=parse_time(created) if isinstance(created, int | float) else None,
        verdict=_verdict(response),
        output=_output(response),
        is_failure=_is_failure(response, usage),
        finds_no_divergence=diagnostics is None,
    )


def _usage_object(response: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in ("usage", "usageMetadata", "usage_metadata"):
        usage = response.get(key)
        if isinstance(usage, Mapping):
            return usage
    return {}


def _is_failure(response: Mapping[str, Any], usage: Mapping[str, Any]) -> bool:
    if usage:
        return False
    if response.get("error") or response.get("type") == "error":
        return True
    if response.get("object") == "error" or response.get("status") in _FAILED:
        return True
    # FastAPI's body for whatever went wrong.
    return response.keys() == {"detail"}


def _verdict(response: Mapping[str, Any]) -> VendorVerdict | None:
    diagnostics = response.get("diagnostics")
    if isinstance(diagnostics, Mapping):
        reason = diagnostics.get("cache_miss_reason")
        if isinstance(reason, Mapping):
            return _verdict_of(reason.get("type"), reason.get("cache_missed_input_tokens"))
        return _verdict_of(reason, None)
    openai = response.get("prompt_cache_diagnostics")
    if isinstance(openai, Mapping):
        kind = openai.get("type")
        reason = openai.get("reason") if kind == "cache_miss" else kind
        return _verdict_of(reason or kind, openai.get("cache_missed_tokens"))
    return None


def _verdict_of(reason: object, missed: object) -> VendorVerdict | None:
    if not isinstance(reason, str) or not reason:
        return None
    is_count = isinstance(missed, int) and not isinstance(missed, bool) and missed >= 0
    return VendorVerdict(reason, missed if is_count and isinstance(missed, int) else None)


def _output(response: Mapping[str, Any]) -> tuple[Segment, ...]:
    """The answer; () if it is absent or has a shape that is not known."""
    try:
        choices = response.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            if isinstance(choices[0].get("message"), Mapping):
                return tuple(chat_message(choices[0]["message"], 0))
            text = choices[0].get("text")
            if isinstance(text, str):
                return (Segment("output", SegmentKind.MESSAGE, text),)
        elif "candidates" in response:
            return tuple(gemini_answer(response))
        elif isinstance(response.get("output"), list):
            return tuple(input_items(response["output"]))
        elif isinstance(response.get("content"), list) and response.get("content"):
            message = {"role": response.get("role", "assistant"), "content": response["content"]}
            return tuple(anthropic_message(message, 0))
    except BadRowError:
        return ()
    return ()
