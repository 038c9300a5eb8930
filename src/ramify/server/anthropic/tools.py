"""Tools of the Messages API as functions: the client's own, and those that Anthropic defines.

Of the latter, those that the client runs have a fixed schema, which is in the table here. Those that
Anthropic's servers run are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.engine.text.chat_template import with_parameters
from ramify.server.anthropic.blocks import required
from ramify.server.anthropic.protocol import InputTool, ToolChoice
from ramify.server.errors import ApiError
from ramify.server.prompts.prompt_parts import PromptPart, tool_parts

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
        definitions: functions as chat templates take them.
        parts: of the prompt, one for each definition.
        skipped: names, or types, of the tools that are left out.
    """

    definitions: list[dict[str, Any]]
    parts: list[PromptPart]
    skipped: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Names of the functions."""
        return [tool["function"]["name"] for tool in self.definitions]

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
        if choice.name not in self.names:
            message = f"{choice.name!r} is not among {self.names}{why}"
            raise ApiError(400, message, param="tool_choice.name")
        return choice.name


def tool_set(tools: Sequence[InputTool]) -> ToolSet:
    """The functions in the prompt.

    A breakpoint at a tool that is left out moves to the tool before it.

    Raises:
        ApiError: 400, a tool has no name.
    """
    definitions: list[dict[str, Any]] = []
    paths: list[str] = []
    ttls_s: list[float | None] = []
    skipped: dict[str, None] = {}
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        ttl_s = None if tool.cache_control is None else tool.cache_control.ttl_s
        definition = _definition(tool, path)
        if definition is not None:
            definitions.append(definition)
            paths.append(path)
            ttls_s.append(ttl_s)
        else:
            skipped[tool.name or str(tool.type)] = None
            if ttls_s and ttl_s is not None:
                ttls_s[-1] = ttl_s
    parts = [
        replace(part, ttl_s=ttl_s) for part, ttl_s in zip(tool_parts(paths), ttls_s, strict=True)
    ]
    return ToolSet(definitions, parts, tuple(skipped))


def _definition(tool: InputTool, path: str) -> dict[str, Any] | None:
    """A function as chat templates take it; None if Anthropic's servers run the tool."""
    kind = tool.type or "custom"
    if kind == "custom" or tool.input_schema is not None:
        name = required(tool.name, f"{path}.name")
        return _function(name, tool.description, tool.input_schema, tool.strict)
    known = next((CLIENT_TOOLS[begin] for begin in CLIENT_TOOLS if kind.startswith(begin)), None)
    if known is None:
        return None
    description = tool.description or known.description
    if tool.display_width_px and tool.display_height_px:
        description += f" The screen has {tool.display_width_px} x {tool.display_height_px} pixels."
    return _function(tool.name or known.name, description, known.parameters, tool.strict)


def _function(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function = with_parameters({**function, "parameters": parameters})
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}
