"""The two sides of a comparison: a request's segments by kind, and a difference between two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ramify.analysis.compare.quoting import NOTHING, Excerpt
from ramify.analysis.compare.summaries import is_reminder, is_summary
from ramify.analysis.compare.templates import Templates
from ramify.analysis.corpus import Corpus, StoredRequest, Unit
from ramify.analysis.records import SegmentKind, TextForm
from ramify.analysis.verdicts import LEGITIMATE, Cause, CauseName, Certainty, ValueKind

PlacedUnit = tuple[int, str]  # unit, path
MIN_SAID = 8  # code points of a message that can tell conversations apart
_REASONING_TYPES = ("reasoning", "redacted_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two requests and its cause."""

    cause: CauseName
    certainty: Certainty
    segment: str
    had: Excerpt = NOTHING
    got: Excerpt = NOTHING
    is_volatile: bool = True  # waste wherever it stands; else only before equal text
    kind: ValueKind | None = None  # of a value that changes
    rule: str = ""  # of `--prompt-rules` that takes the value out of the prompt

    @classmethod
    def proved(
        cls,
        cause: CauseName,
        segment: str,
        had: str,
        got: str,
        start: int = 0,
        end: int | None = None,
    ) -> Difference:
        """A difference that the texts prove, with the same part of both quoted."""
        excerpts = Excerpt(had, start, end), Excerpt(got, start, end)
        return cls(cause, Certainty.PROVED, segment, *excerpts)

    def quoted(self) -> Difference:
        """The same with the quotes alone, without the texts they are from."""
        return replace(self, had=Excerpt(str(self.had)), got=Excerpt(str(self.got)))

    @property
    def is_waste(self) -> bool:
        """Whether the cause could be removed."""
        return self.cause not in LEGITIMATE

    @property
    def is_waste_in_message(self) -> bool:
        """Whether the cause could be removed from a message."""
        return self.is_waste and self.segment.startswith("messages")

    def as_cause(self) -> Cause:
        """The same as a verdict has it."""
        return Cause(
            self.cause,
            self.certainty,
            self.segment,
            str(self.had),
            str(self.got),
            self.kind,
            self.rule,
        )


@dataclass(frozen=True, slots=True)
class WalkStep:
    """Parts of two prompts that differ: what the later one has instead of the earlier one's."""

    start: tuple[int, int]  # segment after the tools, in the earlier and in the later prompt
    stop: tuple[int, int]
    causes: tuple[tuple[CauseName, str], ...]  # waste, with its segment; (): nothing to mend
    # Of the last step, within a segment: where content begins that differs, in both normal forms.
    content: tuple[int, int] | None = None


class Side:
    """A request's segments: settings by name, `tools`, and `rest`: system and messages, in order."""

    def __init__(self, corpus: Corpus, templates: Templates, request: StoredRequest) -> None:
        self.corpus, self.templates, self.request = corpus, templates, request
        units = request.units.tolist()
        kinds = [corpus.units[unit].kind for unit in units]
        self.first = _num_leading(kinds, SegmentKind.SETTING)
        self.rest_first = self.first + _num_leading(kinds[self.first :], SegmentKind.TOOL)
        self.settings = {
            path.partition(".")[2]: unit
            for path, unit in zip(request.paths[: self.first], units[: self.first], strict=True)
        }
        self.prompt = request.units[self.first :]
        self.tools: list[int] = units[self.first : self.rest_first]
        self.rest: list[int] = units[self.rest_first :]
        counts = [corpus.units[unit].num_tokens for unit in units[self.first :]]
        self.ends = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.api = " ".join(filter(None, (request.info.api, request.info.provider)))
        self.normals = [templates.normal(unit) for unit in self.rest]
        self.message_of = [path.partition(".")[0] for path in request.paths[self.rest_first :]]
        last = self.message_of[-1] if self.message_of else ""
        self.last_message = frozenset(
            normal
            for normal, message, unit in zip(self.normals, self.message_of, self.rest, strict=True)
            if message == last and corpus.units[unit].num_chars >= MIN_SAID
        )
        self.older_messages = frozenset(
            normal
            for normal, message in zip(self.normals, self.message_of, strict=True)
            if message != last
        )
        self.last_at = next(
            (at for at, message in enumerate(self.message_of) if message == last), 0
        )

    @cached_property
    def conversation(self) -> list[int]:
        """Places in `rest` of all segments but system prompts."""
        return [at for at in range(len(self.rest)) if self.role(at) != "system"]

    @cached_property
    def canonical_system(self) -> list[int]:
        """System prompts with their values masked."""
        return [self.canonical(at) for at in range(len(self.rest)) if self.role(at) == "system"]

    def canonical(self, at: int) -> int:
        """A segment after the tools with its values masked."""
        return self.templates.canonical(self.rest[at])

    @cached_property
    def summary_at(self) -> int | None:
        """Place of the user's summary that the messages begin with; None: they begin with no summary.

        Before it may stand system prompts, the program's reminders and other blocks of its message.
        """
        for at, message in enumerate(self.message_of):
            if self.role(at) == "system":
                continue
            if self.role(at) != "user":
                return None
            text = self.text(at)
            if not is_reminder(text):
                if is_summary(text, is_certain=True):
                    return at
                if message not in self.message_of[at + 1 : at + 2]:
                    return None
        return None

    def path(self, at: int) -> str:
        """Path of a segment of the prompt, settings not counted."""
        return self.request.paths[self.first + at]

    def rest_path(self, at: int) -> str:
        """Path of a segment after the tools."""
        return self.request.paths[self.rest_first + at]

    def num_tokens(self, units: Iterable[int]) -> int:
        """Tokens of units."""
        return sum(self.corpus.units[unit].num_tokens for unit in units)

    def unit(self, at: int) -> Unit:
        """A segment after the tools."""
        return self.corpus.units[self.rest[at]]

    def text(self, at: int) -> str:
        """The text of a segment after the tools."""
        return self.corpus.text(self.rest[at])

    def normal_text(self, at: int) -> str:
        """The same in normal form."""
        return self.corpus.text(self.normals[at])

    def is_newest(self, at: int) -> bool:
        """Whether a segment after the tools is of the last message."""
        return self.message_of[at] == self.message_of[-1]

    def role(self, at: int) -> str:
        """Role of a segment after the tools; `system` for system prompts without a label."""
        stored = self.unit(at)
        role = stored.label.partition(" ")[0]
        if stored.kind is SegmentKind.SYSTEM or role == "developer":
            return "system"
        return role

    def is_answer(self, at: int) -> bool:
        """Whether the model has written a segment; items of Responses have no role but a type."""
        role = self.role(at)
        is_item = not role and self.unit(at).form is TextForm.JSON
        return role == "assistant" or is_item

    def is_reasoning(self, at: int) -> bool:
        """See the function `is_reasoning`."""
        return is_reasoning(self.corpus, self.rest[at], self.rest_path(at))


def is_reasoning(corpus: Corpus, unit: int, path: str) -> bool:
    """Whether a segment is reasoning of an earlier answer."""
    if path.endswith((".reasoning_content", ".reasoning", ".thinking", ".reasoning_details")):
        return True
    stored = corpus.units[unit]
    if "thinking" in stored.label.split()[1:]:
        return True
    if stored.form is TextForm.JSON:
        head = corpus.text(unit)[:60]
        return any(f'"type":"{kind}"' in head for kind in _REASONING_TYPES)
    return False


def _num_leading(kinds: Sequence[SegmentKind], kind: SegmentKind) -> int:
    return next((at for at, other in enumerate(kinds) if other is not kind), len(kinds))
