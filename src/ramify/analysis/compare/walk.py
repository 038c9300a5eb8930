"""Walks over system prompts and messages of two requests, and steps over differences that are waste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ramify.analysis.compare.history import History
from ramify.analysis.compare.hoisted_notes import HoistedNotes
from ramify.analysis.compare.prompt_sides import Difference, Side, WalkStep
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.unit_pairs import PairDifferences, pair_differences
from ramify.analysis.tokens import common_len
from ramify.analysis.verdicts import CauseName

MAX_QUOTED = 100  # code points of a difference


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of difference at the places of a walk, and how to go on as if it were mended.

    `matches` returns what it knows about the difference, or None or False if it is of another kind; `step`
    takes it.
    """

    name: str
    matches: Callable[[MessageWalk], Any]
    step: Callable[[MessageWalk, Any], None]


class MessageWalk:
    """Places in both prompts, tokens shared so far, and the differences stepped over.

    Args:
        a: the earlier prompt.
        b: the later prompt.
        continues: `b` continues the conversation of `a`.
        notes: of the history, which `a` has at the top.
    """

    def __init__(
        self, a: Side, b: Side, *, continues: bool, notes: frozenset[str] = frozenset()
    ) -> None:
        self.a, self.b, self.continues = a, b, continues
        self.i = self.j = 0  # next index into `a.rest` and `b.rest`
        self.notes = HoistedNotes(a, b, notes)
        self.history = History(a, b, continues=continues)
        self.num_shared = 0
        self.differences: list[Difference] = []
        self.steps: list[WalkStep] = []
        self.end = (0, 0)  # segments of both prompts before which mending makes all equal
        self.content: tuple[int, int] | None = None  # where content begins, in both normal forms
        self.is_done = False
        self._is_at_summary = False
        self._hoisted: dict[tuple[CauseName, str], None] = {}

    def run(self, rules: Sequence[Rule]) -> None:
        """Walk to the end of a prompt or to content that differs, by the first rule that matches."""
        while not self.is_done and self._is_within:
            if self.a.rest[self.i] == self.b.rest[self.j]:
                self.share_and_advance()
                self.end = self.i, self.j
            else:
                self._apply(rules)
        if self.is_done and self._is_within:
            cause = CauseName.COMPACTION if self._is_at_summary else CauseName.NEW_CONTENT
            had, got = self.a.normal_text(self.i), self.b.normal_text(self.j)
            self.add(cause, had, got, max(0, common_prefix_len(had, got) - 16))

    @property
    def _is_within(self) -> bool:
        return self.i < len(self.a.rest) and self.j < len(self.b.rest)

    @property
    def has_all_of_first(self) -> bool:
        """Whether the walk has come to the end of the first prompt."""
        return self.i >= len(self.a.rest)

    def _apply(self, rules: Sequence[Rule]) -> None:
        before, start = len(self.differences), (self.i, self.j)
        for rule in rules:
            if match := rule.matches(self):
                rule.step(self, match)
                break
        else:
            self.stop()
            return
        causes = [(item.cause, item.segment) for item in self.differences[before:] if item.is_waste]
        if rule.name == CauseName.SYSTEM_HOISTED:
            # Where the note stood before gets the same causes.
            self._hoisted |= dict.fromkeys(causes)
            causes = causes or list(self._hoisted)
        self.end = start if self.is_done else (self.i, self.j)
        self.steps.append(WalkStep(start, self.end, tuple(causes), self.content))

    # What steps do

    def add(self, cause: CauseName, had: str, got: str, start: int = 0) -> None:
        """Name a cause at the later prompt's place, with the same part of both texts quoted."""
        path, end = self.b.rest_path(self.j), start + MAX_QUOTED
        self.differences.append(Difference.proved(cause, path, had, got, start, end))

    def share(self) -> None:
        """Count the tokens of the later prompt's segment as shared."""
        self.num_shared += self.b.unit(self.j).num_tokens

    def share_and_advance(self) -> None:
        """Go on in both prompts behind a segment that they share."""
        self.share()
        self.i, self.j = self.i + 1, self.j + 1

    def stop(self) -> None:
        """End the walk at content that differs: count what the two segments share at their start."""
        self.num_shared += self.num_shared_here()
        self.is_done = True

    def stop_at_summary(self) -> None:
        """End the walk at a summary in place of the history."""
        self._is_at_summary = self.is_done = True

    # What rules ask for

    def num_shared_here(self) -> int:
        """Tokens that the two segments have in common at their start."""
        corpus, unit_a, unit_b = self.b.corpus, self.a.normals[self.i], self.b.normals[self.j]
        if corpus.units[unit_a].head != corpus.units[unit_b].head:
            return 0
        return common_len(corpus.tokens(unit_a), corpus.tokens(unit_b))

    def compare_units(self, unit_a: int, unit_b: int) -> PairDifferences | None:
        """How two units differ that stand at the walk's place; None if they have little in common."""
        b = self.b
        return pair_differences(b.corpus, b.templates, unit_a, unit_b, b.rest_path(self.j), b.api)

    def values_between(self, unit_a: int, unit_b: int) -> tuple[Difference, ...] | None:
        """The values in which two units differ; None if their content differs."""
        if unit_a == unit_b:
            return ()
        pair = self.compare_units(unit_a, unit_b)
        return None if pair is None or pair.stop_char is not None else pair.differences
