"""Calls of tools in what a model writes: found while it streams, and forced where that is asked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.params import StructuredOutput

MAX_HELD_CHARS = 1 << 20  # of a call that does not end; then it is text


@dataclass(frozen=True, slots=True)
class Call:
    """One complete call."""

    name: str
    arguments: str  # JSON
    id: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls: JSON between two marks."""

    name: str
    begin: str
    end: str  # "" when a call ends with the answer
    template_mark: str  # what a chat template of the family has in it
    bare: str = ""  # begins an answer that is a call without its mark, a special token not decoded


FORMATS = (
    Format("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    Format("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", bare="[{"),
    Format("llama3", "<|python_tag|>", "", "<|python_tag|>", bare="{"),
)
PLAIN = Format("json", "", "", "", bare="{")


def format_of(template: str) -> Format:
    """The format that a chat template teaches; bare JSON where none is recognised."""
    return next((one for one in FORMATS if one.template_mark in template), PLAIN)


class CallParser:
    """Splits an answer into text and calls, piece by piece.

    Text is told at once unless it may begin a call. What looked like a call and is none is text.

    Args:
        form: how this model writes calls.
        names: of the tools that were given; a call of another is text.
        forced: the answer is nothing but calls, as bare JSON.
    """

    def __init__(self, form: Format, names: Sequence[str], *, forced: bool = False) -> None:
        self._form = PLAIN if forced else form
        self._names = frozenset(names)
        self._held = ""
        self._inside = forced
        self._mark = ""  # that began the call, if one did
        self._seen_text = False
        self.calls: list[Call] = []

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Text that can be shown now, and calls that are complete now."""
        self._held += text
        shown, calls = "", list[Call]()
        while True:
            if not self._inside:
                piece = self._text_before_call()
                shown += piece
                if not self._inside:
                    break
            elif not self._form.end:
                break  # complete when the answer is
            else:
                end = self._held.find(self._form.end)
                if end < 0:
                    if len(self._held) > MAX_HELD_CHARS:
                        shown += self._give_up()
                    break
                body, self._held = self._held[:end], self._held[end + len(self._form.end) :]
                self._inside = False
                found = self._parse(body)
                calls += found
                if not found:
                    shown += self._form.begin + body + self._form.end
        self._seen_text |= bool(shown.strip())
        return shown, calls

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, when the answer has ended."""
        if self._inside:
            found = self._parse(self._held)
            if found:
                self._held = ""
                return "", found
            return self._give_up(), []
        held, self._held = self._held, ""
        return held, []

    def _text_before_call(self) -> str:
        begin = self._form.begin
        bare = self._held.lstrip()
        if not self._seen_text and self._form.bare and bare.startswith(self._form.bare):
            self._inside, self._mark = True, ""
            return ""
        if not bare and not self._seen_text:
            return ""
        if not begin:
            shown, self._held = self._held, ""
            return shown
        place = self._held.find(begin)
        if place >= 0:
            shown = self._held[:place]
            self._held = self._held[place + len(begin) :]
            self._inside, self._mark = True, begin
            return shown
        keep = next((n for n in range(len(begin) - 1, 0, -1) if self._held.endswith(begin[:n])), 0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return shown

    def _give_up(self) -> str:
        shown, self._held, self._inside = self._held, "", False
        return self._mark + shown

    def _parse(self, body: str) -> list[Call]:
        """The calls of a body: one object, several, or a list of them; none if it is something else."""
        decoder, rest, found = json.JSONDecoder(), body.strip(), list[Any]()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            found += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip("; \n\t")
        calls = []
        for one in found:
            name = one.get("name") if isinstance(one, Mapping) else None
            if name not in self._names:
                return []
            arguments = _object(one.get("arguments", one.get("parameters", {})))
            if arguments is None:
                return []
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(Call(str(name), text, f"call_{secrets.token_hex(12)}"))
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


def tool_grammar(tools: Sequence[Mapping[str, Any]], chosen: str | None) -> StructuredOutput:
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
