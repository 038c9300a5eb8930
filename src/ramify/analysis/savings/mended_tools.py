"""Tools of a request as its best match has them: their order, their definitions, or both."""

from __future__ import annotations

from collections.abc import Sequence

from ramify.analysis.compare.prompt_sides import PlacedUnit
from ramify.analysis.compare.tool_lists import tool_places
from ramify.analysis.corpus import Corpus


def merge_tools(
    corpus: Corpus,
    own: Sequence[PlacedUnit],
    base: Sequence[PlacedUnit],
    *,
    takes_order: bool,
    takes_definitions: bool,
) -> tuple[PlacedUnit, ...]:
    """A request's own tools, with the match's order or definitions.

    With definitions come tools that the request lacks, and what the match lacks goes. A tool that only
    one of the two has stays behind the tool that it stands behind there.
    """
    mine, theirs = _by_name(corpus, own), _by_name(corpus, base)
    kept = theirs if takes_definitions else mine
    first, second = (theirs, mine) if takes_order else (mine, theirs)
    names = [name for name in first if name in kept]
    before = ""
    for name in second:
        if name in kept and name not in first:
            names.insert(names.index(before) + 1 if before in names else 0, name)
        before = name
    return tuple(kept[name] for name in names)


def _by_name(corpus: Corpus, tools: Sequence[PlacedUnit]) -> dict[str, PlacedUnit]:
    places = tool_places(corpus, (unit for unit, _ in tools))
    return {name: tools[at] for name, at in places.items()}
