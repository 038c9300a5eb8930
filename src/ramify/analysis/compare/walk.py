"""Walks over system prompts and messages of two requests, and steps over differences that are waste."""

from __future__ import annotations

import re

import numpy as np

from ramify.analysis.compare.context_blocks import MIN_BLOCK, mostly_in, split_block
from ramify.analysis.compare.history import HistoryChanges
from ramify.analysis.compare.hoisted_notes import HoistedNote, HoistedNotes
from ramify.analysis.compare.normal_forms import item_ids
from ramify.analysis.compare.pair_outcome import is_cut, is_reworded, judge_pair
from ramify.analysis.compare.prompt_sides import Difference, Side, WalkStep
from ramify.analysis.compare.templates import Templates
from ramify.analysis.compare.text_diff import common_prefix_len
from ramify.analysis.compare.unit_pairs import PairDifferences, pair_differences, whitespace_of
from ramify.analysis.corpus import Corpus
from ramify.analysis.records import TextForm
from ramify.analysis.tokens import common_len
from ramify.analysis.verdicts import CauseName

MIN_REORDERED = 64  # tokens that another order of blocks shares more
_THINK = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>\s*", re.DOTALL)


class MessageWalk:
    """Places in both prompts, tokens shared so far, and the differences stepped over."""

    def __init__(
        self,
        corpus: Corpus,
        templates: Templates,
        a: Side,
        b: Side,
        *,
        continues: bool,
        notes: frozenset[str] = frozenset(),
    ) -> None:
        self._corpus, self._templates = corpus, templates
        self._a, self._b, self._continues = a, b, continues
        self._notes = HoistedNotes(corpus, a, b, notes)
        self._history = HistoryChanges(corpus, a, b, continues=continues)
        self._i = self._j = 0
        self.num_shared = 0
        self.differences: list[Difference] = []
        self._is_done = False
        self._is_at_summary = False  # the walk has stopped at a summary that is new
        self._content: tuple[int, int] | None = None
        self._hoisted: dict[tuple[CauseName, str], None] = {}
        self.steps: list[WalkStep] = []
        self.end = (0, 0)  # segments of both prompts before which mending makes all equal

    def run(self) -> None:
        """Walk to the end of a prompt or to content that differs."""
        a, b = self._a.rest, self._b.rest
        while not self._is_done and self._i < len(a) and self._j < len(b):
            if a[self._i] == b[self._j]:
                self._share_and_advance()
                self.end = self._i, self._j
            else:
                self._step()
        if self._is_done and self._i < len(a) and self._j < len(b):
            self._add_content()

    def _add_content(self) -> None:
        """The content at which the walk has stopped."""
        cause = CauseName.COMPACTION if self._is_at_summary else CauseName.NEW_CONTENT
        had, got = self._normal_a(), self._normal_b()
        start = max(0, common_prefix_len(had, got) - 16)
        self._add(cause, had, got, start)

    @property
    def has_all_of_first(self) -> bool:
        """Whether the walk has come to the end of the first prompt."""
        return self._i >= len(self._a.rest)

    @property
    def notes(self) -> frozenset[str]:
        """Notes of the history that the later prompt has at the top."""
        return self._notes.kept_texts()

    def _advance(self) -> None:
        self._i, self._j = self._i + 1, self._j + 1

    def _share(self) -> None:
        """Count the tokens of the later prompt's segment as shared."""
        self.num_shared += self._corpus.units[self._b.rest[self._j]].num_tokens

    def _share_and_advance(self) -> None:
        self._share()
        self._advance()

    def _step(self) -> None:
        for step in (
            self._step_role,
            self._step_empty,
            self._step_reasoning,
            self._step_hoisted,
            self._step_context,
            self._step_pair,
            self._step_media,
            self._step_history,
            self._step_order,
        ):
            before, i, j = len(self.differences), self._i, self._j
            if step():
                causes = [
                    (item.cause, item.segment)
                    for item in self.differences[before:]
                    if item.is_waste
                ]
                if step == self._step_hoisted:
                    # Where the note stood before gets the same causes.
                    self._hoisted |= dict.fromkeys(causes)
                    causes = causes or list(self._hoisted)
                self.end = (i, j) if self._is_done else (self._i, self._j)
                self.steps.append(WalkStep((i, j), self.end, tuple(causes), self._content))
                return
        self._stop()

    def _add(self, cause: CauseName, had: str, got: str, start: int = 0) -> None:
        path = self._b.rest_path(self._j)
        self.differences.append(Difference.proved(cause, path, had, got, start, start + 100))

    def _text_a(self) -> str:
        return self._corpus.text(self._a.rest[self._i])

    def _text_b(self) -> str:
        return self._corpus.text(self._b.rest[self._j])

    def _normal_a(self) -> str:
        return self._corpus.text(self._a.normals[self._i])

    def _normal_b(self) -> str:
        return self._corpus.text(self._b.normals[self._j])

    # Steps: each returns whether it has moved on

    def _step_role(self) -> bool:
        unit_a, unit_b = self._a.rest[self._i], self._b.rest[self._j]
        left, right = self._corpus.units[unit_a], self._corpus.units[unit_b]
        role = self._a.role(self._i)
        is_call = " " in left.label and role not in {"user", "assistant", "system"}
        if left.label == right.label or not is_call or role != self._b.role(self._j):
            return False
        if self._text_a() != self._text_b():
            return False
        self._step_over_ids(left.label.split()[-1], right.label.split()[-1])
        return True

    def _step_over_ids(self, had: str, got: str) -> None:
        self._add(CauseName.RANDOM_ID, had, got)
        self._share_and_advance()

    def _step_empty(self) -> bool:
        """A text without a word beside what follows in the same message: "" in place of null."""
        for side, at, other, at_other in (
            (self._a, self._i, self._b, self._j),
            (self._b, self._j, self._a, self._i),
        ):
            following = at + 1
            if (
                following < len(side.rest)
                and side.message_of[following] == side.message_of[at]
                and not self._corpus.text(side.normals[at])
                and side.normals[following] == other.normals[at_other]
            ):
                self._add(CauseName.WHITESPACE, self._text_a(), self._text_b())
                if side is self._a:
                    self._i = following
                else:
                    self._j = following
                return True
        return False

    def _step_reasoning(self) -> bool:
        has_a, has_b = self._a.is_reasoning(self._i), self._b.is_reasoning(self._j)
        if has_a or has_b:
            had = self._text_a() if has_a else ""
            got = self._text_b() if has_b else ""
            if ids := item_ids(had, got):
                self._step_over_ids(*ids)
                return True
            if not self._history.is_reasoning_change(self._i, self._j):
                return False
            self._add(CauseName.REASONING_DROPPED, had, got)
            self._i += has_a
            self._j += has_b
            return True
        had, got = self._text_a(), self._text_b()
        if "<think" not in had + got or _without_thoughts(had) != _without_thoughts(got):
            return False
        self._add(CauseName.REASONING_DROPPED, had, got)
        self._share_and_advance()
        return True

    def _step_hoisted(self) -> bool:
        """A note of the history that stands at the top now, or that stood at the top."""
        a, b = self._a, self._b
        if self._notes.is_moved(self._i):
            self._i += 1  # stepped over where it stood before
            return True
        if note := self._notes.find_known(self._i, self._j):
            return self._step_known_note(note)
        note = self._notes.find_moved(self._i, self._j)
        if note is None:
            return False
        if not note.head:
            self._add(CauseName.SYSTEM_HOISTED, "", self._text_b())
            self._j += 1
            return True
        if note.head != self._normal_a():
            self._add_values(
                a.normals[self._i], self._corpus.unit_like(b.normals[self._j], note.head)
            )
        elif not self._text_b().startswith(self._text_a()):
            path = b.rest_path(self._j)
            self.differences.append(whitespace_of(self._text_a(), self._text_b(), path))
        self._add(CauseName.SYSTEM_HOISTED, "", note.text)
        self._share_and_advance()
        return True

    def _step_known_note(self, note: HoistedNote) -> bool:
        if note.head:
            unit_a, unit_b = self._a.normals[self._i], self._b.normals[self._j]
            head = self._corpus.unit_like(unit_a, note.head)
            if head != unit_b and not self._add_values(head, unit_b):
                return False
            self._share()
        if not note.is_in_way:
            self._is_done = True
            return True
        self._add(CauseName.SYSTEM_HOISTED, note.text, "")
        self._i, self._j = self._i + 1, self._j + bool(note.head)
        return True

    def _compare(self, unit_a: int, unit_b: int) -> PairDifferences | None:
        path = self._b.rest_path(self._j)
        return pair_differences(self._corpus, self._templates, unit_a, unit_b, path, self._b.api)

    def _add_values(self, unit_a: int, unit_b: int) -> bool:
        pair = self._compare(unit_a, unit_b)
        if pair is None or pair.stop_char is not None:
            return False
        self.differences += pair.differences
        return True

    def _step_pair(self) -> bool:
        """White space, order of keys and values within a segment that both have."""
        a, b = self._a, self._b
        pair = self._compare(a.rest[self._i], b.rest[self._j])
        if pair is None:
            return False
        if pair.stop_char is not None and self._history.next_equal(self._i, self._j) is not None:
            return False
        at = self._i, self._j
        if is_reworded(pair) and (
            self._history.replaces_summary(*at) or self._history.takes_in_summary(*at)
        ):
            self._is_at_summary = True
            self._stop()
            return True
        if pair.stop_char is not None or is_cut(pair):
            label = self._corpus.units[b.rest[self._j]].label
            if "thinking" not in label and self._step_result():
                return True
        outcome = judge_pair(pair, a, self._i, b, self._j, continues=self._continues)
        self.differences += outcome.waste
        if outcome.stops and self._reorder(outcome.num_shared):
            return True
        self.num_shared += outcome.num_shared
        self._content = outcome.content
        if outcome.stops:
            self._is_done = True
        else:
            self._advance()
        return True

    def _step_context(self) -> bool:
        """A block of an older message that stands in the newest now."""
        a, b = self._a, self._b
        if a.role(self._i) not in ("user", "system") or not self._continues:
            return False
        newest = "\n".join(
            self._corpus.text(b.rest[at])
            for at in range(self._j, len(b.rest))
            if b.role(at) == a.role(self._i) and b.message_of[at] != b.message_of[self._j]
        )
        if a.role(self._i) == b.role(self._j) == "user" and self._step_part_of_text(newest):
            return True
        return self._step_whole_block(newest)

    def _step_part_of_text(self, newest: str) -> bool:
        """A block at the start or end of a user's text."""
        text_a, text_b = self._normal_a(), self._normal_b()
        block, stripped = split_block(text_a, text_b, newest)
        if not text_b or len(block) < MIN_BLOCK:
            return False
        place = len(self.differences)
        if stripped != text_b:
            unit_b = self._b.normals[self._j]
            if not self._add_values(self._corpus.unit_like(unit_b, stripped), unit_b):
                return False
        self._add(CauseName.CONTEXT_MOVED, block, "")
        if text_a.startswith(block):  # what stands first is named first
            self.differences.insert(place, self.differences.pop())
        self._share_and_advance()
        return True

    def _step_whole_block(self, newest: str) -> bool:
        """A block that is a part of a message's content, or a message."""
        text_a = self._normal_a()
        if len(text_a) < MIN_BLOCK or not mostly_in(text_a, newest):
            return False
        is_gone = self._history.goes_on_without(self._i, self._j)
        if is_gone:
            self._add(CauseName.CONTEXT_MOVED, text_a, "")
            self._i += 1
        return is_gone

    def _step_media(self) -> bool:
        a, b = self._a, self._b
        forms = (
            self._corpus.units[a.rest[self._i]].form,
            self._corpus.units[b.rest[self._j]].form,
        )
        if TextForm.MEDIA not in forms or not self._history.is_media_change(self._i, self._j):
            return False
        same_place = a.rest_path(self._i) == b.rest_path(self._j)
        if same_place or self._history.is_other_medium(self._i, self._j):
            self._add(CauseName.MEDIA_CHANGED, self._text_a(), self._text_b())
            self._share_and_advance()
        elif forms[0] is TextForm.MEDIA:
            self._add(CauseName.MEDIA_CHANGED, self._text_a(), "")
            self._i += 1
        else:
            self._add(CauseName.MEDIA_CHANGED, "", self._text_b())
            self._j += 1
        return True

    def _step_history(self) -> bool:
        if self._history.is_compaction(self._i, self._j):
            self._is_at_summary = True
            self._is_done = True
            return True
        equal_at = self._history.next_equal(self._i, self._j)
        if equal_at is not None:
            had = "" if equal_at[0] == self._i else self._text_a()
            got = "" if equal_at[1] == self._j else self._text_b()
            self._add(CauseName.HISTORY_EDITED, had, got)
            self._i, self._j = equal_at
            return True
        return self._step_result()

    def _step_result(self) -> bool:
        if not self._history.is_edited_result(self._i, self._j):
            return False
        self._add(CauseName.HISTORY_EDITED, self._text_a(), self._text_b())
        self._advance()
        return True

    def _step_order(self) -> bool:
        return self._reorder(self._num_shared_here())

    def _reorder(self, num_shared: int) -> bool:
        """Blocks of a message behind others, by which the messages share more if they stand first.

        Args:
            num_shared: tokens that the segments here share as they stand.
        """
        had, had_end = self._in_order(self._a, self._i)
        got, got_end = self._in_order(self._b, self._j)
        num_equal = common_len(np.array(had), np.array(got))
        num_mended = sum(self._corpus.units[unit].num_tokens for unit in got[:num_equal])
        if num_equal < min(len(had), len(got)):
            num_mended += self._corpus.shared_tokens(had[num_equal], got[num_equal])
        begin = got_end - len(got)
        num_before = sum(
            self._corpus.units[unit].num_tokens for unit in self._b.rest[begin : self._j]
        )
        if num_mended < num_before + num_shared + MIN_REORDERED:
            return False
        at = max(0, common_prefix_len(self._text_a(), self._text_b()) - 16)
        cause, path = CauseName.CONTEXT_ORDER, self._b.message_of[self._j]
        quotes = self._text_a(), self._text_b()
        self.differences.append(Difference.proved(cause, path, *quotes, at, at + 100))
        self.num_shared += num_mended - num_before
        if had == got:
            self._i, self._j = had_end, got_end
        else:
            self._is_done = True
        return True

    def _in_order(self, side: Side, at: int) -> tuple[list[int], int]:
        """Units of a message with its blocks in the order that shares most, and where the message ends."""
        order, message = self._templates.order, side.message_of[at]
        begin = end = at
        while begin and side.message_of[begin - 1] == message:
            begin -= 1
        while end < len(side.rest) and side.message_of[end] == message:
            end += 1
        parts = [(order.mend(side.rest[place]), "") for place in range(begin, end)]
        return [unit for unit, _ in order.sorted_parts(parts)], end

    def _stop(self) -> None:
        """Content that differs: count what the two segments share at their start."""
        self.num_shared += self._num_shared_here()
        self._is_done = True

    def _num_shared_here(self) -> int:
        """Tokens that the two segments have in common at their start."""
        unit_a, unit_b = self._a.normals[self._i], self._b.normals[self._j]
        left, right = self._corpus.units[unit_a], self._corpus.units[unit_b]
        if left.head != right.head:
            return 0
        return common_len(self._corpus.tokens(unit_a), self._corpus.tokens(unit_b))


def _without_thoughts(text: str) -> str:
    return _THINK.sub("", text).strip()
