"""Parts of conversations that a log never shows, and stand-ins for them.

A tool result that is cleared before its conversation is sent again, and reasoning that is never sent
back, are in no prompt. Mended prompts would have them. The longest part of the kind that the log shows
stands in for each, so that a replay bounds what they would add.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain, groupby

from ramify.analysis.compare.prompt_sides import PlacedUnit, WalkStep, is_reasoning
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.records import Segment, SegmentKind
from ramify.analysis.verdicts import CauseName

HIDING = frozenset({CauseName.HISTORY_EDITED, CauseName.REASONING_DROPPED})

Groups = tuple[tuple[PlacedUnit, ...], ...]  # what stands for each segment after the tools

_OTHERS = frozenset({"user", "system", "developer", "tool", "function_call_output"})


class UnseenParts:
    """The longest parts that were hidden after they were shown, and the stubs in their places."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._reasoning: PlacedUnit | None = None
        self._result: int | None = None
        self._stubs: set[int] = set()  # hashes of texts

    def note(
        self, earlier: StoredRequest, request: StoredRequest, first: tuple[int, int], step: WalkStep
    ) -> None:
        """Learn from a step between two prompts, whose segments after the tools begin at `first`."""
        causes = {cause for cause, _ in step.causes}
        had = range(first[0] + step.start[0], first[0] + step.stop[0])
        if CauseName.REASONING_DROPPED in causes:
            for at in had:
                unit, path = int(earlier.units[at]), earlier.paths[at]
                known = -1 if self._reasoning is None else self._num_tokens(self._reasoning[0])
                if is_reasoning(self._corpus, unit, path) and self._num_tokens(unit) > known:
                    self._reasoning = unit, path
        if CauseName.HISTORY_EDITED in causes:
            got = range(first[1] + step.start[1], first[1] + step.stop[1])
            for at, other in zip(had, got, strict=False):
                self._note_stub(int(earlier.units[at]), int(request.units[other]))

    def _note_stub(self, had: int, got: int) -> None:
        full, stub = self._corpus.units[had], self._corpus.units[got]
        if full.label == stub.label and " " in full.label and stub.num_chars < full.num_chars:
            self._stubs.add(hash(self._corpus.text(got)))
            if self._result is None or self._num_tokens(had) > self._num_tokens(self._result):
                self._result = had

    def _num_tokens(self, unit: int) -> int:
        return self._corpus.units[unit].num_tokens

    def fill(self, groups: Groups, causes: Collection[CauseName], *, has_reasoning: bool) -> Groups:
        """A mended prompt with stand-ins for the parts that these causes hide.

        Args:
            groups: the prompt after the tools.
            causes: those that are mended.
            has_reasoning: the app sends reasoning; else its answers have none to drop.
        """
        if CauseName.HISTORY_EDITED in causes and self._result is not None:
            fill_stub = partial(self._fill_stub, self._result)
            groups = tuple(tuple(map(fill_stub, group)) for group in groups)
        if CauseName.REASONING_DROPPED in causes and self._reasoning is not None and has_reasoning:
            groups = self._with_reasoning(groups, self._reasoning)
        return groups

    def _fill_stub(self, result: int, segment: PlacedUnit) -> PlacedUnit:
        unit, path = segment
        stored = self._corpus.units[unit]
        if " " not in stored.label or hash(self._corpus.text(unit)) not in self._stubs:
            return segment
        text, form = self._corpus.text(result), self._corpus.units[result].form
        return self._corpus.unit_of(Segment("", stored.kind, text, form, stored.label)), path

    def _with_reasoning(self, groups: Groups, reasoning: PlacedUnit) -> Groups:
        """With reasoning before each run of the model's segments that has none."""
        out = list(groups)
        filled = (at for at, group in enumerate(groups) if group)
        for is_of_model, run in groupby(filled, lambda at: self._is_of_model(groups[at])):
            places = list(run)
            segments = chain(*(groups[at] for at in places))
            if is_of_model and not any(is_reasoning(self._corpus, *item) for item in segments):
                out[places[0]] = (reasoning, *out[places[0]])
        return tuple(out)

    def _is_of_model(self, group: Sequence[PlacedUnit]) -> bool:
        """Whether a group ends with a segment that the model has written."""
        stored = self._corpus.units[group[-1][0]]
        role = stored.label.partition(" ")[0]
        return stored.kind is SegmentKind.MESSAGE and role not in _OTHERS
