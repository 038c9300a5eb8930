"""Token counts of every provider in one meaning: what is absent stays unknown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.analysis.readers.row_fields import mapping_or_empty
from ramify.analysis.records import Usage

_OTEL = "gen_ai.usage."
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
        return _counts(usage, _GEMINI)
    if not keys.isdisjoint((*_BEDROCK.num_input, *_BEDROCK.num_read, *_BEDROCK.num_written)):
        return _counts(usage, _BEDROCK)
    if any(key.startswith(_OTEL) for key in keys if isinstance(key, str)):
        return _counts(usage, _GENAI)
    if "prompt_tokens" in keys or "prompt_cache_hit_tokens" in keys:
        return _openai(usage, _CHAT)
    is_inside = "cached_input_tokens" in keys or "input_tokens_details" in keys
    if not is_inside and (dialect == "anthropic" or not keys.isdisjoint(_ANTHROPIC_KEYS)):
        return _anthropic(usage)
    return _openai(usage, _RESPONSES)


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


def _counts(usage: Mapping[str, Any], names: _Names) -> Usage:
    read, written = first_count(usage, *names.num_read), first_count(usage, *names.num_written)
    return Usage(
        num_input=names.total(first_count(usage, *names.num_input), read, written),
        num_read=read,
        num_written=written,
        num_output=first_count(usage, *names.num_output),
    )


def _anthropic(usage: Mapping[str, Any]) -> Usage:
    split = mapping_or_empty(usage.get("cache_creation"))
    written_5m = count(split.get("ephemeral_5m_input_tokens"))
    written_1h = count(split.get("ephemeral_1h_input_tokens"))
    counts = _counts({**usage, "5m and 1h": _sum(written_5m, written_1h)}, _ANTHROPIC)
    if counts.num_written == 0 and written_1h is None:
        written_1h = 0
    return replace(counts, num_written_1h=written_1h)


def _openai(usage: Mapping[str, Any], names: _Names) -> Usage:
    details: dict[str, Any] = {}
    for key in ("prompt_tokens_details", "input_tokens_details", "input_token_details"):
        details.update(mapping_or_empty(usage.get(key)))
    named = {**usage, **{f"details.{name}": item for name, item in details.items()}}
    missed = count(usage.get("prompt_cache_miss_tokens"))
    named["read and missed"] = _sum(first_count(named, *names.num_read), missed)
    lifetimes = mapping_or_empty(details.get("cache_creation_token_details"))
    written_1h = count(lifetimes.get("ephemeral_1h_input_tokens"))
    return replace(_counts(named, names), num_written_1h=written_1h)


def _inside(total: int | None, read: int | None, written: int | None) -> int | None:
    """A total that contains the cache counters; the sum if it cannot contain them."""
    cached = (read or 0) + (written or 0)
    return total + cached if total is not None and cached > total else total


def _sum(*counts: int | None) -> int | None:
    known = [number for number in counts if number is not None]
    return sum(known) if len(known) == len(counts) else None


def _as_it_is(total: int | None, _read: int | None, _written: int | None) -> int | None:
    return total


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the counts in a usage object; the first that holds a count is taken."""

    total: Callable[[int | None, int | None, int | None], int | None]  # of input, read, written
    num_input: Sequence[str]
    num_output: Sequence[str]
    num_read: Sequence[str]
    num_written: Sequence[str] = ()


def _genai(names: str) -> list[str]:
    return [_OTEL + name for name in names.split()]


_GEMINI = _Names(
    _as_it_is, ["promptTokenCount"], ["candidatesTokenCount"], ["cachedContentTokenCount"]
)
_BEDROCK = _Names(
    _sum, ["inputTokens"], ["outputTokens"], ["cacheReadInputTokens"], ["cacheWriteInputTokens"]
)
_ANTHROPIC = _Names(
    _sum, ["input_tokens"], ["output_tokens"],
    ["cache_read_input_tokens"], ["cache_creation_input_tokens", "5m and 1h"],
)  # fmt: skip
_GENAI = _Names(
    _inside,
    _genai("input_tokens prompt_tokens"),
    _genai("output_tokens completion_tokens"),
    _genai("""cache_read.input_tokens cache_read_input_tokens details.cache_read_tokens
        details.cache_read_input_tokens details.cached_tokens"""),
    _genai("""cache_write.input_tokens cache_creation.input_tokens cache_creation_input_tokens
        details.cache_write_tokens details.cache_creation_input_tokens"""),
)  # fmt: skip
_CHAT = _Names(
    _inside,
    ["prompt_tokens", "read and missed"],
    ["completion_tokens"],
    """details.cached_tokens details.cache_read prompt_cache_hit_tokens cached_input_tokens
        cache_read_input_tokens cached_tokens""".split(),
    """details.cache_write_tokens details.cache_creation_tokens details.cache_creation
        cache_write_input_tokens cache_creation_input_tokens""".split(),
)
_RESPONSES = replace(
    _CHAT, num_input=["input_tokens", "read and missed"], num_output=["output_tokens"]
)
