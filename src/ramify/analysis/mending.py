"""Prompts as they would be if causes were mended: the same for all requests of a log."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.matching import Match
from ramify.analysis.message_walk import OF_HISTORY
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
_TOOLS = frozenset({CauseName.TOOL_ORDER, CauseName.TOOL_CHANGED})
_SETTINGS = frozenset({CauseName.SETTINGS_CHANGED, CauseName.MODEL_CHANGED})


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
    match: int
    splice: tuple[int, int] | None
    causes: frozenset[CauseName]


_Segments = list[tuple[int, str, int]]  # unit, path, segment of the request it came from or -1


class Mender:
    """Applies fixes to the prompts of a log that was matched.

    A value becomes a constant, tools and keys are sorted, settings and edited history are those of the
    best match.
    """

    def __init__(self, corpus: Corpus, templates: Templates, matches: Iterable[Match] = ()) -> None:
        self._corpus, self._templates = corpus, templates
        self._recipes: dict[int, _Recipe] = {}
        for match in matches:
            causes = frozenset(item.cause for item in match.differences)
            if match.match is not None and causes & (OF_HISTORY | _TOOLS | _SETTINGS):
                self._recipes[match.request.number] = _Recipe(
                    match.match.number, match.splice, causes
                )
        self._memo: dict[
            tuple[frozenset[tuple[CauseName, str]], int], tuple[_Segments, int, int]
        ] = {}

    def mend(self, request: StoredRequest, fixes: Collection[AppliedFix]) -> MendedPrompt:
        """The request's prompt without these causes."""
        key = frozenset((fix.cause, fix.segment) for fix in fixes)
        segments = self._mend(request, key)
        marks = dict(request.breakpoints)
        return MendedPrompt(
            units=np.array([unit for unit, _, _ in segments], np.uint32),
            paths=tuple(path for _, path, _ in segments),
            breakpoints=tuple(
                (at, marks[source]) for at, (_, _, source) in enumerate(segments) if source in marks
            ),
        )

    def _mend(self, request: StoredRequest, fixes: frozenset[tuple[CauseName, str]]) -> _Segments:
        """Mends matches before the requests that build on them, without recursion."""
        stack = [request.number]
        while stack:
            number = stack[-1]
            recipe = self._recipes.get(number)
            needs = (
                recipe is not None
                and recipe.causes & {cause for cause, _ in fixes}
                and (fixes, recipe.match) not in self._memo
            )
            if needs and recipe is not None:
                stack.append(recipe.match)
                continue
            stack.pop()
            if (fixes, number) not in self._memo:
                self._memo[fixes, number] = self._apply(self._corpus.requests[number], fixes)
        return self._memo[fixes, request.number][0]

    def _apply(
        self, request: StoredRequest, fixes: frozenset[tuple[CauseName, str]]
    ) -> tuple[_Segments, int, int]:
        """The segments; and where the part that is the request's own begins: here, and as sent."""
        causes = {cause for cause, _ in fixes}
        segments: _Segments = [
            (self._mend_unit(unit, path, fixes), path, at)
            for at, (unit, path) in enumerate(
                zip(request.units.tolist(), request.paths, strict=True)
            )
        ]
        if CauseName.TOOL_ORDER in causes:
            segments = self._sort_tools(segments)
        recipe = self._recipes.get(request.number)
        if recipe is None or not recipe.causes & causes:
            return segments, 0, 0
        base, base_own, base_sent = self._memo[fixes, recipe.match]
        if recipe.causes & causes & _SETTINGS:
            segments = self._replace(SegmentKind.SETTING, base, segments)
        if CauseName.TOOL_CHANGED in recipe.causes & causes:
            segments = self._replace(SegmentKind.TOOL, base, segments)
        if recipe.splice is None or not recipe.causes & causes & OF_HISTORY:
            return segments, 0, 0
        mine, theirs = self._rest_start(segments), self._rest_start(base)
        cut_base, cut_own = recipe.splice
        if cut_base > base_sent:
            cut_base = base_own + cut_base - base_sent
        else:
            cut_base = min(cut_base, base_own) if base_own else cut_base
        kept: _Segments = [(unit, path, -1) for unit, path, _ in base[theirs : theirs + cut_base]]
        return [*segments[:mine], *kept, *segments[mine + cut_own :]], len(kept), cut_own

    def _mend_unit(self, unit: int, path: str, fixes: frozenset[tuple[CauseName, str]]) -> int:
        place = generalise(path)
        here = {cause for cause, segment in fixes if segment in (place, path)}
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

    def _replace(self, kind: SegmentKind, base: _Segments, segments: _Segments) -> _Segments:
        taken = [(unit, path, -1) for unit, path, _ in base if self._kind((unit, path, 0)) is kind]
        order = list(SegmentKind)
        before = [s for s in segments if order.index(self._kind(s)) < order.index(kind)]
        after = [s for s in segments[len(before) :] if self._kind(s) is not kind]
        return [*before, *taken, *after]

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
