"""The forms in which chat templates write a tool's definition."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Tool = Mapping[str, Any]


def _json(value: object, indent: int | None = None, *, is_compact: bool = False) -> str:
    separators = (",", ":") if is_compact else None
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators)


def _in_list(value: object, indent: int) -> str:
    return _json([value], indent)[1:-1].strip()


# The value that is written, and how.
_VALUES: dict[str, Callable[[Tool], Any]] = {
    "tool": lambda tool: tool,
    "function": lambda tool: tool["function"],
    "parameters": lambda tool: tool["function"].get("parameters") or {},
}
_WRITERS: dict[str, Callable[[Any], str]] = {
    "json": _json,
    "indent 4": partial(_json, indent=4),
    "indent 2": partial(_json, indent=2),
    "compact": partial(_json, is_compact=True),
    "list, indent 4": partial(_in_list, indent=4),
    "list, indent 2": partial(_in_list, indent=2),
    "python": str,
}
TOOL_FORMS = tuple((value, writer) for value in _VALUES for writer in _WRITERS)
NAME_ONLY = ("name", "text")


def tool_text(tool: Tool, form: tuple[str, str]) -> str:
    """The text of a tool's definition in one of `TOOL_FORMS`, or its name."""
    if form == NAME_ONLY:
        return str(tool["function"]["name"])
    value, writer = form
    return _WRITERS[writer](_VALUES[value](tool))
