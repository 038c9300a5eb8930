"""Tools of the Responses API as functions for the model, and back: how each call is returned.

A function stays one. `custom`, `namespace`, `shell`, `local_shell` and `apply_patch` tools, which the
client runs, become functions. Tools that a server would run are skipped with a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from ramify.server.errors import ApiError
from ramify.server.http.request_body import convert_value
from ramify.server.openai.protocol import FunctionDefinition, NamedFunction, NamedTool, Tool
from ramify.server.openai.responses.protocol import (
    AllowedTools,
    CustomTool,
    NamespaceTool,
    ShellTool,
    ToolReference,
)

MAX_TOOLS = 4096  # of one request, those of namespaces included
NAMESPACE_DELIMITER = "__"
CallKind = Literal["function", "custom", "local_shell", "shell", "apply_patch"]

_TEXT = {"type": "string"}
_COMMAND = {"type": "array", "items": _TEXT, "minItems": 1}
_TIMEOUT = {"type": "integer", "minimum": 1, "description": "milliseconds"}
# The tools without a definition of their own, as functions.
ACTION_FUNCTIONS: Mapping[CallKind, FunctionDefinition] = {
    "local_shell": FunctionDefinition(
        "local_shell",
        "Run a program with its arguments, and return its output.",
        {
            "type": "object",
            "properties": {
                "command": _COMMAND | {"description": "the program, then its arguments"},
                "working_directory": _TEXT,
                "timeout_ms": _TIMEOUT,
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    ),
    "shell": FunctionDefinition(
        "shell",
        "Run shell commands, and return their output.",
        {
            "type": "object",
            "properties": {
                "commands": _COMMAND | {"description": "lines for the shell"},
                "timeout_ms": _TIMEOUT,
            },
            "required": ["commands"],
            "additionalProperties": False,
        },
    ),
    "apply_patch": FunctionDefinition(
        "apply_patch",
        "Create, update or delete a file. diff: in the V4A format; not for delete_file.",
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["create_file", "update_file", "delete_file"]},
                "path": _TEXT,
                "diff": _TEXT,
            },
            "required": ["type", "path"],
            "additionalProperties": False,
        },
    ),
}


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function of a namespace, as the model sees it: `mcp__mail__send`."""
    if not namespace:
        return name
    return namespace.rstrip("_") + NAMESPACE_DELIMITER + name.lstrip("_")


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a call of a function is returned to the client."""

    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ServedTools:
    """The functions of a request.

    `forms` has the form of each by its name, `paths` its place in the request; `skipped` the types of
    the tools that are not served; `allowed` the names of those that may be called, None: all.
    """

    functions: list[Tool] = field(default_factory=list)
    forms: dict[str, CallForm] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    allowed: frozenset[str] | None = None

    def add(self, form: CallForm, definition: FunctionDefinition, where: str) -> None:
        """Add a function; one whose name is taken is skipped with a warning."""
        name = flat_name(form.name, form.namespace)
        if name in self.forms:
            self.warnings.append(f"{where} is skipped: there is a tool {name!r} before it")
            return
        self.forms[name], self.paths[name] = form, where
        self.functions.append(Tool(msgspec.structs.replace(definition, name=name)))

    def allowing(self, names: Iterable[str]) -> ServedTools:
        """The functions, of which those of these names may be called."""
        return replace(self, allowed=frozenset(names))


def served_tools(groups: Iterable[tuple[str, Sequence[Mapping[str, Any]]]]) -> ServedTools:
    """Translate the tools of a request.

    Args:
        groups: each with its request field: "tools", "input[2].tools".

    Raises:
        ApiError: 400, a tool is malformed.
    """
    served, num_tools = ServedTools(), 0
    for field_name, tools in groups:
        num_tools += sum(1 + _num_members(tool) for tool in tools)
        if num_tools > MAX_TOOLS:
            raise ApiError(400, f"{num_tools} tools; at most {MAX_TOOLS}", param=field_name)
        for index, tool in enumerate(tools):
            _add_tool(served, tool, f"{field_name}[{index}]")
    if served.skipped:
        names = ", ".join(dict.fromkeys(served.skipped))
        served.warnings.append(f"tools that this server does not run are left out: {names}")
    return served


def _num_members(tool: Mapping[str, Any]) -> int:
    """The tools of a namespace."""
    members = tool.get("tools")
    return len(members) if isinstance(members, list) else 0


def _add_tool(served: ServedTools, tool: Mapping[str, Any], where: str) -> None:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise ApiError(400, "a tool needs a type", param=f"{where}.type")
    if kind == "namespace":
        namespace = convert_value(tool, NamespaceTool, where)
        for index, member in enumerate(namespace.tools):
            path = f"{where}.tools[{index}]"
            if not _add_definition(served, member, namespace.name, path):
                raise ApiError(400, "only functions and custom tools", param=f"{path}.type")
    elif kind == "shell":
        environment = convert_value(tool, ShellTool, where).environment
        if environment is None or environment.get("type") == "local":
            _add_action(served, "shell", where)
        else:
            served.skipped.append("shell in a container")
    elif kind in ("local_shell", "apply_patch"):
        _add_action(served, "local_shell" if kind == "local_shell" else "apply_patch", where)
    elif not _add_definition(served, tool, None, where):
        served.skipped.append(kind[:100])


def _add_action(served: ServedTools, kind: CallKind, where: str) -> None:
    definition = ACTION_FUNCTIONS[kind]
    served.add(CallForm(kind, definition.name), definition, where)


def _add_definition(
    served: ServedTools, tool: Mapping[str, Any], namespace: str | None, where: str
) -> bool:
    """Add a function or a custom tool; returns False for another type."""
    if tool.get("type") == "function":
        # The form of chat completions, which some clients send.
        nested = tool.get("function")
        function = convert_value(
            nested if isinstance(nested, dict) else tool, FunctionDefinition, where
        )
        served.add(CallForm("function", function.name, namespace), function, where)
        return True
    if tool.get("type") == "custom":
        custom = convert_value(tool, CustomTool, where)
        form = CallForm("custom", custom.name, namespace)
        served.add(form, _custom_definition(custom, served.warnings, where), where)
        return True
    return False


def _custom_definition(tool: CustomTool, warnings: list[str], where: str) -> FunctionDefinition:
    """A function with one string, `input`. A regex constrains it; other grammars are described."""
    text: dict[str, Any] = dict(_TEXT)
    grammar = tool.format
    if grammar is not None and grammar.type == "grammar" and grammar.definition:
        if grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        else:
            text["description"] = f"Matches this Lark grammar:\n{grammar.definition}"
            warnings.append(
                f"{where}.format: the Lark grammar is shown to the model but does not constrain it"
            )
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    return FunctionDefinition(tool.name, tool.description, schema)


def apply_tool_choice(
    choice: str | Mapping[str, Any] | None, tools: ServedTools
) -> tuple[Any, ServedTools]:
    """The `tool_choice` of a chat completion request, and the tools with those that it allows.

    Raises:
        ApiError: 400, it is malformed, or forces a tool that is not served.
    """
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            message = f"{choice!r} is not possible; send auto, none, required or a tool"
            raise ApiError(400, message, param="tool_choice")
        mode: str | None = choice
    elif choice.get("type") == "allowed_tools":
        allowed = convert_value(choice, AllowedTools, "tool_choice")
        missing = dict.fromkeys(_described(tool) for tool in _not_served(allowed.tools, tools))
        if missing:
            tools.warnings.append(f"tool_choice.tools: not served: {', '.join(missing)}")
        tools = tools.allowing(_allowed_names(allowed.tools, tools))
        mode = allowed.mode
    else:
        reference = convert_value(choice, ToolReference, "tool_choice")
        return NamedTool(NamedFunction(_chosen_name(reference, tools))), tools
    if mode == "required" and (not tools.functions or tools.allowed == frozenset()):
        skipped = ", ".join(dict.fromkeys(tools.skipped)) or "none"
        raise ApiError(
            400,
            f"a call is required, but no tool is left that is served (not served: {skipped}); "
            "send a function",
            param="tool_choice",
        )
    return mode, tools


def _chosen_name(reference: ToolReference, tools: ServedTools) -> str:
    """The name of the function that the model must call."""
    names = _allowed_names([reference], tools)
    if names:
        return names[0]
    served = ", ".join(map(str, tools.forms)) or "none"
    raise ApiError(
        400,
        f"{_described(reference)} is not among the tools that are served: {served}",
        param="tool_choice",
    )


def _allowed_names(references: Sequence[ToolReference], tools: ServedTools) -> list[str]:
    """The names of the functions that are allowed; tools that are not served are left out."""
    allowed = {_key(reference) for reference in references}
    return [
        name
        for name, form in tools.forms.items()
        if (form.kind, name) in allowed or ("namespace", form.namespace) in allowed
    ]


def _not_served(references: Sequence[ToolReference], tools: ServedTools) -> list[ToolReference]:
    """The references that name neither a tool that is served nor a namespace of one."""
    served: set[tuple[str, str | None]] = {(form.kind, name) for name, form in tools.forms.items()}
    served |= {("namespace", form.namespace) for form in tools.forms.values()}
    return [reference for reference in references if _key(reference) not in served]


def _key(reference: ToolReference) -> tuple[str, str | None]:
    """Kind and name of a tool in `ServedTools.forms`, or "namespace" and its name."""
    if reference.type in ACTION_FUNCTIONS:
        return reference.type, reference.type
    return reference.type, flat_name(reference.name or "", reference.namespace)


def _described(reference: ToolReference) -> str:
    return reference.type if reference.name is None else f"{reference.type} {reference.name!r}"
