"""Templates: units that are equal but for a few values, and the slots in which the values stand.

A unit joins the template with which it shares most of its lines. A slot is a place of a template at
which its members differ; `SlotKind` says whether its values are volatile.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ramify.analysis.compare import changing_values
from ramify.analysis.compare.changing_values import MAX_CONTEXT, SlotVerdict, judge_slot
from ramify.analysis.compare.context_blocks import BlockOrder
from ramify.analysis.compare.normal_forms import normalise
from ramify.analysis.compare.rule_spans import find_rule_spans, rule_at
from ramify.analysis.compare.text_diff import Hunk, find_hunks
from ramify.analysis.corpus import Corpus
from ramify.analysis.records import SegmentKind, TextForm

MAX_FEATURES = 10
MIN_SHARED = 60  # code points that a member has in common with its template before other content
MAX_ALIGNED = 4096  # pairs of units whose differences are kept
MAX_VALUE = 240  # code points of a value; a longer difference is content
MAX_CACHED_LINE = 400  # code points of a line whose masked form is kept
MAX_VALUES = 64  # kept of a slot as evidence

_SYSTEM_ROLES = ("system", "developer")
_LINE = re.compile(r"[^\n]+?(?:[.!?:;](?=\s)|\n|$)")
# Begins at a word's start and keeps what it took: linear in a word without digits, however long.
_VOLATILE = re.compile(r"(?<![\w-])(?:[^\W\d]+|-)*+\d[\w-]*+")


@dataclass(slots=True)
class Slot:
    """A place of a template's text, and the values of its members there."""

    start: int
    end: int
    verdict: SlotVerdict | None = None
    constant: str = ""  # stands for all values: of those in a sample, the one of median length


@dataclass(slots=True)
class Template:
    """The text of the first member, the members' differences from it, and the slots they make."""

    number: int
    unit: int  # the first member, in normal form
    members: dict[int, tuple[Hunk, ...]] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    num_uses: dict[int, int] = field(default_factory=dict)  # by member, in order of first use


class Templates:
    """Templates of all units of a corpus, learned in the order of the requests."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._normal: dict[int, int] = {}
        self._as_sent: dict[int, int] = {}  # the first unit of a normal form
        self._same_words: dict[int, int] = {}  # normal unit by hash of `_words_key`
        self._templates: list[Template] = []
        self._template_of: dict[int, int] = {}  # by normal unit
        self._by_feature: dict[int, int] = {}
        self._canonical: dict[tuple[int, frozenset[str] | None], int] = {}
        self.order = BlockOrder(corpus)
        self._aligned: OrderedDict[tuple[int, int], tuple[Hunk, ...]] = OrderedDict()

    def normal(self, unit: int) -> int:
        """The unit's normal form: see `normal_forms`."""
        known = self._normal.get(unit)
        if known is None:
            text = self._corpus.text(unit)
            normal = normalise(text, self._corpus.units[unit].form)
            known = unit if normal == text else self._corpus.unit_like(unit, normal)
            stored = self._corpus.units[unit]
            key = hash((stored.kind, stored.form, stored.label, _words_key(normal)))
            known = self._same_words.setdefault(key, known)
            self._normal[unit] = self._normal[known] = known
        return known

    def hunks(self, unit: int, other: int) -> tuple[Hunk, ...]:
        """Values in which the normal forms of two units differ."""
        key = (self.normal(unit), self.normal(other))
        known = self._aligned.get(key)
        if known is None:
            known = tuple(find_hunks(self._corpus.text(key[0]), self._corpus.text(key[1])))
            self._aligned[key] = known
            if len(self._aligned) > MAX_ALIGNED:
                self._aligned.popitem(last=False)
        return known

    def add_use(self, unit: int) -> None:
        """Learn a unit from a request that uses it."""
        normal = self.normal(unit)
        self._as_sent.setdefault(normal, unit)
        num_uses = self._place(normal).num_uses
        num_uses[normal] = num_uses.get(normal, 0) + 1

    def judge_slots(self) -> None:
        """Decide which slots are volatile, from all uses."""
        for template in self._templates:
            if len(template.members) > 1:
                self._find_slots(template)

    def template_of(self, unit: int) -> Template | None:
        """The template that a unit belongs to."""
        number = self._template_of.get(self.normal(unit))
        return None if number is None else self._templates[number]

    def _values(self, template: Template, unit: int) -> list[str]:
        """A member's value in each slot."""
        text = self._corpus.text(self.normal(unit))
        return [
            "" if place is None else text[place[0] : place[1]]
            for place in self.slot_places(template, unit)
        ]

    def slot_places(self, template: Template, unit: int) -> list[tuple[int, int] | None]:
        """Where each slot is in the normal form of a member; None where the member has other content."""
        hunks = template.members[self.normal(unit)]
        ends = [hunk.end for hunk in hunks]
        large = [(hunk.start, hunk.end) for hunk in hunks if not _is_value(hunk)]
        large_ends = [end for _, end in large]
        places: list[tuple[int, int] | None] = []
        for slot in template.slots:
            at = bisect_right(large_ends, slot.start)
            if at < len(large) and large[at][0] < slot.end:
                places.append(None)
            else:
                start = _translate(hunks, ends, slot.start)
                places.append((start, _translate(hunks, ends, slot.end, end=True)))
        return places

    def canonical(self, unit: int, causes: frozenset[str] | None = None) -> int:
        """The unit in normal form with the values of volatile slots as a constant.

        Args:
            unit: any unit of the corpus.
            causes: names of the causes whose slots are masked; None for all.
        """
        normal = self.normal(unit)
        template = self.template_of(normal)
        if template is None or not template.slots:
            return normal
        known = self._canonical.get((normal, causes))
        if known is None:
            values = self.volatile_values(normal, causes)
            text = replace_places(self._corpus.text(normal), values)
            known = self._canonical[normal, causes] = self._corpus.unit_like(normal, text)
        return known

    def volatile_values(
        self, unit: int, causes: frozenset[str] | None = None
    ) -> list[tuple[int, int, str]]:
        """Values of volatile slots in a unit's normal form: start, end, and the constant for each.

        `causes` as in `canonical`.
        """
        template = self.template_of(unit)
        if template is None or not template.slots:
            return []
        return [
            (*place, slot.constant)
            for slot, place in zip(template.slots, self.slot_places(template, unit), strict=True)
            if place is not None
            and slot.verdict is not None
            and slot.verdict.is_volatile
            and slot.verdict.cause is not None
            and (causes is None or slot.verdict.cause in causes)
        ]

    # Learning

    def _place(self, normal: int) -> Template:
        number = self._template_of.get(normal)
        if number is not None:
            return self._templates[number]
        stored = self._corpus.units[normal]
        text = self._corpus.text(normal)
        features = [] if stored.form is TextForm.MEDIA else _features(text)
        keys = [hash((stored.kind, stored.label.partition(" ")[0], item)) for item, _ in features]
        votes: dict[int, int] = {}
        for key, (_, weight) in zip(keys, features, strict=True):
            place = self._by_feature.get(key)
            if place is not None:
                votes[place] = votes.get(place, 0) + weight
        if votes:
            best = max(votes, key=lambda number: (votes[number], -number))
            template = self._templates[best]
            hunks = tuple(find_hunks(self._corpus.text(template.unit), text))
            is_system = _is_system(stored.kind, stored.label)
            if _shares_text(text, hunks) or (
                is_system and _mask_numbers(text) == _mask_numbers(self._corpus.text(template.unit))
            ):
                template.members[normal] = hunks
                self._template_of[normal] = best
                self._learn(keys, best)
                return template
        template = Template(len(self._templates), normal, {normal: ()})
        self._templates.append(template)
        self._template_of[normal] = template.number
        self._learn(keys, template.number)
        return template

    def _learn(self, keys: Sequence[int], number: int) -> None:
        for key in keys:
            self._by_feature.setdefault(key, number)

    def _find_slots(self, template: Template) -> None:
        spans = sorted(
            (hunk.start, hunk.end)
            for hunks in template.members.values()
            for hunk in hunks
            if _is_value(hunk)
        )
        slots: list[Slot] = []
        for start, end in spans:
            if slots and start < slots[-1].end + (start == end):
                slots[-1].end = max(slots[-1].end, end)
            else:
                slots.append(Slot(start, end))
        template.slots = slots
        text = self._corpus.text(template.unit)
        stored = self._corpus.units[template.unit]
        members = list(template.num_uses)[:: max(1, len(template.num_uses) // MAX_VALUES)]
        num_uses = sum(template.num_uses[member] for member in members)
        rows = [self._values(template, member) for member in members]
        for number, slot in enumerate(slots):
            filled = sorted((row[number] for row in rows if row[number]), key=len)
            slot.constant = filled[len(filled) // 2] if filled else ""
            slot.verdict = judge_slot(
                changing_values.Slot(
                    kind=stored.kind,
                    label=stored.label,
                    values=tuple(row[number] for row in rows),
                    before=text[max(0, slot.start - MAX_CONTEXT) : slot.start],
                    after=text[slot.end : slot.end + MAX_CONTEXT],
                    num_uses=num_uses,
                )
            )
        self._find_rules(template)

    def _find_rules(self, template: Template) -> None:
        """Name the rule of `--prompt-rules` that takes a slot's values out of a system prompt."""
        stored, unit = self._corpus.units[template.unit], self._as_sent.get(template.unit)
        if not _is_system(stored.kind, stored.label) or unit is None:
            return
        spans = find_rule_spans(self._corpus.text(unit), self._corpus.text(template.unit))
        for slot in template.slots:
            if slot.verdict is not None and slot.verdict.kind is not None:
                rule = rule_at(spans, slot.start, slot.end)
                slot.verdict = replace(slot.verdict, rule=rule)


def _is_system(kind: SegmentKind, label: str) -> bool:
    return kind is SegmentKind.SYSTEM or label.startswith(_SYSTEM_ROLES)


def _features(text: str) -> list[tuple[str, int]]:
    """The longest lines with numbers masked, and their lengths."""
    lines = {_mask_line(line.strip()): len(line) for line in _LINE.findall(text)}
    lines = {line: length for line, length in lines.items() if len(line) >= 4}
    return sorted(lines.items(), key=lambda item: -item[1])[:MAX_FEATURES]


def _words_key(normal: str) -> str:
    """Equal for normal forms that differ only in spaces for line ends, or in HTML escapes."""
    text = html.unescape(normal) if "&" in normal else normal
    return text.replace("\n", " ")


def _mask_numbers(text: str) -> str:
    """The text with words that hold digits as 0."""
    return _VOLATILE.sub("0", text)


def _mask_line(line: str) -> str:
    """`_mask_numbers`; members of a template have most of their lines in common."""
    return _mask_short_line(line) if len(line) <= MAX_CACHED_LINE else _mask_numbers(line)


_mask_short_line = lru_cache(1 << 13)(_mask_numbers)


def replace_places(text: str, places: Sequence[tuple[int, int, str]]) -> str:
    """The text with other texts at places, which are in order: start, end, text."""
    parts, at = [], 0
    for start, end, value in places:
        parts += [text[at:start], value]
        at = end
    return "".join([*parts, text[at:]])


def _shares_text(text: str, hunks: Sequence[Hunk]) -> bool:
    """Whether a text has half of its code points, or enough before other content, as a template has."""
    first = next((at for at, hunk in enumerate(hunks) if not _is_value(hunk)), len(hunks))
    head_end = hunks[first].other_start if first < len(hunks) else len(text)
    head = head_end - sum(hunk.other_end - hunk.other_start for hunk in hunks[:first])
    differing = sum(hunk.other_end - hunk.other_start for hunk in hunks)
    return head >= MIN_SHARED or len(text) - differing >= len(text) / 2


def _is_value(hunk: Hunk) -> bool:
    """Whether a difference is short enough for a value; else it is content."""
    return max(hunk.end - hunk.start, hunk.other_end - hunk.other_start) <= MAX_VALUE


def _translate(hunks: Sequence[Hunk], ends: Sequence[int], at: int, *, end: bool = False) -> int:
    """A place of the template's text in a member's text; `ends` are those of the hunks, in order."""
    first = bisect_left(ends, at)
    shift = hunks[first - 1].other_end - hunks[first - 1].end if first else 0
    for hunk in hunks[first : first + 2]:
        if hunk.start > at or (hunk.start == at and not end and hunk.end > at):
            break
        if at < hunk.end:  # within a hunk that is part of a slot
            return hunk.other_end if end else hunk.other_start
        if hunk.start == at == hunk.end and not end:
            return hunk.other_start  # an insertion at a slot's start belongs to the slot
        shift = hunk.other_end - hunk.end
    return at + shift
