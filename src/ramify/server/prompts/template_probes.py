"""Find the conventions of a chat template: render small conversations and look for marked texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ramify.engine.text.tokenizer import Tokenizer
from ramify.errors import ChatTemplateError
from ramify.server.prompts.role_order import RoleOrder
from ramify.server.prompts.template_conventions import PART_ORDER, TemplateConventions
from ramify.server.prompts.tool_forms import NAME_ONLY, TOOL_FORMS, tool_text

# Words that no template contains.
NEEDLE, OTHER_NEEDLE = "qzneedlea", "qzneedleb"
LONG_ID = "call_0123456789abcdef"
# Of tools' results and of reasoning, in templates that do not take OpenAI's names.
RESULT_ROLES = ("observation", "environment", "tool_response", "ipython", "function")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "tool_plan", "content")
# Where templates read tools that are not a variable of that name.
TOOLS_VARIABLES = ("xml_tools", "available_tools", "custom_tools")
TOOLS_FIELDS = ("tools", "functions")
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "string", "description": "x"}},
    "required": ["x"],
}
USER = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
# The least change of messages first.
ROLE_ORDERS: tuple[dict[str, bool], ...] = (
    {},
    {"begins_with_user": True},
    {"has_repeated_roles": False},
    {"has_repeated_roles": False, "begins_with_user": True},
    {"has_repeated_roles": False, "fills_after_results": True},
    {"has_repeated_roles": False, "begins_with_user": True, "fills_after_results": True},
)
FILLERS = ("", "OK")  # some templates refuse a message without text


def find_conventions(tokenizer: Tokenizer, *, tools_first: bool = False) -> TemplateConventions:
    """Probe the conventions of the tokenizer's chat templates. Without a template, the defaults.

    Args:
        tools_first: write tools before the system prompt, if the template can.
    """
    if not tokenizer.has_chat_template:
        return TemplateConventions()
    return _Probes(tokenizer).find(tools_first=tools_first)


class _Probes:
    """Renders conversations; a text that the template refuses is empty."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = "\n".join(tokenizer.chat_template_sources)
        self._conventions = TemplateConventions()

    def find(self, *, tools_first: bool) -> TemplateConventions:
        """Try one property after the other; later probes are rendered with the earlier ones."""
        self._find_system()
        self._find_tools()
        self._find_calls()
        self._find_results()
        self._find_reasoning()
        if self._writes([{"role": "user", "content": NEEDLE}]):
            self._find_late_system()
            self._find_role_order()
        self._find_order()
        self._find_tools_first()
        if tools_first and self._conventions.can_write_tools_first:
            self._conventions = replace(self._conventions, writes_tools_first=True)
            self._find_order()
        return self._conventions

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        conventions: TemplateConventions | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        conventions = self._conventions if conventions is None else conventions
        adapted, variables = conventions.adapt_tools(conventions.adapt(messages, _no_calls), tools)
        try:
            return self._tokenizer.apply_chat_template(adapted, **variables)
        except ChatTemplateError:
            return ""

    def _first(
        self,
        candidates: Iterator[TemplateConventions],
        messages: Sequence[Mapping[str, Any]],
        *wanted: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> bool:
        """Keep the first conventions with which all wanted texts are in the prompt."""
        for candidate in candidates:
            text = self._render(messages, candidate, tools=tools)
            if all(word in text for word in wanted):
                self._conventions = candidate
                return True
        return False

    def _find_system(self) -> None:
        conversation = [{"role": "system", "content": NEEDLE}, USER]
        system = (replace(self._conventions, has_system=value) for value in (True, False))
        self._first(system, conversation, NEEDLE)

    def _find_tools(self) -> None:
        conversation = [{"role": "system", "content": "s"}, USER]

        def candidates() -> Iterator[TemplateConventions]:
            yield self._conventions
            for name in TOOLS_VARIABLES:
                if name in self._source:
                    yield replace(self._conventions, tools_variable=name)
            for name in TOOLS_FIELDS:
                if name in self._source:
                    field = replace(self._conventions, tools_field=name)
                    yield replace(field, has_json_tools=True)
                    yield field

        if not self._first(candidates(), conversation, NEEDLE, tools=[_tool(NEEDLE)]):
            self._conventions = replace(self._conventions, writes_tools=False)

    def _find_calls(self) -> None:
        """Probe the form of calls: names, and arguments as JSON or in a form of their own."""
        conversation = _called(arguments={NEEDLE: OTHER_NEEDLE})
        flags = product((False, True), repeat=4)
        for has_names, is_null, is_short, is_json in flags:
            candidate = replace(
                self._conventions,
                has_result_names=has_names,
                has_null_content=is_null,
                has_short_ids=is_short,
                has_json_arguments=is_json,
            )
            if _is_written(self._render(conversation, candidate, tools=[_tool("f")])):
                self._conventions = candidate
                self._find_single_calls()
                return
        metadata = replace(self._conventions, writes_calls=False, has_metadata=True)
        has_metadata = "metadata" in self._source and NEEDLE in self._render(conversation, metadata)
        self._conventions = replace(
            self._conventions, writes_calls=False, has_metadata=has_metadata
        )

    def _find_single_calls(self) -> None:
        calls = (replace(self._conventions, has_single_calls=value) for value in (False, True))
        names = (NEEDLE, OTHER_NEEDLE)
        self._first(calls, _called(*names), *names, tools=[_tool("f")])

    def _find_results(self) -> None:
        named = (role for role in RESULT_ROLES if role in self._source)
        # GLM-4's template writes any role, and its model knows one.
        own = ("observation",) if self._conventions.has_metadata else ()
        roles = (
            replace(self._conventions, result_role=role) for role in (*own, "tool", *named, "user")
        )
        self._first(roles, _called(result=NEEDLE), NEEDLE, tools=[_tool("f")])

    def _find_reasoning(self) -> None:
        question, answer, result = _called()
        thought = {"role": "assistant", "content": "", "reasoning_content": NEEDLE}
        with_call = {**thought, "tool_calls": answer["tool_calls"]}
        tools = [_tool("f")]
        for field in REASONING_FIELDS:
            if field not in self._source or (field == "content" and "thinking" not in self._source):
                continue
            candidate = replace(self._conventions, reasoning_field=field)
            calling = self._render([question, with_call, result], candidate, tools=tools)
            last = self._render([question, {**thought, "content": "b"}], candidate)
            if not _is_text(calling) and not _is_text(last):
                continue
            self._conventions = candidate
            with_both = [question, {**with_call, "content": "b"}, result]
            if calling and not self._render(with_both, tools=tools):
                self._conventions = replace(candidate, joins_reasoning=True)
            return

    def _find_late_system(self) -> None:
        """Probe whether two system messages are written, and one behind other messages."""
        first = {"role": "system", "content": "s"}
        late = {"role": "system", "content": NEEDLE}
        conversations = [first, late, USER], [first, USER, ANSWER, late, USER], [USER, late]
        if not all(self._writes(conversation) for conversation in conversations):
            order = RoleOrder(has_late_system=False)
            self._conventions = replace(self._conventions, role_order=order)

    def _find_role_order(self) -> None:
        """Probe whether messages are lost, or refused, whose roles do not alternate."""
        system, question = ({"role": role, "content": NEEDLE} for role in ("system", "user"))
        answer = {"role": "assistant", "content": NEEDLE}
        conversations = (
            [USER, question],
            [USER, ANSWER, answer, USER],
            [answer, USER],
            [system, ANSWER, USER],
            [system],
        )
        after_result = [*_called(), question]
        for changes, filler in product(ROLE_ORDERS, FILLERS):
            order = replace(self._conventions.role_order, filler=filler, **changes)
            candidate = replace(self._conventions, role_order=order)
            if all(self._writes(conversation, candidate) for conversation in conversations) and (
                NEEDLE in self._render(after_result, candidate, tools=[_tool("f")])
            ):
                self._conventions = candidate
                return

    def _writes(
        self,
        messages: Sequence[Mapping[str, Any]],
        conventions: TemplateConventions | None = None,
    ) -> bool:
        """Whether `NEEDLE` is in the prompt, without tools and with a tool."""
        return all(
            NEEDLE in self._render(messages, conventions, tools=tools)
            for tools in (None, [_tool("f")])
        )

    def _find_order(self) -> None:
        """Find where tools and system prompt stand in a conversation of two turns, and their form."""
        words = {name: f"{NEEDLE}{name}" for name in PART_ORDER}
        conversation = [
            {"role": "system", "content": words["system"]},
            {"role": "user", "content": words["earlier"]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": words["last"]},
        ]
        tool = _tool(words["tools"])
        text = self._render(conversation, tools=[tool])
        form = next((form for form in TOOL_FORMS if tool_text(tool, form) in text), NAME_ONLY)
        self._conventions = replace(self._conventions, tool_form=form)
        starts = {name: text.find(word) for name, word in words.items()}
        if starts["tools"] < 0:
            starts["tools"] = starts["system"] - 1
        if min(starts[name] for name in PART_ORDER if name != "tools") >= 0:
            order = tuple(sorted(PART_ORDER, key=lambda name: starts[name]))
            self._conventions = replace(self._conventions, part_order=order)

    def _find_tools_first(self) -> None:
        """Find whether tools can be written before the system prompt."""
        conventions = self._conventions
        if conventions.has_tools_first or not conventions.writes_tools:
            return
        system = {"role": "system", "content": NEEDLE}
        candidate = replace(conventions, writes_tools_first=True)
        text = self._render([system, USER], candidate, tools=[_tool(OTHER_NEEDLE)])
        _, tool, behind = text.partition(OTHER_NEEDLE)
        if tool and behind.count(NEEDLE) == text.count(NEEDLE) == 1:
            self._conventions = replace(conventions, can_write_tools_first=True)


def _is_written(text: str) -> bool:
    """Whether arguments are in the text, and neither as Python writes them nor as quoted JSON."""
    arguments = {NEEDLE: OTHER_NEEDLE}
    is_wrong = str(arguments) in text or json.dumps(json.dumps(arguments)) in text
    return NEEDLE in text and OTHER_NEEDLE in text and not is_wrong


def _is_text(text: str) -> bool:
    """Whether reasoning is in the text, and not as Python's form of a list of parts."""
    return NEEDLE in text and f"'{NEEDLE}'" not in text


def _no_calls(calls: Sequence[tuple[str, Any]]) -> str:
    return " ".join(name for name, _ in calls)


def _tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "f", "parameters": SCHEMA}
    return {"type": "function", "function": function}


def _called(
    *names: str, result: str = "c", arguments: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """A question, calls and their results."""
    function = {"arguments": dict(arguments or {"x": "y"})}
    calls = [
        {"id": f"{LONG_ID}{number}", "type": "function", "function": {"name": name, **function}}
        for number, name in enumerate(names or ("f",))
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": result} for call in calls]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
