"""Segments as they would be if causes within a text were mended: values constant, one form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np

from ramify.analysis.compare.normal_forms import key_orders_differ, parse_json, style_of, write_as
from ramify.analysis.compare.spacing import places_in_text
from ramify.analysis.compare.templates import Templates, replace_places
from ramify.analysis.corpus import Corpus
from ramify.analysis.records import TextForm
from ramify.analysis.verdicts import VALUES, CauseName

FORMS = frozenset({CauseName.KEY_ORDER, CauseName.WHITESPACE})


class MendedUnits:
    """Mends units: a value becomes its slot's constant, a form that of most requests.

    What is not asked for stays as sent: a text whose values alone are mended keeps its white space.
    """

    def __init__(self, corpus: Corpus, templates: Templates) -> None:
        self._corpus, self._templates = corpus, templates
        self._usual_form = self._find_usual_forms()
        self._memo: dict[tuple[int, frozenset[CauseName]], int] = {}

    def mend(self, unit: int, causes: Collection[CauseName]) -> int:
        """The unit without these causes."""
        if self._corpus.units[unit].form in (TextForm.MEDIA, TextForm.TOKENS):
            return unit
        values, forms = VALUES.intersection(causes), FORMS.intersection(causes)
        known = self._memo.get((unit, values | forms))
        if known is None:
            known = self._memo[unit, values | forms] = self._mend(unit, values, forms)
        if CauseName.CONTEXT_ORDER in causes:
            return self._templates.order.mend(known)
        return known

    def _mend(self, unit: int, values: frozenset[CauseName], forms: frozenset[CauseName]) -> int:
        text, normal = self._corpus.text(unit), self._corpus.text(self._templates.normal(unit))
        is_json = parse_json(text) is not None
        if not is_json:
            forms -= {CauseName.KEY_ORDER}
        volatile = self._templates.volatile_values(unit, values) if values else []
        if is_json and forms and not volatile:
            return self._in_usual_form(unit, forms)
        if forms:
            return self._templates.canonical(unit, values)
        if not volatile:
            return unit
        mended = _with_values(text, normal, volatile)
        if mended is None:
            return self._templates.canonical(unit, values)
        return self._corpus.unit_like(unit, mended)

    def _in_usual_form(self, unit: int, forms: frozenset[CauseName]) -> int:
        """JSON with the order of keys, or with the white space and escapes, that most requests have."""
        usual = self._usual_form.get(self._templates.normal(unit), unit)
        if forms == FORMS or usual == unit:
            return usual
        text, usual_text = self._corpus.text(unit), self._corpus.text(usual)
        has_other_order = key_orders_differ(parse_json(text), parse_json(usual_text))
        if CauseName.KEY_ORDER in forms:
            if not has_other_order:
                return unit
            written = write_as(parse_json(usual_text), text)
        elif not has_other_order:
            return usual
        else:
            written = write_as(parse_json(text), usual_text)
        return usual if written is None else self._corpus.unit_like(unit, written)

    def splice(
        self, units: tuple[int, int], mended: tuple[int, int], content: tuple[int, int]
    ) -> int:
        """The second unit mended, with the start that the first has if mended.

        Args:
            units: two units as sent, whose starts differ in values only.
            mended: the same without their causes.
            content: where their contents begin to differ, in both normal forms.
        """
        base, own = (self._corpus.text(unit) for unit in mended)
        had, got = (self._tails(unit, at) for unit, at in zip(units, content, strict=True))
        for tail, own_tail in zip(had, got, strict=True):
            if base.endswith(tail) and own.endswith(own_tail):
                return self._corpus.unit_like(mended[1], base[: len(base) - len(tail)] + own_tail)
        return mended[1]  # a value changes in the content as well

    def _tails(self, unit: int, at: int) -> tuple[str, str]:
        """What follows a place of the normal form, in the text and in the normal form."""
        text, normal = self._corpus.text(unit), self._corpus.text(self._templates.normal(unit))
        places = places_in_text(text, normal, [(at, at)])
        return text[places[0][0] if places else len(text) :], normal[at:]

    def _find_usual_forms(self) -> dict[int, int]:
        """By normal form of JSON that is sent in several: the unit in the style of most requests.

        Requests vote for styles with all such JSON, and for the order of keys with this unit.
        Other text is normalised: two texts with the same start share it in the normal form only.
        """
        counts = np.zeros(len(self._corpus.units), np.int64)
        for request in self._corpus:
            np.add.at(counts, request.units, 1)
        forms: dict[int, list[int]] = {}
        for unit in np.flatnonzero(counts).tolist():
            forms.setdefault(self._templates.normal(unit), []).append(unit)
        several = {
            normal: units
            for normal, units in forms.items()
            if len(units) > 1 and parse_json(self._corpus.text(normal)) is not None
        }
        style = {
            unit: style_of(self._corpus.text(unit)) for units in several.values() for unit in units
        }
        votes: Counter[int] = Counter()
        for unit, number in style.items():
            votes[number] += int(counts[unit])
        return {
            normal: max(units, key=lambda unit: (votes[style[unit]], counts[unit]))
            for normal, units in several.items()
        }


_Values = Sequence[tuple[int, int, str]]  # start and end in the normal form, and the constant


def _with_values(text: str, normal: str, values: _Values) -> str | None:
    """A text with constants for values; None if its words are not those of its normal form."""
    spans = places_in_text(text, normal, [(start, end) for start, end, _ in values])
    if spans is None:
        return None
    constants = (constant for _, _, constant in values)
    return replace_places(
        text, [(*span, constant) for span, constant in zip(spans, constants, strict=True)]
    )
