"""Grammars of answers: calls in a family's own form, or a format, after reasoning where it has any."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ramify.engine.logits.grammar import JSON_OPTIONS, JSON_WHITESPACE
from ramify.params import FreeText, Mark, StructuredOutput
from ramify.server.output_formats.call_syntax import (
    CALL_SYNTAXES,
    CallSyntax,
    Delimiter,
    ParameterSyntax,
    Piece,
    Slot,
)
from ramify.server.output_formats.parser import ReasoningMarks

TEXT = r"/(.|\n)*/"
_SLASH = re.compile(r"\\.|/", re.DOTALL)

_NO_REASONING = ReasoningMarks()
TokenId = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool as a grammar needs it."""

    name: str
    schema: Mapping[str, Any]  # of its arguments, see `enforceable_schema`


@dataclass(frozen=True, slots=True)
class AnswerBegin:
    """What an answer may begin with.

    Args:
        marks: of the model's reasoning; `begin` is "" if it has none.
        is_open: the prompt has begun the reasoning.
        may_begin: the answer may begin with reasoning.
    """

    marks: ReasoningMarks = _NO_REASONING
    is_open: bool = False
    may_begin: bool = False

    @classmethod
    def after(cls, prompt_end: str, marks: ReasoningMarks) -> AnswerBegin:
        """What may follow the end of a prompt."""
        if not marks.begin:
            return cls()
        is_open = prompt_end.rfind(marks.begin) > prompt_end.rfind(marks.end)
        return cls(marks, is_open, may_begin=not is_open and marks.end not in prompt_end)


class AnswerGrammars:
    """Writes the grammars of one model's answers.

    Args:
        call_format: name of a row of `CALL_FORMATS`.
        token_id: the id of an added token, by its text; None if the text is no such token.
    """

    def __init__(self, call_format: str, token_id: TokenId) -> None:
        self._token_id = token_id
        syntaxes = CALL_SYNTAXES.get(call_format, ())
        self._syntax = next(
            (
                syntax
                for syntax in syntaxes
                if not syntax.tokenizer_has or token_id(syntax.tokenizer_has) is not None
            ),
            None,
        )
        self._forced_syntax = self._syntax or CALL_SYNTAXES["json"][0]

    def optional_calls(
        self, tools: Sequence[CallableTool], begin: AnswerBegin, *, single: bool = False
    ) -> StructuredOutput | None:
        """Free text in which each call of a tool is of its schema, once it has begun.

        None where nothing marks the begin of a call, so that it cannot be told from text.
        """
        syntax = self._syntax
        first = None if syntax is None else (syntax.begin or syntax.call)[0]
        if syntax is None or not isinstance(first, Delimiter):
            return None
        trigger = self._mark(first.text)
        is_text = isinstance(trigger[0], str)
        lark = _Lark(self._token_id, left_out=first if is_text else None)
        # Where text may follow a call, the next call has a trigger of its own.
        has_own_trigger = not syntax.begin and syntax.resumes
        lark.add_calls("calls", syntax, tools, single=single or has_own_trigger)
        start = "calls"
        if is_text:
            # The token in which the trigger begins may begin with other text.
            lark.rules.append(f"head[lazy]: {TEXT} {_quoted(first.text)}")
            start = "head calls"
        if syntax.resumes:
            lark.rules.append(f"rest: {TEXT}")
            start += " rest"
        ignored = None
        if begin.marks.begin:
            ignored = self._mark(begin.marks.begin), self._mark(begin.marks.end)
        free_text = FreeText(
            triggers=(trigger,),
            resumes=syntax.resumes,
            ignored=ignored,
            starts_ignored=begin.is_open,
        )
        return StructuredOutput(grammar=lark.text(start), free_text=free_text)

    def forced_calls(
        self,
        tools: Sequence[CallableTool],
        begin: AnswerBegin,
        *,
        single: bool = False,
        or_format: StructuredOutput | None = None,
    ) -> StructuredOutput | None:
        """Nothing but calls, or the text of a format, after reasoning.

        None if the format is a grammar, which cannot be a part of another.
        """
        lark = _Lark(self._token_id)
        lark.add_calls("calls", self._forced_syntax, tools, single=single)
        if or_format is None:
            return self._after_reasoning(lark, "calls", begin)
        if not lark.add_format("format", or_format):
            return None
        return self._after_reasoning(lark, "(calls | format)", begin)

    def format(self, spec: StructuredOutput, begin: AnswerBegin) -> StructuredOutput:
        """The text of a format, after reasoning; a format that is a grammar, only after open reasoning."""
        lark = _Lark(self._token_id)
        if not begin.is_open and not begin.may_begin:
            return spec
        if lark.add_format("format", spec):
            return self._after_reasoning(lark, "format", begin)
        return replace(spec, free_text=self._until_reasoning_ends(begin)) if begin.is_open else spec

    def _after_reasoning(self, lark: _Lark, start: str, begin: AnswerBegin) -> StructuredOutput:
        if begin.is_open:
            free_text = self._until_reasoning_ends(begin)
            return StructuredOutput(grammar=lark.text(f"lead {start}"), free_text=free_text)
        if begin.may_begin:
            first, last = lark.mark(begin.marks.begin), lark.mark(begin.marks.end)
            if isinstance(self._mark(begin.marks.end)[0], int):
                lark.rules.append(f"reasoning: {first} {TEXT} {last} lead")
            else:
                lark.rules += [
                    f"reasoning: {first} reasoning_text lead",
                    f"reasoning_text[lazy]: {TEXT} {last}",
                ]
            start = f"reasoning? {start}"
        return StructuredOutput(grammar=lark.text(start))

    def _until_reasoning_ends(self, begin: AnswerBegin) -> FreeText:
        return FreeText(
            triggers=(self._mark(begin.marks.end),), begins_after=True, must_trigger=True
        )

    def _mark(self, text: str) -> Mark:
        token = self._token_id(text)
        return (text,) if token is None else (token,)


class _Lark:
    """Rules of a grammar in llguidance's dialect of Lark.

    Args:
        left_out: a delimiter that another rule has matched already: the first one is left out.
    """

    def __init__(self, token_id: TokenId, *, left_out: Delimiter | None = None) -> None:
        self._token_id, self._left_out = token_id, left_out
        self.rules: list[str] = []

    def text(self, start: str) -> str:
        """The grammar whose first rule is `start`."""
        common = [
            f"start: {start}",
            "space: | SPACE",
            f"SPACE: /{JSON_WHITESPACE}/",
            r"lead: /\s{0,4}/",
            r"OTHER_NAME: /[^<>\n]{1,256}/",
        ]
        return "\n".join(["%llguidance {}", *common, *self.rules, ""])

    def mark(self, text: str) -> str:
        """A reference to a special token, or a text."""
        token = self._token_id(text)
        return _quoted(text) if token is None else f"<[{token}]>"

    def add_format(self, rule: str, spec: StructuredOutput) -> bool:
        """Add a rule for the text of a format; returns whether it can be a rule."""
        if spec.json_object:
            self.rules.append(f"{rule}: {_json({'type': 'object'})}")
        elif spec.json_schema is not None:
            self.rules.append(f"{rule}: {_json(json.loads(str(spec.json_schema)))}")
        elif spec.regex is not None:
            self.rules.append(f"{rule}: /{_escaped(spec.regex)}/")
        elif spec.choice is not None:
            self.rules += [f"{rule}: CHOICE", f"CHOICE: {' | '.join(map(_quoted, spec.choice))}"]
        else:
            return False
        return True

    def add_calls(
        self, rule: str, syntax: CallSyntax, tools: Sequence[CallableTool], *, single: bool
    ) -> None:
        """Add a rule for one call of the tools, or for several."""
        begin = self._pieces(syntax.begin)
        pieces = list(syntax.call)
        varying = [index for index, piece in enumerate(pieces) if piece in _OF_TOOL]
        first, last = varying[0], varying[-1] + 1
        before, after = self._pieces(pieces[:first]), self._pieces(pieces[last:])
        names = []
        for index, tool in enumerate(tools):
            names.append(f"tool{index}")
            middle = self._pieces(pieces[first:last], tool, index, syntax.parameters)
            self.rules.append(f"tool{index}: {middle}")
        self.rules.append(f"call: {before} ({' | '.join(names)}) {after}")
        more = "" if single else f"({self._pieces(syntax.separator)} call)*"
        self.rules.append(f"{rule}: {begin} call {more} {self._pieces(syntax.end)}")

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
            return _quoted(piece)
        if isinstance(piece, Delimiter):
            if piece is self._left_out:
                self._left_out = None
                return ""
            return self.mark(piece.text)
        if piece is Slot.SPACE:
            return "space"
        if piece is Slot.INDEX:
            return "/[0-9]{1,4}/"
        if piece is Slot.CALL_ID:
            return r"/\"[A-Za-z0-9_-]{1,40}\"|[0-9]{1,4}/"
        assert tool is not None, "the other slots are of a tool"
        if piece is Slot.NAME:
            return _quoted(tool.name)
        if piece is Slot.QUOTED_NAME:
            return _quoted(json.dumps(tool.name, ensure_ascii=False))
        if piece is Slot.ARGUMENTS:
            self.rules.append(f"arguments{index}: {_json(_object(tool.schema))}")
            return f"arguments{index}"
        assert syntax is not None, "a call with parameters has a syntax for them"
        return self._parameters(tool, index, syntax)

    def _parameters(self, tool: CallableTool, index: int, syntax: ParameterSyntax) -> str:
        schema = _object(tool.schema)
        rules = []
        required, defs = schema.get("required", ()), schema.get("$defs")
        for number, (name, value) in enumerate(schema.get("properties", {}).items()):
            rule = f"parameter{index}_{number}"
            begin = _quoted(syntax.begin + name)
            value_rule = self._value(rule, value, defs, syntax)
            self.rules.append(
                f"{rule}: {begin} {self._pieces(syntax.after_name)} {value_rule} space"
            )
            rules.append(rule if name in required else f"{rule}?")
        if schema.get("additionalProperties", True) is not False:
            rule, between = f"parameter{index}_other", self._pieces(syntax.after_name)
            self.rules += [
                f"{rule}: {_quoted(syntax.begin)} OTHER_NAME {between} {rule}_value space",
                f"{rule}_value[lazy]: {TEXT} {_quoted(syntax.end)}",
            ]
            rules.append(f"{rule}*")
        return " ".join(rules)

    def _value(self, rule: str, schema: Any, defs: Any, syntax: ParameterSyntax) -> str:
        """A text as it is, up to the end mark; any other value as JSON."""
        end = _quoted(syntax.end)
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        if choices and all(isinstance(choice, str) for choice in choices):
            return f"({' | '.join(_quoted(choice) for choice in choices)}) space {end}"
        types = schema.get("type") if isinstance(schema, Mapping) else None
        if types in ("object", "array", "integer", "number", "boolean", "null"):
            whole = {**schema, "$defs": defs} if defs and "$ref" in json.dumps(schema) else schema
            self.rules.append(f"{rule}_value: {_json(whole)} space {end}")
        else:
            self.rules.append(f"{rule}_value[lazy]: {TEXT} {end}")
        return f"{rule}_value"


_OF_TOOL = (Slot.NAME, Slot.QUOTED_NAME, Slot.ARGUMENTS, Slot.PARAMETERS)


def _object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of arguments, which are an object in any case."""
    return dict(schema) if schema.keys() & {"type", "$ref"} else {**schema, "type": "object"}


def _json(schema: Mapping[str, Any]) -> str:
    text = json.dumps({"x-guidance": JSON_OPTIONS, **schema}, ensure_ascii=False)
    return f"%json {text}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(regex: str) -> str:
    """A regular expression as it can stand between slashes in one line."""
    escaped = _SLASH.sub(lambda match: r"\/" if match[0] == "/" else match[0], regex)
    return escaped.replace("\n", r"\n")
