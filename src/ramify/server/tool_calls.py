"""Calls of tools in what a model writes: found while it streams, and forced where that is asked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.params import SamplingParams, StructuredOutput

MAX_HELD_CHARS = 1 << 20  # of a call that does not end; then it is text


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One complete call."""

    name: str
    arguments: str  # JSON
    id: str = ""


TextOrCall = str | ParsedToolCall  # of an answer: text, or a call


def split(pieces: Iterable[TextOrCall]) -> tuple[str, list[ParsedToolCall]]:
    """The text of an answer and its calls, for whom their order does not matter."""
    told = list(pieces)
    text = "".join(one for one in told if isinstance(one, str))
    return text, [one for one in told if isinstance(one, ParsedToolCall)]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls: JSON between two marks."""

    name: str
    begin: str
    end: str  # "" when a call ends with the answer
    template_mark: str  # what a chat template of the family has in it
    bare: str = ""  # begins an answer that is a call without its mark, a special token not decoded


FORMATS = (
    ToolCallFormat("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    ToolCallFormat("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", bare="[{"),
    ToolCallFormat("llama3", "<|python_tag|>", "", "<|python_tag|>", bare="{"),
)
BARE_JSON = ToolCallFormat("json", "", "", "", bare="{")


def detect_format(template: str) -> ToolCallFormat:
    """The format that a chat template teaches; bare JSON where none is recognised."""
    return next((one for one in FORMATS if one.template_mark in template), BARE_JSON)


class ToolCallParser:
    """Splits an answer into text and calls, piece by piece.

    Text is told at once unless it may begin a call. What looked like a call and is none is text.

    Args:
        call_format: how this model writes calls.
        names: of the tools that were given; a call of another is text.
        forced: the answer is nothing but calls, as bare JSON.
        single: one call is all that was asked for; further ones are dropped.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        names: Sequence[str],
        *,
        forced: bool = False,
        single: bool = False,
    ) -> None:
        self._format = BARE_JSON if forced else call_format
        self._single = single
        self._names = frozenset(names)
        self._held = ""
        self._inside = forced
        self._delimiter = ""  # that began the call, if one did
        self._seen_text = self._after_call = False
        self._blank = ""  # white space before what may be a call: it is no text if it is one
        self.calls: list[ParsedToolCall] = []

    def feed(self, text: str) -> list[TextOrCall]:
        """What can be told now: text that can be shown, and complete calls, in their order."""
        self._held += text
        found: list[TextOrCall] = []
        while True:
            if not self._inside:
                self._emit_text(found, self._text_before_call())
                if not self._inside:
                    return found
            elif not self._format.end:
                return found  # complete when the answer is
            else:
                end = self._held.find(self._format.end)
                if end < 0:
                    if len(self._held) > MAX_HELD_CHARS:
                        self._emit_text(found, self._flush_as_text())
                    return found
                body, self._held = self._held[:end], self._held[end + len(self._format.end) :]
                self._inside = False
                calls = self._parse(body)
                if calls is None:
                    self._emit_text(
                        found, self._blank + self._format.begin + body + self._format.end
                    )
                else:
                    found += calls
                    self._after_call = True
                self._blank = ""

    def finish(self) -> list[TextOrCall]:
        """What was held back, when the answer has ended."""
        calls = self._parse(self._held) if self._inside else None
        if calls is not None:
            self._held = ""
            return [*calls]
        found: list[TextOrCall] = []
        if self._inside:
            self._emit_text(found, self._flush_as_text())
        elif self._held.strip() or not self._after_call:
            self._emit_text(found, self._held)
        self._held = ""
        return found

    def _emit_text(self, found: list[TextOrCall], text: str) -> None:
        if text:
            found.append(text)
            self._seen_text |= bool(text.strip())
            self._after_call = False

    def _text_before_call(self) -> str:
        begin = self._format.begin
        bare = self._held.lstrip()
        if not self._seen_text and self._format.bare and bare.startswith(self._format.bare):
            self._inside, self._delimiter = True, ""
            return ""
        may_part = self._after_call or not self._seen_text  # white space may stand between calls
        if not bare and may_part:
            return ""
        if not begin:
            shown, self._held = self._held, ""
            return shown
        place = self._held.find(begin)
        if place >= 0:
            shown = self._held[:place]
            self._held = self._held[place + len(begin) :]
            self._inside, self._delimiter = True, begin
            if may_part and not shown.strip():
                self._blank, shown = shown, ""
            return shown
        keep = next((n for n in range(len(begin) - 1, 0, -1) if self._held.endswith(begin[:n])), 0)
        shown = self._held[: len(self._held) - keep]
        if may_part and not shown.strip():
            return ""
        self._held = self._held[len(self._held) - keep :]
        return shown

    def _flush_as_text(self) -> str:
        shown, self._held, self._inside = self._held, "", False
        blank, self._blank = self._blank, ""
        return blank + self._delimiter + shown

    def _parse(self, body: str) -> list[ParsedToolCall] | None:
        """The calls of a body: one object, several, or a list of them; None if it is something else."""
        decoder, rest, found = json.JSONDecoder(), body.strip(), list[Any]()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return None
            found += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip("; \n\t")
        if not found:
            return None
        calls = []
        for one in found:
            name = one.get("name") if isinstance(one, Mapping) else None
            if name not in self._names:
                return None
            arguments = _object(one.get("arguments", one.get("parameters", {})))
            if arguments is None:
                return None
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(ParsedToolCall(str(name), text, f"call_{secrets.token_hex(12)}"))
        if self._single:
            calls = calls[: max(0, 1 - len(self.calls))]
        self.calls += calls
        return calls


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as an object, which some models write as a text of it; None if they are none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def stop_after_call(params: SamplingParams, call_format: ToolCallFormat) -> SamplingParams:
    """The same, but the answer ends with its first call, where that has an end of its own."""
    return replace(params, stop=(*params.stop, call_format.end)) if call_format.end else params


def tool_call_schema(tools: Sequence[Mapping[str, Any]], chosen: str | None) -> StructuredOutput:
    """The form of an answer that is one call of a tool: of `chosen`, or of any."""
    shapes = [
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
    return StructuredOutput(json_schema=shapes[0] if len(shapes) == 1 else {"anyOf": shapes})
