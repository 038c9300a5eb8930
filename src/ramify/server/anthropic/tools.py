"""Tools of the Messages API as functions: the client's own, and those that Anthropic defines.

Of the latter, those that the client runs have a fixed schema, which is in the table here. Those that
Anthropic's servers run are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.engine.text.chat_template import NO_PARAMETERS
from ramify.server.anthropic.blocks import required
from ramify.server.anthropic.protocol import InputTool, ToolChoice
from ramify.server.conversation.conversation import ToolDefinition
from ramify.server.errors import ApiError

_TEXT = {"type": "string"}
_POINT = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_EDITS = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": {"type": "integer"},
    "insert_text": _TEXT,
    "view_range": _POINT,
}
_EDIT_COMMANDS = ("view", "create", "str_replace", "insert")
_COMPUTER_ACTIONS = (
    "key type mouse_move left_click left_click_drag right_click middle_click double_click "
    "triple_click left_mouse_down left_mouse_up scroll hold_key wait screenshot cursor_position zoom"
).split()


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool that Anthropic defines and the client runs."""

    name: str  # where the request has none
    description: str
    properties: dict[str, Any]
    required: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, Any]:
        """The JSON schema of its input."""
        required = list(self.required)
        return {"type": "object", "properties": self.properties, "required": required}


# The beginning of `type` → the tool. A date follows, as in `bash_20250124`.
CLIENT_TOOLS = {
    "bash_2": ClientTool(
        "bash",
        "Run a command in a shell that stays open between calls; `restart` starts a new shell.",
        {"command": _TEXT, "restart": {"type": "boolean"}},
        (),
    ),
    "text_editor_2": ClientTool(
        "str_replace_based_edit_tool",
        "View, create and edit text files. `str_replace` replaces `old_str`, which must occur once, "
        "by `new_str`; `insert` puts `insert_text` after line `insert_line`.",
        {"command": {"type": "string", "enum": [*_EDIT_COMMANDS]}, **_EDITS},
        ("command", "path"),
    ),
    "memory_2": ClientTool(
        "memory",
        "Keep notes in files below /memories, which later conversations can read.",
        {
            "command": {"type": "string", "enum": [*_EDIT_COMMANDS, "delete", "rename"]},
            **_EDITS,
            "old_path": _TEXT,
            "new_path": _TEXT,
        },
        ("command",),
    ),
    "computer_2": ClientTool(
        "computer",
        "Use mouse and keyboard of a computer, and take screenshots of it.",
        {
            "action": {"type": "string", "enum": _COMPUTER_ACTIONS},
            "coordinate": _POINT,
            "start_coordinate": _POINT,
            "text": _TEXT,
            "duration": {"type": "number"},
            "scroll_direction": {"type": "string", "enum": ["up", "down", "left", "right"]},
            "scroll_amount": {"type": "integer"},
            "region": {"type": "array", "items": {"type": "integer"}},
        },
        ("action",),
    ),
}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request that the model may call.

    Args:
        skipped: names, or types, of the tools that are left out.
    """

    definitions: tuple[ToolDefinition, ...]
    skipped: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return [tool.name for tool in self.definitions]

    def warnings(self) -> list[str]:
        """Warnings for the client about tools that are left out."""
        if not self.skipped:
            return []
        return [f"tools that this server does not run are left out: {', '.join(self.skipped)}"]

    def chosen(self, choice: ToolChoice) -> str | None:
        """The name of the tool that a forcing choice demands; None: any of them.

        Raises:
            ApiError: 400, there is no such tool.
        """
        why = f"; not run by this server: {', '.join(self.skipped)}" if self.skipped else ""
        if not self.definitions:
            raise ApiError(400, f"{choice.type!r} needs tools{why}", param="tool_choice")
        if choice.type != "tool":
            return None
        if choice.name is None:
            raise ApiError(400, "it is missing", param="tool_choice.name")
        if choice.name not in self.names:
            message = f"{choice.name!r} is not among the tools given: {', '.join(self.names)}{why}"
            raise ApiError(400, message, param="tool_choice.name")
        return choice.name


def tool_set(tools: Sequence[InputTool]) -> ToolSet:
    """The functions in the prompt.

    A breakpoint at a tool that is left out moves to the tool before it.

    Raises:
        ApiError: 400, a tool has no name.
    """
    definitions: list[ToolDefinition] = []
    skipped: dict[str, None] = {}
    for index, tool in enumerate(tools):
        ttl_s = None if tool.cache_control is None else tool.cache_control.ttl_s
        definition = _definition(tool, f"tools[{index}]", ttl_s)
        if definition is not None:
            definitions.append(definition)
        else:
            skipped[tool.name or str(tool.type)] = None
            if definitions and ttl_s is not None:
                definitions[-1] = replace(definitions[-1], ttl_s=ttl_s)
    return ToolSet(tuple(definitions), tuple(skipped))


def _definition(tool: InputTool, path: str, ttl_s: float | None) -> ToolDefinition | None:
    """The function of a tool; None if Anthropic's servers run it."""
    kind = tool.type or "custom"
    if kind == "custom" or tool.input_schema is not None:
        name, description = required(tool.name, f"{path}.name"), tool.description
        parameters = tool.input_schema
    else:
        known = next((CLIENT_TOOLS[word] for word in CLIENT_TOOLS if kind.startswith(word)), None)
        if known is None:
            return None
        name, parameters = tool.name or known.name, known.parameters
        description = tool.description or known.description
        if (width := tool.display_width_px) and (height := tool.display_height_px):
            description += f" The screen has {width} x {height} pixels."
    fields = {
        "name": name,
        "description": description,
        "parameters": NO_PARAMETERS if parameters is None else parameters,
        "strict": tool.strict,
    }
    return ToolDefinition.of(path, fields, ttl_s)
