"""Differences within a pair of units that stand at the same place: form, order of keys, values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from ramify.analysis.compare.changing_values import MAX_CONTEXT, Slot, SlotVerdict, judge_slot
from ramify.analysis.compare.normal_forms import key_orders_differ, parse_json
from ramify.analysis.compare.prompt_sides import Difference
from ramify.analysis.compare.quoting import Excerpt
from ramify.analysis.compare.spacing import SpacedText, find_respaced
from ramify.analysis.compare.templates import Templates
from ramify.analysis.compare.text_diff import common_prefix_len, shares_sentences
from ramify.analysis.corpus import Corpus
from ramify.analysis.records import TextForm
from ramify.analysis.verdicts import CauseName, Certainty


@dataclass(frozen=True, slots=True)
class PairDifferences:
    """The differences; NEW_CONTENT is the last, at a place of the normal form of either text."""

    differences: tuple[Difference, ...] = ()
    stop_char: int | None = None  # in the second
    had_stop_char: int = 0  # in the first
    tail_chars: int = 0  # equal code points after the last value


def pair_differences(
    corpus: Corpus, templates: Templates, unit_a: int, unit_b: int, path: str, api: str
) -> PairDifferences | None:
    """How a unit differs from another; None if they have little in common."""
    a, b = corpus.units[unit_a], corpus.units[unit_b]
    if a.head != b.head or a.form in (TextForm.MEDIA, TextForm.TOKENS):
        return None
    text_a, text_b = corpus.text(unit_a), corpus.text(unit_b)
    normal_a, normal_b = templates.normal(unit_a), templates.normal(unit_b)
    is_equal = normal_a == normal_b
    differences = _form_differences(text_a, text_b, path, api, is_equal=is_equal)
    if is_equal:
        return PairDifferences(tuple(differences))
    values = _values(corpus, templates, normal_a, normal_b)
    if values is None:
        return None
    body_a, body_b = corpus.text(normal_a), corpus.text(normal_b)
    respaced = None
    if parse_json(text_a) is None or parse_json(text_b) is None:
        respaced = find_respaced(
            SpacedText(text_a, body_a, [value[0] for value in values]),
            SpacedText(text_b, body_b, [value[1] for value in values]),
        )
    tail = 0
    for number, ((start_a, end_a), (start_b, end_b), verdict) in enumerate(values):
        if respaced is not None and respaced.num_values <= number:
            differences.append(
                whitespace_of(text_a, text_b, path, respaced.char_a, respaced.char_b)
            )
            respaced = None
        if verdict.cause is None:
            return PairDifferences(
                (*differences, Difference(CauseName.NEW_CONTENT, Certainty.PROVED, path)),
                start_b,
                start_a,
            )
        had, got = Excerpt(body_a, start_a, end_a), Excerpt(body_b, start_b, end_b)
        differences.append(
            Difference(
                verdict.cause,
                Certainty.PROVED,
                path,
                had,
                got,
                verdict.is_volatile,
                verdict.kind,
                verdict.rule if _is_at_start(path) else "",
            )
        )
        tail = len(body_b) - end_b
    if respaced is not None:
        differences.append(whitespace_of(text_a, text_b, path, respaced.char_a, respaced.char_b))
    return PairDifferences(tuple(differences), tail_chars=tail)


def _is_at_start(path: str) -> bool:
    """Whether a segment stands before the messages, or is the first of them: what rules look at."""
    return not path.startswith("messages[") or path.startswith("messages[0]")


def _values(
    corpus: Corpus, templates: Templates, a: int, b: int
) -> list[tuple[tuple[int, int], tuple[int, int], SlotVerdict]] | None:
    """Places of the values that differ, and what they are."""
    text_a, text_b = corpus.text(a), corpus.text(b)
    template = templates.template_of(a)
    if template is not templates.template_of(b):
        template = None
    if template is None and len(text_b) > 400 and not shares_sentences(text_a, text_b):
        return None
    hunks = templates.hunks(a, b)
    places: list[tuple[tuple[int, int], SlotVerdict]] = []
    if template is not None:
        places = [
            (place, slot.verdict)
            for slot, place in zip(template.slots, templates.slot_places(template, b), strict=True)
            if place is not None and slot.verdict is not None
        ]
    elif 2 * sum(hunk.other_end - hunk.other_start for hunk in hunks) > len(text_b):
        return None
    kind, label = corpus.units[b].kind, corpus.units[b].label
    known = _Places(places)
    pairs = []
    for hunk in hunks:
        mine, theirs = (hunk.start, hunk.end), (hunk.other_start, hunk.other_end)
        verdict = known.verdict(theirs)
        starts_later = verdict is not None and known.starts_in_later_line(theirs[0], text_b)
        if verdict is None or starts_later:
            before = text_b[max(0, theirs[0] - MAX_CONTEXT) : theirs[0]]
            values = (text_a[mine[0] : mine[1]], text_b[theirs[0] : theirs[1]])
            after = text_b[theirs[1] : theirs[1] + MAX_CONTEXT]
            alone = judge_slot(Slot(kind, label, values, before, after))
            verdict = alone if verdict is None or alone.cause is not None else verdict
        pairs.append((mine, theirs, verdict))
    return pairs


class _Places:
    """Places of a text with the verdicts of all requests about them, found by position."""

    def __init__(self, places: list[tuple[tuple[int, int], SlotVerdict]]) -> None:
        self._places = places
        # In order but for a few: bounds of those before and of those behind each place.
        self._ends = list(accumulate((end for (_, end), _ in places), max))
        starts = (start for (start, _), _ in reversed(places))
        self._starts = list(accumulate(starts, min))[::-1]

    def verdict(self, at: tuple[int, int]) -> SlotVerdict | None:
        """The verdict about a place; None if the place is only a part of a larger one."""
        first, stop = bisect_left(self._ends, at[1]), bisect_right(self._starts, at[0])
        for (start, end), verdict in self._places[first:stop]:
            overlaps = start <= at[0] and at[1] <= end
            if overlaps and (verdict.cause is not None or end - start <= 2 * (at[1] - at[0]) + 8):
                return verdict
        return None

    def starts_in_later_line(self, at: int, text: str) -> bool:
        """Whether a value begins in another line than the place that holds it: two may have met."""
        first, stop = bisect_right(self._ends, at), bisect_left(self._starts, at)
        return any(
            start < at < end and "\n" in text[start:at]
            for (start, end), _ in self._places[first:stop]
        )


def _form_differences(
    had: str, got: str, path: str, api: str, *, is_equal: bool
) -> list[Difference]:
    """Order of keys and white space, judged apart from values."""
    differences = []
    json_a, json_b = parse_json(had), parse_json(got)
    if json_a is not None and json_b is not None and key_orders_differ(json_a, json_b):
        is_parsed = "anthropic" in api
        at = common_prefix_len(had, got)
        differences.append(
            Difference(
                CauseName.KEY_ORDER,
                Certainty.LIKELY if is_parsed else Certainty.PROVED,
                path,
                Excerpt(had, max(0, at - 1), at + 60),
                Excerpt(got, max(0, at - 1), at + 60),
            )
        )
    if is_equal and (not differences or _layout(had) != _layout(got)):
        differences.append(whitespace_of(had, got, path))
    return differences


def _layout(text: str) -> tuple[bool, bool, bool]:
    """How JSON is written, in strings of JSON too: escapes, line ends, blanks after separators."""
    has_line_end = "\n" in text or "\\n" in text
    return ("\\u" in text, has_line_end, '": ' in text or '", ' in text)


def whitespace_of(
    had: str, got: str, path: str, char_a: int | None = None, char_b: int | None = None
) -> Difference:
    """White space that differs, at its place in each text; by default at the first difference."""
    if char_a is None or char_b is None:
        char_a = char_b = common_prefix_len(had, got)
    return Difference(
        CauseName.WHITESPACE,
        Certainty.PROVED,
        path,
        Excerpt(had, max(0, char_a - 8), char_a + 12),
        Excerpt(got, max(0, char_b - 8), char_b + 12),
    )
