"""Prompts as they would be if causes were mended: the same for all requests of a log."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, takewhile
from typing import NamedTuple

import numpy as np

from ramify.analysis.compare.context_blocks import message_of
from ramify.analysis.compare.prompt_sides import Difference, PlacedUnit
from ramify.analysis.compare.templates import Templates
from ramify.analysis.corpus import Corpus, StoredRequest
from ramify.analysis.predecessor import Match
from ramify.analysis.providers.prompts import ReplayPrompt
from ramify.analysis.records import SegmentKind
from ramify.analysis.savings.mended_units import MendedUnits
from ramify.analysis.savings.repeated_blocks import RepeatedBlocks
from ramify.analysis.verdicts import VALUES, CauseName


class Fix(NamedTuple):
    """A cause that is mended at a place; numbers of tools and of later messages are `*`."""

    cause: CauseName
    segment: str = ""  # empty: a cause that has no place in the text


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


Groups = tuple[tuple[PlacedUnit, ...], ...]  # what stands for each segment after the tools
_Fixes = frozenset[Fix]


@dataclass(frozen=True, slots=True)
class _Step:
    """`WalkStep` with the places of findings."""

    start: tuple[int, int]
    stop: tuple[int, int]
    causes: _Fixes
    content: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a prompt is made equal to that of its match."""

    match: int
    settings: dict[str, Fix | None]  # those that differ as sent, and why
    has_other_tools: bool  # as sent
    tools: _Fixes  # causes in the tools
    steps: tuple[_Step, ...]
    end: tuple[int, int]

    @classmethod
    def of(cls, match: Match, earlier: StoredRequest) -> _Recipe:
        """From the differences of a match."""
        waste = [(item.segment, _fix_of(item)) for item in match.differences if item.is_waste]
        reasons = dict(waste)
        (mine, tools), (theirs, other_tools) = map(_outer, (match.request, earlier))
        return cls(
            match=earlier.number,
            settings={
                path: reasons.get(path)
                for path in mine | theirs
                if mine.get(path) != theirs.get(path)
            },
            has_other_tools=tools != other_tools,
            tools=frozenset(place for path, place in waste if path.startswith("tools[")),
            steps=tuple(
                _Step(
                    step.start,
                    step.stop,
                    frozenset(Fix(cause, generalise(path)) for cause, path in step.causes),
                    step.content,
                )
                for step in match.steps
            ),
            end=match.end,
        )


@dataclass(frozen=True, slots=True)
class _Mended:
    """A mended prompt, by the segments of the prompt as sent."""

    settings: dict[str, PlacedUnit]
    tools: tuple[PlacedUnit, ...]
    groups: Groups  # in place of each segment after the tools, and at the end
    blocks: frozenset[str] = frozenset()  # of context that stay where they were sent first


class PromptFixer:
    """Applies fixes to the prompts of a log that was matched.

    Values become constants and forms become equal in each prompt by itself. Whatever
    else differs from the best match is taken from there, and so from the first prompt that had it.

    A finding names the first place of its cause in a request. Its fix mends the later places too.
    """

    def __init__(self, corpus: Corpus, templates: Templates, matches: Iterable[Match] = ()) -> None:
        self._corpus, self._templates = corpus, templates
        self._units = MendedUnits(corpus, templates)
        self._blocks = RepeatedBlocks(corpus)
        self._recipes: dict[int, _Recipe] = {}
        self._later_places: dict[Fix, set[Fix]] = {}
        for match in matches:
            if match.match is not None:
                self._recipes[match.request.number] = _Recipe.of(match, match.match)
                self._note_places(match.differences)
                self._note_steps(match.match, match)
        self._given: _Fixes = frozenset()
        self._fixes: _Fixes = frozenset()  # those given, and their later places
        self._memo: dict[int, _Mended] = {}
        self._causes_at: dict[str, frozenset[CauseName]] = {}  # by path, of the present fixes

    def _note_places(self, differences: Sequence[Difference]) -> None:
        first: dict[CauseName, Fix] = {}
        for item in differences:
            if item.is_waste and item.cause not in VALUES:
                fix = _fix_of(item)
                named = first.setdefault(fix.cause, fix)
                self._later_places.setdefault(named, set()).add(fix)

    def _note_steps(self, earlier: StoredRequest, match: Match) -> None:
        moved = [
            step
            for step in match.steps
            if any(cause is CauseName.CONTEXT_MOVED for cause, _ in step.causes)
        ]
        if moved:
            first = self._starts(earlier)[1], self._starts(match.request)[1]
            for step in moved:
                self._blocks.note(earlier, match.request, first, step)

    def mend(self, request: StoredRequest, fixes: Collection[Fix]) -> ReplayPrompt:
        """The request's prompt without these causes."""
        self._start(fixes)
        return self._join(request, self._mend(request.number))

    def _start(self, fixes: Collection[Fix]) -> None:
        """Forget what was mended if these are other fixes."""
        given = frozenset(fixes)
        if given != self._given:
            later = (self._later_places.get(fix, ()) for fix in given)
            self._given, self._fixes = given, given.union(*later)
            self._memo, self._causes_at = {}, {}

    def _join(self, request: StoredRequest, mended: _Mended) -> ReplayPrompt:
        marks = dict(request.breakpoints)
        segments = list(mended.settings.values())
        breakpoints: dict[int, float] = {}
        segments += mended.tools
        first = len(request.units) - len(mended.groups) + 1
        for sent, group in enumerate(mended.groups, first):
            segments += group
            if sent in marks and segments:  # that of a dropped segment is at the one before
                breakpoints[len(segments) - 1] = marks[sent]
        segments = list(self._in_order(segments))
        return ReplayPrompt(
            request,
            units=np.array([unit for unit, _ in segments], np.uint32),
            paths=tuple(self._numbered(segments)),
            breakpoints=tuple(breakpoints.items()),
        )

    def _in_order(self, segments: Sequence[PlacedUnit]) -> Iterator[PlacedUnit]:
        """The segments, with the parts of messages in order where that is mended."""
        mended = [place for cause, place in self._fixes if cause is CauseName.CONTEXT_ORDER]
        heads = {place.partition(".")[0] for place in mended}
        for head, parts in groupby(segments, message_of):
            if generalise(head) in heads:
                yield from self._templates.order.sorted_parts(list(parts))
            else:
                yield from parts

    def _numbered(self, segments: Iterable[PlacedUnit]) -> Iterator[str]:
        """Paths with the messages numbered as they stand: those of the match have its numbers."""
        number, last = -1, ("", "")
        for unit, path in segments:
            head, bracket, tail = path.partition("]")
            if not head.startswith("messages["):
                yield path
                continue
            message = head, self._corpus.units[unit].label.partition(" ")[0]
            number, last = number + (message != last), message
            yield f"messages[{number}{bracket}{tail}"

    def _mend(self, number: int) -> _Mended:
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
        return self._memo[number]

    def _apply(self, request: StoredRequest, recipe: _Recipe | None) -> _Mended:
        """The request's prompt by itself, and then as its match has it."""
        segments = [
            (self._mend_unit(unit, path), path)
            for unit, path in zip(request.units.tolist(), request.paths, strict=True)
        ]
        num_settings, first = self._starts(request)
        settings = {path: (unit, path) for unit, path in segments[:num_settings]}
        tools = tuple(segments[num_settings:first])
        own = segments[first:]
        if recipe is None:
            return _Mended(settings, tools, (*((item,) for item in own), ()))
        base = self._memo[recipe.match]
        sent = self._corpus.requests[recipe.match]
        groups = self._groups(own, base, recipe, request, sent)
        blocks = self._drop_repeated(groups, base.blocks, recipe, request)
        return _Mended(
            self._settings(settings, base, recipe),
            self._tools(tools, base, recipe),
            tuple(map(tuple, groups)),
            blocks,
        )

    def _drop_repeated(
        self,
        groups: list[list[PlacedUnit]],
        known: frozenset[str],
        recipe: _Recipe,
        request: StoredRequest,
    ) -> frozenset[str]:
        """Drop from new messages the blocks that older ones keep; returns these blocks."""
        cause = CauseName.CONTEXT_MOVED
        moved = self._blocks.moved(request)
        known |= {block for path, block in moved if Fix(cause, generalise(path)) in self._fixes}
        new = recipe.end[1]
        older = chain(*groups[:new], groups[new][:-1])  # what the match has stands before the new
        standing_blocks = self._blocks.standing(known, older)
        for group in groups[new:-1] if standing_blocks else ():
            group[-1:] = self._blocks.without(group[-1:], standing_blocks)
        return standing_blocks

    def _settings(
        self, own: dict[str, PlacedUnit], base: _Mended, recipe: _Recipe
    ) -> dict[str, PlacedUnit]:
        """The match's settings where they are equal as sent, or where their change is mended."""
        out: dict[str, PlacedUnit] = {}
        for path in sorted(own | base.settings, key=lambda path: (path != "settings.model", path)):
            differs = path in recipe.settings and recipe.settings[path] not in self._fixes
            source = own if differs else base.settings
            if path in source:
                out[path] = source[path]
        return out

    def _tools(
        self, own: tuple[PlacedUnit, ...], base: _Mended, recipe: _Recipe
    ) -> tuple[PlacedUnit, ...]:
        """The match's tools if they are equal as sent, or if all that differs is mended."""
        is_mended = bool(recipe.tools) and recipe.tools <= self._fixes
        return base.tools if is_mended or not recipe.has_other_tools else own

    def _groups(
        self,
        own: Sequence[PlacedUnit],
        base: _Mended,
        recipe: _Recipe,
        request: StoredRequest,
        sent: StoredRequest,
    ) -> list[list[PlacedUnit]]:
        """What stands for each segment after the tools: the match's where equal or mended."""
        groups: list[list[PlacedUnit]] = [[] for _ in range(len(own) + 1)]
        i = j = 0
        for step in (*recipe.steps, _Step(recipe.end, recipe.end, frozenset())):
            while j < step.start[1]:
                groups[j] += base.groups[i]
                i, j = i + 1, j + 1
            if step.causes and step.causes <= self._fixes:
                for at in range(i, step.stop[0]):
                    groups[min(j + at - i, max(j, step.stop[1] - 1))] += base.groups[at]
            else:
                for at in range(j, step.stop[1]):
                    groups[at].append(own[at])
            i, j = step.stop
        for at in range(j, len(own)):
            groups[at].append(own[at])
        last = recipe.steps[-1] if recipe.steps else None
        is_mended = last is not None and bool(last.causes) and last.causes <= self._fixes
        if last is not None and last.content is not None and is_mended and base.groups[i]:
            (_, path), base_unit = own[j], base.groups[i][-1][0]
            units = _unit_at(sent, base.groups, i), _unit_at(request, groups, j)
            unit = self._units.splice(units, (base_unit, own[j][0]), last.content)
            groups[j] = [(unit, path)]
        return groups

    def _starts(self, request: StoredRequest) -> tuple[int, int]:
        """Number of settings, and place of the first segment after settings and tools."""
        kinds = [self._corpus.units[unit].kind for unit in request.units.tolist()]
        num_settings = sum(1 for _ in takewhile(lambda kind: kind is SegmentKind.SETTING, kinds))
        tools = takewhile(lambda kind: kind is SegmentKind.TOOL, kinds[num_settings:])
        return num_settings, num_settings + sum(1 for _ in tools)

    def _mend_unit(self, unit: int, path: str) -> int:
        here = self._causes_at.get(path)
        if here is None:
            # A text may be sent as the content, or as the first block of a list.
            head, dot, _ = path.partition(".content[")
            other = head if dot else f"{path}.content[0]"
            places = generalise(path), path, generalise(other), other
            here = frozenset(cause for cause, segment in self._fixes if segment in places)
            self._causes_at[path] = here
        return self._units.mend(unit, here) if here else unit


def _outer(request: StoredRequest) -> tuple[dict[str, int], list[int]]:
    """Units of a request's settings by path, and of its tools."""
    segments = list(zip(request.paths, request.units.tolist(), strict=True))
    settings = {path: unit for path, unit in segments if path.startswith("settings.")}
    return settings, [unit for path, unit in segments if path.startswith("tools[")]


def _fix_of(difference: Difference) -> Fix:
    return Fix(difference.cause, generalise(difference.segment))


def _unit_at(request: StoredRequest, groups: Sequence[object], at: int) -> int:
    """Unit of a segment after the tools; there is a group for each, and one at the end."""
    return int(request.units[len(request.units) - len(groups) + 1 + at])
