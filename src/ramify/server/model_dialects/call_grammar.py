"""Grammars of answers: calls in a family's own form, or a format, after reasoning where it has any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ramify.params import FreeText, StructuredOutput
from ramify.server.model_dialects.call_syntax import JSON_SYNTAX, find_syntax
from ramify.server.model_dialects.lark_rules import TEXT, AddedTokens, CallableTool, LarkRules
from ramify.server.model_dialects.parser import ReasoningMarks

_NO_REASONING = ReasoningMarks()


@dataclass(frozen=True, slots=True)
class AnswerBegin:
    """The reasoning that an answer may begin with.

    Args:
        marks: of the model's reasoning.
        is_open: the prompt has begun the reasoning.
        may_begin: the answer may begin with reasoning.
    """

    marks: ReasoningMarks = _NO_REASONING
    is_open: bool = False
    may_begin: bool = False

    @classmethod
    def after(cls, prompt_end: str, marks: ReasoningMarks) -> AnswerBegin:
        """The beginning of an answer after this end of a prompt."""
        if not marks.begin or not marks.end:
            return cls()
        is_open = marks.are_open_after(prompt_end)
        has_ended = any(mark in prompt_end for mark in marks.end)
        return cls(marks, is_open, may_begin=not is_open and not has_ended)


class AnswerGrammars:
    """Writes the grammars of one model's answers.

    Args:
        call_format: name of a row of `CALL_FORMATS`.
        template: the chat template, which shows the variant.
    """

    def __init__(self, call_format: str, added: AddedTokens, *, template: str = "") -> None:
        self._added = added
        self._syntax = find_syntax(call_format, template)
        # Every parser reads forced calls as bare JSON too.
        self._forced_syntax = self._syntax or JSON_SYNTAX

    def optional_calls(
        self, tools: Sequence[CallableTool], begin: AnswerBegin, *, single: bool = False
    ) -> StructuredOutput | None:
        """Free text, and from the mark of a call on the grammar of the tools' calls.

        None where nothing marks the begin of a call, so that it cannot be told from text.
        """
        syntax = self._syntax
        if syntax is None or not syntax.mark:
            return None
        trigger = self._added.split(
            "".join(piece if isinstance(piece, str) else piece.text for piece in syntax.mark)
        )
        rules = LarkRules(self._added)
        # Where text may follow a call, the next call has a mark of its own.
        single = single or (syntax.resumes and not syntax.begin)
        calls = rules.add_calls(syntax, tools, single=single, has_mark=False)
        start = f"{rules.add_head(trigger)} {calls}"
        free_text = FreeText(
            triggers=(trigger,),
            resumes=syntax.resumes,
            ignored=(
                tuple(map(self._added.split, begin.marks.begin)),
                tuple(map(self._added.split, begin.marks.end)),
            ),
            starts_ignored=begin.is_open,
        )
        # The last token of a call may have text after it.
        start = f"{start} {TEXT}" if syntax.resumes else start
        return StructuredOutput(grammar=rules.text(start), free_text=free_text)

    def without_calls(self, openings: Sequence[str]) -> StructuredOutput:
        """Any text that contains none of these openings of calls.

        An added token may also be spelled in the tokens of its text.
        """
        marks = {mark: None for text in openings for mark in (self._added.split(text), (text,))}
        free_text = FreeText(triggers=tuple(marks), forbids_triggers=True)
        return StructuredOutput(regex=r"(.|\n)*", free_text=free_text)

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
        rules = LarkRules(self._added)
        calls = rules.add_calls(self._forced_syntax, tools, single=single)
        if or_format is None:
            return self._after_reasoning(rules, calls, begin)
        answer_format = rules.add_format(or_format)
        if answer_format is None:
            return None
        before = rules.add_pieces(self._forced_syntax.before_text)
        return self._after_reasoning(rules, f"({calls} | {before} {answer_format})", begin)

    def format(self, spec: StructuredOutput, begin: AnswerBegin) -> StructuredOutput:
        """The text of a format, after reasoning; a grammar comes only after open reasoning."""
        syntax, rules = self._syntax, LarkRules(self._added)
        before = () if syntax is None else syntax.before_text
        if not begin.is_open and not begin.may_begin and not before:
            return spec
        answer_format = rules.add_format(spec)
        if answer_format is not None:
            start = f"{rules.add_pieces(before)} {answer_format}"
            return self._after_reasoning(rules, start, begin)
        return replace(spec, free_text=self._until_reasoning_ends(begin)) if begin.is_open else spec

    def _after_reasoning(
        self, rules: LarkRules, start: str, begin: AnswerBegin
    ) -> StructuredOutput:
        before = () if self._syntax is None else self._syntax.before
        start = f"{rules.add_pieces(before)} {start}"
        if begin.is_open:
            free_text = self._until_reasoning_ends(begin)
            return StructuredOutput(grammar=rules.text(f"lead {start}"), free_text=free_text)
        if begin.may_begin:
            first = " | ".join(map(rules.mark, begin.marks.begin))
            start = f"(({first}) {rules.add_text_until(begin.marks.end)} lead)? {start}"
        return StructuredOutput(grammar=rules.text(start))

    def _until_reasoning_ends(self, begin: AnswerBegin) -> FreeText:
        return FreeText(
            triggers=tuple(map(self._added.split, begin.marks.end)),
            begins_after=True,
            must_trigger=True,
        )
