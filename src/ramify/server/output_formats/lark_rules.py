"""Writes grammars in llguidance's dialect of Lark: rules for calls, parameters, formats, reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.engine.logits.grammar import JSON_OPTIONS, JSON_WHITESPACE
from ramify.params import Mark, StructuredOutput
from ramify.server.output_formats.call_syntax import (
    CallSyntax,
    Delimiter,
    Maybe,
    ParameterSyntax,
    Piece,
    Slot,
)

TEXT = r"/(.|\n)*/"
MAX_CALLS = 16  # in a row: some models would go on for ever
_ESCAPE_OR_SLASH = re.compile(r"\\.|/", re.DOTALL)
_OF_TOOL = (Slot.NAME, Slot.QUOTED_NAME, Slot.ARGUMENTS, Slot.PARAMETERS)
_RULE_OF_SLOT = {
    Slot.SPACE: "space",
    Slot.TEXT: TEXT,
    Slot.INDEX: "/[0-9]{1,4}/",
    Slot.CALL_ID: r"/\"[A-Za-z0-9_-]{1,40}\"|[0-9]{1,4}/",
}
_COMMON_RULES = (
    "space: | SPACE",
    f"SPACE: /{JSON_WHITESPACE}/",
    r"lead: /\s{0,4}/",
    r"OTHER_NAME: /[^<>\"\n]{1,256}/",
)


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as a grammar needs it."""

    name: str
    schema: Mapping[str, Any]  # of its arguments, see `enforceable_schema`


class AddedTokens:
    """The tokens that were added to a vocabulary: a model writes their texts as single tokens.

    Args:
        texts: id → text.
    """

    def __init__(self, texts: Mapping[int, str]) -> None:
        self._ids = {text: token for token, text in texts.items() if text}
        ordered = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def split(self, text: str) -> Mark:
        """A text as the model writes it: ids of added tokens, and the texts between them."""
        parts: list[str | int] = []
        position = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            parts += [text[position : match.start()], self._ids[match[0]]]
            position = match.end()
        return tuple(part for part in (*parts, text[position:]) if part != "")


class LarkRules:
    """The rules of one grammar."""

    def __init__(self, added: AddedTokens) -> None:
        self._added = added
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """The grammar whose rule `start` is this."""
        return "\n".join(["%llguidance {}", f"start: {start}", *_COMMON_RULES, *self._rules, ""])

    def mark(self, text: str) -> str:
        """What matches a text that may contain added tokens."""
        return " ".join(_part(part) for part in self._added.split(text))

    def add_head(self, mark: Mark) -> str:
        """Add rules for any text up to a mark and with it; returns what matches it.

        The text comes from the token in which the mark begins, so it has none of the mark before.
        """
        return self._text_with(mark)

    def _text_with(self, mark: Mark) -> str:
        """Any text up to the first text of a mark, the mark, and any text before its other texts."""
        heads = []
        for part, following in zip(mark, (*mark[1:], ""), strict=True):
            if isinstance(part, int):
                heads.append(_part(part))
            elif isinstance(following, int):
                # Where a special token does not follow, the text goes on.
                heads.append(f"/(.|\\n)*{_escaped(re.escape(part))}/")
            else:
                heads.append(self._add(f"head{len(self._rules)}[lazy]", f"{TEXT} {quoted(part)}"))
        return " ".join(heads)

    def add_text_until(self, marks: Iterable[str]) -> str:
        """Add rules for any text up to one of these marks and with it; returns what matches it."""
        ways = []
        for mark in map(self._added.split, marks):
            first, rest = mark[0], " ".join(map(_part, mark[1:]))
            if isinstance(first, int):
                ways.append(f"{TEXT} {_part(first)} {rest}")
            else:
                rule = self._add(f"until{len(self._rules)}[lazy]", f"{TEXT} {quoted(first)}")
                ways.append(f"{rule} {rest}")
        return f"({' | '.join(ways)})"

    def add_format(self, spec: StructuredOutput) -> str | None:
        """Add a rule for the text of a format; returns its name, None if it is a grammar itself."""
        if spec.json_object:
            return self._add("format", _json({"type": "object"}))
        if spec.json_schema is not None:
            return self._add("format", _json(json.loads(str(spec.json_schema))))
        if spec.regex is not None:
            return self._add("format", f"/{_escaped(spec.regex)}/")
        if spec.choice is not None:
            self._add("CHOICE", " | ".join(map(quoted, spec.choice)))
            return self._add("format", "CHOICE")
        return None

    def add_calls(
        self,
        syntax: CallSyntax,
        tools: Sequence[CallableTool],
        *,
        single: bool,
        has_mark: bool = True,
    ) -> str:
        """Add rules for one call of the tools, or for several; returns what matches them.

        Args:
            has_mark: False leaves out the mark with which the first call begins.
        """
        num_left_out = 0 if has_mark else len(syntax.mark)
        varying = [index for index, piece in enumerate(syntax.call) if piece in _OF_TOOL]
        first, last = varying[0], varying[-1] + 1
        names = [
            self._add(
                f"tool{index}",
                self._pieces(syntax.call[first:last], tool, index, syntax.parameters),
            )
            for index, tool in enumerate(tools)
        ]
        self._add("tool", " | ".join(names))
        after = self._pieces(syntax.call[last:])
        call = self._add("call", f"{self._pieces(syntax.call[:first])} tool {after}")
        begin = self._pieces(syntax.begin[num_left_out:])
        if num_left_out and not syntax.begin:
            first_call = f"{self._pieces(syntax.call[num_left_out:first])} tool {after}"
        else:
            first_call = call
        more = "" if single else f"({self._pieces(syntax.separator)} {call}){{0,{MAX_CALLS - 1}}}"
        return f"{begin} {first_call} {more} {self._pieces(syntax.end)}"

    def add_pieces(self, pieces: Iterable[Piece]) -> str:
        """What matches pieces that are of no tool."""
        return self._pieces(pieces)

    def _add(self, rule: str, body: str) -> str:
        """Add a rule; returns its name."""
        self._rules.append(f"{rule}: {body}")
        return rule.partition("[")[0]

    def _pieces(
        self,
        pieces: Iterable[Piece],
        tool: CallableTool | None = None,
        index: int = 0,
        parameters: ParameterSyntax | None = None,
    ) -> str:
        return " ".join(self._piece(piece, tool, index, parameters) for piece in pieces)

    def _piece(
        self, piece: Piece, tool: CallableTool | None, index: int, syntax: ParameterSyntax | None
    ) -> str:
        if isinstance(piece, str):
            return quoted(piece)
        if isinstance(piece, Delimiter):
            return self.mark(piece.text)
        if isinstance(piece, Maybe):
            return f"({self._pieces(piece.pieces)})?"
        if piece in _RULE_OF_SLOT:
            return _RULE_OF_SLOT[piece]
        assert tool is not None, "the other slots are of a tool"
        if piece is Slot.NAME:
            return quoted(tool.name)
        if piece is Slot.QUOTED_NAME:
            return quoted(json.dumps(tool.name, ensure_ascii=False))
        if piece is Slot.ARGUMENTS:
            return self._add(f"arguments{index}", _json(_object(tool.schema)))
        assert syntax is not None, "a call with parameters has a syntax for them"
        return self._parameters(tool, index, syntax)

    def _parameters(self, tool: CallableTool, index: int, syntax: ParameterSyntax) -> str:
        """Parameters in the order of the schema; those that it leaves open come last."""
        schema = _object(tool.schema)
        required = schema.get("required", ())
        parameters = []
        for number, (name, value) in enumerate(schema.get("properties", {}).items()):
            begin, rule = self.mark(syntax.begin + name), f"parameter{index}_{number}"
            value_rule = self._value(f"value{index}_{number}", value, schema, syntax)
            self._add(rule, f"{begin} {value_rule} space")
            parameters.append(rule if name in required else f"{rule}?")
        if schema.get("additionalProperties", True) is not False:
            value_rule = f"{self._after_name(syntax, is_text=True)} {self._text_to_end(syntax)}"
            begin = self.mark(syntax.begin)
            rule = self._add(f"parameter{index}", f"{begin} OTHER_NAME {value_rule} space")
            parameters.append(f"{rule}*")
        return " ".join(parameters)

    def _value(
        self, rule: str, value: Any, schema: Mapping[str, Any], syntax: ParameterSyntax
    ) -> str:
        """A text as it is, up to the end mark; any other value as JSON."""
        end = self.mark(syntax.end)
        fields = value if isinstance(value, Mapping) else {}
        choices, types = fields.get("enum"), fields.get("type")
        after_name = self._after_name(syntax, is_text=True)
        if choices and all(isinstance(choice, str) for choice in choices):
            ways = " | ".join(map(quoted, choices))
            newline = r'"\n"?' if syntax.strips_newlines else ""
            return self._add(rule, f"{after_name} {newline} ({ways}) {newline} {end}")
        if types in ("object", "array", "integer", "number", "boolean", "null"):
            after_name = self._after_name(syntax, is_text=False)
            defs = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            return self._add(rule, f"{after_name} space {_json({**fields, **defs})} space {end}")
        return f"{after_name} {self._text_to_end(syntax)}"

    def _after_name(self, syntax: ParameterSyntax, *, is_text: bool) -> str:
        of_text = syntax.after_name_of_text or syntax.after_name
        return self._pieces(of_text if is_text else syntax.after_name)

    def _text_to_end(self, syntax: ParameterSyntax) -> str:
        return self._text_with(self._added.split(syntax.end))


def quoted(text: str) -> str:
    """A text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def _part(part: str | int) -> str:
    return f"<[{part}]>" if isinstance(part, int) else quoted(part)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, which are an object in any case."""
    return dict(schema) if schema.keys() & {"type", "$ref"} else {**schema, "type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': JSON_OPTIONS, **schema}, ensure_ascii=False)}"


def _escaped(regex: str) -> str:
    """A regular expression as it can stand between slashes in one line."""
    escaped = _ESCAPE_OR_SLASH.sub(lambda match: r"\/" if match[0] == "/" else match[0], regex)
    return escaped.replace("\n", r"\n")
