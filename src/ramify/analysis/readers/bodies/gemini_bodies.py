"""Bodies of Gemini's `generateContent`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ramify.analysis.reader import BadRowError
from ramify.analysis.readers.bodies.body_fields import GEMINI, BodyFields, text_or_none
from ramify.analysis.readers.bodies.segments import (
    block_of,
    json_segment,
    label_of,
    setting,
    tools_of,
)
from ramify.analysis.records import Segment, SegmentKind

_MODEL = re.compile(r"/models/([^/:?]+)")
_DECLARATIONS = ("functionDeclarations", "function_declarations")


def parse_gemini(body: Mapping[str, Any], *, url_path: str = "") -> BodyFields:
    """Fields of a body with `contents`; `parts[j]` is `content[j]`.

    A body that names a `cachedContent` does not hold what was cached.
    """
    contents = body.get("contents")
    if isinstance(contents, str):
        contents = [{"role": "user", "parts": [{"text": contents}]}]
    if not isinstance(contents, list):
        raise BadRowError("contents is no list")
    match = _MODEL.search(url_path)
    model = text_or_none(body.get("model")) or (match[1] if match else None)
    segments = [] if model is None else [setting("model", model)]
    for name in ("toolConfig", "tool_config"):
        if body.get(name) is not None:
            segments.append(setting(name, body[name]))
    segments += tools_of(_tools(body.get("tools")))
    cached = text_or_none(body.get("cachedContent", body.get("cached_content")))
    if cached is not None:
        segments.append(Segment("prompt", SegmentKind.SYSTEM, cached))
    system = body.get("systemInstruction", body.get("system_instruction"))
    segments += _parts(system, "system", "system", SegmentKind.SYSTEM)
    for number, content in enumerate(contents):
        role = content.get("role") if isinstance(content, dict) else None
        path = f"messages[{number}]"
        segments += _parts(content, f"{path}.content", label_of(role), SegmentKind.MESSAGE)
    return BodyFields(
        api=GEMINI,
        segments=tuple(segments),
        model=model,
        provider="gemini",
        has_full_text=cached is None,
        note=None if cached is None else "cached content is stored at the vendor",
    )


def _tools(tools: object) -> list[Any]:
    """Each function as a tool, whatever groups they were sent in."""
    declarations: list[Any] = []
    for tool in tools if isinstance(tools, list) else ():
        declared = next(
            (tool[key] for key in _DECLARATIONS if isinstance(tool, dict) and key in tool), None
        )
        declarations += declared if isinstance(declared, list) else [tool]
    return declarations


def _parts(content: object, path: str, label: str, kind: SegmentKind) -> list[Segment]:
    if content is None:
        return []
    parts = content.get("parts") if isinstance(content, dict) else content
    if isinstance(parts, dict | str):
        parts = [parts]
    if not isinstance(parts, list):
        return [json_segment(content, path.removesuffix(".content"), label, kind)]
    return [
        block_of(_block(part), f"{path}[{number}]", label, kind)
        for number, part in enumerate(parts)
    ]


def _block(part: object) -> object:
    """The content block that a part is; a thought becomes Anthropic's block for it."""
    if isinstance(part, dict) and part.get("thought") is True and "text" in part:
        return {"type": "thinking", "thinking": part["text"]}
    return part


def gemini_answer(response: Mapping[str, Any]) -> list[Segment]:
    """Segments of the first candidate."""
    candidates = response.get("candidates")
    if not isinstance(candidates, list) or not candidates or not isinstance(candidates[0], dict):
        return []
    content = candidates[0].get("content")
    return _parts(content, "messages[0].content", "model", SegmentKind.MESSAGE)
