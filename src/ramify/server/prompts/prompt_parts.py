"""Request fields in the text of a prompt: the forms that templates write, and where they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.server.prompts.template_conventions import TemplateConventions
from ramify.server.prompts.text_spans import SoughtText, find_spans
from ramify.server.prompts.tool_forms import NAME_ONLY, tool_text

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A request field to locate in the rendered text.

    Args:
        texts: forms in which a template may write it, the likeliest first.
        ttl_s: of the breakpoint at its end; None: there is none.
        role: of its message; "tools" for the definition of a tool.
        may_be_dropped: templates may leave it out, and its text may stand elsewhere.
    """

    path: str
    texts: tuple[str, ...]
    ttl_s: float | None = None
    role: str = ""
    may_be_dropped: bool = False


def text_variants(content: str) -> tuple[str, ...]:
    """The forms in which templates write a message's text: as it is, or stripped."""
    return (content, content.strip())


def json_variants(value: object) -> tuple[str, ...]:
    """The forms in which templates write a value as JSON: by indent and separators."""
    return (
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, indent=4),
        json.dumps(value, ensure_ascii=False, indent=2),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
    )


def tool_part(path: str, ttl_s: float | None = None) -> PromptPart:
    """The part of a tool definition. The renderer knows how the template writes it."""
    return PromptPart(path, (), ttl_s, role="tools", may_be_dropped=True)


def result_variants(content: str) -> tuple[str, ...]:
    """The forms in which templates write a tool's result: as text, or inside JSON."""
    escaped = json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1]
    return (*text_variants(content), *escaped)


def call_variants(name: str, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The forms in which templates write a call's arguments; or its name alone."""
    return (*json_variants(arguments), name) if arguments else (name,)


def locate_parts(
    text: str,
    parts: Sequence[PromptPart],
    tools: Sequence[Tool] = (),
    conventions: TemplateConventions | None = None,
) -> list[tuple[PromptPart, int, int]]:
    """Each part with its span in `text`, ascending; empty if the template rewrote or dropped it.

    Args:
        tools: of the parts with that role, in their order.
        conventions: where the template writes tools and system prompt, and how.
    """
    conventions = TemplateConventions() if conventions is None else conventions
    form = conventions.tool_form if conventions.writes_tools else None
    ordered = _in_order(parts, conventions.part_order)
    rest = iter(tools)
    sought = [
        SoughtText((tool_text(next(rest), form),), may_be_missing=True)
        if part.role == "tools" and form is not None
        else SoughtText(part.texts, part.may_be_dropped)
        for part in ordered
    ]
    spans = list(find_spans(text, sought))
    if form == NAME_ONLY:
        spans = list(_with_descriptions(text, ordered, spans, tools))
    return [(part, start, end) for part, (start, end) in zip(ordered, spans, strict=True)]


def _in_order(parts: Sequence[PromptPart], order: Sequence[str]) -> list[PromptPart]:
    """Parts in the order of a template. See `TemplateConventions.part_order`."""
    groups: dict[str, list[PromptPart]] = {name: [] for name in order}
    users = [part.path.partition(".")[0] for part in parts if part.role == "user"]
    group = "system"
    for part in parts:
        if part.role == "tools":
            groups["tools"].append(part)
            continue
        if group == "system" and part.role != "system":
            group = "earlier"
        if part.role == "user" and part.path.partition(".")[0] == users[-1]:
            group = "last"
        groups[group].append(part)
    return [part for name in order for part in groups[name]]


def _with_descriptions(
    text: str,
    parts: Sequence[PromptPart],
    spans: Sequence[tuple[int, int]],
    tools: Sequence[Tool],
) -> Iterator[tuple[int, int]]:
    """Spans of tools from their name on, up to the last of their words before the next part."""
    rest = iter(tools)
    for index, (part, (start, end)) in enumerate(zip(parts, spans, strict=True)):
        words = tuple(_words(next(rest)["function"])) if part.role == "tools" else ()
        if start == end or not words:
            yield start, end
            continue
        behind = (begin for begin, stop in spans[index + 1 :] if begin < stop)
        limit = next(behind, len(text))
        starts = ((word, text.rfind(word, end, limit)) for word in words)
        yield start, max((at + len(word) for word, at in starts if at >= 0), default=end)


def _words(value: object) -> Iterator[str]:
    """Names and descriptions in a tool's definition."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name == "properties" and isinstance(item, Mapping):
                yield from (str(key) for key in item)
            if name == "description" and isinstance(item, str):
                yield item.strip()
            yield from _words(item)
    elif isinstance(value, list):
        for item in value:
            yield from _words(item)
