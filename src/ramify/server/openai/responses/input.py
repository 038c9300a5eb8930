"""Items of the Responses API as messages of a chat completion request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ramify.server.answers.call_arguments import call_arguments
from ramify.server.errors import ApiError
from ramify.server.http.request_body import convert_value
from ramify.server.http.wire import encode_json
from ramify.server.openai.messages import content_path, content_text
from ramify.server.openai.protocol import ChatMessage, ContentPart, FunctionCall, ToolCall
from ramify.server.openai.responses.protocol import (
    ActionCallItem,
    CallItem,
    CallOutputItem,
    CodeCallItem,
    CompactionItem,
    CustomCallItem,
    McpCallItem,
    MessageItem,
    ReasoningItem,
    ToolsItem,
    WrappedOutput,
)
from ramify.server.openai.responses.tools import flat_name
from ramify.server.request_fields.opaque_text import decode_opaque

SUMMARY_TITLE = "Summary of the conversation until here:\n"
# Items without text for the model: results and bookkeeping of tools that other servers run.
SKIPPED_ITEMS = frozenset(
    "web_search_call file_search_call image_generation_call computer_call computer_call_output "
    "mcp_list_tools mcp_approval_request mcp_approval_response tool_search_call program "
    "program_output compaction_trigger configuration_update".split()
)
TEXT_FIELDS = ("content", "text", "output", "arguments", "input", "code", "summary", "result")


@dataclass(slots=True)
class _ModelTurn:
    """A message of the model that further items may extend."""

    where: str  # of its first item
    contents: list[str | list[ContentPart] | None] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def message(self) -> ChatMessage:
        """The message. Several texts, before and after a call, are one."""
        content = self.contents[0] if self.contents else ""
        if len(self.contents) > 1:
            path = content_path(self.where)
            content = "".join(content_text(part, path) for part in self.contents)
        reasoning = "".join(self.reasoning) or None
        calls = self.calls or None
        return ChatMessage("assistant", content, tool_calls=calls, reasoning_content=reasoning)


_Translate = Callable[["ItemTranslator", Mapping[str, Any], str], None]


class ItemTranslator:
    """Collects items as messages of a chat.

    Consecutive items of one turn of the model, such as reasoning, text and calls, are one message.
    """

    def __init__(self) -> None:
        self.tools: list[tuple[str, list[dict[str, Any]]]] = []  # that items add, by field
        self._messages: list[ChatMessage] = []
        self._names: list[str] = []
        self._skipped: Counter[str] = Counter()
        self._turn: _ModelTurn | None = None

    def finish(self) -> tuple[list[ChatMessage], list[str]]:
        """The messages, and the request field of each."""
        self._end_turn()
        return self._messages, self._names

    def append_message(self, message: ChatMessage, where: str) -> None:
        """Append a message as it is."""
        self._end_turn()
        self._messages.append(message)
        self._names.append(where)

    def append(self, item: Mapping[str, Any], where: str) -> None:
        """Append an item.

        Raises:
            ApiError: 400, it is malformed, or has text and is of a type that is not served.
        """
        kind = item.get("type") or "message"
        if not isinstance(kind, str):
            raise ApiError(400, f"{kind!r} is not the type of an item", param=f"{where}.type")
        translate = self._BY_TYPE.get(kind)
        if translate is not None:
            translate(self, item, where)
        elif kind in SKIPPED_ITEMS or not any(item.get(name) for name in TEXT_FIELDS):
            self._skipped[kind[:100]] += 1
        else:
            raise ApiError(
                400, f"input of type {kind!r} is not served; send messages", param=f"{where}.type"
            )

    @property
    def warnings(self) -> list[str]:
        """Warnings about what was left out of the prompt."""
        if not self._skipped:
            return []
        kinds = ", ".join(f"{kind} ({count})" for kind, count in self._skipped.items())
        return [f"input items that this server cannot read are skipped: {kinds}"]

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        message = convert_value(item, MessageItem, where)
        if message.role != "assistant":
            self.append_message(ChatMessage(message.role, message.content), where)
            return
        turn = self._turn
        if turn is not None and turn.contents and not turn.calls:
            self._end_turn()
        self._model_turn(where).contents.append(message.content)

    def _call(self, name: str, arguments: dict[str, Any], call_id: str | None, where: str) -> None:
        call = ToolCall(FunctionCall(name, arguments), call_id or "")
        self._model_turn(where).calls.append(call)

    def _output(self, content: str | list[ContentPart], call_id: str | None, where: str) -> None:
        message = ChatMessage("tool", content, tool_call_id=call_id)
        self.append_message(message, f"{where}.output")

    def _function_call(self, item: Mapping[str, Any], where: str) -> None:
        call = convert_value(item, CallItem, where)
        arguments = call_arguments(call.arguments, f"{where}.arguments")
        self._call(flat_name(call.name, call.namespace), arguments, call.call_id, where)

    def _custom_call(self, item: Mapping[str, Any], where: str) -> None:
        call = convert_value(item, CustomCallItem, where)
        name = flat_name(call.name, call.namespace)
        self._call(name, {"input": call.input}, call.call_id, where)

    def _action_call(self, item: Mapping[str, Any], where: str) -> None:
        call = convert_value(item, ActionCallItem, where)
        name = str(item["type"]).removesuffix("_call")
        fields = dict(call.action or call.operation or {})
        if name == "local_shell":
            fields.pop("type", None)  # always "exec"
        self._call(name, fields, call.call_id or call.id, where)

    def _call_output(self, item: Mapping[str, Any], where: str) -> None:
        result = convert_value(item, CallOutputItem, where)
        path, call_id = f"{where}.output", result.call_id or result.id
        if isinstance(result.output, dict):
            content = convert_value(result.output, WrappedOutput, path).content or ""
            self._output(content, call_id, where)
        elif isinstance(result.output, list):
            parts = [
                convert_value(part, ContentPart, f"{path}[{index}]")
                for index, part in enumerate(result.output)
            ]
            self._output(parts, call_id, where)
        else:
            self._output(result.output or "", call_id, where)

    def _shell_output(self, item: Mapping[str, Any], where: str) -> None:
        result = convert_value(item, CallOutputItem, where)
        output = result.output
        text = output if isinstance(output, str) else encode_json(output or []).decode()
        self._output(text, result.call_id or result.id, where)

    def _patch_output(self, item: Mapping[str, Any], where: str) -> None:
        result = convert_value(item, CallOutputItem, where)
        output = result.output
        text = output if isinstance(output, str | None) else encode_json(output).decode()
        parts = [part for part in (result.status, text) if part]
        self._output("\n".join(parts), result.call_id or result.id, where)

    def _reasoning_item(self, item: Mapping[str, Any], where: str) -> None:
        reasoning = convert_value(item, ReasoningItem, where)
        text = "".join(part.text for part in reasoning.content or reasoning.summary or ())
        if reasoning.encrypted_content:
            own = decode_opaque(reasoning.encrypted_content)
            if own is None and not text:
                self._skipped["reasoning of another server"] += 1
            text = own or text
        if text:
            self._model_turn(where).reasoning.append(text)

    def _compaction(self, item: Mapping[str, Any], where: str) -> None:
        summary = decode_opaque(convert_value(item, CompactionItem, where).encrypted_content)
        if summary is None:
            self._skipped["compaction of another server"] += 1
        else:
            self.append_message(ChatMessage("assistant", SUMMARY_TITLE + summary), where)

    def _mcp_call(self, item: Mapping[str, Any], where: str) -> None:
        call = convert_value(item, McpCallItem, where)
        arguments = call_arguments(call.arguments, f"{where}.arguments")
        self._call(flat_name(call.name, call.server_label), arguments, call.id, where)
        if call.output is not None:
            self._output(call.output, call.id, where)

    def _code_call(self, item: Mapping[str, Any], where: str) -> None:
        call = convert_value(item, CodeCallItem, where)
        self._call("code_interpreter", {"code": call.code or ""}, call.id, where)
        logs = [output.get("logs") for output in call.outputs or ()]
        self._output("\n".join(log for log in logs if isinstance(log, str)), call.id, where)

    def _more_tools(self, item: Mapping[str, Any], where: str) -> None:
        self.tools.append((f"{where}.tools", convert_value(item, ToolsItem, where).tools))

    def _model_turn(self, where: str) -> _ModelTurn:
        """The turn that an item of the model belongs to."""
        if self._turn is None:
            self._turn = _ModelTurn(where)
        return self._turn

    def _end_turn(self) -> None:
        """Append the model's turn, unless it is only reasoning that led to nothing."""
        turn, self._turn = self._turn, None
        if turn is not None and (turn.contents or turn.calls):
            self._messages.append(turn.message())
            self._names.append(turn.where)

    _BY_TYPE: ClassVar[Mapping[str, _Translate]] = {
        "message": _message,
        "function_call": _function_call,
        "function_call_output": _call_output,
        "custom_tool_call": _custom_call,
        "custom_tool_call_output": _call_output,
        "local_shell_call": _action_call,
        "local_shell_call_output": _call_output,
        "shell_call": _action_call,
        "shell_call_output": _shell_output,
        "apply_patch_call": _action_call,
        "apply_patch_call_output": _patch_output,
        "reasoning": _reasoning_item,
        "compaction": _compaction,
        "compaction_summary": _compaction,
        "mcp_call": _mcp_call,
        "code_interpreter_call": _code_call,
        "additional_tools": _more_tools,
        "tool_search_output": _more_tools,
    }
