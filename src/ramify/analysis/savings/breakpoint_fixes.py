"""Breakpoints that a fix places or takes away."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.analysis.providers.positions import BlockRoles
from ramify.analysis.providers.prompts import PromptLayout, ReplayPrompt
from ramify.analysis.records import SegmentKind

Breakpoints = tuple[tuple[int, float], ...]

DEFAULT_TTL_S = 300.0  # of a new breakpoint, where the rule has no lifetime


def add_breakpoint(layout: PromptLayout, place: str) -> Breakpoints:
    """The prompt's breakpoints with one at a place; the earliest ones give way beyond the limit.

    A place in the messages with `*` for a number is the last message; tools and system are cached as
    a whole, up to the named segment if the prompt has it.
    """
    prompt, rule = layout.prompt, layout.rule
    at = _segment_of(layout, place)
    marks = dict(prompt.breakpoints)
    if at is None or at in marks:
        return prompt.breakpoints
    marks[at] = rule.lifetime_s or DEFAULT_TTL_S
    others = sorted(marks.keys() - {at})
    while rule.max_breakpoints and len(others) >= rule.max_breakpoints:
        del marks[others.pop(0)]
    return tuple(sorted(marks.items()))


def _segment_of(layout: PromptLayout, place: str) -> int | None:
    paths = layout.prompt.paths
    if "*" not in place and place in paths:
        return paths.index(place)
    head = place.split("[", maxsplit=1)[0].split(".", maxsplit=1)[0]
    kind = {"tools": SegmentKind.TOOL, "system": SegmentKind.SYSTEM}.get(head, SegmentKind.MESSAGE)
    units = layout.corpus.units
    kinds = [units[unit].kind for unit in layout.prompt.units.tolist()]
    return next((at for at in range(len(kinds) - 1, -1, -1) if kinds[at] is kind), None)


def add_steps(layout: PromptLayout, roles: BlockRoles) -> Breakpoints:
    """Breakpoints from the last back, each in reach of the next, as many as the rule allows."""
    prompt, rule = layout.prompt, layout.rule
    if not prompt.breakpoints or rule.lookback is None:
        return prompt.breakpoints
    marks = dict(prompt.breakpoints)
    last = max(marks)
    positions = roles.positions(layout.units).tolist()
    first = layout.num_settings
    kept = {last: marks[last]}
    edge = positions[last - first]
    for at in range(last - 1, first - 1, -1):
        if len(kept) >= rule.max_breakpoints:
            break
        if edge - positions[at - first] >= rule.lookback - 1:
            kept[at] = marks.get(at, marks[last])
            edge = positions[at - first]
    for at in sorted(marks, reverse=True):  # the others stay while there is room
        if len(kept) >= rule.max_breakpoints:
            break
        kept.setdefault(at, marks[at])
    return tuple(sorted(kept.items()))


def drop_last(breakpoints: Breakpoints, read_until: int) -> Breakpoints:
    """Without the last breakpoint, whose entry nobody reads.

    What the prompt reads itself stays in reach: a breakpoint ends at `read_until`, the last segment
    that is read, -1 if none is.
    """
    marks = dict(breakpoints[:-1])
    if breakpoints and read_until >= 0:
        marks.setdefault(read_until, breakpoints[-1][1])
    return tuple(sorted(marks.items()))


def keep_tool_breakpoints(before: ReplayPrompt, after: ReplayPrompt) -> Breakpoints:
    """The mended prompt's breakpoints, those of tools as far from the last tool as they were.

    A client marks its last tool, whichever that is: sorting tools moves no breakpoint.
    """
    last_before, last_after = _last_tool(before.paths), _last_tool(after.paths)
    marks = {at: ttl for at, ttl in after.breakpoints if not after.paths[at].startswith("tools[")}
    for at, ttl in before.breakpoints:
        place = last_after - (last_before - at)
        was_tool = before.paths[at].startswith("tools[")
        if was_tool and place >= 0 and after.paths[place].startswith("tools["):
            marks[place] = ttl
    return tuple(sorted(marks.items()))


def _last_tool(paths: Sequence[str]) -> int:
    return max((at for at, path in enumerate(paths) if path.startswith("tools[")), default=-1)
