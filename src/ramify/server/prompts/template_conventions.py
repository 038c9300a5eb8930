"""What a chat template reads of messages and tools: found by rendering probes, applied to requests."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ramify.server.model_dialects.json_scanner import json_text
from ramify.server.prompts.role_order import ANY_ORDER, RoleOrder
from ramify.server.prompts.tool_forms import TOOL_FORMS

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
# Writes calls, name and arguments of each, as the text of an answer.
WriteCalls = Callable[[Sequence[tuple[str, Any]]], str]

# What a prompt consists of: tools, system prompt, messages before the user's last and from it on.
PART_ORDER = ("tools", "system", "earlier", "last")
SHORT_ID_CHARS = 9  # Mistral's templates refuse ids of another length


@dataclass(frozen=True, slots=True)
class TemplateConventions:
    """The fields that a chat template reads. The defaults are those of most templates.

    Args:
        has_system: False: the system prompt belongs to the first message of the user.
        role_order: the order of roles that the template demands.
        tools_variable: the variable that holds the tools.
        tools_field: the field of the system message that holds the tools; "": they are a variable.
        has_json_tools: tools are JSON text, and no list.
        writes_tools: False: tools are left out of the prompt.
        has_json_arguments: arguments of calls are JSON text, and no object.
        has_null_content: a message with calls has None as its content, and text is another message.
        has_short_ids: ids of calls have `SHORT_ID_CHARS` characters.
        has_single_calls: an assistant's message has at most one call.
        writes_calls: False: calls have no field, and are text of the answer.
        has_metadata: the name of a call is the field `metadata`, and its arguments are the content.
        result_role: the role of a tool's result.
        has_result_names: results name their tool, also where the client does not.
        reasoning_field: of an assistant's message; "content" is a part of its content.
        joins_reasoning: a message with calls has reasoning or content, never both.
        part_order: the names of `PART_ORDER`, as the template orders them.
        tool_form: how it writes a tool's definition, of `TOOL_FORMS`.
        can_write_tools_first: it writes tools and system prompt together, the tools behind, and takes the
            system prompt as a further system message too, which it writes behind them.
        writes_tools_first: the system prompt is given so.
    """

    has_system: bool = True
    role_order: RoleOrder = ANY_ORDER
    tools_variable: str = "tools"
    tools_field: str = ""
    has_json_tools: bool = False
    writes_tools: bool = True
    has_json_arguments: bool = False
    has_null_content: bool = False
    has_short_ids: bool = False
    has_single_calls: bool = False
    writes_calls: bool = True
    has_metadata: bool = False
    result_role: str = "tool"
    has_result_names: bool = False
    reasoning_field: str = "reasoning_content"
    joins_reasoning: bool = False
    part_order: tuple[str, ...] = PART_ORDER
    tool_form: tuple[str, str] = TOOL_FORMS[0]
    can_write_tools_first: bool = False
    writes_tools_first: bool = False

    @property
    def has_tools_first(self) -> bool:
        """Tools stand before the system prompt, so that they stay cached when it changes."""
        return self.part_order.index("tools") < self.part_order.index("system")

    def adapt(self, messages: Sequence[Message], write_calls: WriteCalls) -> list[dict[str, Any]]:
        """Messages in OpenAI's form, with arguments as objects, as this template reads them."""
        adapted = self.role_order.apply([dict(message) for message in messages])
        if self.has_result_names:
            _name_results(adapted)
        if self.has_single_calls:
            adapted = _one_call_each(adapted)
        adapted = [part for message in adapted for part in self._message(message, write_calls)]
        if self.result_role == "user":
            adapted = _joined_users(adapted)
        if not self.has_system:
            adapted = _system_in_user(adapted)
        return adapted

    def adapt_tools(
        self, messages: list[dict[str, Any]], tools: Tools | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Put tools where this template reads them: returns messages, and variables."""
        if not tools:
            return messages, {"tools": None}
        if self.writes_tools_first and messages and messages[0]["role"] == "system":
            messages = [{"role": "system", "content": ""}, *messages]
        value = json_text(tools) if self.has_json_tools else list(tools)
        if not self.tools_field:
            return messages, {"tools": tools, self.tools_variable: value}
        if not messages or messages[0]["role"] != "system":
            messages = [{"role": "system", "content": ""}, *messages]
        first = {**messages[0], self.tools_field: value}
        return [first, *messages[1:]], {"tools": None}

    def _message(self, message: dict[str, Any], write_calls: WriteCalls) -> list[dict[str, Any]]:
        calls = message.pop("tool_calls", None) or ()
        functions = [call["function"] for call in calls]
        if message["role"] == "tool":
            message["role"] = self.result_role
        if "tool_call_id" in message:
            message["tool_call_id"] = self._id(message["tool_call_id"])
        if calls and self.writes_calls:
            called = {"tool_calls": [self._call(call) for call in calls]}
            if self.has_null_content:
                texts = [message] if message.get("content") else []
                return [*texts, {"role": message["role"], "content": None, **called}]
            message |= called
        elif calls and not self.has_metadata:
            text = write_calls([(call["name"], call["arguments"]) for call in functions])
            message["content"] = "\n".join(filter(None, (message.get("content"), text)))
        self._move_reasoning(message, has_calls=bool(calls))
        if not calls or not self.has_metadata:
            return [message]
        texts = [message] if message.get("content") else []
        return texts + [
            {
                "role": message["role"],
                "metadata": call["name"],
                "content": json_text(call["arguments"]),
            }
            for call in functions
        ]

    def _call(self, call: Message) -> dict[str, Any]:
        function = dict(call["function"])
        if self.has_json_arguments:
            function["arguments"] = json_text(function["arguments"])
        return {**call, "id": self._id(call.get("id", "")), "function": function}

    def _id(self, id_: str) -> str:
        """An id that the template takes: equal for equal ids."""
        is_short = len(id_) == SHORT_ID_CHARS and id_.isalnum()
        if not self.has_short_ids or is_short:
            return id_
        return hashlib.blake2b(id_.encode()).hexdigest()[:SHORT_ID_CHARS]

    def _move_reasoning(self, message: dict[str, Any], *, has_calls: bool) -> None:
        if self.reasoning_field == "reasoning_content" or "reasoning_content" not in message:
            return
        text, content = message.pop("reasoning_content"), message.get("content") or ""
        if self.reasoning_field == "content":
            thoughts = {"type": "thinking", "thinking": text}
            texts = [{"type": "text", "text": content}] if content else []
            message["content"] = [thoughts, *texts]
            return
        if self.joins_reasoning and has_calls and content:
            text, message["content"] = f"{text}\n{content}", ""
        message[self.reasoning_field] = text


def _name_results(messages: list[dict[str, Any]]) -> None:
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id", "") in names:
            message.setdefault("name", names[message.get("tool_call_id", "")])


def _joined_users(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join consecutive messages of the user: results and questions are the same role."""
    joined: list[dict[str, Any]] = []
    for is_user, group in groupby(messages, lambda message: message["role"] == "user"):
        run = list(group)
        if is_user and len(run) > 1:
            contents = (message.get("content") for message in run)
            run = [{"role": "user", "content": "\n".join(filter(None, contents))}]
        joined += run
    return joined


def _system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the system prompt before the text of the first message of the user."""
    if not messages or messages[0]["role"] != "system":
        return messages
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{**system, "role": "user"}, *rest]
    contents = (system.get("content"), rest[0].get("content"))
    return [{**rest[0], "content": "\n\n".join(filter(None, contents))}, *rest[1:]]


def _one_call_each(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split messages with several calls; each call is followed by its result."""
    split: list[dict[str, Any]] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        results: list[dict[str, Any]] = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        first = {name: value for name, value in message.items() if name != "tool_calls"}
        own, others = _results_by_call(calls, results)
        for number, (call, answers) in enumerate(zip(calls, own, strict=True)):
            head = {"role": message["role"], "content": ""} if number else first
            split += [{**head, "tool_calls": [call]}, *answers]
        split += others
    return split


def _results_by_call(
    calls: Sequence[Message], results: Sequence[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]]]:
    """The results of each call, and those of none; each result is in one list.

    Calls with equal ids, or without ids, get one result each, in their order; the last gets the rest.
    """
    numbers: dict[str, deque[int]] = {}
    for number, call in enumerate(calls):
        numbers.setdefault(call.get("id", ""), deque()).append(number)
    own: list[list[dict[str, Any]]] = [[] for _ in calls]
    others: list[dict[str, Any]] = []
    for result in results:
        left = numbers.get(result.get("tool_call_id", ""))
        if left is None:
            others.append(result)
        else:
            own[left.popleft() if len(left) > 1 else left[0]].append(result)
    return own, others
