"""The grammar of an answer that is a tool call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramify.params import StructuredOutput


def tool_call_schema(tools: Sequence[Mapping[str, Any]], chosen: str | None) -> StructuredOutput:
    """The grammar of an answer that is one call: of the tool `chosen`, or of any if None."""
    schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if chosen in (None, tool["function"]["name"])
    ]
    return StructuredOutput(json_schema=schemas[0] if len(schemas) == 1 else {"anyOf": schemas})
