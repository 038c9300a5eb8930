"""Segments of blocks, tools and settings: the parts that the bodies of all APIs have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.records import Segment, SegmentKind, TextForm

# Top-level keys of a body that change the rendered prompt or the key of a vendor's cache.
SETTINGS = frozenset(
    """model tool_choice response_format reasoning_effort reasoning verbosity text
    parallel_tool_calls service_tier thinking output_config output_format context_management speed
    betas chat_template_kwargs enable_thinking""".split()
)
TTL_5M_S, TTL_1H_S = 300.0, 3600.0

# Tuples: a type that is a list or an object has no hash.
_TEXT_TYPES = ("text", "input_text", "output_text", "summary_text", "refusal")
_MEDIA_TYPES = tuple(
    "image image_url input_image audio input_audio video video_url file input_file document "
    "inlineData inline_data fileData file_data".split()
)
_SOURCE_KEYS = ("image_url", "file_id", "file_data", "file_url", "data", "url")
_INNER_SOURCE_KEYS = ("data", "bytes", "url", "file_id", "file_data", "fileUri", "source")
_MARKERS = ("cache_control", "prompt_cache_breakpoint")


def compact_json(value: object) -> str:
    """JSON without spaces and without `cache_control` at any depth, keys as they came."""
    text = _dump(value)
    if any(marker in text for marker in _MARKERS):
        text = _dump(_strip_markers(value))
    return text


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _strip_markers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip_markers(item) for key, item in value.items() if key not in _MARKERS}
    if isinstance(value, list):
        return [_strip_markers(item) for item in value]
    return value


def settings_of(body: Mapping[str, Any], betas: object = None) -> list[Segment]:
    """Segments of the settings: the model first, the others by name."""
    values = {key: body[key] for key in SETTINGS.intersection(body) if body[key] is not None}
    if betas and "betas" not in values:
        values["betas"] = betas
    names = sorted(values, key=lambda name: (name != "model", name))
    return [setting(name, values[name]) for name in names]


def setting(name: str, value: object) -> Segment:
    """Segment of a setting."""
    if isinstance(value, str):
        return Segment(f"settings.{name}", SegmentKind.SETTING, value)
    return json_segment(value, f"settings.{name}", "", SegmentKind.SETTING)


def tools_of(tools: object, path: str = "tools") -> list[Segment]:
    """Segments of tool definitions, in order."""
    if not isinstance(tools, list):
        return []
    segments: list[Segment] = []
    for number, tool in enumerate(tools):
        if is_cache_point(tool):
            mark_last(segments, ttl_of(tool))
            continue
        segments.append(json_segment(tool, f"{path}[{number}]", "", SegmentKind.TOOL))
        mark_last(segments, ttl_of(tool))
    return segments


def content_of(
    content: object, path: str, label: str, kind: SegmentKind = SegmentKind.MESSAGE
) -> list[Segment]:
    """Segments of a message's content or of a system prompt: a string, or blocks at `path[j]`."""
    if isinstance(content, str):
        return [Segment(path, kind, content, label=label)]
    if not isinstance(content, list):
        return [] if content is None else [json_segment(content, path, label, kind)]
    at = path if kind is SegmentKind.SYSTEM else f"{path}.content"
    segments: list[Segment] = []
    for number, block in enumerate(content):
        if is_cache_point(block):
            mark_last(segments, ttl_of(block))
        else:
            segments.append(block_of(block, f"{at}[{number}]", label, kind))
    return segments


def block_of(
    block: object, path: str, label: str, kind: SegmentKind = SegmentKind.MESSAGE
) -> Segment:
    """Segment of a content block."""
    if isinstance(block, str):
        return Segment(path, kind, block, label=label)
    if not isinstance(block, dict):
        return json_segment(block, path, label, kind)
    ttl_s = ttl_of(block)
    text = _text_of(block)
    if text is not None:
        label = " ".join((label, *_extra_label(block))).strip()
        return Segment(path, kind, text, TextForm.TEXT, label, ttl_s)
    media = media_of(block)
    if media is not None:
        return Segment(path, kind, media, TextForm.MEDIA, label, ttl_s)
    return Segment(path, kind, compact_json(block), TextForm.JSON, label, ttl_s)


def json_segment(
    value: object, path: str, label: str, kind: SegmentKind = SegmentKind.MESSAGE
) -> Segment:
    """Segment of a value as compact JSON."""
    return Segment(path, kind, compact_json(value), TextForm.JSON, label)


def _text_of(block: Mapping[str, Any]) -> str | None:
    """Text of a block that is read as text."""
    kind = block.get("type")
    value: object = None
    if kind is None and len(block) == 1:
        value = block.get("text")  # Bedrock and Gemini have blocks without a type
    elif not isinstance(kind, str):
        return None
    elif kind in _TEXT_TYPES:
        value = block.get("refusal" if kind == "refusal" else "text")
    elif kind == "thinking":
        value = block.get("thinking")
    elif kind in ("tool_result", "function_call_output"):
        value = block.get("content" if kind == "tool_result" else "output")
    elif kind == "document":
        source = block.get("source")
        if isinstance(source, dict) and source.get("type") == "text":
            value = source.get("data")
    return value if isinstance(value, str) else None


def _extra_label(block: Mapping[str, Any]) -> list[str]:
    """What the model reads beside the text of a block."""
    kind = block.get("type")
    if kind == "tool_result":
        parts = [block.get("tool_use_id"), "error" if block.get("is_error") is True else None]
    elif kind == "function_call_output":
        parts = [kind, block.get("call_id")]
    elif kind == "document":
        parts = [kind, block.get("title"), block.get("context")]
    elif kind in ("thinking", "refusal"):
        parts = [kind]
    else:
        parts = []
    return [part for part in parts if isinstance(part, str)]


def media_of(block: Mapping[str, Any]) -> str | None:
    """Type and digest of an image, a sound or a file; None for other blocks."""
    kind = block.get("type")
    if kind is None:
        kind = next((key for key in block if key in _MEDIA_TYPES), None)
    if not isinstance(kind, str) or kind not in _MEDIA_TYPES:
        return None
    source = _first_of(block, ("source", kind, *_SOURCE_KEYS))
    detail = block.get("detail")
    while isinstance(source, dict):
        detail = source.get("detail", detail)
        inner = _first_of(source, _INNER_SOURCE_KEYS)
        if inner is None:
            break
        source = inner
    if source is None:
        return None
    data = source if isinstance(source, str) else _dump(source)
    digest = sha256(data.encode("utf-8", "surrogatepass")).hexdigest()
    suffix = f" detail={detail}" if isinstance(detail, str) and detail != "auto" else ""
    return f"{kind} sha256:{digest}{suffix}"


def _first_of(values: Mapping[str, Any], keys: Iterable[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def ttl_of(block: object) -> float | None:
    """Lifetime in seconds that a block's breakpoint asks for; None if there is no breakpoint."""
    if not isinstance(block, dict):
        return None
    for key in ("cache_control", "prompt_cache_breakpoint", "cachePoint"):
        marker = block.get(key)
        if isinstance(marker, dict):
            return TTL_1H_S if marker.get("ttl") == "1h" else TTL_5M_S
    function = block.get("function")  # LiteLLM takes the marker inside a tool's function
    if isinstance(function, dict) and "cache_control" in function:
        return ttl_of({"cache_control": function["cache_control"]})
    inner = block.get("content")
    if block.get("type") == "tool_result" and isinstance(inner, list):
        for part in reversed(inner):
            ttl_s = ttl_of(part)
            if ttl_s is not None:
                return ttl_s
    return None


def is_cache_point(block: object) -> bool:
    """Whether a block is only a breakpoint (Bedrock Converse)."""
    return isinstance(block, dict) and len(block) == 1 and "cachePoint" in block


def mark_last(segments: list[Segment], ttl_s: float | None) -> None:
    """Put a breakpoint at the end of the last segment, unless it has one."""
    if segments and ttl_s is not None and segments[-1].breakpoint_ttl_s is None:
        segments[-1] = replace(segments[-1], breakpoint_ttl_s=ttl_s)


def token_segment(ids: Sequence[int]) -> Segment:
    """A prompt of token ids.

    Raises:
        BadRowError: an id is negative or has more than 63 bits.
    """
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 63):
        bad = next(number for number in ids if not 0 <= number < 1 << 63)
        raise BadRowError(f"token id {bad} is out of range")
    return Segment("prompt", SegmentKind.MESSAGE, " ".join(map(str, ids)), TextForm.TOKENS)


def label_of(*parts: object) -> str:
    """Role, name and call id with a space between."""
    return " ".join(part for part in parts if isinstance(part, str) and part)


def shift_messages(segments: Iterable[Segment], by: int) -> tuple[Segment, ...]:
    """The same segments with `messages[i]` at `i + by`."""
    shifted = []
    for segment in segments:
        head, bracket, rest = segment.path.partition("[")
        number, _, tail = rest.partition("]")
        if by and bracket and head == "messages" and number.isdecimal():
            segment = replace(segment, path=f"messages[{int(number) + by}]{tail}")  # noqa: PLW2901
        shifted.append(segment)
    return tuple(shifted)


def num_messages(segments: Iterable[Segment]) -> int:
    """One more than the highest index of a message."""
    highest = -1
    for segment in segments:
        if segment.path.startswith("messages["):
            number = segment.path[9:].partition("]")[0]
            highest = max(highest, int(number))
    return highest + 1
