"""Prompts as they would be if causes were mended: the same for all requests of a log."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.matching import Match
from ramify.analysis.records import SegmentKind
from ramify.analysis.savings import AppliedFix
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
_FORMS = frozenset({CauseName.KEY_ORDER, CauseName.WHITESPACE})


@dataclass(frozen=True, slots=True)
class Fix:
    """A cause that is mended at a place; numbers of tools and of later messages are `*`."""

    cause: CauseName
    segment: str


@dataclass(frozen=True, slots=True)
class MendedPrompt:
    """A prompt with causes mended."""

    units: NDArray[np.uint32]  # [segments]
    paths: tuple[str, ...]  # [segments]
    breakpoints: tuple[tuple[int, float], ...]


@lru_cache(1 << 16)
def generalise(segment: str) -> str:
    """The place of a finding: a tool or a message after the second has `*` for its number."""
    head, bracket, rest = segment.partition("[")
    if not bracket or head == "system":
        return segment
    number, _, tail = rest.partition("]")
    if head == "tools" or (number.isdecimal() and int(number) > 1):
        return f"{head}[*]{re.sub(r'[0-9]+', '*', tail)}"
    return segment


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a prompt is made equal to that of its match, up to a place in both."""

    match: int
    steps: tuple[tuple[CauseName, str, int, int], ...]
    end: tuple[int, int]
    outer: frozenset[tuple[CauseName, str]]  # causes in settings and tools, with their places


_Segments = list[tuple[int, str, int]]  # unit, path, segment of the request it stands for or -1
_Fixes = frozenset[tuple[CauseName, str]]


class Mender:
    """Applies fixes to the prompts of a log that was matched.

    A value becomes a constant, tools and keys are sorted; what a request shares with its best match if
    mended is taken from the match.
    """

    def __init__(self, corpus: Corpus, templates: Templates, matches: Iterable[Match] = ()) -> None:
        self._corpus, self._templates = corpus, templates
        self._recipes: dict[int, _Recipe] = {}
        for match in matches:
            if match.match is not None and match.end != (0, 0):
                self._recipes[match.request.number] = _Recipe(
                    match.match.number,
                    match.steps,
                    match.end,
                    frozenset(
                        (item.cause, generalise(item.segment))
                        for item in match.differences
                        if item.segment.startswith(("settings", "tools"))
                    ),
                )
        self._fixes: _Fixes = frozenset()
        self._memo: dict[int, tuple[_Segments, int, int]] = {}
        self._causes_at: dict[str, frozenset[CauseName]] = {}  # by path, of the present fixes

    def mend(self, request: StoredRequest, fixes: Collection[AppliedFix]) -> MendedPrompt:
        """The request's prompt without these causes."""
        key = frozenset((fix.cause, fix.segment) for fix in fixes)
        if key != self._fixes:
            self._fixes, self._memo, self._causes_at = key, {}, {}
        segments = self._mend(request.number)
        marks = dict(request.breakpoints)
        return MendedPrompt(
            units=np.array([unit for unit, _, _ in segments], np.uint32),
            paths=tuple(path for _, path, _ in segments),
            breakpoints=tuple(
                (at, marks[source]) for at, (_, _, source) in enumerate(segments) if source in marks
            ),
        )

    def _mend(self, number: int) -> _Segments:
        """Mends matches before the requests that build on them, without recursion."""
        stack = [number]
        while stack:
            recipe = self._recipes.get(stack[-1])
            if recipe is not None and recipe.match not in self._memo:
                stack.append(recipe.match)
                continue
            at = stack.pop()
            if at not in self._memo:
                self._memo[at] = self._apply(self._corpus.requests[at], recipe)
        return self._memo[number][0]

    def _apply(self, request: StoredRequest, recipe: _Recipe | None) -> tuple[_Segments, int, int]:
        """The segments; and where the request's own part begins after the tools: here, and as sent."""
        segments: _Segments = [
            (self._mend_unit(unit, path), path, at)
            for at, (unit, path) in enumerate(
                zip(request.units.tolist(), request.paths, strict=True)
            )
        ]
        if any(cause is CauseName.TOOL_ORDER for cause, _ in self._fixes):
            segments = self._sort_tools(segments)
        if recipe is None:
            return segments, 0, 0
        base, base_own, base_sent = self._memo[recipe.match]
        if recipe.outer <= self._fixes:
            head = [s for s in base if self._kind(s) in (SegmentKind.SETTING, SegmentKind.TOOL)]
            own = [s for s in segments if self._kind(s) in (SegmentKind.SETTING, SegmentKind.TOOL)]
            segments = [*_with_places(head, own), *segments[len(own) :]]
        cut_base, cut_own = recipe.end
        for cause, place, i, j in recipe.steps:
            if (cause, generalise(place)) not in self._fixes:
                cut_base, cut_own = i, j
                break
        cut_base += base_own - base_sent
        mine, theirs = self._rest_start(segments), self._rest_start(base)
        if cut_base <= 0:
            return segments, 0, 0
        kept = _with_places(
            base[theirs : theirs + cut_base], segments[mine : mine + cut_own], from_end=True
        )
        return [*segments[:mine], *kept, *segments[mine + cut_own :]], len(kept), cut_own

    def _mend_unit(self, unit: int, path: str) -> int:
        here = self._causes_at.get(path)
        if here is None:
            places = generalise(path), path
            here = frozenset(cause for cause, segment in self._fixes if segment in places)
            self._causes_at[path] = here
        if not here:
            return unit
        if here & VALUES:
            return self._templates.canonical(unit, frozenset(here & VALUES))
        return self._templates.normal(unit) if here & _FORMS else unit

    def _sort_tools(self, segments: _Segments) -> _Segments:
        tools = [item for item in segments if self._kind(item) is SegmentKind.TOOL]
        first = next(
            (at for at, item in enumerate(segments) if self._kind(item) is SegmentKind.TOOL), 0
        )
        ordered = sorted(
            tools, key=lambda item: self._corpus.text(self._templates.canonical(item[0]))
        )
        return [*segments[:first], *ordered, *segments[first + len(tools) :]]

    def _rest_start(self, segments: _Segments) -> int:
        return next(
            (
                at
                for at, item in enumerate(segments)
                if self._kind(item) not in (SegmentKind.SETTING, SegmentKind.TOOL)
            ),
            len(segments),
        )

    def _kind(self, item: tuple[int, str, int]) -> SegmentKind:
        return self._corpus.units[item[0]].kind


def _with_places(taken: _Segments, own: _Segments, *, from_end: bool = False) -> _Segments:
    """Segments of another request, which stand for those of a request's own at the same places."""
    shift = len(own) - len(taken) if from_end else 0
    places = [own[at + shift][2] if 0 <= at + shift < len(own) else -1 for at in range(len(taken))]
    return [(unit, path, place) for (unit, path, _), place in zip(taken, places, strict=True)]
