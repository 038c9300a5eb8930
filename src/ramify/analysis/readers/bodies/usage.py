"""Token counts of every provider in one meaning: what is absent stays unknown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ramify.analysis.readers.row_fields import mapping_or_empty
from ramify.analysis.records import Usage

_OTEL = "gen_ai.usage."
_BEDROCK_KEYS = ("inputTokens", "cacheReadInputTokens", "cacheWriteInputTokens")
_ANTHROPIC_KEYS = ("cache_read_input_tokens", "cache_creation_input_tokens", "cache_creation")


def parse_usage(usage: Mapping[str, Any], *, dialect: str | None = None) -> Usage:
    """The counts of a usage object.

    Args:
        usage: as the API, the gateway or the exporter wrote it.
        dialect: "anthropic" if the response is known to be Anthropic's: `input_tokens` alone is then
            ordinary input, and the total unknown. Otherwise the keys decide.

    Where cache counters are outside the input (Anthropic, Bedrock), the total is the sum of all
    three, and unknown if a counter is missing. Where they should be inside the total but exceed it,
    an exporter passed on counters of the other kind, and the sum is taken as well.
    """
    keys = usage.keys()
    if "promptTokenCount" in keys or "cachedContentTokenCount" in keys:
        return _gemini(usage)
    if not keys.isdisjoint(_BEDROCK_KEYS):
        return _bedrock(usage)
    if any(key.startswith(_OTEL) for key in keys if isinstance(key, str)):
        return _otel(usage)
    if "prompt_tokens" in keys or "prompt_cache_hit_tokens" in keys:
        return _openai(usage, "prompt_tokens", "completion_tokens")
    is_inside = "cached_input_tokens" in keys or "input_tokens_details" in keys
    if not is_inside and (dialect == "anthropic" or not keys.isdisjoint(_ANTHROPIC_KEYS)):
        return _anthropic(usage)
    return _openai(usage, "input_tokens", "output_tokens")


def count(value: object) -> int | None:
    """A count of tokens, None for whatever is none."""
    if isinstance(value, str):
        value = value.strip()
        if not value.isascii() or not value.isdecimal() or len(value) > 18:
            return None
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value < 10**18 or int(value) != value:
        return None
    return int(value)


def first_count(values: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these keys that holds a count."""
    return next((number for key in keys if (number := count(values.get(key))) is not None), None)


def provider_of_usage(usage: Mapping[str, Any]) -> str | None:
    """The provider that only can have written these keys."""
    if "prompt_cache_hit_tokens" in usage or "prompt_cache_miss_tokens" in usage:
        return "deepseek"
    if "promptTokenCount" in usage or "cachedContentTokenCount" in usage:
        return "gemini"
    if "prompt_tokens" not in usage and (
        "cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage
    ):
        return "anthropic"
    return None


def _anthropic(usage: Mapping[str, Any]) -> Usage:
    rest = count(usage.get("input_tokens"))
    read = count(usage.get("cache_read_input_tokens"))
    written = count(usage.get("cache_creation_input_tokens"))
    split = mapping_or_empty(usage.get("cache_creation"))
    written_5m = count(split.get("ephemeral_5m_input_tokens"))
    written_1h = count(split.get("ephemeral_1h_input_tokens"))
    if written is None and written_5m is not None and written_1h is not None:
        written = written_5m + written_1h
    if written == 0 and written_1h is None:
        written_1h = 0
    return Usage(
        num_input=_sum(rest, read, written),
        num_read=read,
        num_written=written,
        num_written_1h=written_1h,
        num_output=count(usage.get("output_tokens")),
    )


def _bedrock(usage: Mapping[str, Any]) -> Usage:
    read = count(usage.get("cacheReadInputTokens"))
    written = count(usage.get("cacheWriteInputTokens"))
    return Usage(
        num_input=_sum(count(usage.get("inputTokens")), read, written),
        num_read=read,
        num_written=written,
        num_output=count(usage.get("outputTokens")),
    )


def _gemini(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        num_input=count(usage.get("promptTokenCount")),
        num_read=count(usage.get("cachedContentTokenCount")),
        num_output=count(usage.get("candidatesTokenCount")),
    )


def _otel(usage: Mapping[str, Any]) -> Usage:
    def get(*names: str) -> int | None:
        return first_count(usage, *(_OTEL + name for name in names))

    read = get(
        "cache_read.input_tokens", "cache_read_input_tokens", "details.cache_read_tokens",
        "details.cache_read_input_tokens", "details.cached_tokens",
    )  # fmt: skip
    written = get(
        "cache_write.input_tokens", "cache_creation.input_tokens", "cache_creation_input_tokens",
        "details.cache_write_tokens", "details.cache_creation_input_tokens",
    )  # fmt: skip
    return Usage(
        num_input=_inside(get("input_tokens", "prompt_tokens"), read, written),
        num_read=read,
        num_written=written,
        num_output=get("output_tokens", "completion_tokens"),
    )


def _openai(usage: Mapping[str, Any], input_key: str, output_key: str) -> Usage:
    details: dict[str, Any] = {}
    for key in ("prompt_tokens_details", "input_tokens_details", "input_token_details"):
        details.update(mapping_or_empty(usage.get(key)))
    read = first_count(details, "cached_tokens", "cache_read")
    if read is None:
        read = first_count(
            usage,
            "prompt_cache_hit_tokens",
            "cached_input_tokens",
            "cache_read_input_tokens",
            "cached_tokens",
        )
    written = first_count(details, "cache_write_tokens", "cache_creation_tokens", "cache_creation")
    if written is None:
        written = first_count(usage, "cache_write_input_tokens", "cache_creation_input_tokens")
    total = count(usage.get(input_key))
    if total is None:
        missed = count(usage.get("prompt_cache_miss_tokens"))
        total = _sum(read, missed) if missed is not None else None
    return Usage(
        num_input=_inside(total, read, written),
        num_read=read,
        num_written=written,
        num_written_1h=first_count(
            mapping_or_empty(details.get("cache_creation_token_details")),
            "ephemeral_1h_input_tokens",
        ),
        num_output=count(usage.get(output_key)),
    )


def _inside(total: int | None, read: int | None, written: int | None) -> int | None:
    """A total that contains the cache counters; the sum if it cannot contain them."""
    cached = (read or 0) + (written or 0)
    return total + cached if total is not None and cached > total else total


def _sum(*counts: int | None) -> int | None:
    total = 0
    for number in counts:
        if number is None:
            return None
        total += number
    return total
