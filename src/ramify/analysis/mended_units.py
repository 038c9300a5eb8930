"""Segments as they would be if causes within a text were mended: values constant, one form."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ramify.analysis.corpus import Corpus
from ramify.analysis.normal_forms import parse_json
from ramify.analysis.records import Segment, TextForm
from ramify.analysis.templates import Templates
from ramify.analysis.verdicts import CauseName

VALUES = frozenset(
    {
        CauseName.CLOCK,
        CauseName.RANDOM_ID,
        CauseName.PATH_OR_STATE,
        CauseName.BILLING_HEADER,
    }
)
FORMS = frozenset({CauseName.KEY_ORDER, CauseName.WHITESPACE})


class MendedUnits:
    """Mends units: a value becomes its slot's constant, a form that of most requests."""

    def __init__(self, corpus: Corpus, templates: Templates) -> None:
        self._corpus, self._templates = corpus, templates
        self._usual_form = self._find_usual_forms()

    def mend(self, unit: int, causes: Collection[CauseName]) -> int:
        """The unit without these causes."""
        values = VALUES.intersection(causes)
        if values:
            return self._templates.canonical(unit, values)
        if not FORMS.isdisjoint(causes):
            normal = self._templates.normal(unit)
            return self._usual_form.get(normal, normal)
        return unit

    def splice(
        self, units: tuple[int, int], mended: tuple[int, int], content: tuple[int, int]
    ) -> int:
        """The second unit mended, with the start that the first has if mended.

        Args:
            units: two units as sent, whose starts differ in values only.
            mended: the same without their causes.
            content: where their contents begin to differ, in both normal forms.
        """
        corpus = self._corpus
        tails = [
            corpus.text(self._templates.normal(unit))[at:]
            for unit, at in zip(units, content, strict=True)
        ]
        base, own = (corpus.text(unit) for unit in mended)
        if not base.endswith(tails[0]) or not own.endswith(tails[1]):
            return mended[1]  # a value changes in the content as well
        stored = corpus.units[mended[1]]
        text = base[: len(base) - len(tails[0])] + tails[1]
        return corpus.unit_of(Segment("", stored.kind, text, stored.form, stored.label))

    def _find_usual_forms(self) -> dict[int, int]:
        """By normal form of JSON, the unit that most requests have; of several, the first.

        Other text is normalised: two texts with the same start share it in the normal form only.
        """
        counts = np.zeros(len(self._corpus.units), np.int64)
        for request in self._corpus:
            np.add.at(counts, request.units, 1)
        usual: dict[int, int] = {}
        for unit in np.flatnonzero(counts).tolist():
            if self._corpus.units[unit].form in (TextForm.MEDIA, TextForm.TOKENS):
                continue
            if parse_json(self._corpus.text(unit)) is None:
                continue
            known = usual.setdefault(self._templates.normal(unit), unit)
            if counts[unit] > counts[known]:
                usual[self._templates.normal(unit)] = unit
        return usual
