"""Tool calls in a model's output: formats, streaming parser, and grammars that force a call."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.params import SamplingParams, StructuredOutput
from ramify.server.output_formats.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    OutputEvent,
    TextDelta,
)

MAX_HELD_CHARS = 1 << 20  # of a call without an end; a longer one is shown as text


@dataclass(frozen=True, slots=True)
class ParsedToolCall:
    """One complete call."""

    name: str
    arguments: str  # JSON
    id: str = ""


TextOrCall = str | ParsedToolCall


def split(pieces: Iterable[TextOrCall]) -> tuple[str, list[ParsedToolCall]]:
    """Separate an answer's text from its calls, when their order does not matter."""
    pieces = list(pieces)
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [piece for piece in pieces if isinstance(piece, ParsedToolCall)]


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a model family writes calls: JSON between two delimiters."""

    name: str
    begin: str
    end: str  # "" if a call extends to the end of the answer
    template_mark: str  # a chat template of the family contains it
    # An answer that begins with it is a call without its `begin` delimiter: where that is a special
    # token, decoding drops it.
    bare: str = ""


FORMATS = (
    ToolCallFormat("hermes", "<tool_call>", "</tool_call>", "<tool_call>"),
    ToolCallFormat("mistral", "[TOOL_CALLS]", "", "[TOOL_CALLS]", bare="[{"),
    ToolCallFormat("llama3", "<|python_tag|>", "", "<|python_tag|>", bare="{"),
)
BARE_JSON = ToolCallFormat("json", "", "", "", bare="{")


def detect_format(template: str) -> ToolCallFormat:
    """The call format that a chat template asks for; `BARE_JSON` if it names none of `FORMATS`."""
    return next((form for form in FORMATS if form.template_mark in template), BARE_JSON)


class ToolCallParser:
    """Splits a streamed answer into text and calls.

    Text is returned at once unless it may begin a call; a failed call is returned as text.

    Args:
        call_format: how this model writes calls.
        names: of the tools of the request; a call of any other is text.
        forced: the answer is nothing but calls, as bare JSON.
        single: return the first call only, and drop further ones.
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
        self._delimiter = ""  # that began the call, if any did
        self._seen_text = self._after_call = False
        self._blank = ""  # white space before a possible call; dropped if it is a call
        self.calls: list[ParsedToolCall] = []

    def feed(self, text: str, *, is_last: bool = False) -> list[TextOrCall]:
        """Append text of the answer; returns new text to show and complete calls, in order.

        Args:
            is_last: the answer ends here: `finish` as well.
        """
        self._held += text
        pieces: list[TextOrCall] = []
        while True:
            if not self._inside:
                self._emit_text(pieces, self._text_before_call())
                if not self._inside:
                    break
            elif not self._format.end:
                break  # the call is complete when the answer is
            else:
                end = self._held.find(self._format.end)
                if end < 0:
                    if len(self._held) > MAX_HELD_CHARS:
                        self._emit_text(pieces, self._flush_as_text())
                    break
                body, self._held = self._held[:end], self._held[end + len(self._format.end) :]
                self._inside = False
                calls = self._parse(body)
                if calls is None:
                    self._emit_text(
                        pieces, self._blank + self._format.begin + body + self._format.end
                    )
                else:
                    pieces += calls
                    self._after_call = True
                self._blank = ""
        return pieces + self.finish() if is_last else pieces

    def finish(self) -> list[TextOrCall]:
        """Return what was held back, after the last text of the answer."""
        calls = self._parse(self._held) if self._inside else None
        if calls is not None:
            self._held = ""
            return [*calls]
        pieces: list[TextOrCall] = []
        if self._inside:
            self._emit_text(pieces, self._flush_as_text())
        elif self._held.strip() or not self._after_call:
            self._emit_text(pieces, self._held)
        self._held = ""
        return pieces

    def _emit_text(self, pieces: list[TextOrCall], text: str) -> None:
        if text:
            pieces.append(text)
            self._seen_text |= bool(text.strip())
            self._after_call = False

    def _text_before_call(self) -> str:
        begin = self._format.begin
        stripped = self._held.lstrip()
        if not self._seen_text and self._format.bare and stripped.startswith(self._format.bare):
            self._inside, self._delimiter = True, ""
            return ""
        # white space before the first call and between calls is not text
        may_drop_blank = self._after_call or not self._seen_text
        if not stripped and may_drop_blank:
            return ""
        if not begin:
            shown, self._held = self._held, ""
            return shown
        start = self._held.find(begin)
        if start >= 0:
            shown = self._held[:start]
            self._held = self._held[start + len(begin) :]
            self._inside, self._delimiter = True, begin
            if may_drop_blank and not shown.strip():
                self._blank, shown = shown, ""
            return shown
        # hold back a suffix that may be the beginning of the delimiter
        num_held = next(
            (n for n in range(len(begin) - 1, 0, -1) if self._held.endswith(begin[:n])), 0
        )
        shown = self._held[: len(self._held) - num_held]
        if may_drop_blank and not shown.strip():
            return ""
        self._held = self._held[len(self._held) - num_held :]
        return shown

    def _flush_as_text(self) -> str:
        shown, self._held, self._inside = self._held, "", False
        blank, self._blank = self._blank, ""
        return blank + self._delimiter + shown

    def _parse(self, body: str) -> list[ParsedToolCall] | None:
        """The calls of a body: an object, several, or a list of objects; None if it is not calls."""
        decoder, remaining, values = json.JSONDecoder(), body.strip(), list[Any]()
        while remaining:
            try:
                value, end = decoder.raw_decode(remaining)
            except (ValueError, RecursionError):
                return None
            values += value if isinstance(value, list) else [value]
            remaining = remaining[end:].lstrip("; \n\t")
        if not values:
            return None
        calls = []
        for value in values:
            name = value.get("name") if isinstance(value, Mapping) else None
            if name not in self._names:
                return None
            arguments = _object(value.get("arguments", value.get("parameters", {})))
            if arguments is None:
                return None
            text = json.dumps(arguments, ensure_ascii=False)
            calls.append(ParsedToolCall(str(name), text, f"call_{secrets.token_hex(12)}"))
        if self._single:
            calls = calls[: max(0, 1 - len(self.calls))]
        self.calls += calls
        return calls


class CallEvents:
    """The pieces of a `ToolCallParser` as output events: each call at once."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser, self._num_calls = parser, 0

    def feed(self, text: str, *, is_last: bool = False) -> list[OutputEvent]:
        """Append text of the answer; see `OutputParser`."""
        events: list[OutputEvent] = []
        for piece in self._parser.feed(text, is_last=is_last):
            if isinstance(piece, str):
                events.append(TextDelta(piece))
                continue
            index = self._num_calls
            self._num_calls += 1
            events += [
                CallStart(index, piece.name, piece.id),
                ArgumentsDelta(index, piece.arguments),
                CallEnd(index),
            ]
        return events


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as an object, which some models write as JSON in a string; None if they are none."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return arguments if isinstance(arguments, dict) else None


def stop_after_call(params: SamplingParams, call_format: ToolCallFormat) -> SamplingParams:
    """Add a stop string that ends the answer with its first call, if the format has an end."""
    return replace(params, stop=(*params.stop, call_format.end)) if call_format.end else params


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
