"""`OutputFormat`: how one model writes reasoning and tool calls, detected or named."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ramify.errors import ConfigError
from ramify.server.model_dialects.events import OutputParser
from ramify.server.model_dialects.parser import AnswerParser, CallForm, Delimiters, delimited_answer
from ramify.server.model_dialects.reader import Reader
from ramify.server.model_dialects.table import (
    BARE,
    CALL_FORMATS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
)
from ramify.server.model_dialects.writer import EventWriter

# Marks of calls that other text has too.
TEXT_MARKS = frozenset({"", "```json", "```xml", "Action:", "functools"})
AnyRow = TypeVar("AnyRow", CallFormat, ReasoningFormat)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format in which a model writes tool calls and reasoning."""

    calls: CallFormat
    reasoning: ReasoningFormat
    special_tokens: frozenset[str] = frozenset()  # of the model's tokenizer

    @property
    def kept_special_tokens(self) -> tuple[str, ...]:
        """Marks that may be special tokens, and that the parser needs in the text of an answer.

        Where they delimit nothing, the parser drops them. Other marks are text there.
        """
        marks = self.reasoning.marks
        begins = (form.mark for form in self.calls.forms)
        delimiters = (*begins, *self.calls.inner, *marks.begin, *marks.end)
        special = (mark for mark in delimiters if mark in self.special_tokens)
        return tuple(dict.fromkeys((*self.calls.hidden, *self.reasoning.hidden, *special)))

    @property
    def call_openings(self) -> tuple[str, ...]:
        """Texts that begin a call and nothing else; none where calls are bare or fenced JSON."""
        forms = (form for form in self.calls.forms if not form.is_part)
        marks = (form.mark for form in forms if form.mark not in TEXT_MARKS)
        return tuple(dict.fromkeys((*marks, *self.calls.openings)))

    def new_parser(
        self,
        tool_names: Collection[str],
        *,
        prompt_end: str,
        forced: bool = False,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        is_streamed: bool = True,
        has_format: bool = False,
    ) -> OutputParser:
        """A parser for one answer.

        Args:
            tool_names: of the request; a call of any other is text.
            prompt_end: the end of the rendered prompt, from the header of the answer's turn on; it may
                have begun the reasoning or, with a prefill, a call.
            forced: the answer may also be a call as bare JSON, whatever the format.
            schemas: JSON schemas of the tools' arguments; for formats whose arguments have no types.
            is_streamed: the client sees text as it is written; else it may be held until the end of
                the answer, which tells whether it is reasoning that no mark has opened.
            has_format: text of the answer must match a format, so that JSON within it is no call.
        """
        schemas = schemas or {}
        tools = {name: schemas.get(name, {}) for name in tool_names}
        hidden = self.kept_special_tokens
        delimiters = Delimiters(
            reasoning=self.reasoning.marks,
            forms=self._forms(forced=forced, has_format=has_format) if tools else (),
            call_end=self.calls.end,
            hidden=hidden,
            is_streamed=is_streamed,
        )
        answer = self.calls.answer or self.reasoning.answer or delimited_answer
        reader = Reader()
        writer = EventWriter(reader, tools, hidden=hidden, new_id=self.calls.new_id)
        steps = answer(reader, writer, delimiters=delimiters, prompt_end=prompt_end)
        return AnswerParser(reader, writer, steps)

    def _forms(self, *, forced: bool, has_format: bool) -> tuple[CallForm, ...]:
        forms = tuple(form for form in self.calls.forms if not (has_format and form.is_part))
        return (BARE, *(form for form in forms if form is not BARE)) if forced else forms


def detect(template: str, *, special_tokens: Iterable[str] = ()) -> OutputFormat:
    """The format that a chat template asks for; calls are bare JSON if it shows none.

    Args:
        special_tokens: of the model's tokenizer.
    """
    return OutputFormat(
        _detect(CALL_FORMATS, template),
        _detect(REASONING_FORMATS, template),
        frozenset(special_tokens),
    )


def named(
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    template: str = "",
    special_tokens: Iterable[str] = (),
) -> OutputFormat:
    """The format of these names, ours or other servers'; None: the one that the template shows.

    Raises:
        ConfigError: there is no format of that name.
    """
    form = detect(template, special_tokens=special_tokens)
    if tool_call_parser is not None:
        form = replace(form, calls=_named(CALL_FORMATS, tool_call_parser, "--tool-call-parser"))
    if reasoning_parser is not None:
        row = _named(REASONING_FORMATS, reasoning_parser, "--reasoning-parser")
        form = replace(form, reasoning=row)
    return form


def _detect(rows: tuple[AnyRow, ...], template: str) -> AnyRow:
    def fits(row: AnyRow) -> bool:
        return any(all(mark in template for mark in marks) for marks in row.templates)

    return next(filter(fits, rows), rows[-1])


def _named(rows: tuple[AnyRow, ...], name: str, option: str) -> AnyRow:
    for row in rows:
        if name == row.name or name in row.aliases:
            return row
    names = ", ".join(sorted(row.name for row in rows))
    raise ConfigError(f"{option} {name}: there is no such format; use one of {names}")
