"""Writes grammars in llguidance's dialect of Lark: rules for calls, parameters, formats, reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.engine.logits.grammar import JSON_OPTIONS, JSON_WHITESPACE
from ramify.errors import InvalidParamsError
from ramify.params import MAX_GRAMMAR_BYTES, Mark, StructuredOutput
from ramify.server.model_dialects.call_syntax import (
    CallSyntax,
    Delimiter,
    Maybe,
    ParameterSyntax,
    Piece,
    Slot,
)
from ramify.server.model_dialects.value_types import plain_schema, value_types

TEXT = r"/(.|\n)*/"
MAX_CALLS = 16  # in a row: some models would go on for ever
# A tool with more arguments, or longer rules, takes its arguments in the schema's order only.
MAX_ANY_ORDER = 64  # bits of a rule's parameter
MAX_ANY_ORDER_CHARS = 120_000
_PLAIN_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs"})
RULE_CHARS = 100  # of the rules of an argument, its schema and name not included
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
    'comma: space "," space',
    'colon: space ":" space',
    r"lead: /\s{0,4}/",
    r"OTHER_NAME: /[^<>\"\n]{1,256}/",
)


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as a grammar needs it.

    Args:
        schema: of its arguments, see `enforceable_schema`.
        any_order: its arguments may come in any order, as models write them. In the schema's order
            only, a model that skips an argument cannot write it any more.
    """

    name: str
    schema: Mapping[str, Any]
    any_order: bool = True


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
        self._shared: dict[str, str] = {}  # body → rule
        self._num_chars = self._num_any_order_chars = 0

    def text(self, start: str) -> str:
        """The grammar whose rule `start` is this."""
        return "\n".join(["%llguidance {}", f"start: {start}", *_COMMON_RULES, *self._rules, ""])

    def mark(self, text: str) -> str:
        """Grammar expression for a text, which may contain added tokens."""
        return " ".join(_part(part) for part in self._added.split(text))

    def add_head(self, mark: Mark) -> str:
        """Add rules for any text up to a mark and with it; returns what matches it.

        The grammar begins with the token in which the mark begins: the text before the mark is of that
        token, and contains no earlier mark. Text may also stand before the later texts of the mark.
        """
        heads = []
        for part, following in zip(mark, (*mark[1:], ""), strict=True):
            if isinstance(part, int):
                heads.append(_part(part))
            elif isinstance(following, int):
                # Where a special token does not follow, the text goes on.
                heads.append(f"/(.|\\n)*{_escaped(re.escape(part))}/")
            else:
                heads.append(self._share("head", f"{TEXT} {quoted(part)}", "[lazy]"))
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
                self.add_pieces(syntax.call[first:last], tool, index, syntax.parameters),
            )
            for index, tool in enumerate(tools)
        ]
        self._add("tool", " | ".join(names))
        after = self.add_pieces(syntax.call[last:])
        call = self._add("call", f"{self.add_pieces(syntax.call[:first])} tool {after}")
        begin = self.add_pieces(syntax.begin[num_left_out:])
        if num_left_out and not syntax.begin:
            first_call = f"{self.add_pieces(syntax.call[num_left_out:first])} tool {after}"
        else:
            first_call = call
        more = (
            "" if single else f"({self.add_pieces(syntax.separator)} {call}){{0,{MAX_CALLS - 1}}}"
        )
        return f"{begin} {first_call} {more} {self.add_pieces(syntax.end)}"

    def _add(self, rule: str, body: str) -> str:
        """Add a rule; returns its name. Raises InvalidParamsError beyond `MAX_GRAMMAR_BYTES`."""
        self._num_chars += len(body)
        if self._num_chars > MAX_GRAMMAR_BYTES:
            raise InvalidParamsError(
                "tools", "given", f"simpler: their rules take more than {MAX_GRAMMAR_BYTES} bytes"
            )
        self._rules.append(f"{rule}: {body}")
        return rule.partition("[")[0]

    def _share(self, name: str, body: str, attribute: str = "") -> str:
        """Add a rule, unless there is one with this body; returns its name."""
        if body not in self._shared:
            self._shared[body] = self._add(f"{name}{len(self._rules)}{attribute}", body)
        return self._shared[body]

    def add_pieces(
        self,
        pieces: Iterable[Piece],
        tool: CallableTool | None = None,
        index: int = 0,
        parameters: ParameterSyntax | None = None,
    ) -> str:
        """Add rules for pieces of a call syntax; returns what matches them.

        Args:
            tool: that the pieces belong to; None: to no tool.
            index: of the tool.
            parameters: syntax of the tool's parameters.
        """
        return " ".join(self._piece(piece, tool, index, parameters) for piece in pieces)

    def _piece(
        self, piece: Piece, tool: CallableTool | None, index: int, syntax: ParameterSyntax | None
    ) -> str:
        if isinstance(piece, str):
            return quoted(piece)
        if isinstance(piece, Delimiter):
            return self.mark(piece.text)
        if isinstance(piece, Maybe):
            return f"({self.add_pieces(piece.pieces)})?"
        if piece in _RULE_OF_SLOT:
            return _RULE_OF_SLOT[piece]
        assert tool is not None, "the other slots are of a tool"
        if piece is Slot.NAME:
            return quoted(tool.name)
        if piece is Slot.QUOTED_NAME:
            return quoted(json.dumps(tool.name, ensure_ascii=False))
        if piece is Slot.ARGUMENTS:
            return self._arguments(tool, index)
        assert syntax is not None, "a call with parameters has a syntax for them"
        return self._parameters(tool, index, syntax)

    def _arguments(self, tool: CallableTool, index: int) -> str:
        """Add rules for a JSON object of the tool's schema; returns their name."""
        schema = _object(tool.schema)
        rule, names = f"arguments{index}", schema.get("properties", {})
        if (
            schema.keys() <= _PLAIN_OBJECT
            and schema.get("additionalProperties") is False
            and schema["type"] in ("object", ["object"])
            and False not in names.values()
            and self._reserve_any_order(tool, schema)
        ):
            members = {}
            for number, (name, value) in enumerate(names.items()):
                member = f"member{index}_{number}"
                key = quoted(json.dumps(name, ensure_ascii=False))
                self._add(member, f"{key} colon {self._json_value(value, schema)}")
                members[member] = name in schema.get("required", ())
            in_any_order = self._in_any_order(index, members, "comma")
            return self._add(rule, f'"{{" space {in_any_order} space "}}"')
        return self._add(rule, _json(schema))

    def _reserve_any_order(self, tool: CallableTool, schema: Mapping[str, Any]) -> bool:
        """Take room for rules of the arguments in any order; returns whether there was enough."""
        names = schema.get("properties", {})
        if not tool.any_order or not 1 < len(names) <= MAX_ANY_ORDER:
            return False
        # Each value that refers to definitions has a copy of them.
        text = json.dumps(schema["$defs"], ensure_ascii=False) if "$defs" in schema else ""
        num_chars = len(names) * (len(text) + RULE_CHARS) + sum(map(len, names))
        if self._num_any_order_chars + num_chars > MAX_ANY_ORDER_CHARS:
            return False
        self._num_any_order_chars += num_chars
        return True

    def _in_any_order(self, index: int, members: Mapping[str, bool], separator: str) -> str:
        """Add rules for members in any order, each at most once; returns what matches them.

        A parameter of the rules has a bit for each member that has come, as in llguidance's
        documentation of parametric grammars; those of required members are the lowest.

        Args:
            members: rule → whether it is required.
        """
        rules = sorted(members, key=lambda rule: not members[rule])
        num_required = sum(members.values())
        is_whole = f"is_ones([0:{num_required}])" if num_required else "true"
        next_rule, end = f"members{index}", f"after{index}"
        ways = (
            f"{rule} {end}::set_bit({bit}) %if bit_clear({bit})" for bit, rule in enumerate(rules)
        )
        self._add(f"{next_rule}::_", " | ".join(ways))
        has_more = f"not(is_ones([0:{len(rules)}]))"
        self._add(f"{end}::_", f'"" %if {is_whole} | {separator} {next_rule}::_ %if {has_more}')
        return f"{next_rule}::0x0" if num_required else f"({next_rule}::0x0)?"

    def _json_value(self, value: Any, schema: Mapping[str, Any]) -> str:
        """Add a rule for the values of a property, unless there is one; returns its name."""
        fields = value if isinstance(value, Mapping) else {}
        text = _json(fields)
        if "$defs" in schema and '"$ref"' in text:
            text = _json({**fields, "$defs": schema["$defs"]})
        return self._share("json", text)

    def _parameters(self, tool: CallableTool, index: int, syntax: ParameterSyntax) -> str:
        """Parameters; those that the schema leaves open come last."""
        schema = _object(tool.schema)
        required = schema.get("required", ())
        members = {}
        for number, (name, value) in enumerate(schema.get("properties", {}).items()):
            begin, rule = self.mark(syntax.begin + name), f"parameter{index}_{number}"
            value_rule = self._value(value, schema, syntax)
            self._add(rule, f"{begin} {value_rule} space")
            members[rule] = name in required
        if self._reserve_any_order(tool, schema):
            parameters = [self._in_any_order(index, members, "")]
        else:
            parameters = [
                rule if is_required else f"{rule}?" for rule, is_required in members.items()
            ]
        if schema.get("additionalProperties", True) is not False:
            value_rule = f"{self._after_name(syntax, is_text=True)} {self._text_to_end(syntax)}"
            begin = self.mark(syntax.begin)
            rule = self._add(f"parameter{index}", f"{begin} OTHER_NAME {value_rule} space")
            parameters.append(f"{rule}*")
        return " ".join(parameters)

    def _value(self, value: Any, schema: Mapping[str, Any], syntax: ParameterSyntax) -> str:
        """A text as it is, up to the end mark; any other value as JSON."""
        end = self.mark(syntax.end)
        fields = plain_schema(value, schema)
        choices = [fields["const"]] if "const" in fields else fields.get("enum")
        types = value_types(fields, schema)
        after_name = self._after_name(syntax, is_text=True)
        if choices and all(isinstance(choice, str) for choice in choices):
            ways = " | ".join(map(quoted, choices))
            newline = r'"\n"?' if syntax.strips_newlines else ""
            return self._share("value", f"{after_name} {newline} ({ways}) {newline} {end}")
        if types and "string" not in types:
            after_name = self._after_name(syntax, is_text=False)
            value_rule = self._json_value(fields, schema)
            return self._share("value", f"{after_name} space {value_rule} space {end}")
        return f"{after_name} {self._text_to_end(syntax)}"

    def _after_name(self, syntax: ParameterSyntax, *, is_text: bool) -> str:
        of_text = syntax.after_name_of_text or syntax.after_name
        return self.add_pieces(of_text if is_text else syntax.after_name)

    def _text_to_end(self, syntax: ParameterSyntax) -> str:
        return self.add_head(self._added.split(syntax.end))


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
